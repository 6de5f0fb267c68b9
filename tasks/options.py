"""The options of a trigger: which are the run's, which are Celery's plumbing, which are refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from dispatch.errors import InvalidParameters

RUN = frozenset({"countdown", "eta", "priority", "queue", "idempotency_key", "parent_run_id"})
_IDS = frozenset({"task_id", "run_id"})
STEP = frozenset({"countdown", "priority", "queue"})

_REFUSED = {
    "expires": "a durable run does not expire: cancel it, or let its schedule skip what was missed",
    "time_limit": "the time limit of a run is its job's: set timeout in the job's definition",
    "soft_time_limit": "the time limit of a run is its job's: set timeout in the job's definition",
    "exchange": "a run is routed by its queue alone: use queue=",
    "routing_key": "a run is routed by its queue alone: use queue=",
    "exchange_type": "a run is routed by its queue alone: use queue=",
}
# What Celery itself adds to a call, or what shapes its message, which holds the run's id alone.
_PLUMBING = frozenset(
    {
        "producer", "publisher", "connection", "router", "route_name", "result_cls", "task_type",
        "add_to_parent", "group_id", "group_index", "root_id", "parent_id", "reply_to", "retries",
        "replaced_task_nesting", "shadow", "headers", "serializer", "compression", "retry",
        "retry_policy", "delivery_mode", "mandatory", "immutable", "stamped_headers",
        "periodic_task_name", "link", "link_error", "chord", "chain",
    }
)  # fmt: skip


def job_of(args: object) -> str:
    """The job that a trigger's positional arguments name. Raises InvalidParameters."""
    if isinstance(args, Sequence) and not isinstance(args, str) and len(args) == 1:
        job = args[0]
        if isinstance(job, str) and job:
            return job
    raise InvalidParameters(
        "a trigger takes one positional argument, the job's name; parameters go by keyword: "
        "trigger.delay('report', day='2026-11-01')"
    )


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``options`` is the run's, for `dispatch.enqueue`. Raises InvalidParameters."""
    _refuse(options, RUN | _IDS)
    found = {name: options[name] for name in RUN if options.get(name) is not None}
    ids = {_as_run_id(options[name]) for name in _IDS if options.get(name) is not None}
    if len(ids) > 1:
        raise InvalidParameters("task_id and run_id are the same thing: give one of them")
    if ids:
        found["run_id"] = ids.pop()
    return _with_queue_name(found)


def step(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of a later chain step's ``options`` is stored with it. Raises InvalidParameters."""
    for name in ("eta", "idempotency_key", "parent_run_id"):
        if options.get(name) is not None:
            raise InvalidParameters(
                f"{name} cannot be set on a later step of a chain, which starts when the step "
                "before it has succeeded; countdown, priority and queue can"
            )
    _refuse(options, RUN | _IDS)
    found = {name: options[name] for name in STEP if options.get(name) is not None}
    if options.get("task_id") is not None:
        found["run_id"] = _as_run_id(options["task_id"])
    return _with_queue_name(found)


def run_id_of_task(task_id: object) -> UUID:
    """The run id that stands for a Celery task id: itself where it is a UUID, else derived from it.

    A UUID may be spelt in any way that uuid.UUID reads. So a task id of another form resolves as
    well, and a repetition of it finds the same run (R-T7).
    """
    try:
        return UUID(str(task_id))
    except ValueError:
        return uuid5(NAMESPACE_OID, f"claimcheck:{task_id}")


def _as_run_id(task_id: object) -> UUID:
    if not isinstance(task_id, str | UUID) or not task_id:
        raise InvalidParameters(f"task_id must be a string, not {type(task_id).__name__}")
    return run_id_of_task(task_id)


def _refuse(options: Mapping[str, Any], known: frozenset[str]) -> None:
    stamps = set(options.get("stamped_headers") or ())
    for name, value in options.items():
        if value is None or name in known or name in _PLUMBING or name in stamps:
            continue
        if name in _REFUSED:
            raise InvalidParameters(f"{name}: {_REFUSED[name]}")
        if name == "ignore_result":
            if value:
                raise InvalidParameters("ignore_result: the outcome of a run is always kept")
            continue
        close = difflib.get_close_matches(name, [*known, *_REFUSED], n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise InvalidParameters(
            f"a trigger has no option {name!r}{hint} Parameters of the run go into kwargs: "
            "trigger.apply_async(('report',), {'day': '2026-11-01'})"
        )


def _with_queue_name(found: dict[str, Any]) -> dict[str, Any]:
    queue = found.get("queue")
    if queue is not None and not isinstance(queue, str):
        found["queue"] = getattr(queue, "name", queue)
    return found
