"""The sweep: what is due is done, each part by itself and within bounds (R-D3, R-D5, R-D9)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from run_support import Recorder, Rows, claim, ended, finish, new_job, request_cancel, run
from test_deadlines import offered, set_up_schedule

from db import session, statements
from dispatch import chains, recovery, retention, sweep
from dispatch import schedules as scheduling
from dispatch.deadlines import EVERYTHING, Scope
from dispatch.enqueue import submit
from dispatch.retry import retry_run
from dispatch.sweep import Pause, Sweep


class Clock:
    """The monotonic clock, which a test may move forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def swept(rows: Rows, recorder: Recorder, clock: Clock) -> Iterator[Sweep]:
    """A sweep; ``swept.run(swept.connection, ...)`` looks on a connection of its own."""
    with session.connect() as connection:
        made = Sweep(recorder.ports, clock=clock)
        made.connection = connection  # type: ignore[attr-defined]
        yield made


def do(swept: Sweep, *scopes: Scope) -> bool:
    return swept.run(swept.connection, scopes or (EVERYTHING,))  # type: ignore[attr-defined]


def later(swept: Sweep) -> bool:
    """A sweep for a known deadline, without a new look at everything."""
    return swept.run(swept.connection)  # type: ignore[attr-defined]


def waiting_runs(rows: Rows, count: int, job: str = "orders") -> list[UUID]:
    """Runs that were stored by hand: eligible, and never offered."""
    found = rows(
        """insert into job_run (job_id) select id from job, generate_series(1, %s)
           where name = %s returning id""",
        count,
        job,
    )
    return [row["id"] for row in found]


def break_row(rows: Rows, run_id: UUID) -> None:
    """Let every update of this run fail, until the trigger ``broken`` is dropped."""
    rows(
        """create function refuse() returns trigger language plpgsql as $$
           begin raise exception 'this row is broken'; end $$"""
    )
    rows(
        f"""create trigger broken before update on job_run for each row
            when (old.id = '{run_id}') execute function refuse()"""
    )


def next_in(swept: Sweep, clock: Clock) -> float | None:
    due = swept.next_deadline()
    return None if due is None else due - clock()


# --- offers (R-D5) ------------------------------------------------------------------------------


