"""A run's attempts as one: by the id of any of them, or an alias, the last one counts (R-T7)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from db import session, statements
from db.runs import JobRunRepository, Run
from db.statements import AnyConnection

_RACES = 10
_SQL = statements.load("lineage")


def last_attempt(connection: AnyConnection, run_id: UUID) -> Mapping[str, Any] | None:
    """The attempt that nothing replaced; None where no run has the id. Raises the driver's errors.

    Within one transaction each call tells what is committed at that moment.
    """
    return statements.row(connection, _SQL["last_attempt"], {"run_id": str(run_id)})


def lock_last_attempt(connection: AnyConnection, run_id: UUID) -> Mapping[str, Any] | None:
    """`last_attempt`, which nothing replaces before the transaction ends. Raises as that does."""
    found = None
    for _ in range(_RACES):
        found = statements.row(connection, _SQL["lock_last_attempt"], {"run_id": str(run_id)})
        # Where it is that, it was replaced while the lock was waited for.
        if found is None or found["status"] != "RETRY_SCHEDULED":
            break
    return found


def outcome(run_id: UUID) -> Mapping[str, Any] | None:
    """How the run stands or ended, for a caller who waits for this id; None where it is of no run.

    Also a step that its chain lost has ended so. Raises sqlalchemy.exc.DBAPIError.
    """
    engine = session.engine().execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        return statements.row(connection, _SQL["outcome"], {"run_id": str(run_id)})


def children_of(runs: JobRunRepository, root_run_id: UUID) -> list[Run]:
    """The last attempt of each run that a lineage enqueued, in any of its attempts, by job.

    Where several attempts enqueued the same, one job with the same parameters, only what the
    newest of them did counts: a retry by hand starts failed children anew (R-R8).
    """
    place = {run["id"]: number for number, run in enumerate(runs.lineage(root_run_id))}
    found = runs.children(place.keys())
    newest: dict[tuple[str, str], int] = {}
    for run in found:
        newest[_work(run)] = max(place[run["parent_run_id"]], newest.get(_work(run), 0))
    return [run for run in found if place[run["parent_run_id"]] == newest[_work(run)]]


def _work(run: Run) -> tuple[str, str]:
    return run["job_name"], json.dumps(run["params"], sort_keys=True)
