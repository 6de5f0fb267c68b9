"""Due schedules: each slot settled exactly once, with its outcome (R-D1, R-D2, R-D9)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from run_support import (
    Recorder,
    Rows,
    claim,
    ended,
    in_thread,
    new_job,
    run,
    waits_for_a_lock,
)
from support.waiting import until

from db import session
from dispatch.enqueue import submit
from dispatch.schedules import ScheduleReconciler


def new_schedule(rows: Rows, job: UUID, name: str = "s", due: float = -1.0, **columns: Any) -> UUID:
    """A schedule whose next fire is ``due`` seconds from now; every minute unless it says else."""
    if "cron" not in columns:
        columns.setdefault("every_seconds", 60)
    values = {"job_id": job, "name": name, **columns}
    names = ", ".join(values)
    places = ", ".join(["%s"] * len(values))
    [row] = rows(
        f"""insert into job_schedule ({names}, anchor_at, next_fire_at)
            values ({places}, statement_timestamp() + make_interval(secs => %s) - interval '1 day',
              statement_timestamp() + make_interval(secs => %s)) returning id""",  # noqa: S608
        *values.values(),
        due,
        due,
    )
    return UUID(str(row["id"]))


def schedule(rows: Rows, schedule_id: UUID) -> dict[str, Any]:
    [found] = rows("select * from job_schedule where id = %s", schedule_id)
    return found


def slots(rows: Rows) -> list[dict[str, Any]]:
    return rows("select * from schedule_slot order by fire_at")


def now(rows: Rows) -> datetime:
    found = rows("select clock_timestamp() as now")[0]["now"]
    assert isinstance(found, datetime)
    return found


def test_a_due_slot_becomes_a_run_and_moves_on__R_D1(rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders", definition={"params": {"a": 1}}), "nightly")
    before = rows("select * from job_schedule")[0]
    done = ScheduleReconciler().settle_due()
    [created] = rows("select * from job_run")
    [slot] = slots(rows)
    after = rows("select * from job_schedule")[0]
    assert (done.settled, done.failed) == (1, 0)
    assert [offer.run_id for offer in done.offers] == [created["id"]]
    assert (slot["fire_at"], slot["outcome"], slot["reason"], slot["run_id"]) == (
        before["next_fire_at"],
        "run",
        None,
        created["id"],
    )
    assert after["next_fire_at"] == before["next_fire_at"] + timedelta(seconds=60)
    assert after["last_fire_at"] == before["next_fire_at"]
    assert created["schedule_id"] == before["id"]
    assert created["scheduled_for"] == before["next_fire_at"]
    assert (created["params"], created["triggered_by"]) == ({"a": 1}, "schedule nightly")
    assert created["offer_count"] == 1
    [record] = rows("select * from audit_event")
    assert record["actor"] == "schedule nightly"
    assert record["detail"]["schedule_id"] == str(before["id"])


def test_what_is_not_due_is_left_alone__R_D1(rows: Rows) -> None:
    job = new_job(rows, "orders")
    new_schedule(rows, job, "later", due=30)
    disabled = new_schedule(rows, job, "off")
    rows(
        "update job_schedule set enabled = false, next_fire_at = null where id = %s",
        disabled,
    )
    before = rows("select * from job_schedule order by name")
    assert ScheduleReconciler().settle_due().settled == 0
    assert rows("select * from job_schedule order by name") == before
    assert slots(rows) == []


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_slot_is_skipped_where_a_run_is_active__R_T6(
    rows: Rows, recorder: Recorder, state: str
) -> None:
    # The job itself would queue; for a schedule the default is to skip.
    new_schedule(rows, new_job(rows, "orders", "queue"))
    active = submit(recorder.ports, "orders").run_id
    if state == "RUNNING":
        claim(rows, active)
    done = ScheduleReconciler().settle_due()
    [slot] = slots(rows)
    assert done.offers == []
    assert (slot["outcome"], slot["run_id"]) == ("skipped", active)
    assert str(active) in slot["reason"]
    assert rows("select count(*) as n from job_run")[0]["n"] == 1
    assert rows("select count(*) as n from run_alias")[0]["n"] == 0
    assert schedule(rows, slot["schedule_id"])["next_fire_at"] > now(rows)


def test_a_stated_overlap_policy_holds_for_schedules_too__R_T6(
    rows: Rows, recorder: Recorder
) -> None:
    new_schedule(rows, new_job(rows, "orders", "queue", definition={"overlap": "queue"}))
    submit(recorder.ports, "orders")
    assert len(ScheduleReconciler().settle_due().offers) == 1
    assert [slot["outcome"] for slot in slots(rows)] == ["run"]


@pytest.mark.parametrize(
    ("name", "columns", "reason"),
    [
        ("orders", {"enabled": False}, "job 'orders' is disabled"),
        ("orders", {"source_enabled": False}, "the source binding of job 'orders' is disabled"),
        ("all/a. b", {"sink_enabled": False}, "the sink binding of job 'all/a. b' is disabled"),
    ],
)
def test_a_slot_of_a_disabled_job_is_skipped_and_says_so__R_D1(
    rows: Rows, name: str, columns: dict[str, Any], reason: str
) -> None:
    new_schedule(rows, new_job(rows, name, **columns))
    assert ScheduleReconciler().settle_due().settled == 1
    [slot] = slots(rows)
    assert (slot["outcome"], slot["reason"]) == ("skipped", reason)
    assert rows("select count(*) as n from job_run")[0]["n"] == 0


def test_a_slot_of_a_paused_job_becomes_a_run_that_waits__R_T8(rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders", paused=True))
    assert ScheduleReconciler().settle_due().offers == []
    [created] = rows("select * from job_run")
    assert (created["status"], created["offered_at"]) == ("PENDING", None)


# --- misfires (R-D2) ----------------------------------------------------------------------------


def outcomes(rows: Rows) -> list[tuple[str, int]]:
    """The outcomes with how many slots have them in a row, oldest first."""
    found: list[tuple[str, int]] = []
    for slot in slots(rows):
        if found and found[-1][0] == slot["outcome"]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot["outcome"], 1))
    return found


@pytest.mark.parametrize(
    ("misfire", "expected"),
    [
        ("fire_once", [("skipped", 10), ("run", 1)]),
        ("skip", [("skipped", 11)]),
        ("catch_up", [("run", 11)]),
    ],
)
def test_missed_slots_follow_the_policy_and_each_leaves_a_trace__R_D2(
    rows: Rows, misfire: str, expected: list[tuple[str, int]]
) -> None:
    # Eleven slots were missed: the last one 70 s ago, the next one is due in 50 s.
    job = new_job(rows, "orders", "queue", definition={"overlap": "queue"})
    new_schedule(rows, job, due=-70 - 10 * 120, every_seconds=120, misfire=misfire)
    done = ScheduleReconciler().settle_due()
    assert outcomes(rows) == expected
    assert len(done.offers) == dict(expected).get("run", 0)
    assert all(slot["reason"] for slot in slots(rows) if slot["outcome"] == "skipped")
    assert (
        45
        < (rows("select next_fire_at from job_schedule")[0]["next_fire_at"] - now(rows)).seconds
        <= 50
    )


def test_catch_up_fires_the_newest_hundred__R_D2(rows: Rows) -> None:
    job = new_job(rows, "orders", "queue", definition={"overlap": "queue"})
    new_schedule(rows, job, due=-70 - 249 * 120, every_seconds=120, misfire="catch_up")
    ScheduleReconciler().settle_due()
    found = slots(rows)
    fired = [slot for slot in found if slot["outcome"] == "run"]
    assert len(fired) == 100
    assert fired == found[-100:]
    assert rows("select count(*) as n from job_run")[0]["n"] == 100


def test_slots_too_many_to_name_leave_one_trace_of_all__R_D1(rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders"), due=-86_400, every_seconds=1)
    first = rows("select next_fire_at from job_schedule")[0]["next_fire_at"]
    ScheduleReconciler().settle_due()
    found = slots(rows)
    assert found[0]["fire_at"] == first
    assert "fire times from this one on" in found[0]["reason"]
    assert len(found) < 300


def test_a_slot_that_was_settled_before_does_not_fire_again__R_D1(rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders", "allow", definition={"overlap": "allow"}))
    ScheduleReconciler().settle_due()
    rows("update job_schedule set next_fire_at = last_fire_at")
    done = ScheduleReconciler().settle_due()
    assert (done.settled, done.offers) == (1, [])
    assert outcomes(rows) == [("run", 1)]
    assert rows("select count(*) as n from job_run")[0]["n"] == 1


# --- any number of beats (R-D1) -----------------------------------------------------------------


def test_eight_reconcilers_at_once_settle_each_slot_once__R_D1(rows: Rows) -> None:
    for number in range(20):
        job = new_job(rows, f"job{number}", "allow", definition={"overlap": "allow"})
        new_schedule(rows, job)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: ScheduleReconciler().settle_due(), range(8)))
    assert sum(found.settled for found in done) == 20
    assert outcomes(rows) == [("run", 20)]
    assert rows("select count(*) as n from job_run")[0]["n"] == 20


def test_a_schedule_that_another_beat_holds_does_not_stop_the_rest__R_D1(
    database: str, rows: Rows
) -> None:
    held = new_schedule(rows, new_job(rows, "orders"), due=-5)
    other = new_schedule(rows, new_job(rows, "returns"))
    with psycopg.connect(database) as beat:
        beat.execute("select 1 from job_schedule where id = %s for update", [held])
        done = ScheduleReconciler().settle_due()
        assert done.settled == 1
        assert [slot["schedule_id"] for slot in slots(rows)] == [other]
        # The other beat is killed in the middle: nothing of it remains, and nothing is lost.
        beat.close()
    assert until("the slot to be settled", lambda: ScheduleReconciler().settle_due().settled) == 1
    assert outcomes(rows) == [("run", 2)]


def test_a_rollback_leaves_neither_slot_nor_run_nor_move__R_D1(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatch import schedules

    new_schedule(rows, new_job(rows, "orders"))
    before = rows("select next_fire_at from job_schedule")
    broken = dict(schedules._SQL) | {"move_schedule": "select 1 / 0 where %(schedule_id)s <> ''"}
    monkeypatch.setattr(schedules, "_SQL", broken)
    assert ScheduleReconciler().settle_due().failed == 1
    assert slots(rows) == []
    assert rows("select count(*) as n from job_run")[0]["n"] == 0
    assert rows("select next_fire_at from job_schedule") == before


def test_a_stopped_beat_lets_go_of_its_schedule__R_D1(database: str, rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders"))
    from dispatch import schedules

    with session.transaction() as connection:
        connection.exec_driver_sql(schedules._SQL["lock_due_schedule"], {"passed": []})
        [patience] = connection.exec_driver_sql("show idle_in_transaction_session_timeout")
    assert patience[0] == "10s"


# --- one bad row (R-D9) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"cron": "61 * * * *", "timezone": "UTC"},
        {"cron": "* * * * *", "timezone": "Mars/Olympus"},
        {"every_seconds": 0.001},
    ],
)
def test_a_bad_schedule_is_reported_and_backed_off_and_the_rest_goes_on__R_D9(
    rows: Rows, caplog: pytest.LogCaptureFixture, columns: dict[str, Any]
) -> None:
    bad = new_schedule(rows, new_job(rows, "broken"), "bad", due=-30, **columns)
    new_schedule(rows, new_job(rows, "orders"), "good")
    done = ScheduleReconciler().settle_due()
    assert (done.settled, done.failed) == (1, 1)
    assert len(slots(rows)) == 1
    assert "schedule bad of job broken" in caplog.text
    found = schedule(rows, bad)
    assert found["failures"] == 1
    assert 5 < (found["retry_at"] - now(rows)).total_seconds() <= 10

    assert ScheduleReconciler().settle_due().failed == 0
    for failures, wait in ((2, 20), (3, 40)):
        rows("update job_schedule set retry_at = clock_timestamp() where id = %s", bad)
        assert ScheduleReconciler().settle_due().failed == 1
        found = schedule(rows, bad)
        assert found["failures"] == failures
        assert wait - 5 < (found["retry_at"] - now(rows)).total_seconds() <= wait


def test_a_mended_schedule_settles_what_it_owes__R_D9(rows: Rows) -> None:
    bad = new_schedule(rows, new_job(rows, "orders"), cron="61 * * * *", timezone="UTC", due=-5)
    assert ScheduleReconciler().settle_due().failed == 1
    # A minute of the hour that no test runs into.
    rows(
        "update job_schedule set retry_at = clock_timestamp(),"
        " cron = extract(minute from now() + interval '30 minutes') || ' * * * *' where id = %s",
        bad,
    )
    assert ScheduleReconciler().settle_due().settled == 1
    found = schedule(rows, bad)
    assert (found["failures"], found["retry_at"]) == (0, None)
    assert outcomes(rows) == [("run", 1)]


def test_a_job_that_is_being_removed_is_passed_over__R_D9(database: str, rows: Rows) -> None:
    new_schedule(rows, new_job(rows, "orders"))
    new_schedule(rows, new_job(rows, "returns"))
    with psycopg.connect(database) as remover:
        remover.execute("select 1 from job where name = 'orders' for update")
        assert ScheduleReconciler().settle_due().settled == 1
        remover.rollback()
    assert ScheduleReconciler().settle_due().settled == 1


# --- edits (R-D2) -------------------------------------------------------------------------------


def test_a_change_settles_what_was_due_before_it__R_D2(
    rows: Rows, heard: Callable[[], list[str]]
) -> None:
    schedule_id = new_schedule(rows, new_job(rows, "orders", queue="slow"))
    due = schedule(rows, schedule_id)["next_fire_at"]
    with session.transaction() as connection:
        moment = ScheduleReconciler().settle_before_change(connection, schedule_id)
        assert slots(rows) == []
        assert heard() == []
    assert due <= moment <= now(rows)
    assert outcomes(rows) == [("run", 1)]
    assert schedule(rows, schedule_id)["next_fire_at"] > moment
    # R-D3: the editor's commit is not the beat's, so the beat is told of the run.
    assert heard() == ["work queue:slow"]
    assert rows("select offered_at from job_run") == [{"offered_at": None}]


def test_a_change_of_what_cannot_be_read_still_goes_through__R_D2(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bad = new_schedule(rows, new_job(rows, "orders"), "bad", cron="nonsense", timezone="UTC")
    with session.transaction() as connection:
        ScheduleReconciler().settle_before_change(connection, bad)
    assert slots(rows) == []
    assert "bad" in caplog.text


def test_a_change_waits_for_the_beat_that_settles_and_settles_nothing_twice__R_D1(
    database: str, rows: Rows
) -> None:
    schedule_id = new_schedule(
        rows, new_job(rows, "orders", "allow", definition={"overlap": "allow"})
    )

    def edit() -> None:
        with session.transaction() as connection:
            ScheduleReconciler().settle_before_change(connection, schedule_id)

    with session.transaction() as beat:
        ScheduleReconciler().settle_before_change(beat, schedule_id)
        waiting = in_thread(edit)
        until("the edit to wait", lambda: waits_for_a_lock(rows))
    waiting.result(5)
    assert outcomes(rows) == [("run", 1)]
    assert rows("select count(*) as n from job_run")[0]["n"] == 1


def test_a_slot_fires_again_after_its_run_has_ended__R_T6(rows: Rows) -> None:
    schedule_id = new_schedule(rows, new_job(rows, "orders", "skip"))
    ScheduleReconciler().settle_due()
    first = rows("select id from job_run")[0]["id"]
    ended(rows, first)
    rows("update job_schedule set next_fire_at = clock_timestamp() where id = %s", schedule_id)
    ScheduleReconciler().settle_due()
    assert outcomes(rows) == [("run", 2)]
    assert run(rows, first)["status"] == "SUCCEEDED"
    assert json.dumps([slot["reason"] for slot in slots(rows)]) == "[null, null]"
