"""The worker's consumer: what it cannot use is dropped, and none of it is repeated (R-T3).

Celery's own lines print the whole body, and a body that is not a wake-up may hold anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import signals
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.exceptions import OperationalError

from tasks import embedded_broker, inspection

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 4.0

logger = logging.getLogger("claimcheck.worker")
inspection.register()


class Consumer(CeleryConsumer):
    """Celery's consumer with quiet refusals, and back soon after its broker is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As kombu calls a connection that broke while something was published: no reason to end
        # the whole worker, which Celery does with an error that is not among these.
        self.connection_errors = (*self.conninfo.connection_errors, OperationalError)

    def ensure_connected(self, conn: Any) -> Any:
        # Celery's own pause grows to 30 s, which runs would wait for once Redis is back.
        ensure = partial(
            conn.ensure_connection,
            interval_start=FIRST_PAUSE_SECONDS,
            interval_step=FIRST_PAUSE_SECONDS,
            interval_max=LONGEST_PAUSE_SECONDS,
        )

        def ensured(errback: Callable[[Exception, float], object], *args: Any, **kw: Any) -> Any:
            def failed(error: Exception, interval: float) -> None:
                embedded_broker.bring_back()
                errback(error, interval)

            return ensure(failed, *args, **kw)

        conn.ensure_connection = ensured
        connected = super().ensure_connected(conn)
        embedded_broker.keep()
        return connected

    def on_unknown_message(self, body: Any, message: Any) -> None:
        drop(message, self.connection_errors, "it is not a task")
        signals.task_rejected.send(sender=self, message=message, exc=None)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        drop(message, self.connection_errors, "this worker does not know its task")
        signals.task_unknown.send(
            sender=self,
            message=message,
            exc=exc,
            name=message.headers.get("task"),
            id=message.headers.get("id"),
        )

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        drop(message, self.connection_errors, f"it cannot be used ({type(exc).__name__})")
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        drop(message, self.connection_errors, f"it cannot be decoded ({type(exc).__name__})")


def drop(message: Any, connection_errors: Any, why: str) -> None:
    """Take a message out of its queue and say so, without its content."""
    logger.error(
        "dropped a message from the queue %s: %s", message.delivery_info.get("routing_key"), why
    )
    message.reject_log_error(logger, connection_errors)
