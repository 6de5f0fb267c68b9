"""The lease of a held run: what renews it and what is stored along with it (R-L1, R-F1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from db import statements
from db.link import Link
from dispatch.context import Progress
from dispatch.redaction import redact
from dispatch.runlog import LogDelta

_SQL = statements.load("leases")


class LeaseState(StrEnum):
    """What a renewal or report found."""

    HELD = "HELD"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    """Held, and asked to stop: the work should end."""
    FENCED = "FENCED"
    """The token holds nothing any more: finished, recovered or expired. Nothing was written."""
    NOT_FOUND = "NOT_FOUND"
    """There is no such run."""

    @property
    def is_held(self) -> bool:
        return self in {LeaseState.HELD, LeaseState.CANCEL_REQUESTED}


@dataclass(frozen=True, slots=True)
class RunLeaseService:
    """Renews leases of ``lease_seconds`` each, by the database's clock.

    Every method raises psycopg.Error where the database does not answer or a lock is not had in
    time; the caller repeats it, which is safe, since each is idempotent under its token (R-R7).
    """

    lease_seconds: float

    def renew(
        self, link: Link, run_id: UUID, token: UUID, progress: Progress | None = None
    ) -> LeaseState:
        """Prolong the lease from now on, if it is still held at this very moment (R-L1)."""
        return self._ask(link, "renew", run_id, token, progress)

    def report(self, link: Link, run_id: UUID, token: UUID, progress: Progress) -> LeaseState:
        """Store progress; the lease stays as it is."""
        return self._ask(link, "report", run_id, token, progress)

    def write_log(self, link: Link, run_id: UUID, token: UUID, delta: LogDelta) -> bool:
        """Append to the run's log; False where the token holds nothing, or a newer delta came."""
        return link.row(_SQL["write_log"], log_parameters(run_id, token, delta)) is not None

    def _ask(
        self, link: Link, statement: str, run_id: UUID, token: UUID, progress: Progress | None
    ) -> LeaseState:
        row = link.row(
            _SQL[statement],
            {
                "run_id": run_id,
                "token": token,
                "lease_seconds": self.lease_seconds,
                **progress_parameters(progress),
            },
        )
        if row is not None:
            asked_to_stop = row["status"] == "CANCEL_REQUESTED"
            return LeaseState.CANCEL_REQUESTED if asked_to_stop else LeaseState.HELD
        exists = link.row(_SQL["exists"], {"run_id": run_id})
        return LeaseState.FENCED if exists else LeaseState.NOT_FOUND


def progress_parameters(progress: Progress | None) -> dict[str, Any]:
    """The parameters ``progress`` and ``rows_processed`` of a statement; None leaves both alone."""
    if progress is None:
        return {"progress": None, "rows_processed": None}
    stored = {
        "done": progress.done,
        "total": progress.total,
        "total_is_estimate": progress.total_is_estimate,
        "bytes": progress.bytes,
        "phase": None if progress.phase is None else redact(progress.phase),
    }
    return {
        "progress": json.dumps({key: value for key, value in stored.items() if value is not None}),
        "rows_processed": progress.done,
    }


def log_parameters(run_id: UUID, token: UUID, delta: LogDelta) -> dict[str, Any]:
    """The parameters of the statement ``write_log``."""
    return {
        "run_id": run_id,
        "token": token,
        "offset": delta.offset,
        "head": delta.head,
        "tail": delta.tail,
        "dropped_bytes": delta.dropped_bytes,
    }


def log_statement() -> Any:
    """The statement ``write_log``, for a transaction that also does something else."""
    return _SQL["write_log"]
