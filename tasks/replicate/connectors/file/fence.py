"""The fence beside the files: an older attempt replaces no file after a newer one (R-F5).

A folder's record and its lock are two hidden files. The lock is held from the begin to the commit,
so that no two attempts are between them at once. A file system has no transaction over two files:
the record of a step is written after the file has been replaced, and between the two a crash can
fall; the next attempt then replaces the file again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tasks.replicate.connector import Fenced, Load, SinkError

RECORD = ".claimcheck_fence"
LOCK = ".claimcheck_lock"
LOCK_SECONDS = 60.0
_NAP_SECONDS = 0.02


class Fence:
    """The lock and the record of one folder."""

    def __init__(self, folder: Path) -> None:
        self._record = folder / RECORD
        self._path = folder / LOCK
        self._lock: IO[bytes] | None = None

    def enter(self, load: Load, check: Callable[[], None]) -> None:
        """Take the lock and pass the fence, or raise Fenced."""
        self._take(check)
        steps = self._read().get(load.scope, {})
        if load.step and "0" not in steps:
            raise SinkError(f"the fence record of this job has vanished from {self._record}")
        newest = steps.get("0", 0)
        if newest > load.fence:
            raise Fenced(load.fence, newest)
        if load.step == 0:
            # Recorded at once: a file cannot be taken back, so older attempts end here.
            self._write(load.scope, {**steps, "0": load.fence})

    def done(self, load: Load) -> None:
        """The step's change is in place."""
        steps = self._read().get(load.scope, {})
        self._write(load.scope, {**steps, f"done {load.step}": load.fence})

    def settled(self, load: Load, check: Callable[[], None]) -> bool:
        """Whether the step's change was put in place."""
        self._take(check)
        try:
            steps = self._read().get(load.scope, {})
        finally:
            self.leave()
        return bool(steps.get(f"done {load.step}") == load.fence)

    def alone(self) -> bool:
        """Take the lock, if nobody holds it."""
        self._lock = lock = self._path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        lock = self._path.open("ab")
        try:
            while True:
                check()
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SinkError(f"{self._path} was locked for {LOCK_SECONDS:g} s") from None
                    time.sleep(_NAP_SECONDS)
                else:
                    break
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self._record.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise SinkError(
                f"{self._record} cannot be read; remove it when no job writes here", permanent=True
            ) from None
        return dict(found)

    def _write(self, scope: str, steps: dict[str, Any]) -> None:
        everything = self._read() | {scope: steps}
        replacement = self._record.with_name(RECORD + ".new")
        with replacement.open("wb") as file:
            file.write(json.dumps(everything, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(self._record)
