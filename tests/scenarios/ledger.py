"""What the handlers of a scenario did, kept apart from what Claimcheck says that they did.

Effects stand in a database of their own, each in a transaction that passes a fence, as R-F5 asks
of a handler's sink. The trace is a file, and passes no fence: it tells when code was running.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

SCHEMA = """
create table fence (scope text primary key, fence bigint not null);
create table entry (
  seq bigint generated always as identity,
  what text not null check (what in ('began', 'effect')),
  root_run_id uuid not null, run_id uuid not null, job text not null,
  attempt integer not null, fence bigint not null
);
"""


class Stale(Exception):
    """A newer attempt of the lineage has been here: this one must write nothing."""


def begin(ledger: psycopg.Connection[Any] | None, run: Any) -> None:
    """Record the attempt's fence and its beginning. Raises Stale."""
    if ledger is None:
        return
    with ledger.transaction():
        taken = ledger.execute(
            """insert into fence values (%s, %s)
               on conflict (scope) do update set fence = excluded.fence
               where fence.fence <= excluded.fence returning fence""",
            (str(run.root_run_id), run.fence),
        ).fetchone()
        if taken is None:
            raise Stale
        _write(ledger, "began", run)


def effect(ledger: psycopg.Connection[Any] | None, run: Any) -> None:
    """Record the attempt's effect, if no newer attempt has begun. Raises Stale."""
    if ledger is None:
        return
    with ledger.transaction():
        row = ledger.execute(
            "select fence from fence where scope = %s for share", (str(run.root_run_id),)
        ).fetchone()
        if row is None or row[0] > run.fence:
            raise Stale
        _write(ledger, "effect", run)


def _write(ledger: psycopg.Connection[Any], what: str, run: Any) -> None:
    ledger.execute(
        "insert into entry (what, root_run_id, run_id, job, attempt, fence)"
        " values (%s, %s, %s, %s, %s, %s)",
        (what, run.root_run_id, run.id, run.job, run.attempt, run.fence),
    )


@contextmanager
def opened(url: str | None) -> Iterator[psycopg.Connection[Any] | None]:
    """A connection to the ledger, or none where there is to be no record."""
    if url is None:
        yield None
        return
    with psycopg.connect(url, autocommit=True, connect_timeout=5) as ledger:
        yield ledger


# --- the trace ----------------------------------------------------------------------------------


class Trace:
    """Lines of one attempt in the file that all processes of the fleet append to."""

    def __init__(self, run: Any) -> None:
        self._file = os.open(os.environ["SCENARIO_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._run = run

    def tell(self, what: str) -> None:
        # CLOCK_MONOTONIC is one clock for all processes of the machine.
        line = {
            "at": time.clock_gettime(time.CLOCK_MONOTONIC), "what": what, "pid": os.getpid(),
            "job": self._run.job, "root": str(self._run.root_run_id), "run": str(self._run.id),
            "attempt": self._run.attempt, "fence": self._run.fence,
        }  # fmt: skip
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass
class Stretch:
    """When the code of one attempt was seen running, first and last; ``pid`` is its process."""

    run: str
    root: str
    job: str
    fence: int
    pid: int
    first: float
    last: float
    ended: bool = False


def stretches(file: Path) -> list[Stretch]:
    """The trace, attempt by attempt, in the order in which they began."""
    found: dict[str, Stretch] = {}
    for text in file.read_bytes().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # a process was killed within its line
        known = found.setdefault(
            line["run"],
            Stretch(line["run"], line["root"], line["job"], line["fence"], line["pid"],
                    line["at"], line["at"]),
        )  # fmt: skip
        known.last = max(known.last, line["at"])
        known.ended |= line["what"] == "ended"
    return sorted(found.values(), key=lambda stretch: stretch.first)
