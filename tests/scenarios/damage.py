"""Damage: processes killed and frozen, servers stopped, hung, emptied and cut off, at random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psycopg
import redis

from scenarios.fleet import Fleet, Member


class Damage:
    """One piece of damage after another, each undone after a while; some last side by side."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._busy: set[str] = set()
        self._deeds: list[tuple[Callable[[], bool], int]] = [
            (self.kill_child, 6), (self.kill_parent, 2), (self.kill_worker, 3),
            (self.freeze_child, 4), (self.freeze_worker, 3), (self.kill_beat, 2),
            (self.freeze_beat, 2), (self.terminate_worker, 2), (self.quit_worker, 1),
            (self.flush_redis, 3), (self.kill_redis, 2), (self.hang_redis, 1),
            (self.cut_connections, 4), (self.restart_postgres, 2), (self.hang_postgres, 1),
        ]  # fmt: skip

    def go_on_for(self, seconds: float, pause: tuple[float, float]) -> None:
        until = time.monotonic() + seconds
        due = time.monotonic()
        while time.monotonic() < until:
            self._undo_due()
            if time.monotonic() >= due:
                [deed] = self.chance.choices(
                    [d for d, _ in self._deeds], [w for _, w in self._deeds]
                )
                if deed():
                    self.counts[deed.__name__] += 1
                due = time.monotonic() + self.chance.uniform(*pause)
            time.sleep(0.05)

    def repair(self) -> None:
        """Undo all that is not undone yet."""
        self._undo = [(0.0, undo) for _, undo in self._undo]
        self._undo_due()

    def _undo_due(self) -> None:
        now = time.monotonic()
        due = [undo for at, undo in self._undo if at <= now]
        self._undo = [(at, undo) for at, undo in self._undo if at > now]
        for undo in due:
            undo()

    def _later(self, seconds: float, what: str, undo: Callable[[], None]) -> None:
        self._busy.add(what)

        def done() -> None:
            undo()
            self._busy.discard(what)

        self._undo.append((time.monotonic() + seconds, done))

    def _some(self, *, workers: bool) -> Member | None:
        found = [
            member
            for member in self.fleet.members.values()
            if member.is_worker is workers and member.is_alive() and member.name not in self._busy
        ]
        return self.chance.choice(found) if found else None

    # Processes

    def kill_child(self) -> bool:
        member = self._some(workers=True)
        children = member.children() if member is not None else []
        if not children:
            return False
        return _signal(self.chance.choice(children), signal.SIGKILL)

    def kill_parent(self) -> bool:
        return self._kill(signal.SIGKILL, group=False)

    def kill_worker(self) -> bool:
        return self._kill(signal.SIGKILL, group=True)

    def terminate_worker(self) -> bool:
        return self._kill(signal.SIGTERM, group=False)

    def quit_worker(self) -> bool:
        return self._kill(signal.SIGQUIT, group=False)

    def _kill(self, number: int, *, group: bool) -> bool:
        member = self._some(workers=True)
        if member is not None:
            member.kill(number, group=group)
        return member is not None

    def kill_beat(self) -> bool:
        member = self._some(workers=False)
        if member is not None:
            member.kill()
        return member is not None

    def freeze_child(self) -> bool:
        member = self._some(workers=True)
        children = member.children() if member is not None else []
        if member is None or not children:
            return False
        self._freeze(member, [self.chance.choice(children)])
        return True

    def freeze_worker(self) -> bool:
        member = self._some(workers=True)
        if member is not None:
            self._freeze(member, member.family())
        return member is not None

    def freeze_beat(self) -> bool:
        member = self._some(workers=False)
        if member is not None:
            self._freeze(member, [member.pid])
        return member is not None

    def _freeze(self, member: Member, pids: list[int]) -> None:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)

        def thaw() -> None:
            self.fleet.note("thaw", thawed=pids)
            for pid in reversed(pids):
                _signal(pid, signal.SIGCONT)

        seconds = self.fleet.lease_seconds * self.chance.uniform(0.5, 2.5)
        self._later(seconds, member.name, thaw)

    # Servers

    def flush_redis(self) -> bool:
        if "redis" in self._busy:
            return False
        with suppress(redis.RedisError), self.fleet.redis.client() as client:
            client.flushall()
        return True

    def kill_redis(self) -> bool:
        if "redis" in self._busy:
            return False
        self.fleet.redis.kill()
        self._later(self.chance.uniform(0.2, 6), "redis", self.fleet.redis.start)
        return True

    def hang_redis(self) -> bool:
        if "redis" in self._busy:
            return False
        self.fleet.redis.hang()
        self._later(self.chance.uniform(0.5, 4), "redis", self.fleet.redis.go_on)
        return True

    def cut_connections(self) -> bool:
        if "postgres" in self._busy:
            return False
        database = self.chance.choice(["control", "control", "control", "sink", "source", "ledger"])
        with suppress(psycopg.OperationalError):
            self.fleet.postgres.cut(database, self.chance.choice([0.3, 1.0]))
        return True

    def restart_postgres(self) -> bool:
        if "postgres" in self._busy:
            return False
        self.fleet.postgres.stop(self.chance.choice(["fast", "immediate", "crash"]))
        self._later(self.chance.uniform(0, 6), "postgres", self.fleet.postgres.start)
        return True

    def hang_postgres(self) -> bool:
        if "postgres" in self._busy:
            return False
        self.fleet.postgres.hang()
        seconds = self.chance.uniform(0.5, 1.5) * self.fleet.lease_seconds

        def thaw() -> None:
            # Its own sessions were frozen, so what waited for it goes on when they do.
            self.fleet.postgres.go_on()

        self._later(seconds, "postgres", thaw)
        return True


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
