"""Servers stopped, hung, emptied, filled and cut off, and rows that someone else holds locked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import redis
from support.proxy import Proxy

from scenarios.damage import Damage, Deed


class ServerBreaker:
    """The deeds against PostgreSQL and Redis; ``way`` is what one worker reaches the first by."""

    def __init__(self, damage: Damage, way: Proxy | None = None) -> None:
        self._damage = damage
        self._fleet = damage.fleet
        self._way = way

    @property
    def deeds(self) -> list[tuple[Deed, int]]:
        return [
            (self.flush_redis, 3), (self.kill_redis, 2), (self.hang_redis, 1),
            (self.shuffle_wake_ups, 3), (self.repeat_wake_ups, 2),
            (self.cut_connections, 4), (self.restart_postgres, 2), (self.hang_postgres, 1),
            (self.cut_off_a_worker, 3), (self.lock_rows, 3), (self.fill_connections, 1),
        ]  # fmt: skip

    def flush_redis(self) -> bool:
        if "redis" in self._damage.busy:
            return False
        with suppress(redis.RedisError), self._fleet.redis.client() as client:
            client.flushall()
        return True

    def kill_redis(self) -> bool:
        if "redis" in self._damage.busy:
            return False
        self._fleet.redis.kill()
        self._damage.later(self._damage.chance.uniform(0.2, 6), "redis", self._fleet.redis.start)
        return True

    def hang_redis(self) -> bool:
        if "redis" in self._damage.busy:
            return False
        self._fleet.redis.hang()
        self._damage.later(self._damage.chance.uniform(0.5, 4), "redis", self._fleet.redis.go_on)
        return True

    def cut_connections(self) -> bool:
        if "postgres" in self._damage.busy:
            return False
        database = self._damage.chance.choice(
            ["control", "control", "control", "sink", "source", "ledger"]
        )
        with suppress(psycopg.OperationalError):
            self._fleet.postgres.cut(database, self._damage.chance.choice([0.3, 1.0]))
        return True

    def restart_postgres(self) -> bool:
        if "postgres" in self._damage.busy:
            return False
        self._fleet.postgres.stop(self._damage.chance.choice(["fast", "immediate", "crash"]))
        self._damage.later(
            self._damage.chance.uniform(0, 6), "postgres", self._fleet.postgres.start
        )
        return True

    def hang_postgres(self) -> bool:
        if "postgres" in self._damage.busy:
            return False
        self._fleet.postgres.hang()
        seconds = self._damage.chance.uniform(0.5, 1.5) * self._fleet.lease_seconds

        def thaw() -> None:
            # Its own sessions were frozen, so what waited for it goes on when they do.
            self._fleet.postgres.go_on()

        self._damage.later(seconds, "postgres", thaw)
        return True

    def cut_off_a_worker(self) -> bool:
        """One worker alone does not reach the control database, and nobody tells it."""
        if self._way is None or "way" in self._damage.busy:
            return False
        way = self._way
        way.hang()

        def back() -> None:
            way.resume()
            if self._damage.chance.random() < 0.5:
                way.cut()

        seconds = self._fleet.lease_seconds * self._damage.chance.uniform(0.5, 3)
        self._damage.later(seconds, "way", back)
        return True

    def lock_rows(self) -> bool:
        """Someone's open transaction holds some active runs and a job."""
        if self._damage.busy & {"postgres", "rows"}:
            return False
        stack = ExitStack()
        with suppress(psycopg.Error):
            connection = stack.enter_context(self._fleet.postgres.connect("control"))
            connection.execute("set lock_timeout = '200ms'")
            connection.execute("begin")
            connection.execute(
                """select id from job_run where finished_at is null order by random() limit 3
                   for no key update skip locked"""
            )
            connection.execute("select id from job order by random() limit 1 for update")
        seconds = self._fleet.lease_seconds * self._damage.chance.uniform(0.1, 1.2)
        self._damage.later(seconds, "rows", _quietly(stack.close))
        return True

    def fill_connections(self) -> bool:
        """Someone takes every connection that the server still has."""
        if self._damage.busy & {"postgres", "room"}:
            return False
        stack = ExitStack()
        with suppress(psycopg.Error):
            while True:
                stack.enter_context(self._fleet.postgres.connect("postgres"))
        self._damage.later(self._damage.chance.uniform(0.5, 3), "room", _quietly(stack.close))
        return True

    # Wake-ups are lost, repeated, delayed and reordered

    def shuffle_wake_ups(self) -> bool:
        """Take all wake-ups away, and bring them back later, in another order."""
        taken = self._wake_ups(remove=True)
        if not taken:
            return False
        self._damage.later(self._damage.chance.uniform(0.5, 5), "", lambda: self._bring(taken, 1))
        return True

    def repeat_wake_ups(self) -> bool:
        """Let every wake-up come again now, and once more later, when its run has long ended."""
        taken = self._wake_ups(remove=False)
        if not taken:
            return False
        self._bring(taken, 1)
        self._damage.later(self._damage.chance.uniform(1, 10), "", lambda: self._bring(taken, 2))
        return True

    def _wake_ups(self, *, remove: bool) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        if "redis" in self._damage.busy:
            return found
        with suppress(redis.RedisError), self._fleet.redis.client() as client:
            for key in client.scan_iter(match="runs*", _type="list"):
                messages = client.lrange(key, 0, -1)
                if remove:
                    client.delete(key)
                found += [(key, message) for message in messages]
        return found

    def _bring(self, taken: list[tuple[bytes, bytes]], times: int) -> None:
        if "redis" in self._damage.busy:
            return
        with suppress(redis.RedisError), self._fleet.redis.client() as client:
            for key, message in self._damage.chance.sample(taken * times, len(taken) * times):
                client.rpush(key, message)


def _quietly(undo: Callable[[], Any]) -> Callable[[], None]:
    """A server that went away meanwhile has undone it already."""

    def done() -> None:
        with suppress(psycopg.Error):
            undo()

    return done
