"""A connection that breaks at COMMIT: settled, never assumed (R-R7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, ended, in_thread, new_job, run, waits_for_a_lock
from support.proxy import Proxy, before_database
from support.waiting import until
from worker_support import Claimer, Gate, Worker, new_run

from db import session
from dispatch import enqueue
from dispatch.cancel import cancel
from dispatch.children import spawner
from dispatch.context import ChildJob, RunContext
from dispatch.errors import DatabaseUnavailable
from dispatch.lifecycle import JobRunStatus
from dispatch.ports import Ports, RunEvent
from dispatch.recovery import recover_run
from dispatch.retry import retry


@pytest.fixture
def cutter(database: str, rows: Rows, configure: Callable[..., Any]) -> Iterator[Proxy]:
    """The product's own connections go through a proxy; ``rows`` does not."""
    with before_database(database) as (made, through):
        configure(DATABASE_URL=through, REDIS_URL="redis://127.0.0.1:1/0")
        session.dispose()
        yield made
        session.dispose()


def executes(data: bytes) -> bool:
    """Whether a prepared statement is executed: the message Bind."""
    return data[:1] == b"B"


def sends(*parts: bytes) -> Callable[[bytes], bool]:
    return lambda data: all(part in data for part in parts)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_claim_is_looked_up_by_its_token__R_R7(rows: Rows, cutter: Proxy, answered: bool) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    claimer = Claimer()
    try:
        assert claimer.directed(uuid4()) is None  # the statement is prepared now
        cutter.cut_when(executes, answered=answered)
        held = claimer.directed(run_id)
        assert cutter.cuts == 1
        found = run(rows, run_id)
        if answered:
            assert held is not None
            assert (found["status"], found["lease_token"]) == ("RUNNING", held.token)
        else:
            assert held is None
            assert found["status"] == "PENDING"
            assert claimer.directed(run_id) is not None
    finally:
        claimer.close()


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_claim_that_waited_for_an_edit_is_looked_up_too__R_R7(
    database: str, rows: Rows, cutter: Proxy, answered: bool
) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    claimer = Claimer()
    try:
        with psycopg.connect(database) as other:
            other.execute("update job set updated_at = now()")
            cutter.cut_when(sends(b"COMMIT"), answered=answered)
            asked = in_thread(lambda: claimer.directed(run_id))
            until("the claim to wait", lambda: waits_for_a_lock(rows), 5)
            other.commit()
        held = asked.result(10)
        assert cutter.cuts == 1
        found = run(rows, run_id)
        assert found["status"] == ("RUNNING" if answered else "PENDING")
        assert found["lease_token"] == (None if held is None else held.token)
    finally:
        claimer.close()


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fails", [False, True], ids=["success", "retry"])
@pytest.mark.parametrize("logs", [False, True], ids=["statement", "transaction"])
def test_a_finish_is_repeated_and_recorded_once__R_R7__R_F2(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool, fails: bool, logs: bool
) -> None:
    def work(run: RunContext) -> str:
        if logs:
            run.log.info("a line makes the finish a transaction of several statements")
        cutter.cut_when(sends(b"COMMIT") if logs else sends(b"update job_run r"), answered=answered)
        if fails:
            raise ValueError("it went wrong")
        return "done"

    worker = Worker(rows, recorder)
    try:
        definition = {"retry": {"backoff": 600}}
        run_id = new_run(rows, worker.job("orders", work, definition=definition))
        assert worker.run(run_id) == [run_id]
    finally:
        worker.close()
    assert cutter.cuts == 1
    found = run(rows, run_id)
    assert found["status"] == ("RETRY_SCHEDULED" if fails else "SUCCEEDED")
    assert found["result"] == (None if fails else "done")
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 1
    assert len(rows("select 1 from job_run where previous_run_id = %s", run_id)) == int(fails)
    assert [event.kind for event in worker.events[2:]] == ["retried" if fails else "succeeded"]
    kept = "".join(row["head"] for row in rows("select head from run_log"))
    assert kept.count("a line makes") == int(logs)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_log_whose_writing_was_not_answered_is_whole__R_R7__R_X5(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    def work(run: RunContext) -> None:
        cutter.cut_when(sends(b"insert into run_log"), answered=answered)
        run.log.info("the first line")
        until("the answer to be lost", lambda: cutter.cuts == 1, 10)
        run.log.info("the last line")

    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("orders", work))
        assert worker.run(run_id) == [run_id]
    finally:
        worker.close()
    [kept] = rows("select head from run_log")
    assert [line.rpartition(" INFO ")[2] for line in kept["head"].splitlines()] == [
        "the first line",
        "the last line",
    ]


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_finish_that_was_recovered_meanwhile_is_fenced__R_R7__R_F1(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    def work(run: RunContext) -> str:
        def seen(data: bytes) -> bool:
            if b"update job_run r" not in data:
                return False
            rows("update job_run set lease_until = clock_timestamp() where id = %s", run.id)
            rows(
                """update job_run set status = 'FAILED', error_code = 'lease_expired',
                     finished_at = clock_timestamp() where id = %s""",
                run.id,
            )
            return True

        cutter.cut_when(seen, answered=answered)
        return "done"

    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("orders", work))
        worker.run(run_id)
    finally:
        worker.close()
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("FAILED", "lease_expired")
    assert [event.kind for event in worker.events] == ["received", "started"]
    assert not rows("select 1 from audit_event where action = 'run.finish'")


