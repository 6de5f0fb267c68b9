"""A wake-up in the worker's parent process: what it does when its child dies, and on a revoke."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request

from tasks import identity, wakeup
from tasks.drain import Level, bells

logger = logging.getLogger("claimcheck.worker")

RELEASE_SECONDS = 1.0
_REST_SECONDS = 10.0
_DEATHS = (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


class WakeUp(Request):
    """Celery's request for ``tasks.trigger``. Runs in the parent, on its event loop."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, _DEATHS) and self.worker_pid is not None:
            # In a line: Celery's traceback would only show its own code.
            what = f"{type(error).__name__}: {error}"
            logger.error("child %s of the pool died: %s", self.worker_pid, what)
            release(self.worker_pid)
            return_ok = True
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def revoked(self) -> bool:
        """Never: a run is cancelled in Postgres, and this wake-up may serve another run (R-K1)."""
        return False

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Cancel the run instead of killing the process, which may hold another one by now."""
        run_id = wakeup.uuid_of(self.id)
        if run_id is not None:
            threading.Thread(target=_cancel, args=(run_id,), daemon=True).start()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """A cold shutdown: the process stops its run, records that, and ends by itself."""
        bells.ring(Level.COLD)


class _Rest:
    until = 0.0


def release(pid: int) -> None:
    """Let the lease of a dead child's run go at once (R-L5).

    The parent's loop, which serves all its children, waits RELEASE_SECONDS for it and no longer: to
    connect alone may take longer than that. What takes longer goes on beside it.
    """
    # Not in the thread: a child that is forked meanwhile would never get a module's import lock.
    from db import session
    from dispatch import recovery
    from tasks.ports import PORTS

    def let_go() -> None:
        try:
            with session.connect("claimcheck release", patience=RELEASE_SECONDS) as connection:
                released = recovery.release_lease(connection, executor, PORTS)
        except Exception as error:
            _Rest.until = time.monotonic() + _REST_SECONDS
            logger.warning("the lease of child %s expires by itself: %s", pid, type(error).__name__)
            return
        for run_id in released:
            logger.warning("child %s died; the lease of its run %s was released", pid, run_id)

    if time.monotonic() < _Rest.until:
        return
    executor = identity.executor_of_child(pid)
    releasing = threading.Thread(target=let_go, name="claimcheck-release", daemon=True)
    releasing.start()
    releasing.join(RELEASE_SECONDS)
    if releasing.is_alive():
        # One slow answer is enough.
        _Rest.until = time.monotonic() + _REST_SECONDS


def _cancel(run_id: Any) -> None:
    from tasks import cancelling

    try:
        cancelling.cancel(run_id)
    except Exception as error:
        logger.warning("run %s was not cancelled: %s", run_id, error)
