"""Sessions stepped statement by statement: who waits for whom, and what each sees afterwards.

R-C4, R-C5, R-C7, R-C8, R-F4, R-K1, R-R2, R-T6. A session here is a transaction that is left open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Rows, in_thread, new_job, run
from support.waiting import until
from worker_support import Claimer, new_datasource, new_run

from db import link, session, statements
from db.session import ControlConnection
from dispatch.claims import PRIORITIES, TRIES, WINDOW
from dispatch.finalization import WATERMARK_BASIS

CLAIMS, FINISH = statements.load("claims"), statements.load("finish")


class Session:
    """A transaction that is stepped; ``begin`` starts a statement that may wait."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows = rows
        self.name = name
        self.connection: ControlConnection = session.connect(name, planner=link.POINT_PLANS)
        self.connection.execute("begin")
        self.token = uuid4()

    def step(self, statement: Any, parameters: Any = None) -> list[dict[str, Any]]:
        return statements.rows(self.connection, statement, parameters)

    def begin(self, statement: Any, parameters: Any = None) -> Future[list[dict[str, Any]]]:
        asked = in_thread(lambda: self.step(statement, parameters))
        until(f"{self.name} to wait", lambda: asked.done() or self.waits(), 5)
        return asked

    def waits(self) -> bool:
        """Whether this session waits for a lock that another one holds."""
        [found] = self.rows(
            """select count(*) > 0 as waits from pg_stat_activity a join pg_locks l using (pid)
               where a.application_name = %s and a.datname = current_database()
                 and not l.granted and cardinality(pg_blocking_pids(a.pid)) > 0""",
            self.name,
        )
        return bool(found["waits"])

    def claim(self, run_id: UUID | None = None) -> Any:
        """The parameters and statement of a claim, directed or the next."""
        common = {
            "executor": "host:1:nonce:2", "token": self.token, "lease_seconds": 60.0,
            "handlers": ["report"], "key_versions": ["v1"], "notify": False,
        }  # fmt: skip
        if run_id is not None:
            return CLAIMS["claim_directed"], {**common, "run_id": run_id}
        return CLAIMS["claim_next"], {
            **common, "queue": "runs", "priorities": list(PRIORITIES),
            "after_available_at": ["-infinity"] * 10, "after_created_at": ["-infinity"] * 10,
            "after_id": [UUID(int=0)] * 10, "wide": False, "deep": False, "window": WINDOW,
            "tries": TRIES,
        }  # fmt: skip

    def finish(self, run_id: UUID, token: UUID, **others: Any) -> Any:
        return FINISH["finish"], {
            "run_id": run_id, "token": token, "actor": "x", "status": "SUCCEEDED",
            "error_code": None, "error_message": None, "warning": None, "delay": 0.0,
            "result": None, "counters": None, "watermark": None, "watermark_type": None,
            "watermark_basis": list(WATERMARK_BASIS), "progress": None, "rows_processed": None,
            "in_transaction": True, **others,
        }  # fmt: skip

    def commit(self) -> None:
        self.connection.execute("commit")

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def sessions(rows: Rows) -> Iterator[Callable[[str], Session]]:
    made: list[Session] = []

    def make(name: str) -> Session:
        made.append(Session(rows, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def taken(found: list[dict[str, Any]]) -> Any:
    return found[0]["id"] if found else None


EDITS = {
    "job": "update job set updated_at = now() where name = 'one'",
    "disable": "update job set enabled = false where name = 'one'",
    "source": "update datasource set enabled = false where name = 'a'",
    "sink": "update datasource set updated_at = now() where name = 'b'",
}


@pytest.fixture
def one(rows: Rows) -> UUID:
    """A waiting run of the job ``one``, from datasource ``a`` to ``b``."""
    a, b = new_datasource(rows, "a"), new_datasource(rows, "b")
    return new_run(rows, new_job(rows, "one", source_id=a, sink_id=b))


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "next"])
def test_an_edit_waits_for_a_claim_that_came_first__R_C4__R_C5(
    rows: Rows, sessions: Callable[[str], Session], one: UUID, edit: str, directed: bool
) -> None:
    claim, editor = sessions("claim"), sessions("editor")
    assert taken(claim.step(*claim.claim(one if directed else None))) == one
    editing = editor.begin(edit)
    assert not editing.done()
    claim.commit()
    editing.result(5)
    editor.commit()
    # The attempt goes on with what it was claimed with.
    assert run(rows, one)["status"] == "RUNNING"