def test_a_cancellation_that_recovery_recorded_is_not_told_again__R_R7__R_F1(
    database: str, rows: Rows, recorder: Recorder, cutter: Proxy
) -> None:
    def work(run: RunContext) -> str:
        def seen(data: bytes) -> bool:
            if b"update job_run r" not in data:
                return False
            rows(
                """update job_run set status = 'CANCEL_REQUESTED',
                     cancel_requested_at = clock_timestamp(), lease_until = clock_timestamp()
                   where id = %s""",
                run.id,
            )
            with psycopg.connect(database) as beat:
                assert recover_run(beat, run.id) is not None
            return True

        cutter.cut_when(seen, answered=False)
        return "done"

    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("orders", work))
        worker.run(run_id)
    finally:
        worker.close()
    assert run(rows, run_id)["status"] == "CANCELLED"
    assert [event.kind for event in worker.events] == ["received", "started"]


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_cancellation_whose_answer_was_lost_is_told_once__R_R7(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    def work(run: RunContext) -> str:
        rows(
            """update job_run set status = 'CANCEL_REQUESTED',
                 cancel_requested_at = clock_timestamp() where id = %s""",
            run.id,
        )
        cutter.cut_when(sends(b"update job_run r"), answered=answered)
        return "done"

    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("orders", work))
        worker.run(run_id)
    finally:
        worker.close()
    assert cutter.cuts == 1
    assert run(rows, run_id)["status"] == "CANCELLED"
    assert [event.kind for event in worker.events] == ["received", "started", "cancelled"]


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_renewal_is_repeated__R_R7(rows: Rows, cutter: Proxy, answered: bool) -> None:
    gate = Gate("done")
    worker = Worker(rows, lease=3.0)
    try:
        run_id = new_run(rows, worker.job("orders", gate))
        working = in_thread(lambda: worker.run(run_id))
        assert gate.began.wait(10)
        until("the heartbeat", lambda: worker.coordinator._keeper.is_connected)
        cutter.cut_when(sends(b"set lease_until"), answered=answered)
        until("the cut", lambda: cutter.cuts == 1, 10)
        [then] = rows("select clock_timestamp() + interval '2.5 seconds' as at")
        until(
            "a renewal after it",
            lambda: run(rows, run_id)["lease_until"] > then["at"],
            10,
        )
        gate.go.set()
        assert working.result(10) == [run_id]
    finally:
        worker.close()
    assert run(rows, run_id)["status"] == "SUCCEEDED"


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_an_enqueue_is_repeated_under_its_id__R_R7(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    new_job(rows, "orders", "allow")
    session.engine().connect().close()
    cutter.cut_when(sends(b"insert into job_run"), answered=answered)
    handle = enqueue.submit(recorder.ports, "orders")
    assert cutter.cuts == 1
    assert handle.created
    assert [row["id"] for row in rows("select id from job_run")] == [handle.run_id]
    assert len(rows("select 1 from audit_event")) == 1


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_cancel_is_repeated_recorded_once_and_told__R_R7__R_X4(
    rows: Rows, cutter: Proxy, answered: bool
) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    session.engine().connect().close()
    cutter.cut_when(sends(b"COMMIT"), answered=answered)
    events: list[RunEvent] = []
    answer = cancel(Ports(emit=events.append), run_id, actor="someone")
    assert cutter.cuts == 1
    assert (answer.status, answer.changed) == (JobRunStatus.CANCELLED, True)
    assert [(event.kind, event.run_id) for event in events] == [("cancelled", run_id)]
    assert len(rows("select 1 from audit_event where action = 'run.cancel'")) == 1


@pytest.mark.parametrize("change", [cancel, retry])
def test_what_may_yet_land_is_not_said_to_have_changed_nothing__R_R7(
    database: str, rows: Rows, recorder: Recorder, cutter: Proxy, change: Callable[..., Any]
) -> None:
    """The connection breaks while the change waits for a lock, which is then there still."""
    run_id = new_run(rows, new_job(rows, "orders"))
    if change is retry:
        ended(rows, run_id, "FAILED")
    session.engine().connect().close()
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run for update")
        asked = in_thread(lambda: change(recorder.ports, run_id, actor="someone"))
        until("it to wait", lambda: waits_for_a_lock(rows), 5)
        cutter.cut()
        with pytest.raises(DatabaseUnavailable, match="may be stored"):
            asked.result(10)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_children_are_started_once_where_the_commit_got_no_answer__R_R7(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    stored: list[bytes] = []

    def commits(data: bytes) -> bool:
        if b"INSERT INTO job " in data:
            stored.append(data)
        return bool(stored) and b"COMMIT" in data

    def work(run: RunContext) -> None:
        cutter.cut_when(commits, answered=answered)
        run.spawn([ChildJob("all/t", {"mode": "complete", "overlap": "allow"})])

    worker = Worker(rows, recorder, spawn=spawner(recorder.ports))
    try:
        definition = {"retry": {"on_failure": False}}
        run_id = new_run(rows, worker.job("all", work, definition=definition))
        worker.coordinator.run_only(run_id)
    finally:
        worker.close()
    assert cutter.cuts == 1
    assert run(rows, run_id)["status"] == "SUCCEEDED"
    assert len(rows("select 1 from job_run where parent_run_id = %s", run_id)) == 1
