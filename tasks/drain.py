"""How a worker that shuts down tells every process of it that holds runs (R-D8, R-K3).

The parent rings a bell, which is the closing of a pipe that all its children hold: one system
call, so a signal handler may do it, and every child hears it at once, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from enum import IntEnum

from db import settings

logger = logging.getLogger("claimcheck.worker")

HONCHO_SECONDS = 4.0
"""How long runs go on under honcho, which kills the whole group five seconds after its signal."""
HONCHO_STOP_SECONDS = 0.4
"""How long they may take there to stop, so that their end is recorded before the kill."""


class Level(IntEnum):
    """How a worker ends. WARM lets runs go on for `grace` seconds; COLD stops them at once."""

    WARM = 0
    COLD = 1


def grace(level: Level) -> float:
    """Seconds that active runs may go on for."""
    if level is Level.COLD:
        return 0.0
    seconds = settings.settings().shutdown_seconds
    return min(seconds, HONCHO_SECONDS) if "HONCHO_PROCESS_NAME" in os.environ else seconds


def stop_grace() -> float | None:
    """Seconds that work may take to stop once it is told to, where less than usual is left."""
    return HONCHO_STOP_SECONDS if "HONCHO_PROCESS_NAME" in os.environ else None


class Bells:
    """One bell for each level, made in the parent and heard in it and in all its children."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._pipes: list[tuple[int, int]] = []
        self._rung: set[Level] = set()

    def hang(self) -> None:
        """Make the bells, in the parent and before it has children."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._pipes = [os.pipe() for _ in Level]
            self._rung = set()

    def ring(self, level: Level) -> None:
        """Let every process of this worker hear it. System calls only: fit for a signal handler."""
        if self._pid == os.getpid() and level not in self._rung:
            self._rung.add(level)
            os.close(self._pipes[level][1])

    def forked(self) -> None:
        """In a child: let go of the parent's end."""
        if self._pid is not None and self._pid != os.getpid() and self._pipes:
            for level in Level:
                if level not in self._rung:
                    os.close(self._pipes[level][1])
            self._pipes = [(reader, -1) for reader, _ in self._pipes]
            self._rung = set(Level)

    def listen(self, heard: Callable[[Level], None]) -> None:
        """Call ``heard`` from a thread of its own, for each level that is rung."""
        readers = dict(zip((reader for reader, _ in self._pipes), Level, strict=False))
        if readers:
            threading.Thread(
                target=_listen, args=(readers, heard), name="claimcheck-drain", daemon=True
            ).start()


def _listen(readers: dict[int, Level], heard: Callable[[Level], None]) -> None:
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    parent = os.getppid()
    while readers:
        for ready, _ in poll.poll():
            poll.unregister(ready)
            level = readers.pop(ready)
            # A parent that is gone rings all its bells; its children's runs may end.
            try:
                heard(level if os.getppid() == parent else Level.WARM)
            except Exception:
                logger.exception("the drain could not be started")


bells = Bells()
# Any child that kept the parent's end open would keep the bells from being heard.
os.register_at_fork(after_in_child=bells.forked)