def test_a_run_that_nobody_offered_is_offered_once_and_again_after_its_grace__R_D5(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders")
    [run_id] = waiting_runs(rows, 1)
    assert do(swept)
    assert recorder.take() == [run_id]
    for times, grace in ((1, 10), (2, 20), (3, 40)):
        assert run(rows, run_id)["offer_count"] == times
        due = next_in(swept, clock)
        assert due is not None
        assert grace - 2 < due <= grace
        assert not do(swept)
        assert recorder.take() == []
        offered(rows, run_id, ago=grace, times=times)
        assert do(swept)
        assert recorder.take() == [run_id]


def test_the_offers_of_a_backlog_are_bounded_by_what_the_queue_can_take__R_D5(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    stored = waiting_runs(rows, 100)
    recorder.executors, recorder.queued = 8, 6
    do(swept)
    first = recorder.take()
    assert len(first) == 10
    # The oldest first, and what is left is looked at again soon, not at once.
    assert first == stored[:10]
    due = next_in(swept, clock)
    assert due is not None
    assert 0.5 < due <= 1
    clock.ahead += 1.1
    recorder.queued = 16
    later(swept)
    assert recorder.take() == []
    recorder.queued = 0
    clock.ahead += 2.1
    later(swept)
    assert recorder.take() == stored[10:26]


def test_a_queue_without_room_is_asked_less_and_less__R_D5(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    waiting_runs(rows, 5)
    recorder.queued = 99
    do(swept)
    for pause in (1, 2, 4, 8, 10, 10):
        due = next_in(swept, clock)
        assert due is not None
        assert pause - 0.5 < due <= pause
        clock.ahead += pause
        later(swept)
    assert recorder.take() == []


def test_higher_priorities_are_offered_first__R_C3(
    swept: Sweep, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    new_job(rows, "urgent", "allow", priority=9)
    waiting_runs(rows, 40)
    high = waiting_runs(rows, 2, "urgent")
    recorder.executors = 2
    do(swept)
    assert recorder.take()[:2] == high


def test_blocked_work_stands_in_nobodys_way__R_C3(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "paused", paused=True)
    new_job(rows, "orders")
    waiting_runs(rows, 2000, "paused")
    [run_id] = waiting_runs(rows, 1)
    do(swept)
    assert recorder.take() == [run_id]
    assert (next_in(swept, clock) or 0) > 5


def test_a_job_that_runs_one_at_a_time_is_offered_once__R_D7(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "queue")
    stored = waiting_runs(rows, 50)
    do(swept)
    assert recorder.take() == stored[:1]
    assert (next_in(swept, clock) or 0) > 5
    claim(rows, stored[0])
    do(swept)
    assert recorder.take() == []


def test_what_a_change_frees_is_offered_regardless_of_its_grace__R_D7(
    swept: Sweep, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    new_job(rows, "returns", "allow")
    freed = submit(recorder.ports, "orders").run_id
    other = submit(recorder.ports, "returns").run_id
    do(swept)
    recorder.take()
    assert do(swept, Scope(job="orders", work=True))
    assert recorder.take() == [freed]
    assert do(swept, Scope(work=True))
    assert sorted(recorder.take()) == sorted([freed, other])
    do(swept, Scope(queue="runs", work=True))
    assert recorder.take() == []


def test_a_run_that_someone_holds_locked_is_left_to_them__R_D5(
    swept: Sweep, rows: Rows, recorder: Recorder, database: str, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    first, second = waiting_runs(rows, 2)
    with psycopg.connect(database) as claimer:
        claimer.execute("select 1 from job_run where id = %s for update", [first])
        do(swept)
        assert recorder.take() == [second]
        assert (next_in(swept, clock) or 0) > 0.5
        claimer.rollback()


def test_a_broker_that_takes_nothing_does_not_lengthen_the_grace__R_T4(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    stored = waiting_runs(rows, 3)
    offered(rows, stored[0], ago=15, times=1)
    recorder.taken = 0
    do(swept)
    assert [run(rows, run_id)["offer_count"] for run_id in stored] == [1, 0, 0]
    recorder.taken = None
    clock.ahead += 1.1
    later(swept)
    assert set(recorder.take()) == set(stored[1:])


def test_a_broker_that_takes_some_is_asked_again_for_the_rest__R_D5(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    stored = waiting_runs(rows, 5)
    recorder.taken = 2
    do(swept)
    assert recorder.take() == stored[:2]
    recorder.taken = None
    clock.ahead += 1.1
    later(swept)
    assert recorder.take() == stored[2:]


def test_two_sweeps_at_once_offer_each_run_once__R_D5(
    rows: Rows, recorder: Recorder, database: str
) -> None:
    new_job(rows, "orders", "allow")
    stored = waiting_runs(rows, 20)
    with session.connect() as one, session.connect() as other:
        sweeps = [(Sweep(recorder.ports), one), (Sweep(recorder.ports), other)]
        for swept, connection in sweeps:
            swept._look(connection, [EVERYTHING])
        for swept, connection in sweeps:
            swept.run(connection)
    assert sorted(recorder.take()) == sorted(stored)


# --- delays, schedules, leases ------------------------------------------------------------------


def test_a_delayed_run_is_offered_when_its_time_has_come__R_D3(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders")
    handle = submit(recorder.ports, "orders", countdown=0.3)
    do(swept)
    assert recorder.take() == []
    due = next_in(swept, clock)
    assert due is not None
    assert 0 < due <= 0.3
    time.sleep(due)
    later(swept)
    assert recorder.take() == [handle.run_id]


def test_a_due_schedule_fires_and_its_run_is_offered__R_D1(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), -1)
    assert do(swept)
    [created] = rows("select id from job_run")
    assert recorder.take() == [created["id"]]
    # What is known next is the run's grace, and then the schedule's next fire.
    assert 5 < (next_in(swept, clock) or 0) <= 10


def test_expired_leases_are_recovered__R_R1(swept: Sweep, rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", "allow")
    lost, cancelled, alive = (submit(recorder.ports, "orders").run_id for _ in range(3))
    recorder.take()
    claim(rows, lost, lease=-1)
    claim(rows, cancelled, lease=-1)
    request_cancel(rows, cancelled)
    claim(rows, alive)
    assert do(swept)
    assert [run(rows, run_id)["status"] for run_id in (lost, cancelled, alive)] == [
        "RETRY_SCHEDULED",
        "CANCELLED",
        "RUNNING",
    ]
    [retry] = rows("select * from job_run where previous_run_id = %s", lost)
    # R-R4: the first retry after a lost worker is due at once.
    assert recorder.take() == [retry["id"]]


def test_a_lease_that_was_renewed_is_a_later_deadline__R_D3(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders")
    held = submit(recorder.ports, "orders").run_id
    claim(rows, held, lease=0.2)
    do(swept)
    rows("update job_run set lease_until = clock_timestamp() + interval '60 seconds'")
    clock.ahead += 0.3
    later(swept)
    assert run(rows, held)["status"] == "RUNNING"
    assert (next_in(swept, clock) or 0) > 50


# --- one bad row (R-D9) -------------------------------------------------------------------------


def test_a_part_that_fails_keeps_the_sweep_from_nothing_else__R_D9(
    swept: Sweep,
    rows: Rows,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
) -> None:
    job = new_job(rows, "orders", "allow", definition={"overlap": "allow"})
    set_up_schedule(rows, job, -1)
    lost = submit(recorder.ports, "orders").run_id
    claim(rows, lost, lease=-1)
    recorder.take()

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(recovery, "recover_expired", fail)
        do(swept)
    assert len(recorder.take()) == 1
    assert rows("select count(*) as n from schedule_slot")[0]["n"] == 1
    assert "leases" in caplog.text
    assert 0 < (next_in(swept, clock) or 0) <= 0.1
    with monkeypatch.context() as broken:
        broken.setattr(scheduling.ScheduleReconciler, "settle_due", fail)
        rows("update job_schedule set next_fire_at = clock_timestamp()")
        clock.ahead += 1
        do(swept)
    assert run(rows, lost)["status"] == "RETRY_SCHEDULED"


def test_a_run_that_cannot_be_recovered_is_set_aside_and_the_rest_goes_on__R_D9(
    swept: Sweep,
    rows: Rows,
    recorder: Recorder,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    new_job(rows, "orders", "allow")
    bad, good = (submit(recorder.ports, "orders").run_id for _ in range(2))
    claim(rows, bad, lease=-5)
    claim(rows, good, lease=-1)
    break_row(rows, bad)
    do(swept)
    assert run(rows, good)["status"] == "RETRY_SCHEDULED"
    assert run(rows, bad)["status"] == "RUNNING"
    assert str(bad) in caplog.text
    due = next_in(swept, clock)
    assert due is not None
    assert due > 5
    # Others are recovered at their own time meanwhile.
    third = submit(recorder.ports, "orders").run_id
    claim(rows, third, lease=-1)
    do(swept, Scope(queue="runs"))
    assert run(rows, third)["status"] == "RETRY_SCHEDULED"

    rows("drop trigger broken on job_run")
    clock.ahead += 30
    later(swept)
    assert run(rows, bad)["status"] == "RETRY_SCHEDULED"


def test_a_run_that_cannot_be_offered_is_set_aside_and_the_rest_goes_on__R_D9(
    swept: Sweep,
    rows: Rows,
    recorder: Recorder,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    new_job(rows, "orders", "allow")
    stored = waiting_runs(rows, 4)
    break_row(rows, stored[1])
    do(swept)
    assert recorder.take() == [stored[0], *stored[2:]]
    assert f"run {stored[1]} cannot be offered" in caplog.text
    caplog.clear()
    # What is told of meanwhile does not wait for it, and it is not reported again and again.
    [another] = waiting_runs(rows, 1)
    do(swept, Scope(queue="runs", work=True))
    assert recorder.take() == [another]
    assert caplog.text == ""
    rows("drop trigger broken on job_run")
    clock.ahead += 15
    later(swept)
    assert recorder.take() == [stored[1]]


@pytest.mark.parametrize("queue", ["a-queue", "z-queue"])
def test_what_another_queue_offers_forgets_no_run_that_is_set_aside__R_D9(
    swept: Sweep,
    rows: Rows,
    recorder: Recorder,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    queue: str,
) -> None:
    for name in ("orders", "report"):
        new_job(rows, name, "allow", queue=queue if name == "report" else "runs")
    [bad] = waiting_runs(rows, 1, "report")
    break_row(rows, bad)
    tried = []
    # Its while is 10 seconds, then 20, then 40, whatever happens to others meanwhile.
    for at in (0, 11, 22, 33, 44, 55, 66, 77):
        clock.ahead = at
        [good] = waiting_runs(rows, 1)
        caplog.clear()
        do(swept)
        assert recorder.take() == [good]
        if f"run {bad} cannot be offered" in caplog.text:
            tried.append(at)
    assert tried == [0, 11, 33, 77]
    rows("drop trigger broken on job_run")
    clock.ahead += 90
    do(swept)
    assert recorder.take() == [bad]
    assert not swept._unoffered.next()


def test_two_beats_that_sweep_in_turn_do_not_slow_each_other_down__R_D1(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    other = Sweep(recorder.ports, clock=clock)
    for _ in range(3):
        [run_id] = waiting_runs(rows, 1)
        other._look(swept.connection, [EVERYTHING])  # type: ignore[attr-defined]
        do(swept)
        # The other one knows of the same run and comes too late.
        assert other.run(swept.connection) is False  # type: ignore[attr-defined]
        assert recorder.take() == [run_id]
        assert (next_in(other, clock) or 0) > 5


def test_a_due_schedule_that_another_holds_is_no_busy_loop__R_D9(
    swept: Sweep, rows: Rows, recorder: Recorder, database: str, clock: Clock
) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), -1)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_schedule for update")
        do(swept)
        pauses = []
        for _ in range(9):
            due = next_in(swept, clock)
            assert due is not None
            pauses.append(due)
            clock.ahead += max(due, 0)
            later(swept)
        other.rollback()
    assert 0 < pauses[0] <= 0.05
    assert 3 < pauses[-1] <= 5
    clock.ahead += 5
    later(swept)
    assert rows("select count(*) as n from schedule_slot")[0]["n"] == 1


def test_a_database_that_is_away_ends_the_sweep(
    swept: Sweep, rows: Rows, configure: Callable[..., Any]
) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), -1)
    configure(DATABASE_URL="host=127.0.0.1 port=1 user=x dbname=x", REDIS_URL="redis://127.0.0.1:1")
    with pytest.raises(Exception, match="connection"):
        do(swept)


def test_a_pause_doubles_while_nothing_moves() -> None:
    pause = Pause(1.0, 5.0)
    for length in (1, 2, 4, 5, 5):
        pause.after(100.0, left=True, moved=False)
        assert pause.until == 100 + length
    pause.after(100.0, left=True, moved=True)
    assert pause.until == 101
    pause.after(100.0, left=False, moved=True)
    assert pause.until == 0


# --- forgetting (R-S3) --------------------------------------------------------------------------


def old(rows: Rows, run_id: UUID, status: str = "SUCCEEDED", days: float = 91) -> None:
    claim(rows, run_id)
    finish(rows, run_id, status, ago=days * 86_400)


def test_the_sweep_forgets_what_outlived_its_retention__R_S3(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    gone, kept = (submit(recorder.ports, "orders").run_id for _ in range(2))
    rows("insert into run_log (run_id, head) values (%s, 'lines')", gone)
    old(rows, gone)
    ended(rows, kept)
    do(swept)
    assert [row["id"] for row in rows("select id from job_run")] == [kept]
    assert rows("select count(*) as n from run_log")[0]["n"] == 0
    assert [row["run_id"] for row in rows("select run_id from audit_event")] == [kept]
    # It is done rarely: what becomes old now is forgotten within the hour.
    old(rows, submit(recorder.ports, "orders").run_id)
    do(swept)
    assert rows("select count(*) as n from job_run")[0]["n"] == 2
    assert sweep.FORGET_SECONDS - 60 < (next_in(swept, clock) or 0) <= sweep.FORGET_SECONDS


def test_forgetting_that_fails_is_tried_again_after_a_growing_pause__R_D9(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    old(rows, submit(recorder.ports, "orders").run_id)
    rows(
        """create function refuse() returns trigger language plpgsql as $$
           begin raise exception 'this row is broken'; end $$"""
    )
    rows("create trigger broken before delete on job_run for each row execute function refuse()")
    do(swept)
    for pause in (1, 2, 4, 8):
        due = next_in(swept, clock)
        assert due is not None
        assert pause - 1 < due <= pause
        clock.ahead += due
        later(swept)
    rows("drop trigger broken on job_run")
    clock.ahead += 16
    later(swept)
    assert rows("select from job_run") == []
    # The next failure is a first one again.
    assert swept._retention.pause.length == 0


def test_a_broken_chain_is_forgotten_with_the_run_before_it__R_S3(
    rows: Rows, recorder: Recorder
) -> None:
    for name in ("orders", "report"):
        new_job(rows, name)
    chain = chains.stored([chains.Step("gone"), chains.Step("report")])
    first = submit(recorder.ports, "orders").run_id
    rows("update job_run set chain = %s where id = %s", Jsonb([chain]), first)
    old(rows, first)
    with session.transaction() as connection:
        assert chains.enqueue_next_of_chain(connection, first, [chain]) == []
        assert len(chains.breaks(connection, first)) == 1
    with session.connect() as connection:
        assert retention.prune(connection).runs == 1
    assert rows("select * from audit_event where action like 'run.%%'") == []


def attempts(rows: Rows, recorder: Recorder, count: int, days: float) -> list[UUID]:
    """A lineage whose last attempt still waits, and whose others ended ``days`` ago."""
    found = [submit(recorder.ports, "orders").run_id]
    for _ in range(count - 1):
        claim(rows, found[-1])
        with session.transaction() as connection:
            connection.exec_driver_sql(
                """update job_run set status = 'RETRY_SCHEDULED', error_code = 'snoozed',
                     finished_at = clock_timestamp() - make_interval(days => %s) where id = %s""",
                (days, found[-1]),
            )
            created = connection.exec_driver_sql(
                """insert into job_run (job_id, previous_run_id, root_run_id, attempt)
                   select job_id, id, root_run_id, attempt from job_run where id = %s
                   returning id""",
                (found[-1],),
            )
            found.append(created.scalar_one())
    return found


def test_a_lineage_is_forgotten_as_a_whole__R_S3(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", "allow")
    *_, last = attempts(rows, recorder, 5, days=100)
    other = submit(recorder.ports, "orders").run_id
    old(rows, other)
    with session.connect() as connection:
        # A batch that is all of the living lineage's rows hides nothing behind it.
        assert retention.prune(connection, batch=1) == retention.Forgotten(1, False)
        assert rows("select count(*) as n from job_run")[0]["n"] == 5
        old(rows, last)
        # Longer than a batch, and yet never in pieces.
        with connection.transaction(force_rollback=True):
            assert retention.prune(connection, batch=1, longest_seconds=None).runs == 5
        asked = {"seconds": 90 * 86_400.0, "batch": 1}
        statement = statements.load("retention")["forget_runs"]
        found = statements.row(connection, statement, asked)
    assert found is not None
    assert found["removed"] == 5


def test_a_batch_holds_no_more_than_its_first_lineages__R_S3(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    for days in (101, 100, 99):
        old(rows, attempts(rows, recorder, 3, days=days)[-1], days=days)
    statement = statements.load("retention")["forget_runs"]
    with session.connect() as connection:
        found = [
            statements.row(connection, statement, {"seconds": 90 * 86_400.0, "batch": 4})
            for _ in range(3)
        ]
    assert [row["removed"] for row in found if row is not None] == [6, 3, 0]


def test_a_lineage_that_is_just_retried_is_not_forgotten__R_S3__R_R8(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    failed = submit(recorder.ports, "orders").run_id
    old(rows, failed, "FAILED")
    with session.connect() as connection:
        with session.transaction() as retrying:
            retry_run(retrying, failed, actor="someone")
            assert retention.prune(connection).runs == 0
        assert retention.prune(connection).runs == 0
    assert rows("select count(*) as n from job_run")[0]["n"] == 2


def test_a_living_lineage_is_no_deadline_of_retention__R_D3(
    swept: Sweep, rows: Rows, recorder: Recorder, clock: Clock
) -> None:
    new_job(rows, "orders", "allow")
    attempts(rows, recorder, 3, days=100)
    do(swept)
    assert swept.agenda.retention is None


def test_no_run_is_forgotten_before_its_key__R_T5(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders", "allow", max_attempts=2)
    first = submit(recorder.ports, "orders", idempotency_key="k").run_id
    old(rows, first, "FAILED")
    with session.transaction() as connection:
        last = retry_run(connection, first, actor="someone").run_id
    old(rows, last)
    other = submit(recorder.ports, "orders").run_id
    old(rows, other, days=90.5)
    with session.connect() as connection:
        # What is kept stands in front of nothing.
        assert retention.prune(connection, days=1e-9, batch=1).runs == 1
        again = submit(recorder.ports, "orders", idempotency_key="k")
        assert (again.created, again.run_id) == (False, first)
        rows("update trigger_key set expires_at = clock_timestamp()")
        assert retention.prune(connection, days=1e-9).runs == 2
    assert submit(recorder.ports, "orders", idempotency_key="k").created


def test_slots_and_keys_are_forgotten_too__R_T5(rows: Rows, recorder: Recorder) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), 60)
    for days in (100, 1):
        rows(
            """insert into schedule_slot (schedule_id, fire_at, outcome, reason)
               select id, clock_timestamp() - make_interval(days => %s), 'skipped', 'test'
               from job_schedule""",
            days,
        )
    submit(recorder.ports, "orders", idempotency_key="old")
    rows("update trigger_key set expires_at = clock_timestamp()")
    submit(recorder.ports, "orders", idempotency_key="new")
    with session.connect() as connection:
        retention.prune(connection)
    assert rows("select count(*) as n from schedule_slot")[0]["n"] == 1
    assert rows("select key from trigger_key") == [{"key": "new"}]


def test_nothing_is_forgotten_where_all_is_kept__R_S3(
    rows: Rows, recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(CLAIMCHECK_RETENTION_DAYS=0)
    new_job(rows, "orders", "allow")
    old(rows, submit(recorder.ports, "orders").run_id, days=5000)
    with session.connect() as connection:
        assert retention.prune(connection).runs == 0
        assert retention.prune(connection, days=6000).runs == 0
        assert retention.prune(connection, days=4000).runs == 1


def test_forgetting_goes_in_small_batches_and_stops_in_time__R_S3(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    for _ in range(7):
        old(rows, submit(recorder.ports, "orders").run_id)
    with session.connect() as connection:
        assert retention.prune(connection, longest_seconds=0) == retention.Forgotten(0, True)
        done = retention.prune(connection, batch=3, longest_seconds=None)
    assert done == retention.Forgotten(7, False)


def test_an_interrupted_prune_has_a_record_of_what_is_gone__R_X4(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    stored = [submit(recorder.ports, "orders").run_id for _ in range(7)]
    for days, run_id in enumerate(reversed(stored), 91):
        old(rows, run_id, days=days)
    rows(
        """create function refuse() returns trigger language plpgsql as $$
           begin raise exception 'this row is broken'; end $$"""
    )
    rows(
        f"""create trigger broken before delete on job_run for each row
            when (old.id = '{stored[-1]}') execute function refuse()"""
    )
    records = "select actor, subject, detail from audit_event where action = 'db.prune'"
    with session.connect() as connection:
        with pytest.raises(psycopg.Error, match="broken"):
            retention.prune(connection, batch=2, longest_seconds=None, actor="someone")
        assert rows("select count(*) as n from job_run") == [{"n": 1}]
        said = {"actor": "someone", "subject": "job_run", "detail": {"runs": 6, "days": 90}}
        assert rows(records) == [said]
        rows("drop trigger broken on job_run")
        # The beat's own forgetting is nobody's action.
        assert retention.prune(connection).runs == 1
    assert rows(records) == [said]
