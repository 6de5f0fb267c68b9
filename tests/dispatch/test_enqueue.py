"""How a run comes to be (R-T1 to R-T8, R-R7, R-X4)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from run_support import (
    NOTHING,
    Recorder,
    Rows,
    in_thread,
    new_job,
    run,
    stored,
    waits_for_a_lock,
)
from sqlalchemy.orm import Session
from support.waiting import until

from db import session
from db.models import NIL_DATASOURCE
from dispatch.enqueue import enqueue, submit
from dispatch.errors import (
    DatabaseUnavailable,
    InvalidParameters,
    JobDisabled,
    TriggerBusy,
    UnknownJob,
)

# --- one durable PENDING row (R-T1) -------------------------------------------------------------


def test_a_trigger_stores_one_pending_run_and_offers_it__R_T1(
    rows: Rows, recorder: Recorder
) -> None:
    job = new_job(rows, "orders", queue="slow", priority=3, max_attempts=5)
    handle = submit(recorder.ports, "orders", {"day": "2026-11-01"}, actor="ann")
    found = run(rows, handle.run_id)
    assert handle.created
    assert handle.requested_id == handle.run_id
    assert recorder.take() == [handle.run_id]
    assert {
        key: found[key]
        for key in ("status", "job_id", "job_name", "queue", "priority", "max_attempts", "attempt")
    } == {
        "status": "PENDING",
        "job_id": job,
        "job_name": "orders",
        "queue": "slow",
        "priority": 3,
        "max_attempts": 5,
        "attempt": 1,
    }
    assert found["root_run_id"] == found["id"]
    assert found["params"] == {"day": "2026-11-01"}
    assert found["triggered_by"] == "ann"
    assert found["available_at"] <= rows("select clock_timestamp() as now")[0]["now"]


def test_an_offered_run_is_marked_in_its_own_insert__R_D3(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    handle = submit(recorder.ports, "orders")
    found = run(rows, handle.run_id)
    assert found["offered_at"] is not None
    assert found["offer_count"] == 1
    # One row version: marking it in a second statement would have moved the row.
    assert rows("select ctid::text as place from job_run") == [{"place": "(0,1)"}]


def test_the_triggers_parameters_overlay_the_jobs__R_T1(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "report", definition={"params": {"day": "monday", "limit": 3, "deep": {"a": 1}}})
    handle = submit(recorder.ports, "report", {"day": "sunday", "deep": {"b": 2}})
    assert run(rows, handle.run_id)["params"] == {"day": "sunday", "limit": 3, "deep": {"b": 2}}


def test_a_run_that_a_program_inserts_gets_its_jobs_parameters_too__R_S2(rows: Rows) -> None:
    new_job(rows, "report", definition={"params": {"day": "monday", "limit": 3}})
    rows("""insert into job_run (job_id, params) select id, '{"limit": 5}' from job""")
    assert rows("select params from job_run") == [{"params": {"day": "monday", "limit": 5}}]


def test_priority_and_queue_of_the_trigger_win(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", queue="slow", priority=3)
    handle = submit(recorder.ports, "orders", priority=9, queue="fast")
    assert (handle.queue, handle.priority) == ("fast", 9)
    found = run(rows, handle.run_id)
    assert (found["queue"], found["priority"]) == ("fast", 9)


def test_each_created_run_has_one_audit_record__R_X4(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    handle = submit(recorder.ports, "orders", actor="ann")
    [record] = rows("select * from audit_event")
    assert (record["actor"], record["action"], record["subject"], record["outcome"]) == (
        "ann",
        "run.trigger",
        "orders",
        "created",
    )
    assert record["run_id"] == handle.run_id


def test_a_delayed_run_is_available_later_by_database_time__R_L2(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    handle = submit(recorder.ports, "orders", countdown=60)
    [found] = rows(
        """select extract(epoch from available_at - clock_timestamp()) as wait, offered_at
           from job_run"""
    )
    assert 50 < found["wait"] <= 60
    assert found["offered_at"] is None
    assert not handle.offerable
    assert recorder.take() == []


def test_an_eta_in_the_past_is_now_and_overtakes_nothing__R_C3(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    first = submit(recorder.ports, "orders")
    late = submit(recorder.ports, "orders", eta=datetime(2001, 1, 1, tzinfo=UTC))
    found = rows("select id from job_run order by available_at")
    assert [row["id"] for row in found] == [first.run_id, late.run_id]


# --- the caller's transaction (R-T2) ------------------------------------------------------------


def callers(database: str) -> dict[str, Callable[[], Any]]:
    engine = sa.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database), poolclass=sa.NullPool
    )
    return {
        "connection": engine.connect,
        "session": lambda: Session(engine),
        "psycopg": lambda: psycopg.connect(database),
    }


@pytest.mark.parametrize("kind", ["connection", "session", "psycopg"])
def test_a_commit_of_the_caller_stores_the_run__R_T2(
    database: str, rows: Rows, heard: Callable[[], list[str]], kind: str
) -> None:
    new_job(rows, "orders")
    with callers(database)[kind]() as caller:
        handle = enqueue(caller, "orders", {"a": 1}, idempotency_key="k")
        assert stored(rows) == NOTHING
        assert heard() == []
        caller.commit()
    assert run(rows, handle.run_id)["params"] == {"a": 1}
    assert run(rows, handle.run_id)["offered_at"] is None
    # R-D3: nobody else sees this commit, so the beat is told of it.
    assert heard() == ["work queue:runs"]


@pytest.mark.parametrize("kind", ["connection", "session", "psycopg"])
def test_a_rollback_of_the_caller_leaves_nothing__R_T2(
    database: str, rows: Rows, heard: Callable[[], list[str]], kind: str
) -> None:
    new_job(rows, "orders", "skip")
    with callers(database)[kind]() as caller:
        enqueue(caller, "orders", idempotency_key="k")
        enqueue(caller, "orders", run_id=uuid4())
        caller.rollback()
    assert stored(rows) == NOTHING
    assert heard() == []


def test_in_autocommit_mode_the_call_is_a_transaction_of_its_own__R_T2(
    database: str, rows: Rows, heard: Callable[[], list[str]]
) -> None:
    new_job(rows, "orders")
    with psycopg.connect(database, autocommit=True) as caller:
        handle = enqueue(caller, "orders", idempotency_key="k")
        assert run(rows, handle.run_id)["status"] == "PENDING"
        with caller.transaction(force_rollback=True):
            enqueue(caller, "orders")
    assert stored(rows)["job_run"] == 1
    assert heard() == ["work queue:runs"]


def test_the_callers_settings_are_left_as_they_were__R_T4(database: str, rows: Rows) -> None:
    new_job(rows, "orders")
    with psycopg.connect(database) as caller:
        for value in ("0", "250ms", "1min"):
            caller.execute(f"set lock_timeout = '{value}'")  # type: ignore[call-overload]
            enqueue(caller, "orders")
            assert caller.execute("show lock_timeout").fetchone() == (value,)


def test_a_refusal_leaves_the_callers_transaction_usable__R_T8(database: str, rows: Rows) -> None:
    new_job(rows, "orders")
    new_job(rows, "off", enabled=False)
    with psycopg.connect(database) as caller:
        for job, params in (("nothing", None), ("off", None), ("orders", {"a": object()})):
            with pytest.raises((UnknownJob, JobDisabled, InvalidParameters)):
                enqueue(caller, job, params)
        enqueue(caller, "orders")
        caller.commit()
    assert stored(rows)["job_run"] == 1


def test_a_connection_to_another_database_is_told_apart(empty_database: str, rows: Rows) -> None:
    with (
        psycopg.connect(empty_database) as caller,
        pytest.raises(DatabaseUnavailable, match="db upgrade"),
    ):
        enqueue(caller, "orders")


def test_what_is_no_connection_is_refused_by_its_name(rows: Rows) -> None:
    with pytest.raises(InvalidParameters, match="not Engine"):
        enqueue(session.engine(), "orders")  # type: ignore[arg-type]


# --- notifications (R-D3) -----------------------------------------------------------------------


def test_a_delayed_run_notifies_inside_its_transaction__R_D3(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]], database: str
) -> None:
    new_job(rows, "orders", queue="slow")
    submit(recorder.ports, "orders")
    heard()
    submit(recorder.ports, "orders", countdown=5)
    assert heard() == ["deadlines queue:slow"]
    with psycopg.connect(database) as caller:
        enqueue(caller, "orders", countdown=5)
        assert heard() == []
        caller.commit()
    assert heard() == ["deadlines queue:slow"]


def test_a_process_gives_a_sign_of_life_each_third_of_a_lease__R_D3(
    rows: Rows,
    recorder: Recorder,
    heard: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_job(rows, "orders")
    for _ in range(3):
        submit(recorder.ports, "orders")
    assert heard() == ["deadlines queue:runs"]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 19.9)
    submit(recorder.ports, "orders")
    assert heard() == []
    monkeypatch.setattr(time, "monotonic", lambda: now + 20.1)
    submit(recorder.ports, "orders")
    assert heard() == ["deadlines queue:runs"]


# --- refusals (R-T8) ----------------------------------------------------------------------------


def test_an_unknown_job_is_refused_with_the_name_it_may_mean__R_T8(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    with pytest.raises(UnknownJob, match=r"'oders'; did you mean orders\?"):
        submit(recorder.ports, "oders", idempotency_key="k")
    assert stored(rows) == NOTHING


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"enabled": False}, "job 'orders' is disabled"),
        ({"source_enabled": False}, "--binding source"),
        ({"sink_enabled": False}, "--binding sink"),
    ],
)
def test_a_disabled_job_or_binding_is_refused_and_stores_nothing__R_T8(
    rows: Rows, recorder: Recorder, columns: dict[str, Any], said: str
) -> None:
    new_job(rows, "orders", "skip", **columns)
    with pytest.raises(JobDisabled, match=said):
        submit(recorder.ports, "orders", run_id=uuid4(), idempotency_key="k")
    assert stored(rows) == NOTHING
    assert recorder.take() == []


def test_a_paused_job_accepts_and_waits__R_T8(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", paused=True)
    handle = submit(recorder.ports, "orders")
    assert handle.created
    assert run(rows, handle.run_id)["offered_at"] is None
    assert recorder.take() == []


def test_a_job_whose_datasource_is_disabled_accepts__R_T8(rows: Rows, recorder: Recorder) -> None:
    rows("update datasource set enabled = false where id = %s", NIL_DATASOURCE)
    new_job(rows, "orders", source_id=NIL_DATASOURCE)
    assert submit(recorder.ports, "orders").created


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (["a"], "mapping"),
        ({1: "a"}, "must be a string"),
        ({"at": datetime(2026, 1, 1, tzinfo=UTC)}, "isoformat"),
        ({"id": uuid4()}, r"str\(\)"),
        ({"x": {1, 2}}, "set is not a type of JSON"),
        ({"x": math.nan}, "no nan"),
        ({"x": [{"y": math.inf}]}, "no inf"),
        ({"x": "a\x00b"}, "NUL"),
        ({"x": [{"y\x00": 1}]}, "NUL"),
        ({"x": "\ud800"}, "surrogate"),
        ({"x": 10**5000}, "cannot be written"),
        ({"x": "a" * 300_000}, "at most 262144"),
    ],
)
def test_parameters_that_cannot_be_stored_are_refused_by_name(
    rows: Rows, recorder: Recorder, params: Any, said: str
) -> None:
    new_job(rows, "orders")
    with pytest.raises(InvalidParameters, match=said):
        submit(recorder.ports, "orders", params, idempotency_key="k")
    assert stored(rows) == NOTHING


def test_parameters_that_contain_themselves_are_refused(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(InvalidParameters, match="contains itself"):
        submit(recorder.ports, "orders", loop)


def test_any_json_that_postgres_can_hold_arrives_as_it_was(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    params = {"a": [1, 2.5, None, True, "é😀\\u0000 %s"], "b": {"": {"deep": []}}, "%(x)s": 10**40}
    handle = submit(recorder.ports, "orders", params)
    assert run(rows, handle.run_id)["params"] == params


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": 10}, "0 to 9"),
        ({"priority": -1}, "0 to 9"),
        ({"priority": True}, "0 to 9"),
        ({"priority": "5"}, "0 to 9"),
        ({"queue": ""}, "queue"),
        ({"queue": "a\nb"}, "queue"),
        ({"queue": "q" * 201}, "queue"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k\x00"}, "NUL"),
        ({"idempotency_key": 7}, "must be a string"),
        ({"run_id": "seven"}, "must be a UUID"),
        ({"countdown": math.nan}, "countdown"),
        ({"countdown": 1e300}, "century"),
        ({"countdown": "1"}, "countdown"),
        ({"eta": datetime(2026, 1, 1)}, "time zone"),
        ({"countdown": 1, "eta": datetime.now(UTC)}, "not both"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    rows: Rows, recorder: Recorder, options: dict[str, Any], said: str
) -> None:
    new_job(rows, "orders")
    with pytest.raises(InvalidParameters, match=said):
        submit(recorder.ports, "orders", **options)
    assert stored(rows) == NOTHING


def test_a_countdown_may_be_a_timedelta_and_negative_means_now(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    assert not submit(recorder.ports, "orders", countdown=timedelta(minutes=1)).offerable
    assert submit(recorder.ports, "orders", countdown=-5).offerable


# --- deadlines (R-T4) ---------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_another_callers_open_transaction_is_waited_for_a_second__R_T4(
    database: str, rows: Rows, recorder: Recorder, overlap: str
) -> None:
    new_job(rows, "orders", overlap)
    with psycopg.connect(database) as caller:
        enqueue(caller, "orders", idempotency_key="k")
        started = time.monotonic()
        with pytest.raises(TriggerBusy, match="'orders'"):
            submit(recorder.ports, "orders", idempotency_key="k")
        assert 0.9 < time.monotonic() - started < 3
        caller.rollback()
    assert stored(rows) == NOTHING
    assert submit(recorder.ports, "orders", idempotency_key="k").created


def test_a_caller_that_waits_in_its_own_transaction_is_not_held_either__R_T4(
    database: str, rows: Rows
) -> None:
    new_job(rows, "orders", "skip")
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        enqueue(first, "orders")
        second.execute("set lock_timeout = 0")
        started = time.monotonic()
        with pytest.raises(TriggerBusy):
            enqueue(second, "orders")
        assert 0.9 < time.monotonic() - started < 3


def test_a_job_that_is_being_edited_can_be_triggered__R_T4(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "skip")
    with psycopg.connect(database) as editor:
        editor.execute("update job set priority = 5")
        assert submit(recorder.ports, "orders").created
        editor.rollback()


def test_a_job_that_is_removed_meanwhile_is_unknown__R_T8(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    with psycopg.connect(database) as remover:
        remover.execute("delete from job")
        waiting = in_thread(lambda: submit(recorder.ports, "orders"))
        until("the trigger to wait", lambda: waits_for_a_lock(rows))
        remover.commit()
    with pytest.raises(UnknownJob):
        waiting.result(5)


def test_a_database_that_is_away_is_said_at_once__R_T4(
    recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(DATABASE_URL="host=127.0.0.1 port=1 user=x dbname=x", REDIS_URL="redis://127.0.0.1:1")
    session.dispose()
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match="DATABASE_URL"):
        submit(recorder.ports, "orders")
    assert time.monotonic() - started < 3
    session.dispose()


def test_a_server_that_restarted_is_not_noticed_by_the_caller__R_R7(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    submit(recorder.ports, "orders")
    rows(
        """select pg_terminate_backend(pid) from pg_stat_activity
           where datname = current_database() and pid <> pg_backend_pid()"""
    )
    assert submit(recorder.ports, "orders").created
    assert stored(rows)["job_run"] == 2


def test_a_broker_that_takes_nothing_does_not_fail_the_trigger__R_T4(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    recorder.taken = 0
    handle = submit(recorder.ports, "orders")
    assert run(rows, handle.run_id)["status"] == "PENDING"


def test_a_full_queue_gets_no_further_wake_ups__R_D5(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    recorder.executors, recorder.queued = 4, 8
    submit(recorder.ports, "orders")
    assert recorder.take() == []
    recorder.queued = 7
    handle = submit(recorder.ports, "orders")
    assert recorder.take() == [handle.run_id]
