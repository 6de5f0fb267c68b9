"""What executes runs in this process: its coordinator, its signals, its part of the drain.

One coordinator a process, made at the first wake-up and so after any fork. In a prefork child the
main thread does the work; in the threads pool several threads share the coordinator.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any
from uuid import UUID

from db import keyring, settings
from db.keyring import Keyring, KeyringError
from dispatch import children, enqueue, offers
from dispatch.coordinator import WorkerDispatchCoordinator
from dispatch.enqueue import RunHandle
from dispatch.ports import DEFAULT_QUEUE, Capacity, Ports
from tasks import handlers, identity
from tasks.drain import Level, bells, grace, stop_grace
from tasks.ports import PORTS

logger = logging.getLogger("claimcheck.worker")

EXIT_AFTER_SECONDS = 0.5
"""How long after its last run a child that got a signal of its own goes, once that is reported."""


def take(run_id: UUID, queue: str | None, priority: int) -> str:
    """Execute the run that a wake-up names, or others of its queue. Says what was done."""
    process = _current()
    with process:
        done = process.coordinator.run(run_id, queue or DEFAULT_QUEUE, priority)
    return f"{len(done)} runs" if len(done) != 1 else f"run {done[0]}"


def execute_here(job: str, params: Mapping[str, Any], **options: Any) -> RunHandle:
    """Store a run and execute it in this thread; what cannot be claimed is offered to the workers.

    Raises as `dispatch.enqueue.submit` does, and KeyringError and HandlerNotLoaded.
    """
    handlers.load()
    process = _current()
    handle = enqueue.submit(_UNOFFERED, job, params, **options)
    with process:
        executed = process.coordinator.run_only(handle.run_id)
    if not executed and handle.offerable:
        offers.publish(PORTS, [handle.offer])
    return handle


def close() -> None:
    """Let go of what this process has, where it has anything; its runs have ended."""
    if _process is not None and _process.pid == os.getpid():
        _process.coordinator.stop()
        _process.coordinator.wait(1.0)
        _process.coordinator.close()


def _no_room(queue: str) -> Capacity:
    return Capacity(executors=0, queued=0)


_UNOFFERED = Ports(emit=PORTS.emit, capacity=_no_room)


class Keys:
    """The keyring file as it is now: read again where it has changed, kept where that fails."""

    def __init__(self) -> None:
        self._path = settings.settings().keyring_path()
        self._stamp = self._look()
        self._keys = keyring.in_force()

    def __call__(self) -> Keyring:
        stamp = self._look()
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = Keyring.load(self._path)
            except KeyringError as error:
                logger.error("%s. Until then the keys that were read before are used.", error)
        return self._keys

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _Process:
    """This process as an executor of runs. Entered around each piece of work, by any thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._busy = 0
        self._lock = threading.Lock()
        self._signalled: int | None = None
        self._before: dict[int, Any] = {}
        self.coordinator = WorkerDispatchCoordinator(
            PORTS,
            executor=identity.executor,
            keyring=Keys(),
            spawn=children.spawner(PORTS),
            on_stuck=_end_this_process if identity.is_child() else None,
        )
        bells.listen(self._drain)
        if identity.is_child() and threading.current_thread() is threading.main_thread():
            self._heed_signals()

    def __enter__(self) -> None:
        with self._lock:
            self._busy += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy -= 1
        if self._signalled is not None and self._busy == 0:
            # Not at once: the pool is to hear of this task's end before its process goes.
            number = self._signalled
            threading.Timer(EXIT_AFTER_SECONDS, os.kill, (self.pid, number)).start()

    def _drain(self, level: Level) -> None:
        seconds = grace(level)
        if self._busy:
            logger.warning("shutting down: the active runs have %g s", seconds)
        self.coordinator.drain(seconds, stop_grace())

    # A child's own signals: to its group, from honcho or a terminal, or to it alone

    def _heed_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGQUIT):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            # Celery's handler would raise SystemExit into the midst of the run.
            self._signalled = number
            level = Level.COLD if number == signal.SIGQUIT else Level.WARM
            self.coordinator.drain(grace(level), stop_grace())
            return
        before = self._before[number]
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        else:
            os.kill(self.pid, number)


def _end_this_process(run_id: UUID, reason: str) -> None:
    """The last resort against a run that does not stop (R-K3); its end is recorded, or fenced."""
    os.kill(os.getpid(), signal.SIGKILL)


_process: _Process | None = None
_making = threading.Lock()


def _current() -> _Process:
    global _process
    with _making:
        if _process is None or _process.pid != os.getpid():
            _process = _Process()
        return _process


def _forked() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forked)
