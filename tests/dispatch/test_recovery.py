"""Runs whose holder is gone: R-R1 to R-R6, R-L5, R-D7, R-D9, R-F1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job, request_cancel, run
from worker_support import Claimer, Worker, new_run, new_runs

from db import session
from dispatch.context import Outcome
from dispatch.finalization import RunFinalizationService, success
from dispatch.recovery import recover_expired, release_lease


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


def lose(rows: Rows, claimer: Claimer, job: UUID, run_id: UUID | None = None) -> UUID:
    """A run of ``job`` that is held under an expired lease."""
    held = claimer.directed(run_id or new_run(rows, job))
    assert held is not None
    rows("update job_run set lease_until = clock_timestamp() where id = %s", held.id)
    return held.id


def following(rows: Rows, run_id: UUID) -> list[dict[str, Any]]:
    return rows("select * from job_run where previous_run_id = %s", run_id)


def test_a_held_lease_is_left_alone__R_R1(rows: Rows, claimer: Claimer, recorder: Recorder) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    before = run(rows, held.id)
    assert recover_expired(recorder.ports).recovered == []
    assert run(rows, held.id) == before


def test_an_expired_run_becomes_a_retry_that_is_due_at_once__R_R1__R_R4(
    rows: Rows, claimer: Claimer, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    run_id = lose(rows, claimer, new_job(rows, "orders"))
    heard()
    [recovered] = recover_expired(recorder.ports).recovered
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "lease_expired")
    [new] = following(rows, run_id)
    assert (new["attempt"], new["available_at"]) == (2, found["finished_at"])
    assert recovered.next_run_id == new["id"]
    assert recorder.take() == [new["id"]]
    assert heard() == ["deadlines queue:runs"]
    [audit] = rows("select * from audit_event where action = 'run.finish'")
    assert (audit["actor"], audit["outcome"]) == ("recovery", "RETRY_SCHEDULED")


def test_a_cancel_that_was_asked_for_becomes_cancelled__R_R1(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    run_id = lose(rows, claimer, new_job(rows, "orders"))
    rows("update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()")
    recover_expired(recorder.ports)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("CANCELLED", None)
    assert found["cancellation_warning"] is None
    assert following(rows, run_id) == []


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("complete", "the sink may hold a part"),
        ("complete-atomic", "its old content or the new rows"),
        ("incremental", "its old content or the new rows"),
    ],
)
def test_a_lost_load_that_was_cancelled_has_a_warning__R_F4(
    rows: Rows, claimer: Claimer, recorder: Recorder, mode: str, says: str
) -> None:
    run_id = lose(rows, claimer, new_job(rows, "orders", definition={"mode": mode}))
    rows("update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()")
    recover_expired(recorder.ports)
    assert says in run(rows, run_id)["cancellation_warning"]


@pytest.mark.parametrize("has_children", [True, False])
def test_a_lost_pattern_run_that_was_cancelled_speaks_of_its_children_alone__R_F4(
    rows: Rows, claimer: Claimer, recorder: Recorder, has_children: bool
) -> None:
    job = new_job(rows, "all", definition={"mode": "complete", "tables": ["public.*"]})
    run_id = lose(rows, claimer, job)
    if has_children:
        new_run(rows, new_job(rows, "all/public.a"), parent_run_id=run_id)
    request_cancel(rows, run_id)
    recover_expired(recorder.ports)
    found = run(rows, run_id)
    assert found["status"] == "CANCELLED"
    if has_children:
        assert found["cancellation_warning"].startswith("the child runs that it started go on")
    else:
        assert found["cancellation_warning"] is None


@pytest.mark.parametrize(
    "definition", [{"mode": "complete"}, {"retry": {"on_worker_loss": False}}], ids=str
)
def test_a_run_that_is_not_retried_fails_with_the_reason__R_R1__R_R4(
    rows: Rows, claimer: Claimer, recorder: Recorder, definition: dict[str, Any]
) -> None:
    run_id = lose(rows, claimer, new_job(rows, "orders", definition=definition))
    recover_expired(recorder.ports)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("FAILED", "lease_expired")
    assert following(rows, run_id) == []


def test_a_run_that_keeps_losing_its_worker_stops_at_its_limit_and_waits_between__R_R6(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", max_attempts=3)
    run_id = lose(rows, claimer, job)
    recover_expired(recorder.ports)
    [second] = following(rows, run_id)
    lose(rows, claimer, job, second["id"])
    recover_expired(recorder.ports)
    [third] = following(rows, second["id"])
    # The second loss in a row is not repeated at once.
    finished = run(rows, second["id"])["finished_at"]
    assert 120 <= (third["available_at"] - finished).total_seconds() <= 150
    rows("update job_run set available_at = now() where id = %s", third["id"])
    lose(rows, claimer, job, third["id"])
    recover_expired(recorder.ports)
    found = run(rows, third["id"])
    assert (found["status"], found["attempt"]) == ("FAILED", 3)
    assert "attempt 3 of 3" in found["error_message"]
    assert claimer.next() is None


def test_a_retry_of_a_disabled_job_is_created_and_waits__R_T8(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    run_id = lose(rows, claimer, new_job(rows, "orders"))
    rows("update job set enabled = false")
    recover_expired(recorder.ports)
    [new] = following(rows, run_id)
    assert claimer.directed(new["id"]) is None


def test_any_number_of_recoverers_make_one_replacement_each__R_R2(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", "allow")
    ids = [lose(rows, claimer, job) for _ in range(30)]
    asked = [in_thread(lambda: recover_expired(recorder.ports)) for _ in range(4)]
    done = [one.result(60) for one in asked]
    assert sorted(r.run_id for one in done for r in one.recovered) == sorted(ids)
    assert all(one.failed == [] for one in done)
    assert [len(following(rows, run_id)) for run_id in ids] == [1] * 30
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 30


def test_a_late_finish_and_a_recovery_never_both_count__R_F1__R_R2(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    service = RunFinalizationService(recorder.ports, patience=20)
    job = new_job(rows, "orders", "allow")
    for _ in range(20):
        held = claimer.directed(new_run(rows, job))
        assert held is not None
        rows("update job_run set lease_until = clock_timestamp() where id = %s", held.id)
        recovering = in_thread(lambda: recover_expired(recorder.ports))
        finished = service.finish(claimer.link, held, success(Outcome(result="mine")))
        recovered = recovering.result(20).recovered
        found = run(rows, held.id)
        if finished is None:
            assert [one.run_id for one in recovered] == [held.id]
            assert found["status"] == "RETRY_SCHEDULED"
        else:
            assert recovered == []
            assert found["status"] == "SUCCEEDED"
        assert len(rows("select 1 from audit_event where run_id = %s", held.id)) == 1


def test_a_recoverer_waits_for_nobody_and_comes_back__R_R2__R_D9(
    database: str, rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", "allow")
    first, second = lose(rows, claimer, job), lose(rows, claimer, job)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run where id = %s for update", [first])
        assert [one.run_id for one in recover_expired(recorder.ports).recovered] == [second]
        other.rollback()
    assert [one.run_id for one in recover_expired(recorder.ports).recovered] == [first]


def test_one_bad_row_does_not_keep_the_rest_from_being_recovered__R_D9(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", "allow")
    ids = [lose(rows, claimer, job) for _ in range(3)]
    rows(
        f"""alter table audit_event add constraint bad
              check (run_id <> '{ids[0]}') not valid"""
    )
    done = recover_expired(recorder.ports)
    assert done.failed == [ids[0]]
    assert sorted(one.run_id for one in done.recovered) == sorted(ids[1:])
    assert recover_expired(recorder.ports, set_aside=done.failed).failed == []
    assert run(rows, ids[0])["status"] == "RUNNING"


def test_a_recovery_is_bounded(rows: Rows, claimer: Claimer, recorder: Recorder) -> None:
    job = new_job(rows, "orders", "allow")
    ids = [lose(rows, claimer, job) for _ in range(3)]
    done = recover_expired(recorder.ports, limit=2)
    assert sorted(one.run_id for one in done.recovered) == sorted(ids[:2])


def test_a_nonsensical_definition_does_not_keep_a_run_from_recovery__R_D9(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    definition = {"retry": [1], "mode": 5, "timeout": "soon"}
    run_id = lose(rows, claimer, new_job(rows, "orders", definition=definition))
    recover_expired(recorder.ports)
    assert run(rows, run_id)["status"] == "RETRY_SCHEDULED"


def test_a_recovery_offers_what_the_lost_run_held__R_D7(
    rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 1)")
    lost = new_job(rows, "lost", "allow", concurrency_key="shared", max_attempts=1)
    waits = new_run(rows, new_job(rows, "waits", "allow", concurrency_key="shared"))
    lose(rows, claimer, lost)
    assert claimer.directed(waits) is None
    recover_expired(recorder.ports)
    assert recorder.take() == [waits]
    assert claimer.directed(waits) is not None


def test_a_dead_childs_runs_are_released_without_their_tokens__R_L5(
    database: str, rows: Rows, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    dead, alive = Claimer("host:1:nonce:20"), Claimer("host:1:nonce:21")
    job = new_job(rows, "orders", "allow")
    mine, others = (one.directed(new_run(rows, job)) for one in (dead, alive))
    assert mine is not None
    assert others is not None
    heard()
    with psycopg.connect(database, autocommit=True) as parent:
        assert release_lease(parent, "host:1:nonce:20", recorder.ports) == [mine.id]
        assert release_lease(parent, "host:1:nonce:20", recorder.ports) == []
    found = run(rows, mine.id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "worker_lost")
    [new] = following(rows, mine.id)
    assert recorder.take() == [new["id"]]
    assert run(rows, others.id)["status"] == "RUNNING"
    assert "deadlines queue:runs" in heard()
    dead.close()
    alive.close()


def test_what_a_dead_child_held_is_offered_on_its_parents_connection_alone__R_L5__R_D7(
    database: str, rows: Rows, recorder: Recorder, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is bounded by that connection's patience; the engine's is far longer."""
    job = new_job(rows, "orders", max_attempts=1)
    held = claimer.directed(new_run(rows, job))
    assert held is not None
    waits = new_run(rows, job)

    def refuse() -> None:
        pytest.fail("the parent's loop would wait for the engine")

    monkeypatch.setattr(session, "engine", refuse)
    with psycopg.connect(database, autocommit=True) as parent:
        assert release_lease(parent, held.executor, recorder.ports) == [held.id]
    assert run(rows, held.id)["status"] == "FAILED"
    assert recorder.take() == [waits]


