"""The fence beside the files: an older attempt replaces no file after a newer one (R-F5).

A folder's record and its lock are two hidden files. The lock is held for moments alone: to begin,
and to look at the record again and put the new file in the target's place. So no load waits for
another, and a worker that is frozen in the middle of one holds nothing up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.replicate.connector import Fenced, Load, SinkError
from tasks.replicate.connectors import turns
from tasks.replicate.connectors.file.places import state

RECORD = ".claimcheck_fence"
LOCK = ".claimcheck_lock"
LOCK_SECONDS = 60.0
_NAP_SECONDS = 0.02


class Fence:
    """The lock of the target's folder, and what is recorded there of its jobs and of the target.

    ``check`` is called while the lock is waited for, and raises to give up.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._record = target.with_name(RECORD)
        self._path = target.with_name(LOCK)
        self._turn = f"file {target.name}"

    def begin(self, load: Load, check: Callable[[], None]) -> None:
        """Pass the fence; raises Fenced, or SinkError where another job has the target's turn."""
        with self.locked(check):
            everything = self._read()
            steps = self._admitted(everything, load)
            if load.step == 0:
                # Recorded at once: a file cannot be taken back, so older attempts end here.
                self._write(everything | {load.scope: {**steps, "0": load.fence}})

    @contextlib.contextmanager
    def commit(self, load: Load, new: Path | None, check: Callable[[], None]) -> Iterator[None]:
        """Pass the fence once more; ``new`` is to be put in the target's place within the block.

        The first step takes the target's turn as it replaces the file, not before: until then the
        target holds what another job has left, and that one may go on.
        """
        with self.locked(check):
            everything = self._read()
            steps = self._admitted(everything, load)
            # Recorded before: by its state the new file is known, whether or not it got there.
            put = {"fence": load.fence, "state": None if new is None else state(new)}
            everything[load.scope] = {**steps, f"put {load.step}": put}
            if load.step == 0:
                everything[self._turn] = {"run": load.run_id}
            self._write(everything)
            yield

    def settled(self, load: Load, check: Callable[[], None]) -> bool:
        """Whether the target is what the step put there."""
        with self.locked(check):
            put = self._read().get(load.scope, {}).get(f"put {load.step}")
            if put is None or put["fence"] != load.fence:
                return False
            return put["state"] is None or put["state"] == _state(self._target)

    def _admitted(self, everything: dict[str, Any], load: Load) -> dict[str, Any]:
        """With the lock: the record of the load's job, where that lets the load go on."""
        steps: dict[str, Any] = everything.get(load.scope, {})
        if load.step and "0" not in steps:
            raise SinkError(f"the fence record of this job has vanished from {self._record}")
        newest = steps.get("0", 0)
        if newest > load.fence:
            raise Fenced(load.fence, newest)
        if load.step:
            turns.check(load, everything.get(self._turn, {}).get("run"))
        return steps

    @contextlib.contextmanager
    def locked(self, check: Callable[[], None], seconds: float | None = None) -> Iterator[None]:
        """Hold the folder's lock; raises SinkError where another process has it for too long."""
        seconds = LOCK_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with self._path.open("ab") as lock:
            while True:
                check()
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SinkError(
                            f"{self._path} was locked for {seconds:g} s, and is held for moments "
                            "alone: end the process that holds it, which is frozen"
                        ) from None
                time.sleep(_NAP_SECONDS)
            yield

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._record.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            found = None
        if not _is_record(found):
            raise SinkError(
                f"{self._record} cannot be read; remove it when no job writes here", permanent=True
            )
        return dict(found)

    def _write(self, everything: dict[str, Any]) -> None:
        replacement = self._record.with_name(RECORD + ".new")
        with replacement.open("wb") as file:
            file.write(json.dumps(everything, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(self._record)


def _is_record(found: Any) -> bool:
    """Whether this can be what :class:`Fence` has written."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("0", 0), int)
        and all(
            isinstance(put, dict) and "fence" in put and "state" in put
            for step, put in entry.items()
            if step.startswith("put ")
        )
        for entry in found.values()
    )


def _state(path: Path) -> list[int] | None:
    """As the record holds it; None where there is no file."""
    try:
        return list(state(path))
    except FileNotFoundError:
        return None
