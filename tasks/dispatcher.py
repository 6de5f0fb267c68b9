"""Celery's own events of a worker, which must not hold up its parent process."""

from __future__ import annotations

from typing import Any

from celery.app.events import Events as CeleryEvents
from celery.events.dispatcher import EventDispatcher


class Dispatcher(EventDispatcher):
    """Sends each event once: what Redis does not take now is kept for its next connection.

    Celery would try a worker's heartbeat again and again, inside the event loop that also watches
    over the children and over the end of the process.
    """

    def send(self, type: str, *args: Any, **fields: Any) -> Any:
        return super().send(type, *args, **{**fields, "retry": False})


class Events(CeleryEvents):
    dispatcher_cls = "tasks.dispatcher:Dispatcher"
