"""Runs as commands show them: the contract's fields, the lineage, and what happens next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich.text import Text

from db import session
from db.runs import JobRunRepository, Run
from dispatch import chains
from dispatch.chains import Break
from dispatch.errors import UnknownRun
from dispatch.lifecycle import JobRunStatus
from dispatch.lineage import children_of
from tasks.commands import progress, waits
from tasks.commands.tables import shown

MOST_FAILURES = 5
"""How many failed children are told with their reasons."""
EXIT_STATUS = {
    JobRunStatus.SUCCEEDED: 0,
    JobRunStatus.FAILED: 1,
    JobRunStatus.CANCELLED: 3,
}
"""What `run watch` and `run trigger --wait` exit with."""

STYLES = {
    JobRunStatus.PENDING: "cyan",
    JobRunStatus.RUNNING: "blue",
    JobRunStatus.CANCEL_REQUESTED: "magenta",
    JobRunStatus.SUCCEEDED: "green",
    JobRunStatus.FAILED: "red",
    JobRunStatus.CANCELLED: "magenta",
    JobRunStatus.RETRY_SCHEDULED: "yellow",
}

_FIELDS = (
    "id",
    "job",
    "status",
    "attempt",
    "max_attempts",
    "previous_run_id",
    "root_run_id",
    "parent_run_id",
    "queue",
    "priority",
    "params",
    "available_at",
    "created_at",
    "started_at",
    "finished_at",
    "heartbeat_at",
    "lease_until",
    "executor",
    "fence",
    "progress",
    "rows_processed",
    "counters",
    "committed_watermark",
    "error_code",
    "error_message",
    "cancellation_warning",
    "datasources_resolved_at",
    "result",
    "schedule_id",
    "scheduled_for",
    "triggered_by",
    "offered_at",
    "offer_count",
    "cancel_requested_at",
)


def as_json(run: Run) -> dict[str, Any]:
    """One attempt with the contract's fields, and ``percent`` of its progress."""
    found = {field: run["job_name"] if field == "job" else run[field] for field in _FIELDS}
    return {**found, "percent": progress.percent(run)}


def named(runs: JobRunRepository, run_id: UUID) -> Run:
    """The attempt with this id, or alias. Raises UnknownRun."""
    found = runs.get(run_id)
    if found is None:
        broken = chains.breaks(runs.connection, run_id)
        if broken:
            raise UnknownRun(f"no run has the id {run_id}: {broken[0]}")
        raise UnknownRun(f"no run has the id {run_id}. List them with: celery -A tasks run list")
    return found


def with_lineage(run_id: UUID) -> dict[str, Any]:
    """An attempt with all that a person at three in the morning asks. Raises UnknownRun."""
    with session.transaction() as connection:
        runs = JobRunRepository(connection)
        run = named(runs, run_id)
        lineage = runs.lineage(run["root_run_id"])
        found = as_json(run)
        inputs = runs.claimed_inputs(run["id"])
        found["inputs"] = None if inputs is None else _inputs(inputs)
        found["lineage"] = [as_json(attempt) for attempt in lineage]
        children = children_of(runs, run["root_run_id"])
        found["children"] = summed_up(children) if children else None
        broken = chains.breaks(connection, run["id"])
    # Behind the transaction: it may have to ask the workers.
    found["next"] = what_next(run, lineage, broken)
    return found


def what_next(run: Run, lineage: Sequence[Run], broken: Sequence[Break] = ()) -> str:
    """What happens next with a run, in a sentence; ``broken`` is where its chains broke."""
    status = JobRunStatus(run["status"])
    if status is JobRunStatus.PENDING:
        return waits.why(run["id"]) or "it was just taken: look again"
    if status is JobRunStatus.RUNNING:
        return f"it goes on; without a sign of life it is recovered at {shown(run['lease_until'])}"
    if status is JobRunStatus.CANCEL_REQUESTED:
        return "its worker stops it; without one it is CANCELLED when its lease ends"
    if status is JobRunStatus.RETRY_SCHEDULED:
        last = lineage[-1]
        return f"attempt {last['attempt']} took its place: {last['id']} is {last['status']}"
    if status is JobRunStatus.FAILED:
        return f"nothing by itself; try it again with: celery -A tasks run retry {run['id']}"
    return "; ".join(["nothing: it has ended", *map(_lost, broken)])


def summed_up(children: Sequence[Run]) -> dict[str, Any]:
    """How the child runs of a pattern job stand, together and one by one.

    Rows are summed up of those that succeeded: what others have read is not at the sink.
    """
    arrived = [run["rows_processed"] or 0 for run in children if run["status"] == "SUCCEEDED"]
    by_status: dict[str, int] = {}
    for child in children:
        by_status[child["status"]] = by_status.get(child["status"], 0) + 1
    return {
        "count": len(children),
        "by_status": by_status,
        "rows_processed": sum(arrived),
        "runs": [as_json(child) for child in children],
    }


def together(children: Mapping[str, Any]) -> str:
    """``5 child runs: 4 SUCCEEDED, 1 FAILED, 71,500 rows``, of what `summed_up` found."""
    stand = ", ".join(f"{count} {status}" for status, count in children["by_status"].items())
    runs = "child run" if children["count"] == 1 else "child runs"
    return f"{children['count']} {runs}: {stand}, {children['rows_processed']:,} rows"


def failures(children: Mapping[str, Any]) -> list[str]:
    """Why children failed, at most MOST_FAILURES of them, and how to try one again."""
    failed = [run for run in children["runs"] if run["status"] == "FAILED"]
    found = [f"{run['job']} FAILED: {failure(run)}" for run in failed[:MOST_FAILURES]]
    if len(failed) > MOST_FAILURES:
        found.append(f"and {len(failed) - MOST_FAILURES} more")
    if failed:
        found.append(f"try one again with: celery -A tasks run retry {failed[0]['id']}")
    return found


def failure(run: Run) -> str:
    """Why an attempt ended without success, in its code and words; empty where it did not."""
    if run["error_code"] is None:
        return ""
    return ": ".join(text for text in (run["error_code"], run["error_message"]) if text)


def warnings(run: Run) -> list[str]:
    """What a replication warned of; a handler's result may hold anything under that name."""
    result = run["result"]
    found = result.get("warnings") if isinstance(result, dict) else None
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def styled(status: str) -> Text:
    return Text(status, STYLES[JobRunStatus(status)])


def took(run: Mapping[str, Any]) -> str:
    """How long an attempt has run, or ran; by the database's clock where it has ended."""
    if run["started_at"] is None:
        return ""
    seconds = ((run["finished_at"] or datetime.now(UTC)) - run["started_at"]).total_seconds()
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _lost(broken: Break) -> str:
    steps = "step was" if broken.steps_lost == 1 else "steps were"
    return f"{broken}, so {broken.steps_lost:,} later {steps} not started"


def _inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    snapshot = inputs["job_snapshot"]
    found = {
        "definition": snapshot.get("definition"),
        "watermark": snapshot.get("watermark"),
        "watermark_type": snapshot.get("watermark_type"),
    }
    for side in ("source", "sink"):
        named_so = snapshot.get(side)
        found[side] = named_so and {**named_so, "key_version": inputs[f"{side}_key_version"]}
    return found
