"""A cancel by task id: what ``AsyncResult.revoke`` and Flower's button mean for a run (R-K1)."""

from __future__ import annotations

from typing import Any

from tasks import options
from tasks.app import app


def is_run(task_id: Any) -> bool:
    """Whether the id is a run's, and not an ordinary task's."""
    return bool(app.backend.is_run(str(task_id)))


def cancel(task_id: Any, actor: str = "api") -> None:
    """Record the intent to cancel the run's lineage, durably, before anything is signalled.

    Raises UnknownRun, and NotCancellable where it has ended as SUCCEEDED or FAILED.
    """
    from dispatch.cancel import cancel as record
    from tasks.ports import PORTS

    record(PORTS, options.run_id_of_task(task_id), actor=actor)
