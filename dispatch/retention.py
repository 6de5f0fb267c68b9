"""Forgetting: finished runs, their logs and records, settled slots and expired keys (R-S3)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from db import settings, statements

BATCH = 200
"""How many rows one statement removes: short transactions, so that nothing waits for them."""
LONGEST_SECONDS = 0.05
"""How long the beat goes on with it before it turns to its other duties."""

_SQL = statements.load("retention")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many runs were removed, and whether ``more`` rows have outlived their retention."""

    runs: int
    more: bool


def prune(
    connection: psycopg.Connection[Any],
    *,
    days: float | None = None,
    longest_seconds: float | None = LONGEST_SECONDS,
    batch: int = BATCH,
    actor: str | None = None,
) -> Forgotten:
    """Remove what has outlived its retention, in small batches; no run before its key (R-T5).

    ``days`` counts from a run's end by the database's clock; None takes CLAIMCHECK_RETENTION_DAYS,
    and 0 keeps all runs. Begins no batch after ``longest_seconds`` (monotonic; None goes on to the
    end): the next call goes on. ``actor`` asked for it, and has one record of the runs that are
    gone (R-X4); the beat's own forgetting has none. ``connection`` is in autocommit mode. Raises
    psycopg.Error.
    """
    kept = settings.settings().retention_days if days is None else days
    asked = {"seconds": kept * 86_400, "batch": batch}
    until = None if longest_seconds is None else time.monotonic() + longest_seconds
    record = _Record(connection, actor, kept) if actor else None
    runs = 0
    for name in ("forget_runs", "forget_slots", "forget_keys"):
        if not kept and name != "forget_keys":
            continue
        removed = batch
        while removed:
            if until is not None and time.monotonic() >= until:
                return Forgotten(runs, True)
            with connection.transaction():
                found = statements.row(connection, _SQL[name], asked)
                removed = 0 if found is None else found["removed"]
                if name == "forget_runs":
                    runs += removed
                    if record and removed:
                        record.add(removed)
    return Forgotten(runs, False)


class _Record:
    """The audit record of one prune, which grows in the transaction of each batch (R-X4)."""

    def __init__(self, connection: psycopg.Connection[Any], actor: str, days: float) -> None:
        self._connection = connection
        self._said = {"actor": actor, "days": days, "record": None}

    def add(self, runs: int) -> None:
        noted = statements.row(self._connection, _SQL["record_prune"], {**self._said, "runs": runs})
        assert noted is not None
        self._said["record"] = noted["id"]
