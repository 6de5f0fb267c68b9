"""The known deadlines: what is stored, as seconds from now by the database's clock (R-D3, R-D6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from run_support import Recorder, Rows, claim, ended, finish, new_job, request_cancel

from db import session
from db.models import NIL_DATASOURCE
from dispatch.deadlines import EVERYTHING, Agenda, Scope, look, merged
from dispatch.enqueue import submit


@pytest.fixture
def see(rows: Rows) -> Any:
    """``see()`` looks at everything, or at given scopes, and returns the agenda."""
    connection = session.connect()
    agenda = Agenda()

    def look_at(*scopes: Scope, fresh: bool = True, **options: Any) -> Agenda:
        nonlocal agenda
        if fresh:
            agenda = Agenda()
        look(connection, agenda, scopes or (EVERYTHING,), **options)
        return agenda

    yield look_at
    connection.close()


def wait(due: float | None) -> float:
    """Seconds from now, for a known deadline."""
    assert due is not None
    return due - time.monotonic()


def offered(rows: Rows, run_id: UUID, ago: float, times: int) -> None:
    rows(
        """update job_run set offered_at = clock_timestamp() - make_interval(secs => %s),
             offer_count = %s where id = %s""",
        ago,
        times,
        run_id,
    )


def set_up_schedule(rows: Rows, job: UUID, due: float, name: str = "s", **columns: Any) -> None:
    rows(
        """insert into job_schedule (job_id, name, every_seconds, next_fire_at, retry_at)
           values (%s, %s, 60, clock_timestamp() + make_interval(secs => %s),
             clock_timestamp() + make_interval(secs => %s))""",
        job,
        name,
        due,
        columns.get("retry"),
    )


def test_nothing_stored_is_no_deadline__R_D3(see: Any, rows: Rows) -> None:
    new_job(rows, "orders")
    found = see()
    assert (found.schedule, found.lease, found.retention, found.waiting) == (None, None, None, [])


# --- offers, retries and delays -----------------------------------------------------------------


def test_a_run_that_was_never_offered_is_due_now__R_D3(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    rows("insert into job_run (job_id) select id from job")
    [waiting] = see().waiting
    assert (waiting.queue, waiting.job, waiting.level) == ("runs", "orders", 0)
    assert waiting.room > 0
    assert -5 < wait(waiting.due) <= 0


def test_a_delayed_run_is_due_at_its_time__R_D3(see: Any, rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    submit(recorder.ports, "orders", countdown=20)
    submit(recorder.ports, "orders", countdown=90)
    [waiting] = see().waiting
    assert 15 < wait(waiting.due) <= 20


@pytest.mark.parametrize(
    ("times", "grace"), [(1, 10), (2, 20), (3, 40), (6, 320), (7, 600), (9, 600), (30, 600)]
)
def test_the_grace_of_an_offered_run_doubles_up_to_ten_minutes__R_D3(
    see: Any, rows: Rows, recorder: Recorder, times: int, grace: float
) -> None:
    new_job(rows, "orders")
    offered(rows, submit(recorder.ports, "orders").run_id, ago=3, times=times)
    [waiting] = see().waiting
    assert grace - 5 < wait(waiting.due) <= grace - 3


def test_the_grace_is_configurable__R_D3(
    see: Any, rows: Rows, recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(CLAIMCHECK_OFFER_GRACE_SECONDS=2)
    new_job(rows, "orders")
    submit(recorder.ports, "orders")
    assert 1 < wait(see().waiting[0].due) <= 2


def test_of_many_runs_the_first_of_each_kind_is_known__R_D3(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    for ago in (1, 8, 4):
        offered(rows, submit(recorder.ports, "orders").run_id, ago, 1)
    offered(rows, submit(recorder.ports, "orders").run_id, 5, 2)
    submit(recorder.ports, "orders", countdown=99)
    found = {waiting.level: round(wait(waiting.due)) for waiting in see().waiting}
    assert found == {0: 99, 1: 2, 2: 15}


def test_a_time_that_is_moved_by_hand_counts_as_never_offered__R_S2(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    submit(recorder.ports, "orders")
    rows("update job_run set available_at = clock_timestamp() + interval '30 seconds'")
    [waiting] = see().waiting
    assert waiting.level == 0
    assert 25 < wait(waiting.due) <= 30
    rows("update job_run set available_at = clock_timestamp()")
    assert wait(see().waiting[0].due) <= 0


@pytest.mark.parametrize(
    "closed",
    [
        "update job set enabled = false",
        "update job set paused = true",
        "update job set source_enabled = false",
        "update job set sink_enabled = false",
        "update datasource set enabled = false",
    ],
)
def test_blocked_work_is_no_deadline__R_D3(
    see: Any, rows: Rows, recorder: Recorder, closed: str
) -> None:
    new_job(rows, "orders", source_id=NIL_DATASOURCE, sink_id=NIL_DATASOURCE)
    submit(recorder.ports, "orders")
    submit(recorder.ports, "orders", countdown=60)
    assert see().waiting
    rows(closed)
    assert see().waiting == []


def test_behind_a_full_slot_only_a_time_to_come_is_a_deadline__R_D7(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    rows("insert into concurrency_key values ('warehouse', 1)")
    new_job(rows, "orders", "allow", concurrency_key="warehouse")
    new_job(rows, "returns", "allow", concurrency_key="warehouse")
    held = submit(recorder.ports, "orders").run_id
    rows("insert into job_run (job_id) select id from job where name = 'returns'")
    assert {waiting.job for waiting in see().waiting} == {"orders", "returns"}
    claim(rows, held)
    rows("update job_run set slot_key = 'warehouse', slot_no = 1 where id = %s", held)
    assert see().waiting == []
    submit(recorder.ports, "returns", countdown=30)
    rows(
        "update job_run set available_at = clock_timestamp() + interval '30 s' where id <> %s", held
    )
    [waiting] = see().waiting
    assert (waiting.job, waiting.room) == ("returns", 0)
    assert 25 < wait(waiting.due) <= 30


def test_a_job_that_runs_one_at_a_time_has_one_deadline__R_D7(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "queue")
    first = submit(recorder.ports, "orders").run_id
    rows("insert into job_run (job_id) select id from job")
    # The first one's wake-up is under way; the second waits its turn.
    [waiting] = see().waiting
    assert (waiting.level, waiting.room) == (1, 1)
    claim(rows, first)
    assert see().waiting == []
    finish(rows, first)
    [waiting] = see().waiting
    assert (waiting.level, waiting.room) == (0, 1)


def test_a_wake_up_in_one_queue_holds_back_none_of_another__R_D7(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "queue")
    submit(recorder.ports, "orders", queue="slow")
    rows("insert into job_run (job_id) select id from job")
    # Whether a worker takes from the queue `slow` nobody knows.
    found = {waiting.queue: (waiting.level, waiting.room) for waiting in see().waiting}
    assert found == {"slow": (1, 1), "runs": (0, 1)}


def test_runs_of_other_queues_and_jobs_are_known_apart__R_D6(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    for job, queue in (("a", "fast"), ("b", "fast"), ("c", "slow")):
        new_job(rows, job, queue=queue)
        submit(recorder.ports, job, countdown=10)
    submit(recorder.ports, "a", countdown=20, queue="slow")
    assert {(waiting.queue, waiting.job) for waiting in see().waiting} == {
        ("fast", "a"),
        ("fast", "b"),
        ("slow", "a"),
        ("slow", "c"),
    }
    assert {waiting.job for waiting in see(Scope(queue="fast")).waiting} == {"a", "b"}
    assert {waiting.queue for waiting in see(Scope(job="a")).waiting} == {"fast", "slow"}
    assert see(Scope(queue="nothing")).waiting == []


# --- leases, schedules, retention ---------------------------------------------------------------


def test_the_next_lease_to_expire_is_a_deadline__R_D3(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    first, second = (submit(recorder.ports, "orders").run_id for _ in range(2))
    claim(rows, first, lease=50)
    claim(rows, second, lease=40)
    assert 35 < wait(see().lease) <= 40
    request_cancel(rows, second)
    assert 35 < wait(see().lease) <= 40
    assert 45 < wait(see(set_aside=[second]).lease) <= 50
    finish(rows, first)
    rows(
        """update job_run set status = 'CANCELLED', finished_at = clock_timestamp()
           where id = %s""",
        second,
    )
    assert see().lease is None


def test_the_next_fire_of_any_schedule_is_a_deadline__R_D3(see: Any, rows: Rows) -> None:
    job = new_job(rows, "orders")
    set_up_schedule(rows, job, 30, "a")
    set_up_schedule(rows, job, 20, "b")
    assert 15 < wait(see().schedule) <= 20
    rows("update job_schedule set enabled = false, next_fire_at = null where name = 'b'")
    assert 25 < wait(see().schedule) <= 30


def test_a_backed_off_schedule_is_due_when_its_back_off_ends__R_D9(see: Any, rows: Rows) -> None:
    job = new_job(rows, "orders")
    set_up_schedule(rows, job, -100, "bad", retry=40)
    set_up_schedule(rows, job, 60, "good")
    assert 35 < wait(see().schedule) <= 40


def test_the_first_run_to_outlive_its_retention_is_a_deadline__R_S3(
    see: Any, rows: Rows, recorder: Recorder, configure: Callable[..., Any]
) -> None:
    new_job(rows, "orders")
    ended(rows, submit(recorder.ports, "orders").run_id)
    assert 89 * 86_400 < wait(see().retention) <= 90 * 86_400
    configure(CLAIMCHECK_RETENTION_DAYS=0)
    assert see().retention is None


def test_a_run_that_its_key_keeps_is_a_deadline_when_the_key_ends__R_T5(
    see: Any, rows: Rows, recorder: Recorder, configure: Callable[..., Any]
) -> None:
    configure(CLAIMCHECK_IDEMPOTENCY_HOURS=8760)
    day = 86_400
    new_job(rows, "orders", "allow")
    kept, other = (
        submit(recorder.ports, "orders", idempotency_key=key).run_id for key in ("k", None)
    )
    for run_id, days in ((kept, 100), (other, 80)):
        claim(rows, run_id)
        finish(rows, run_id, ago=days * day)
    assert 9 * day < wait(see().retention) <= 10 * day
    rows("delete from job_run where id = %s", other)
    assert 364 * day < wait(see().retention) <= 365 * day


# --- scopes (R-D6) ------------------------------------------------------------------------------


def test_a_notification_is_read_as_its_scope__R_D6() -> None:
    assert Scope.of("work queue:runs") == Scope(queue="runs", work=True)
    assert Scope.of("deadlines queue:a:b c") == Scope(queue="a:b c")
    assert Scope.of("work job:orders") == Scope(job="orders", work=True)
    assert Scope.of("deadlines all") == EVERYTHING
    assert Scope.of("work all") == Scope(work=True)
    for nonsense in ("", "work", "work queue:", "orders", "deadlines everything", "play all"):
        assert Scope.of(nonsense) == EVERYTHING


def test_only_what_a_scope_names_is_looked_at__R_D6(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    orders, returns = new_job(rows, "orders", queue="a"), new_job(rows, "returns", queue="b")
    set_up_schedule(rows, orders, 30)
    set_up_schedule(rows, returns, 20)
    claim(rows, submit(recorder.ports, "orders").run_id)
    submit(recorder.ports, "orders", countdown=5)
    submit(recorder.ports, "returns", countdown=5)

    def parts(*scopes: Scope) -> tuple[bool, bool, set[str]]:
        found = see(*scopes)
        return (
            found.schedule is not None,
            found.lease is not None,
            {waiting.job for waiting in found.waiting},
        )

    assert parts(Scope(work=True)) == (False, False, {"orders", "returns"})
    assert parts(Scope(queue="b", work=True)) == (False, False, {"returns"})
    assert parts(Scope(queue="b")) == (False, True, {"returns"})
    assert parts(Scope(job="orders", work=True)) == (False, False, {"orders"})
    assert parts(Scope(job="orders")) == (True, False, {"orders"})
    assert 25 < wait(see(Scope(job="orders")).schedule) <= 30
    assert parts(EVERYTHING) == (True, True, {"orders", "returns"})


def test_a_look_replaces_what_was_known_of_its_scope_and_keeps_the_rest__R_D6(
    see: Any, rows: Rows, recorder: Recorder
) -> None:
    orders, _ = new_job(rows, "orders", queue="a"), new_job(rows, "returns", queue="b")
    set_up_schedule(rows, orders, 30)
    first = submit(recorder.ports, "orders", countdown=5).run_id
    second = submit(recorder.ports, "returns", countdown=5).run_id
    see()
    rows(
        "update job_run set available_at = clock_timestamp() + interval '50 s' where id = %s", first
    )
    rows(
        "update job_run set available_at = clock_timestamp() + interval '60 s' where id = %s",
        second,
    )
    found = see(Scope(queue="a", work=True), fresh=False)
    assert {waiting.job: round(wait(waiting.due)) for waiting in found.waiting} == {
        "orders": 50,
        "returns": 5,
    }
    assert 25 < wait(found.schedule) <= 30
    rows("update job_schedule set next_fire_at = clock_timestamp() + interval '10 seconds'")
    assert 5 < wait(see(Scope(job="orders"), fresh=False).schedule) <= 10


def test_many_scopes_become_few_looks__R_D6() -> None:
    a, b = Scope(queue="a"), Scope(queue="b", work=True)
    assert merged([a, a, b]) == [a, b]
    assert merged([Scope(queue="a", work=True), a]) == [a]
    assert merged([a, Scope(work=True)]) == [EVERYTHING]
    assert merged([b, Scope(work=True)]) == [Scope(work=True)]
    assert merged([Scope(queue=str(n), work=True) for n in range(20)]) == [Scope(work=True)]
    assert merged([Scope(queue=str(n)) for n in range(20)]) == [EVERYTHING]


# --- what a look costs --------------------------------------------------------------------------


def plan(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    from dispatch import deadlines

    asked = {
        "queue": None,
        "job": None,
        "schedules": True,
        "leases": True,
        "set_aside": [],
        "grace": 10.0,
        "grace_cap": 600.0,
        "retention": 86_400.0,
    }
    explained = connection.execute(
        "explain (analyze, buffers, format json) " + deadlines._SQL["look"], asked
    ).fetchone()
    assert explained is not None
    return dict(explained[0][0]["Plan"])


def scans(node: dict[str, Any]) -> list[str]:
    found = [f"{node['Node Type']} on {node['Relation Name']}"] if "Relation Name" in node else []
    for child in node.get("Plans", []):
        found += scans(child)
    return found


def test_a_look_at_a_large_table_reads_little__R_D3(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    for name in ("a", "b", "c"):
        new_job(rows, name, "allow")
    new_job(rows, "paused", "allow", paused=True)
    rows(
        """insert into job_run (job_id, offered_at, offer_count, available_at)
           select j.id, case when mod(n, 3) > 0 then clock_timestamp() end, mod(n, 3),
             clock_timestamp() + make_interval(secs => mod(n, 1000) - 500)
           from job j cross join generate_series(1, 10000) n"""
    )
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("vacuum analyze job_run")
        found = plan(connection)
    assert [scan for scan in scans(found) if scan.startswith("Seq Scan on job_run")] == []
    # Three levels of four jobs: some hundred pages, of the tens of thousands that the table has.
    assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 400
