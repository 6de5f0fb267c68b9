"""The worker's consumer: what it cannot use is dropped, and none of it is repeated (R-T3).

Celery's own lines print the whole body, and a body that is not a wake-up may hold anything.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import signals
from celery.worker.consumer import Consumer as CeleryConsumer

logger = logging.getLogger("claimcheck.worker")


class Consumer(CeleryConsumer):
    """Celery's consumer with quiet refusals."""

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
