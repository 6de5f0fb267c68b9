"""The scenarios' own judgement can fail: each planted breach is found, and sound rows pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from scenarios import ledger
from scenarios.invariants import WATCH_WATERMARKS, Accepted, breaches

RUN = """
insert into job_run (id, job_id, job_name, previous_run_id, root_run_id, attempt, max_attempts,
  status, queue, priority, executor, lease_token, lease_until, heartbeat_at, fence, started_at,
  finished_at, job_snapshot, datasources_resolved_at, error_code, result, exclusive)
select %(id)s::uuid, id, name, %(previous)s::uuid, %(root)s::uuid, %(attempt)s, 3, %(status)s,
  'runs', 0, 'host:1:a:2', gen_random_uuid(), now(), now(), %(fence)s,
  now() + make_interval(secs => %(began)s), now() + make_interval(secs => %(ended)s),
  '{"handler": "work", "definition": {}}', now(), %(code)s, %(result)s, overlap <> 'allow'
from job where name = %(job)s
"""
AUDIT = """
insert into audit_event (actor, action, subject_type, subject, run_id, outcome)
values ('test', %s, 'run', 'work', %s, %s)
"""
FIRST, SECOND, OTHER = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2, 3))


class Planted:
    """A database with rows as a fleet would leave them, or as it must not."""

    def __init__(self, database: str, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / "trace.jsonl"
        self.members: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self._connection = psycopg.connect(database, autocommit=True, row_factory=dict_row)
        self.rows(WATCH_WATERMARKS)
        self.rows(ledger.SCHEMA)
        # What the guards refuse is to be planted too.
        self.rows("set session_replication_role = replica")
        self.rows("drop index job_run_one_replacement")
        self.rows("insert into job (name, handler, overlap) values ('work', 'work', 'queue')")

    def close(self) -> None:
        self._connection.close()

    def rows(self, query: Any, *values: Any, database: str = "control") -> list[dict[str, Any]]:
        if "pg_xact_commit_timestamp" in query:
            # Whether the server keeps these is a setting of the fleet's own.
            query = query.replace("pg_xact_commit_timestamp(xmin)", "seq")
        found = self._connection.execute(query, values or None)
        return [] if found.description is None else found.fetchall()

    def run(self, run_id: str, status: str = "SUCCEEDED", **given: Any) -> None:
        values = {
            "id": run_id, "previous": None, "root": FIRST, "attempt": 1, "status": status,
            "fence": 1, "began": 1, "ended": 2, "job": "work",
            "code": None if status == "SUCCEEDED" else "lease_expired",
        }  # fmt: skip
        values |= given
        told = {"run": run_id, "attempt": values["attempt"], "fence": values["fence"]}
        values["result"] = json.dumps(told) if status == "SUCCEEDED" else None
        self._connection.execute(RUN, values)
        if values["previous"] is None:
            self._connection.execute(AUDIT, ["run.trigger", run_id, "created"])
        self._connection.execute(AUDIT, ["run.finish", run_id, status])
        for what in ("began", "effect") if status == "SUCCEEDED" else ("began",):
            self.entry(what, run_id, values["fence"])

    def entry(self, what: str, run_id: str, fence: int) -> None:
        self._connection.execute(
            "insert into entry (what, root_run_id, run_id, job, attempt, fence)"
            " values (%s, %s, %s, 'work', 1, %s)",
            [what, FIRST, run_id, fence],
        )

    def told(self, what: str, at: float, run_id: str, fence: int) -> None:
        line = {"what": what, "at": at, "pid": fence, "job": "work", "root": FIRST, "run": run_id,
                "attempt": 1, "fence": fence}  # fmt: skip
        with self.trace.open("a") as trace:
            trace.write(json.dumps(line) + "\n")

    def sound(self) -> None:
        """A lineage of two attempts, the first of which lost its worker."""
        self.run(FIRST, "RETRY_SCHEDULED")
        self.run(SECOND, previous=FIRST, attempt=2, fence=2, began=3, ended=4)
        for at, run_id, fence in ((1.0, FIRST, 1), (2.0, FIRST, 1), (3.0, SECOND, 2)):
            self.told("at", at, run_id, fence)

    def twin(self) -> None:
        """Another replacement of the first attempt."""
        self.run(OTHER, previous=FIRST, attempt=2, fence=3, began=5, ended=6)

    def found(self, accepted: Accepted | None = None) -> list[str]:
        return breaches(self, accepted or Accepted())  # type: ignore[arg-type]


@pytest.fixture
def planted(database: str, tmp_path: Path) -> Iterator[Planted]:
    made = Planted(database, tmp_path)
    yield made
    made.close()


def test_sound_rows_pass(planted: Planted) -> None:
    planted.sound()
    accepted = Accepted(runs=[FIRST], results=[(FIRST, "RunFailed")])
    accepted.by_key["work", "k"] |= {FIRST, SECOND}
    assert planted.found(accepted) == []


PLANTED = {
    "two replacements": lambda p: p.twin(),
    "two last attempts": lambda p: p.twin(),
    "has not exactly one audit record": lambda p: p.rows(
        AUDIT.replace("%s, 'run'", "'run.finish', 'run'"), SECOND, "SUCCEEDED"
    ),
    "tells another end than the row": lambda p: p.rows(
        "update audit_event set outcome = 'FAILED' where run_id = %s", SECOND
    ),
    "fence does not rise": lambda p: p.rows("update job_run set fence = 0 where id = %s", SECOND),
    "began before the one that it replaces": lambda p: p.rows(
        "update job_run set started_at = started_at - interval '2 s' where id = %s", SECOND
    ),
    "held at once": lambda p: p.rows(
        "update job_run set started_at = started_at - interval '2 s' where id = %s", SECOND
    ),
    "still active": lambda p: p.rows(
        "update job_run set status = 'RUNNING', finished_at = null where id = %s", SECOND
    ),
    "RETRY_SCHEDULED without": lambda p: p.rows("delete from job_run where id = %s", SECOND),
    "not asked to cancel": lambda p: p.rows(
        "update job_run set cancel_requested_at = now() where id = %s", SECOND
    ),
    "watermark moved backwards": lambda p: p.rows(
        "insert into scenario_watermark (before, after) values ('10', '9')"
    ),
    "schedule's run has no slot": lambda p: p.rows(
        "update job_run set schedule_id = gen_random_uuid(), scheduled_for = now() where id = %s",
        FIRST,
    ),
    "stale attempt wrote to the ledger": lambda p: p.entry("effect", FIRST, 1),
    "success without its effect": lambda p: p.rows("delete from entry where what = 'effect'"),
    "something ran after a success": lambda p: p.entry("began", OTHER, 9),
    "another attempt's result": lambda p: p.rows(
        "update job_run set result = '{}' where id = %s", SECOND
    ),
    "ran on for 1.50 s": lambda p: p.told("at", 4.5, FIRST, 1),
    "deadlock detected": lambda p: (p.folder / "worker.log").write_text("deadlock detected\n"),
    "ZeroDivisionError": lambda p: (p.folder / "beat.log").write_text(
        "Traceback (most recent call last):\n  File x\nZeroDivisionError: division by zero\n"
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_breach_is_found(planted: Planted, what: str) -> None:
    planted.sound()
    PLANTED[what](planted)
    assert any(what in line for line in planted.found()), planted.found()


@pytest.mark.parametrize(
    ("what", "accepted"),
    {
        "accepted run is lost": Accepted(runs=[OTHER]),
        "rolled back run is there": Accepted(rolled_back=[FIRST]),
        "accepted cancel did not win": Accepted(cancelled=[FIRST]),
        "of a chain is missing": Accepted(chains=[[FIRST, OTHER]]),
        "told TaskRevokedError": Accepted(results=[(FIRST, "TaskRevokedError")]),
        "several runs": Accepted(by_key={("work", "k"): {FIRST, OTHER}}),  # type: ignore[arg-type]
    }.items(),
)
def test_broken_promise_to_a_caller_is_found(
    planted: Planted, what: str, accepted: Accepted
) -> None:
    planted.sound()
    assert any(what in line for line in planted.found(accepted)), planted.found(accepted)


def test_thawed_process_may_go_on_for_a_moment__R_L3(planted: Planted) -> None:
    planted.sound()
    planted.told("at", 4.5, FIRST, 1)
    planted.events.append({"at": 4.4, "what": "thaw", "thawed": [1]})
    assert planted.found() == []
    planted.members["w"] = SimpleNamespace(starts=[])
    planted.told("at", 6.0, FIRST, 1)
    assert any("ran on" in line for line in planted.found())