def test_a_trigger_does_not_wait_for_a_claim_of_its_job__R_C4(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    claim, trigger = sessions("claim"), sessions("trigger")
    claim.step(*claim.claim(one))
    inserted = trigger.begin(
        "insert into job_run (job_id) select id from job where name = 'one' returning id"
    )
    assert inserted.done()
    inserted.result(0)
    trigger.commit()


def test_claims_that_share_datasources_pass_each_other__R_C4(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    [bound] = rows("select source_id, sink_id from job where name = 'one'")
    other = new_run(
        rows, new_job(rows, "two", source_id=bound["sink_id"], sink_id=bound["source_id"])
    )
    first, second = sessions("first"), sessions("second")
    first.step(*first.claim(one))
    asked = second.begin(*second.claim(other))
    assert asked.done()
    assert taken(asked.result(0)) == other


@pytest.mark.parametrize("first_directed", [True, False])
@pytest.mark.parametrize("second_directed", [True, False])
def test_a_run_under_an_open_claim_is_passed_by__R_C7(
    sessions: Callable[[str], Session], one: UUID, first_directed: bool, second_directed: bool
) -> None:
    first, second = sessions("first"), sessions("second")
    assert taken(first.step(*first.claim(one if first_directed else None))) == one
    asked = second.begin(*second.claim(one if second_directed else None))
    assert asked.done()
    assert taken(asked.result(0)) is None


def test_a_next_claim_waits_for_nobody__R_C4(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    """Also a look that tries whatever is not locked gives a turn up in a tenth of a second."""
    first, second = sessions("first"), sessions("second")
    [job] = rows("select job_id from job_run where id = %s", one)
    # The second run of the same job: its turn belongs to the open claim.
    new_run(rows, job["job_id"])
    first.step(*first.claim(one))
    statement, look = second.claim()
    asked = second.begin(statement, look)
    assert asked.done()
    assert taken(asked.result(0)) is None
    began = time.monotonic()
    with pytest.raises(psycopg.errors.LockNotAvailable):
        second.step(statement, {**look, "wide": True, "deep": True})
    assert time.monotonic() - began < 2


def test_the_loser_of_a_turn_takes_other_work_or_none__R_T6__R_C3(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    first = sessions("first")
    [job] = rows("select job_id from job_run where id = %s", one)
    new_run(rows, job["job_id"])
    first.step(*first.claim(one))
    claimer = Claimer()
    try:
        assert claimer.next() is None
        other = new_run(rows, new_job(rows, "other"))
        held = claimer.next()
        assert held is not None
        assert held.id == other
    finally:
        claimer.close()


def test_an_open_finish_with_a_watermark_holds_up_nobody_else__R_C4__R_F3(
    rows: Rows, sessions: Callable[[str], Session]
) -> None:
    job = new_job(rows, "one", "allow")
    first, second, third = (new_run(rows, job) for _ in range(3))
    finish, claim = sessions("finish"), sessions("claim")
    finish.step(*finish.claim(first))
    finish.commit()
    finish.connection.execute("begin")
    finish.step(*finish.finish(first, finish.token, watermark="5", watermark_type="bigint"))
    # A claim passes the job by; what a directed one does then waits for it.
    for directed in (None, second):
        asked = claim.begin(*claim.claim(directed))
        assert asked.done()
        [found] = asked.result(0)
        assert found["id"] is None
        assert found["candidates"] > 0
    waiting = claim.begin(CLAIMS["wait_for_edit"], claim.claim(second)[1])
    assert not waiting.done()
    finish.commit()
    assert taken(waiting.result(5)) == second
    [held] = claim.step(*claim.claim(second))
    assert held["id"] == second
    # What was committed while it waited is what it was claimed with.
    assert held["job_snapshot"]["watermark"] == "5"
    claim.commit()
    assert run(rows, third)["status"] == "PENDING"


def test_an_open_cancel_keeps_a_claim_from_its_run__R_K1(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    cancel, claim = sessions("cancel"), sessions("claim")
    cancel.step(
        """update job_run set status = 'CANCELLED', cancel_requested_at = now(),
             finished_at = now() where status = 'PENDING'"""
    )
    for directed in (one, None):
        asked = claim.begin(*claim.claim(directed))
        assert asked.done()
        assert taken(asked.result(0)) is None
    cancel.commit()
    assert run(rows, one)["status"] == "CANCELLED"


def test_a_cancel_waits_for_an_open_claim_and_asks_its_holder__R_K1(
    rows: Rows, sessions: Callable[[str], Session], one: UUID
) -> None:
    claim, cancel = sessions("claim"), sessions("cancel")
    claim.step(*claim.claim(one))
    statement = statements.load("cancel")["cancel"]
    asked = cancel.begin(statement, {"run_id": one, "actor": "someone"})
    assert not asked.done()
    claim.commit()
    [answer] = asked.result(5)
    cancel.commit()
    assert answer["status"] == "CANCEL_REQUESTED"


@pytest.mark.parametrize("first", ["finish", "recovery"])
def test_of_a_finish_and_a_recovery_the_first_counts__R_R2__R_F1(
    rows: Rows, sessions: Callable[[str], Session], one: UUID, first: str
) -> None:
    holder, recoverer = sessions("holder"), sessions("recoverer")
    holder.step(*holder.claim(one))
    holder.commit()
    rows("update job_run set lease_until = clock_timestamp() where id = %s", one)
    holder.connection.execute("begin")
    lock = statements.load("leases")["lock_expired"]
    if first == "finish":
        holder.step(*holder.finish(one, holder.token))
        # The recoverer does not wait for the finish: it has nothing to recover.
        assert recoverer.step(lock, {"run_id": one}) == []
        holder.commit()
        assert run(rows, one)["status"] == "SUCCEEDED"
        return
    [locked] = recoverer.step(lock, {"run_id": one})
    finishing = holder.begin(*holder.finish(one, holder.token))
    assert not finishing.done()
    recoverer.step(
        *recoverer.finish(
            one, locked["lease_token"], status="FAILED", error_code="lease_expired",
            error_message="gone",
        )
    )  # fmt: skip
    recoverer.commit()
    assert finishing.result(5)[0]["id"] is None
    holder.commit()
    assert run(rows, one)["error_code"] == "lease_expired"
