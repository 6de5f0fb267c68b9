"""The Celery app: what Redis carries, how, and where results come from.

Importing this checks the settings and touches no server; the embedded servers start when a
connection is first asked for. A mistake in the settings ends the process with a message and
status 1, because any other exception here reaches the user as a traceback of Celery's.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery

from db import settings
from db.settings import SettingsError
from dispatch.ports import DEFAULT_QUEUE
from dispatch.redaction import RedactingFilter
from tasks import broker, canvas, wakeup


class Configuration:
    """Celery's settings. The broker's URL is settled at its first use, not at import."""

    accept_content = ("json",)
    result_accept_content = ("json",)
    task_serializer = "json"
    result_serializer = "json"
    event_serializer = "json"

    task_default_queue = DEFAULT_QUEUE
    # In Redis 0 goes first: a task that names no priority does not overtake the runs.
    task_default_priority = broker.LOWEST_PRIORITY
    task_publish_retry = False
    task_acks_late = False

    broker_connection_retry_on_startup = True
    # None: a worker waits for its broker as long as it takes.
    broker_connection_max_retries = None

    # R-C9: what a busy worker cannot start stays in Redis for an idle one.
    worker_disable_prefetch = True
    worker_prefetch_multiplier = 1
    worker_send_task_events = True
    worker_cancel_long_running_tasks_on_connection_loss = False
    worker_consumer = "tasks.consumer:Consumer"

    beat_scheduler = "tasks.beat:DeadlineScheduler"

    enable_utc = True
    timezone = "UTC"

    @property
    def broker_url(self) -> str:
        return broker.of(settings.services().redis_url).url

    @property
    def broker_transport_options(self) -> dict[str, Any]:
        return broker.of(_given_redis_url()).options

    @property
    def result_backend_transport_options(self) -> dict[str, Any]:
        return broker.of(_given_redis_url()).result_options


class App(Celery):
    """Celery, but no trigger travels through Redis: neither its job nor what follows it."""

    def send_task(  # type: ignore[override]
        self, name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> Any:
        """Send a task by name; ``tasks.trigger`` becomes a durable run, as by `apply_async`.

        Raises InvalidParameters where a trigger stands in a link, chord or chain of another task.
        """
        if name == wakeup.TASK and not wakeup.is_wake_up(args, kwargs):
            return self.tasks[name].apply_async(args, kwargs, **options)
        canvas.refuse_triggers_in(options, name, kwargs)
        return super().send_task(name, args, kwargs, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned child gets the app of its own import, which knows the tasks.
        return _this_app, ()


def _this_app() -> App:
    import tasks

    return tasks.app


def _given_redis_url() -> str:
    # The options do not need the embedded server, and must not start it.
    given = settings.settings().redis_url
    return "redis://" if given is None else given.get_secret_value()


def _checked() -> Configuration:
    try:
        broker.of(_given_redis_url())
    except SettingsError as error:
        raise SystemExit(f"claimcheck: {error}") from None
    return Configuration()


def redact_logs(logger: logging.Logger | None = None, **_: Any) -> None:
    """Take credentials out of whatever the handlers of ``logger`` write (R-X2)."""
    for handler in (logger or logging.getLogger()).handlers:
        if not any(isinstance(found, RedactingFilter) for found in handler.filters):
            handler.addFilter(RedactingFilter())


app = App(
    "claimcheck",
    backend="tasks.results:RunBackend",
    control="tasks.control:Control",
    events="tasks.dispatcher:Events",
)
app.config_from_object(_checked())
