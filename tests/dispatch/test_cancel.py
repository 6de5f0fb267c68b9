"""Cancelling: R-K1, R-K2, R-R5, R-D3, R-X4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job, run, waits_for_a_lock
from support.waiting import until
from worker_support import Claimer, Gate, Worker, new_run

from dispatch import cancel as cancelling
from dispatch.cancel import CancelAnswer, cancel
from dispatch.context import Outcome
from dispatch.errors import InvalidParameters, NotCancellable, TriggerBusy, UnknownRun
from dispatch.finalization import RunFinalizationService, failure, success
from dispatch.lifecycle import JobRunStatus
from dispatch.ports import Ports, RunEvent
from dispatch.recovery import recover_expired


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


@pytest.fixture
def told(database: str, rows: Rows) -> Iterator[Callable[[], list[str]]]:
    """The run ids whose holders were told of a cancel since the last call."""
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("listen claimcheck_cancel")

        def payloads() -> list[str]:
            listener.execute("select 1")
            return [found.payload for found in listener.notifies(timeout=0)]

        yield payloads


def audits(rows: Rows) -> int:
    return len(rows("select 1 from audit_event where action = 'run.cancel'"))


def test_a_waiting_run_is_cancelled_at_once_and_never_executes__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    answer = cancel(recorder.ports, run_id, actor="someone")
    assert (answer.status, answer.changed) == (JobRunStatus.CANCELLED, True)
    assert claimer.directed(run_id) is None
    assert claimer.next() is None
    found = run(rows, run_id)
    assert found["status"] == "CANCELLED"
    assert found["finished_at"] is not None
    assert heard() == ["deadlines queue:runs"]
    [audit] = rows("select * from audit_event")
    assert (audit["actor"], audit["action"], audit["outcome"]) == (
        "someone", "run.cancel", "CANCELLED",
    )  # fmt: skip


def test_a_held_run_is_asked_and_its_holder_told__R_K1__R_K2(
    rows: Rows, claimer: Claimer, recorder: Recorder, told: Callable[[], list[str]]
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    answer = cancel(recorder.ports, held.id, actor="someone")
    assert (answer.status, answer.changed) == (JobRunStatus.CANCEL_REQUESTED, True)
    assert told() == [str(held.id)]
    assert run(rows, held.id)["finished_at"] is None


def test_only_who_cancelled_a_waiting_run_tells_of_it__R_K1(rows: Rows) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    events: list[RunEvent] = []
    for _ in range(2):
        cancel(Ports(emit=events.append), run_id, actor="someone")
    assert [(event.kind, event.run_id) for event in events] == [("cancelled", run_id)]


def test_cancelling_again_changes_nothing__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder, told: Callable[[], list[str]]
) -> None:
    service = RunFinalizationService(recorder.ports)
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    cancel(recorder.ports, held.id, actor="someone")
    told()
    before = run(rows, held.id)
    again = cancel(recorder.ports, held.id, actor="another")
    assert (again.status, again.changed) == (JobRunStatus.CANCEL_REQUESTED, False)
    assert run(rows, held.id) == before
    service.finish(
        claimer.link, held, failure(held, "handler_error", "stopped", warning="the sink is empty")
    )
    ended = cancel(recorder.ports, held.id, actor="another")
    assert (ended.status, ended.changed) == (JobRunStatus.CANCELLED, False)
    assert ended.cancellation_warning == "the sink is empty"
    assert audits(rows) == 1
    assert told() == []


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_cancelling_a_finished_run_is_refused_and_says_how_it_ended__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder, status: str
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    ending = (
        success(Outcome())
        if status == "SUCCEEDED"
        else failure(held, "handler_error", "wrong", permanent=True)
    )
    RunFinalizationService(recorder.ports).finish(claimer.link, held, ending)
    before = run(rows, held.id)
    with pytest.raises(NotCancellable, match=status):
        cancel(recorder.ports, held.id, actor="someone")
    assert run(rows, held.id) == before
    assert audits(rows) == 0


def lineage(rows: Rows, claimer: Claimer, recorder: Recorder) -> tuple[UUID, UUID]:
    """A failed attempt and the next one, which waits in backoff."""
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    ending = failure(held, "handler_error", "wrong")
    finished = RunFinalizationService(recorder.ports).finish(claimer.link, held, ending)
    assert finished is not None
    assert finished.next_run_id is not None
    return held.id, finished.next_run_id


@pytest.mark.parametrize("by", ["first", "last", "alias"])
def test_a_lineage_in_backoff_is_cancelled_by_any_of_its_ids__R_R5__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder, by: str
) -> None:
    first, last = lineage(rows, claimer, recorder)
    alias = uuid4()
    rows("insert into run_alias (id, run_id) values (%s, %s)", alias, first)
    asked = {"first": first, "last": last, "alias": alias}[by]
    answer = cancel(recorder.ports, asked, actor="someone")
    assert (answer.run_id, answer.requested_id) == (last, asked)
    assert answer.status is JobRunStatus.CANCELLED
    assert run(rows, first)["status"] == "RETRY_SCHEDULED"
    assert run(rows, last)["status"] == "CANCELLED"
    assert claimer.directed(last) is None


def test_an_unknown_or_malformed_id_is_an_error(rows: Rows, recorder: Recorder) -> None:
    with pytest.raises(UnknownRun):
        cancel(recorder.ports, uuid4(), actor="someone")
    with pytest.raises(InvalidParameters):
        cancel(recorder.ports, "not an id", actor="someone")


def test_a_cancel_behind_a_finish_hears_who_won__R_K1(
    database: str, rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    with psycopg.connect(database) as other:
        other.execute("update job_run set status = 'SUCCEEDED', finished_at = now()")
        asked = in_thread(lambda: cancel(recorder.ports, held.id, actor="someone"))
        until("the cancel to wait", lambda: waits_for_a_lock(rows), 5)
        other.commit()
    with pytest.raises(NotCancellable, match="SUCCEEDED"):
        asked.result(10)
    assert audits(rows) == 0


def test_a_cancel_behind_a_retry_cancels_the_new_attempt__R_R5(
    database: str, rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    with psycopg.connect(database) as other:
        other.execute(
            """update job_run set status = 'RETRY_SCHEDULED', error_code = 'handler_error',
                 finished_at = now()"""
        )
        other.execute(
            """insert into job_run (job_id, previous_run_id, root_run_id, attempt)
               select job_id, id, root_run_id, 2 from job_run"""
        )
        asked = in_thread(lambda: cancel(recorder.ports, held.id, actor="someone"))
        until("the cancel to wait", lambda: waits_for_a_lock(rows), 5)
        other.commit()
    answer: CancelAnswer = asked.result(10)
    assert answer.status is JobRunStatus.CANCELLED
    assert answer.run_id != held.id
    assert {row["status"] for row in rows("select status from job_run")} == {
        "RETRY_SCHEDULED", "CANCELLED",
    }  # fmt: skip


def test_a_cancel_that_races_a_claim_wins_or_is_seen_by_it__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", "allow")
    for _ in range(20):
        run_id = new_run(rows, job)
        asked = in_thread(lambda run_id=run_id: cancel(recorder.ports, run_id, actor="someone"))
        held = claimer.directed(run_id)
        answer = asked.result(10)
        if held is None:
            assert answer.status is JobRunStatus.CANCELLED
        else:
            assert answer.status is JobRunStatus.CANCEL_REQUESTED
        assert run(rows, run_id)["status"] == answer.status


def test_a_cancel_that_races_a_finish_tells_what_happened__R_K1__R_F4(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    service = RunFinalizationService(recorder.ports)
    job = new_job(rows, "orders", "allow", definition={"retry": {"backoff": 0}})
    for n in range(30):
        held = claimer.directed(new_run(rows, job))
        assert held is not None
        ending = success(Outcome()) if n % 2 else failure(held, "handler_error", "wrong")
        asked = in_thread(lambda: cancel(recorder.ports, held.id, actor="someone"))  # noqa: B023
        service.finish(claimer.link, held, ending)
        try:
            answer = asked.result(10)
        except NotCancellable:
            assert run(rows, held.id)["status"] == "SUCCEEDED"
            continue
        last = run(rows, answer.run_id)
        assert last["status"] == "CANCELLED"
        assert not rows(
            """select 1 from job_run where root_run_id = %s
               and status in ('PENDING', 'RUNNING', 'CANCEL_REQUESTED')""",
            held.root_run_id,
        )


def test_a_cancel_behind_someone_elses_transaction_gives_up__R_T4(
    database: str, rows: Rows, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "LOCK_SECONDS", 0.2)
    run_id = new_run(rows, new_job(rows, "orders"))
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run for update")
        with pytest.raises(TriggerBusy):
            cancel(recorder.ports, run_id, actor="someone")
    assert run(rows, run_id)["status"] == "PENDING"


def test_with_the_fleet_down_a_cancelled_run_never_executes__R_K1(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", "allow")
    waiting = new_run(rows, job)
    held = claimer.directed(new_run(rows, job))
    assert held is not None
    for run_id in (waiting, held.id):
        cancel(recorder.ports, run_id, actor="someone")
    rows("update job_run set lease_until = now() where status = 'CANCEL_REQUESTED'")
    recover_expired(recorder.ports)
    worker = Worker(rows, recorder)
    try:
        worker.on("report", lambda run: pytest.fail("it executed"))
        assert worker.run(waiting) == []
        assert worker.run(held.id) == []
    finally:
        worker.close()
    assert {row["status"] for row in rows("select status from job_run")} == {"CANCELLED"}


def test_a_cancel_stops_a_working_core_within_a_second__R_K2(
    rows: Rows, recorder: Recorder
) -> None:
    gate = Gate()
    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("slow", gate))
        working = in_thread(lambda: worker.run(run_id))
        assert gate.began.wait(10)
        [asked] = rows("select clock_timestamp() as at")
        cancel(recorder.ports, run_id, actor="someone")
        working.result(10)
        found = run(rows, run_id)
        assert found["status"] == "CANCELLED"
        assert (found["finished_at"] - asked["at"]).total_seconds() < 1
    finally:
        worker.close()