def test_a_released_lease_that_cannot_be_recovered_now_is_left_to_the_sweep__R_L5(
    database: str, rows: Rows, claimer: Claimer, recorder: Recorder
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    rows("alter table audit_event add constraint bad check (action <> 'run.finish') not valid")
    with psycopg.connect(database, autocommit=True) as parent:
        assert release_lease(parent, "host:1:nonce:2", recorder.ports) == [held.id]
    assert run(rows, held.id)["status"] == "RUNNING"
    rows("alter table audit_event drop constraint bad")
    assert [one.run_id for one in recover_expired(recorder.ports).recovered] == [held.id]


def test_the_next_attempt_of_a_lost_run_is_executed_to_its_end__R_R3(
    rows: Rows, recorder: Recorder, claimer: Claimer
) -> None:
    worker = Worker(rows, recorder)
    try:
        job = worker.job("again", lambda run: run.attempt)
        lost = Claimer(handlers=["again"])
        run_id = lose(rows, lost, job)
        lost.close()
        recover_expired(recorder.ports)
        [new] = recorder.take()
        assert worker.run(new) == [new]
        assert run(rows, new)["result"] == 2
        assert run(rows, new)["root_run_id"] == run_id
    finally:
        worker.close()


def test_an_unknown_executor_releases_nothing__R_L5(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_runs(rows, new_job(rows, "orders", "allow"), 2)
    with psycopg.connect(database, autocommit=True) as parent:
        assert release_lease(parent, str(uuid4()), recorder.ports) == []
