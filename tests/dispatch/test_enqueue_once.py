"""A run is created once: idempotency keys, overlap, repeated ids (R-T5, R-T6, R-T7, R-R7)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import (
    Recorder,
    Rows,
    claim,
    ended,
    in_thread,
    new_job,
    request_cancel,
    stored,
    waits_for_a_lock,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from support.waiting import until

from db import session
from dispatch import enqueue as enqueueing
from dispatch.enqueue import enqueue, submit
from dispatch.errors import DatabaseUnavailable, InvalidParameters

# --- idempotency (R-T5) -------------------------------------------------------------------------


def test_a_repeated_key_returns_the_first_run_and_does_nothing_else__R_T5(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    new_job(rows, "orders")
    first = submit(recorder.ports, "orders", idempotency_key="day 1")
    recorder.take()
    heard()
    before = stored(rows)
    again = submit(recorder.ports, "orders", {"other": 1}, idempotency_key="day 1", countdown=9)
    assert (again.run_id, again.created, again.offerable) == (first.run_id, False, False)
    assert recorder.take() == []
    assert heard() == []
    assert stored(rows) == before


def test_a_key_holds_also_after_its_run_has_ended__R_T5(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    first = submit(recorder.ports, "orders", idempotency_key="k")
    ended(rows, first.run_id)
    assert submit(recorder.ports, "orders", idempotency_key="k").run_id == first.run_id


def test_a_key_belongs_to_its_job__R_T5(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    new_job(rows, "returns")
    first = submit(recorder.ports, "orders", idempotency_key="k")
    other = submit(recorder.ports, "returns", idempotency_key="k")
    assert other.created
    assert other.run_id != first.run_id


def test_a_key_is_honoured_as_long_as_configured__R_T5(
    rows: Rows, recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(CLAIMCHECK_IDEMPOTENCY_HOURS=2)
    new_job(rows, "orders")
    first = submit(recorder.ports, "orders", idempotency_key="k")
    [key] = rows("select extract(epoch from expires_at - created_at) as life from trigger_key")
    assert key["life"] == 7200
    rows("update trigger_key set expires_at = clock_timestamp() - interval '1 second'")
    second = submit(recorder.ports, "orders", idempotency_key="k")
    assert second.created
    assert second.run_id != first.run_id
    [key] = rows("select run_id from trigger_key")
    assert key["run_id"] == second.run_id
    assert submit(recorder.ports, "orders", idempotency_key="k").run_id == second.run_id


def test_of_two_callers_with_one_key_both_get_the_first_run__R_T5(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    with psycopg.connect(database) as caller:
        first = enqueue(caller, "orders", idempotency_key="k")
        second = in_thread(lambda: submit(recorder.ports, "orders", idempotency_key="k"))
        until("the second caller to wait", lambda: waits_for_a_lock(rows))
        caller.commit()
    handle = second.result(5)
    assert (handle.run_id, handle.created) == (first.run_id, False)
    assert stored(rows)["job_run"] == 1


def test_where_the_first_of_two_callers_rolls_back_the_second_creates__R_T5(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    with psycopg.connect(database) as caller:
        first = enqueue(caller, "orders", idempotency_key="k")
        second = in_thread(lambda: submit(recorder.ports, "orders", idempotency_key="k"))
        until("the second caller to wait", lambda: waits_for_a_lock(rows))
        caller.rollback()
    handle = second.result(5)
    assert handle.created
    assert handle.run_id != first.run_id
    [key] = rows("select run_id from trigger_key")
    assert key["run_id"] == handle.run_id


def test_sixteen_callers_with_one_key_create_one_run__R_T5(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    with ThreadPoolExecutor(8) as pool:
        handles = list(
            pool.map(
                lambda _: submit(recorder.ports, "orders", idempotency_key="k", run_id=uuid4()),
                range(16),
            )
        )
    assert len({handle.run_id for handle in handles}) == 1
    assert [handle.created for handle in handles].count(True) == 1
    assert stored(rows) == {"job_run": 1, "trigger_key": 1, "run_alias": 15, "audit_event": 1}


# --- overlap (R-T6) -----------------------------------------------------------------------------


def states(rows: Rows) -> dict[str, Callable[[UUID], None]]:
    def cancelling(run_id: UUID) -> None:
        claim(rows, run_id)
        request_cancel(rows, run_id)

    def delayed(run_id: UUID) -> None:
        rows("update job_run set available_at = available_at + interval '1 hour'")

    return {
        "PENDING": lambda run_id: None,
        "delayed": delayed,
        "RUNNING": lambda run_id: claim(rows, run_id),
        "CANCEL_REQUESTED": cancelling,
    }


@pytest.mark.parametrize("state", ["PENDING", "delayed", "RUNNING", "CANCEL_REQUESTED"])
def test_skip_hands_back_the_active_run__R_T6(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]], state: str
) -> None:
    new_job(rows, "orders", "skip")
    first = submit(recorder.ports, "orders")
    states(rows)[state](first.run_id)
    recorder.take()
    heard()
    again = submit(recorder.ports, "orders", idempotency_key="k")
    assert (again.run_id, again.created, again.offerable) == (first.run_id, False, False)
    assert recorder.take() == []
    assert heard() == []
    # R-T5: a key is stored only together with its run.
    assert stored(rows) == {"job_run": 1, "trigger_key": 0, "run_alias": 0, "audit_event": 1}


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_skip_creates_a_run_where_the_last_has_ended__R_T6(
    rows: Rows, recorder: Recorder, status: str
) -> None:
    new_job(rows, "orders", "skip")
    first = submit(recorder.ports, "orders")
    ended(rows, first.run_id, status)
    again = submit(recorder.ports, "orders")
    assert again.created
    assert again.run_id != first.run_id


@pytest.mark.parametrize("overlap", ["queue", "allow"])
def test_queue_and_allow_create_a_run_each_time__R_T6(
    rows: Rows, recorder: Recorder, overlap: str
) -> None:
    new_job(rows, "orders", overlap)
    first = submit(recorder.ports, "orders")
    assert submit(recorder.ports, "orders").created
    claim(rows, first.run_id)
    assert submit(recorder.ports, "orders").created


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_skip_knows_runs_from_before_the_policy__R_T6(
    rows: Rows, recorder: Recorder, state: str
) -> None:
    new_job(rows, "orders", "queue")
    first = submit(recorder.ports, "orders")
    states(rows)[state](first.run_id)
    rows("update job set overlap = 'skip'")
    assert submit(recorder.ports, "orders").run_id == first.run_id


def test_sixteen_callers_of_a_skipping_job_create_one_run__R_T6(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "skip")
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda _: submit(recorder.ports, "orders"), range(16)))
    assert len({handle.run_id for handle in handles}) == 1
    assert [handle.created for handle in handles].count(True) == 1
    assert stored(rows)["audit_event"] == 1


@pytest.mark.parametrize("key", [None, "k"])
def test_of_two_racing_callers_the_second_gets_the_first_ones_run__R_T6(
    database: str, rows: Rows, recorder: Recorder, key: str | None
) -> None:
    new_job(rows, "orders", "skip")
    with psycopg.connect(database) as caller:
        first = enqueue(caller, "orders")
        second = in_thread(lambda: submit(recorder.ports, "orders", idempotency_key=key))
        until("the second caller to wait", lambda: waits_for_a_lock(rows))
        caller.commit()
    handle = second.result(5)
    assert (handle.run_id, handle.created) == (first.run_id, False)
    # R-T5: the key whose run lost the race went with it.
    assert stored(rows)["trigger_key"] == 0


def test_a_lost_race_in_a_callers_transaction_takes_its_key_along__R_T5(
    database: str, rows: Rows
) -> None:
    new_job(rows, "orders", "skip")
    with psycopg.connect(database) as caller, psycopg.connect(database) as other:
        first = enqueue(caller, "orders")
        second = in_thread(lambda: enqueue(other, "orders", idempotency_key="k"))
        until("the second caller to wait", lambda: waits_for_a_lock(rows))
        caller.commit()
        assert second.result(5).run_id == first.run_id
        other.commit()
    assert stored(rows)["trigger_key"] == 0


# --- ids and aliases (R-T7, R-R7) ---------------------------------------------------------------


def test_an_id_that_was_handed_out_resolves_to_the_run_in_its_place__R_T7(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "skip")
    new_job(rows, "report")
    first = submit(recorder.ports, "orders", run_id=uuid4())
    skipped = submit(recorder.ports, "orders", run_id=uuid4())
    keyed = submit(recorder.ports, "report", idempotency_key="k")
    repeated = submit(recorder.ports, "report", idempotency_key="k", run_id=uuid4())
    assert not skipped.created
    assert {row["id"]: row["run_id"] for row in rows("select id, run_id from run_alias")} == {
        skipped.requested_id: first.run_id,
        repeated.requested_id: keyed.run_id,
    }


def test_repeating_an_alias_hands_back_the_same_run__R_T7(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", "skip")
    first = submit(recorder.ports, "orders")
    alias = uuid4()
    submit(recorder.ports, "orders", run_id=alias)
    ended(rows, first.run_id)
    again = submit(recorder.ports, "orders", run_id=alias)
    assert (again.run_id, again.created) == (first.run_id, False)


@pytest.mark.parametrize("state", ["waiting", "ended"])
def test_repeating_an_enqueue_under_one_id_creates_one_run__R_T7__R_R7(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]], state: str
) -> None:
    new_job(rows, "orders", "skip")
    run_id = uuid4()
    first = submit(recorder.ports, "orders", run_id=run_id, idempotency_key="k")
    assert first.created
    if state == "ended":
        ended(rows, run_id)
    recorder.take()
    heard()
    # Settled also where the job was disabled meanwhile: it is the same request.
    rows("update job set enabled = false")
    again = submit(recorder.ports, "orders", run_id=run_id, idempotency_key="k")
    assert (again.run_id, again.created) == (first.run_id, False)
    assert heard() == []
    assert stored(rows) == {"job_run": 1, "trigger_key": 1, "run_alias": 0, "audit_event": 1}


def test_an_id_that_is_another_jobs_run_is_refused(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    new_job(rows, "returns")
    first = submit(recorder.ports, "orders")
    with pytest.raises(InvalidParameters, match="'orders' already"):
        submit(recorder.ports, "returns", run_id=first.run_id)


@pytest.mark.parametrize("run_id", [None, uuid4()], ids=["drawn", "handed out"])
@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_answer_was_lost_is_settled_by_repeating_it__R_R7(
    rows: Rows,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    landed: bool,
    run_id: UUID | None,
) -> None:
    new_job(rows, "orders")
    whole = enqueueing._admit_alone
    calls = []

    def lose_the_first_answer(trigger: Any) -> Any:
        calls.append(trigger)
        if len(calls) > 1:
            return whole(trigger)
        if landed:
            whole(trigger)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(enqueueing, "_admit_alone", lose_the_first_answer)
    handle = submit(recorder.ports, "orders", idempotency_key="k", run_id=run_id)
    assert len(calls) == 2
    assert handle.created
    assert stored(rows) == {"job_run": 1, "trigger_key": 1, "run_alias": 0, "audit_event": 1}


def disable(rows: Rows, patch: pytest.MonkeyPatch) -> None:
    rows("update job set enabled = false")


def exhaust_the_pool(rows: Rows, patch: pytest.MonkeyPatch) -> None:
    def busy(patience: float) -> Any:
        raise PoolTimeout("QueuePool limit reached")

    patch.setattr(session, "autocommitting", busy)


def wait(rows: Rows, patch: pytest.MonkeyPatch) -> None:
    """Its own transaction is still open: what it waits for then is itself."""


@pytest.mark.parametrize("meanwhile", [wait, disable, exhaust_the_pool])
def test_a_trigger_whose_commit_may_yet_land_never_says_that_nothing_was_stored__R_R7(
    database: str,
    rows: Rows,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Rows, pytest.MonkeyPatch], None],
) -> None:
    new_job(rows, "orders")
    whole = enqueueing._admit_alone
    with psycopg.connect(database) as landing:

        def lose_the_first_answer(trigger: Any) -> Any:
            monkeypatch.setattr(enqueueing, "_admit_alone", whole)
            enqueueing.admit(landing, trigger)
            meanwhile(rows, monkeypatch)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(enqueueing, "_admit_alone", lose_the_first_answer)
        with pytest.raises(DatabaseUnavailable) as raised:
            submit(recorder.ports, "orders")
        landing.commit()
    [landed] = rows("select id from job_run")
    assert f"task_id='{landed['id']}'" in str(raised.value)
    assert "nothing was stored" not in str(raised.value)


def test_a_full_pool_says_that_nothing_was_stored__R_T4(
    rows: Rows, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_job(rows, "orders")
    exhaust_the_pool(rows, monkeypatch)
    with pytest.raises(DatabaseUnavailable, match="nothing was stored"):
        submit(recorder.ports, "orders")
