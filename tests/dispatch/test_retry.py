"""The manual retry of a FAILED run (R-R8)."""

from __future__ import annotations

from collections.abc import Callable
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
    run,
    waits_for_a_lock,
)
from support.waiting import until

from db import session
from dispatch import retry as retrying
from dispatch.enqueue import submit
from dispatch.errors import (
    DatabaseUnavailable,
    InvalidParameters,
    NotRetryable,
    OverlapRefused,
    TriggerBusy,
    UnknownRun,
)
from dispatch.retry import retry, retry_run


def failed(rows: Rows, recorder: Recorder, job: str = "orders", **options: Any) -> UUID:
    handle = submit(recorder.ports, job, {"day": 1}, **options)
    ended(rows, handle.run_id, "FAILED")
    recorder.take()
    return handle.run_id


def test_a_failed_run_gets_a_new_attempt_that_is_due_at_once__R_R8(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    new_job(rows, "orders", queue="slow", max_attempts=3)
    first = failed(rows, recorder, priority=4)
    heard()
    handle = retry(recorder.ports, first, actor="ann")
    old, new = run(rows, first), run(rows, handle.run_id)
    assert old["status"] == "RETRY_SCHEDULED"
    assert recorder.take() == [handle.run_id]
    assert heard() == ["deadlines queue:slow"]
    assert {
        key: new[key] for key in ("status", "attempt", "max_attempts", "priority", "queue")
    } == {
        "status": "PENDING",
        "attempt": 2,
        "max_attempts": 3,
        "priority": 4,
        "queue": "slow",
    }
    assert (new["previous_run_id"], new["root_run_id"]) == (first, first)
    assert (new["params"], new["triggered_by"]) == ({"day": 1}, "ann")
    [due] = rows(
        "select available_at <= clock_timestamp() as now from job_run where id = %s", new["id"]
    )
    assert due["now"]
    [record] = rows("select * from audit_event where action = 'run.retry'")
    assert (record["actor"], record["run_id"], record["outcome"]) == ("ann", new["id"], "created")


def test_each_manual_retry_may_pass_the_limit_by_one__R_R8(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", max_attempts=1)
    last = failed(rows, recorder)
    for attempt in (2, 3):
        last = retry(recorder.ports, last, actor="ann").run_id
        found = run(rows, last)
        assert (found["attempt"], found["max_attempts"]) == (attempt, attempt)
        ended(rows, last, "FAILED")


@pytest.mark.parametrize("by", ["root", "alias", "last"])
def test_the_id_of_any_attempt_addresses_the_last__R_R8(
    rows: Rows, recorder: Recorder, by: str
) -> None:
    new_job(rows, "orders", "skip")
    alias = uuid4()
    handle = submit(recorder.ports, "orders")
    submit(recorder.ports, "orders", run_id=alias)
    ended(rows, handle.run_id, "FAILED")
    second = retry(recorder.ports, handle.run_id, actor="ann").run_id
    ended(rows, second, "FAILED")
    asked = {"root": handle.run_id, "alias": alias, "last": second}[by]
    third = retry(recorder.ports, asked, actor="ann")
    assert run(rows, third.run_id)["previous_run_id"] == second


def test_what_is_not_failed_is_refused_and_says_how_it_stands__R_R8(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    handle = submit(recorder.ports, "orders")
    for change, status in (
        (lambda: None, "PENDING"),
        (lambda: claim(rows, handle.run_id), "RUNNING"),
        (lambda: request_cancel(rows, handle.run_id), "CANCEL_REQUESTED"),
    ):
        change()
        with pytest.raises(NotRetryable, match=f"is {status};"):
            retry(recorder.ports, handle.run_id, actor="ann")
    other = submit(recorder.ports, "orders")
    ended(rows, other.run_id)
    with pytest.raises(NotRetryable, match="SUCCEEDED"):
        retry(recorder.ports, other.run_id, actor="ann")
    assert rows("select count(*) as n from job_run")[0]["n"] == 2


def test_an_unknown_run_is_refused(rows: Rows, recorder: Recorder) -> None:
    with pytest.raises(UnknownRun, match="run list"):
        retry(recorder.ports, uuid4(), actor="ann")
    with pytest.raises(InvalidParameters, match="UUID"):
        retry(recorder.ports, "seven", actor="ann")


def test_a_run_whose_job_is_gone_is_refused(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    rows("delete from job")
    with pytest.raises(NotRetryable, match="was removed"):
        retry(recorder.ports, first, actor="ann")


def test_a_retry_obeys_skip__R_T6(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", "skip")
    first = failed(rows, recorder)
    active = submit(recorder.ports, "orders")
    with pytest.raises(OverlapRefused, match=str(active.run_id)):
        retry(recorder.ports, first, actor="ann")
    assert run(rows, first)["status"] == "FAILED"
    ended(rows, active.run_id)
    assert retry(recorder.ports, first, actor="ann").created


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_retry_under_skip_knows_runs_from_before_the_policy__R_T6(
    rows: Rows, recorder: Recorder, state: str
) -> None:
    new_job(rows, "orders", "queue")
    first = failed(rows, recorder)
    active = submit(recorder.ports, "orders").run_id
    if state == "RUNNING":
        claim(rows, active)
    rows("update job set overlap = 'skip'")
    with pytest.raises(OverlapRefused, match=f"{active} .{state}"):
        retry(recorder.ports, first, actor="ann")
    assert run(rows, first)["status"] == "FAILED"
    assert not rows("select 1 from audit_event where action = 'run.retry'")


@pytest.mark.parametrize("overlap", ["queue", "allow"])
def test_a_retry_beside_an_active_run_waits_its_turn__R_T6(
    rows: Rows, recorder: Recorder, overlap: str
) -> None:
    new_job(rows, "orders", overlap)
    first = failed(rows, recorder)
    claim(rows, submit(recorder.ports, "orders").run_id)
    handle = retry(recorder.ports, first, actor="ann")
    assert run(rows, handle.run_id)["status"] == "PENDING"


def test_a_refused_retry_leaves_the_callers_transaction_usable(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "skip")
    first = failed(rows, recorder)
    submit(recorder.ports, "orders")
    with session.transaction() as connection:
        with pytest.raises(OverlapRefused):
            retry_run(connection, first, actor="ann")
        connection.exec_driver_sql("update job set priority = 3")
    assert rows("select priority from job")[0]["priority"] == 3


def test_a_retry_of_a_disabled_job_is_created_and_waits__R_T8(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    rows("update job set enabled = false")
    assert retry(recorder.ports, first, actor="ann").created


def test_of_two_retries_at_once_one_wins__R_R2(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    with session.transaction() as connection:
        created = retry_run(connection, first, actor="ann")
        second = in_thread(lambda: retry(recorder.ports, first, actor="bob"))
        until("the second retry to wait", lambda: waits_for_a_lock(rows))
    with pytest.raises(NotRetryable):
        second.result(5)
    assert run(rows, created.run_id)["previous_run_id"] == first
    assert rows("select count(*) as n from job_run")[0]["n"] == 2


def test_a_retry_whose_commit_was_lost_is_settled__R_R7(
    rows: Rows, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    whole = session.transaction
    calls = []

    class LostAnswer:
        """Commits, and loses the answer the first time."""

        def __init__(self, **options: Any) -> None:
            calls.append(self)
            self._inner = whole(**options)

        def __enter__(self) -> Any:
            return self._inner.__enter__()

        def __exit__(self, *error: Any) -> Any:
            self._inner.__exit__(*error)
            if len(calls) == 1:
                raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(retrying.session, "transaction", LostAnswer)
    handle = retry(recorder.ports, first, actor="ann")
    assert len(calls) == 2
    assert run(rows, handle.run_id)["previous_run_id"] == first
    assert rows("select count(*) as n from job_run")[0]["n"] == 2
    assert recorder.take() == [handle.run_id]


def test_a_retry_behind_another_one_names_the_attempt_that_took_the_place__R_R8(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    with psycopg.connect(database) as other:
        other.execute("update job_run set status = 'RETRY_SCHEDULED'")
        cursor = other.execute(
            """insert into job_run (job_id, previous_run_id, root_run_id, attempt)
               select job_id, id, root_run_id, 2 from job_run returning id"""
        )
        [created] = cursor.fetchone() or (None,)
        asked = in_thread(lambda: retry(recorder.ports, first, actor="ann"))
        until("the retry to wait", lambda: waits_for_a_lock(rows), 5)
        other.commit()
    with pytest.raises(NotRetryable, match=f"{created} is PENDING"):
        asked.result(10)


def test_a_retry_behind_a_lock_gives_up_after_a_second__R_T4(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    first = failed(rows, recorder)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run where id = %s for update", [first])
        with pytest.raises(TriggerBusy):
            retry(recorder.ports, first, actor="ann")
        other.rollback()


def test_a_retry_says_that_the_database_is_away(
    recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(DATABASE_URL="host=127.0.0.1 port=1 user=x dbname=x", REDIS_URL="redis://127.0.0.1:1")
    session.dispose()
    with pytest.raises(DatabaseUnavailable, match="DATABASE_URL"):
        retry(recorder.ports, uuid4(), actor="ann")
    session.dispose()
