"""Processes killed, told to end, and frozen past their lease."""

from __future__ import annotations

import os
import signal

from scenarios.damage import Damage, Deed
from scenarios.fleet import Member


class ProcessBreaker:
    """The deeds against workers and beats."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._fleet = damage.fleet

    @property
    def deeds(self) -> list[tuple[Deed, int]]:
        return [
            (self.kill_child, 6), (self.kill_parent, 2), (self.kill_worker, 3),
            (self.freeze_child, 4), (self.freeze_worker, 3), (self.kill_beat, 2),
            (self.freeze_beat, 2), (self.terminate_worker, 2), (self.quit_worker, 1),
        ]  # fmt: skip

    def _some(self, *, workers: bool) -> Member | None:
        found = [
            member
            for member in self._fleet.members.values()
            if member.is_worker is workers
            and member.is_alive()
            and member.name not in self._damage.busy
        ]
        return self._damage.chance.choice(found) if found else None

    def kill_child(self) -> bool:
        member = self._some(workers=True)
        children = member.children() if member is not None else []
        if not children:
            return False
        return _signal(self._damage.chance.choice(children), signal.SIGKILL)

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
        self._freeze(member, [self._damage.chance.choice(children)])
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
            self._fleet.note("thaw", thawed=pids)
            for pid in reversed(pids):
                _signal(pid, signal.SIGCONT)

        seconds = self._fleet.lease_seconds * self._damage.chance.uniform(0.5, 2.5)
        self._damage.later(seconds, member.name, thaw)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
