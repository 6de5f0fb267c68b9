"""Claimcheck: durable runs for Celery.

``from tasks import app, trigger, handler`` is the Python API; ``celery -A tasks`` the command.
"""

from dispatch.context import (
    HandlerFailure,
    Outcome,
    PermanentFailure,
    RunContext,
    RunStopped,
    Snooze,
)
from dispatch.errors import (
    ClaimcheckError,
    DatabaseUnavailable,
    InvalidParameters,
    JobDisabled,
    NotCancellable,
    NotRetryable,
    OverlapRefused,
    RunFailed,
    TriggerBusy,
    UnknownJob,
    UnknownRun,
)
from tasks import hooks as _hooks  # noqa: F401 (connects Celery's signals)
from tasks import pool as _pool  # noqa: F401 (adds a step to Celery's worker)
from tasks.app import app
from tasks.handlers import handler
from tasks.trigger import trigger

__all__ = [
    "ClaimcheckError",
    "DatabaseUnavailable",
    "HandlerFailure",
    "InvalidParameters",
    "JobDisabled",
    "NotCancellable",
    "NotRetryable",
    "Outcome",
    "OverlapRefused",
    "PermanentFailure",
    "RunContext",
    "RunFailed",
    "RunStopped",
    "Snooze",
    "TriggerBusy",
    "UnknownJob",
    "UnknownRun",
    "app",
    "handler",
    "trigger",
]
