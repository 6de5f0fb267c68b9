"""What Celery's signals set off: the checks at a start, the marks of a process, the drain."""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import suppress
from typing import Any

from billiard import get_start_method
from celery import bootsteps, signals

from tasks import wakeup
from tasks.app import app, redact_logs
from tasks.drain import Level, bells

_COOPERATIVE = ("gevent", "eventlet")


@signals.celeryd_init.connect
def worker_starts(sender: str, instance: Any = None, options: Any = None, **_: Any) -> None:
    """In a worker's parent, before anything else. Raises SystemExit where it cannot work."""
    from tasks import events, identity, startup

    pool = str((options or {}).get("pool_cls") or app.conf.worker_pool)
    if any(name in pool for name in _COOPERATIVE):
        raise SystemExit(
            f"claimcheck: the pool {pool} is not supported: a lease is renewed by a thread that a "
            "busy run must not hold up. Use --pool prefork, threads or solo."
        )
    startup.require_worker()
    identity.be_parent()
    bells.hang()
    events.name_process(sender)


@signals.worker_process_init.connect
def child_starts(sender: str | None = None, **_: Any) -> None:
    """In a new child of the prefork pool (and in the parent itself, for the solo pool)."""
    from tasks import events, handlers

    handlers.load()
    if sender is not None:
        events.name_process(sender)


@signals.worker_process_shutdown.connect
def child_ends(**_: Any) -> None:
    from tasks import events
    from tasks.worker import close

    close()
    events.flush()


@signals.worker_shutting_down.connect
def worker_ends(how: str = "Warm", **_: Any) -> None:
    """In the parent, inside its signal handler."""
    bells.ring(Level.COLD if how == "Cold" else Level.WARM)


@signals.beat_init.connect
def beat_starts(**_: Any) -> None:
    from tasks import events, startup

    startup.require_database()
    events.name_process(f"beat@{socket.gethostname()}")


def _is_not_of_wake_ups(record: logging.LogRecord) -> bool:
    context = getattr(record, "data", None)
    is_of_one = isinstance(context, dict) and context.get("name") == wakeup.TASK
    return record.levelno > logging.INFO or not is_of_one


# Celery would say "succeeded" of a wake-up whose run failed: the run's own line tells its end.
logging.getLogger("celery.app.trace").addFilter(_is_not_of_wake_ups)


@signals.after_setup_logger.connect
@signals.after_setup_task_logger.connect
def logs_start(logger: logging.Logger | None = None, **_: Any) -> None:
    redact_logs(logger)


class Drain(bootsteps.StartStopStep):
    """Rings also where a worker ends without a signal, as by ``celery control shutdown``."""

    requires = ("celery.worker.components:Pool",)

    def start(self, parent: Any) -> None:
        return None

    def close(self, parent: Any) -> None:
        bells.ring(Level.WARM)
        if get_start_method() != "fork":
            # Spawned children have not inherited the bells.
            for child in getattr(getattr(parent.pool, "_pool", None), "_pool", ()):
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)

    def stop(self, parent: Any) -> None:
        bells.ring(Level.WARM)

    def terminate(self, parent: Any) -> None:
        bells.ring(Level.COLD)


app.steps["worker"].add(Drain)
