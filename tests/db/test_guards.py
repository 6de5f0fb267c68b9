"""What the database itself refuses, tried with plain SQL (R-S1, R-S2, R-S3)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.rows import dict_row

from dispatch.lifecycle import TRANSITIONS, JobRunStatus

Connection = psycopg.Connection[dict[str, object]]

ENVELOPE = {"format": 1, "key_version": "v1", "wrapped_key": "d3JhcA==", "ciphertext": "Y2lwaGVy"}


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as opened:
        yield opened


@pytest.fixture
def job(connection: Connection) -> UUID:
    return new_job(connection, "orders")


def new_job(connection: Connection, name: str, overlap: str = "allow") -> UUID:
    row = connection.execute(
        "insert into job (name, handler, overlap) values (%s, 'report', %s) returning id",
        (name, overlap),
    ).fetchone()
    assert row is not None
    return row["id"]  # type: ignore[return-value]


def new_run(connection: Connection, job: UUID) -> UUID:
    row = connection.execute(
        "insert into job_run (job_id) values (%s) returning id", (job,)
    ).fetchone()
    assert row is not None
    return row["id"]  # type: ignore[return-value]


CLAIM = """
update job_run set status = 'RUNNING', lease_token = gen_random_uuid(), executor = 'here:1:a:2',
  lease_until = clock_timestamp() + interval '1 minute', heartbeat_at = clock_timestamp(),
  fence = nextval('fence_seq'), started_at = clock_timestamp(), job_snapshot = '{}',
  source_snapshot = %(envelope)s, source_datasource_id = %(datasource)s,
  sink_snapshot = %(envelope)s, sink_datasource_id = %(datasource)s,
  datasources_resolved_at = clock_timestamp()
where id = %(run)s
"""


def claim(connection: Connection, run: UUID) -> None:
    connection.execute(CLAIM, {"run": run, "envelope": json.dumps(ENVELOPE), "datasource": uuid4()})


def move(connection: Connection, run: UUID, to: JobRunStatus) -> None:
    """Write `to` with all that a row of that state needs, so that only the step can be wrong."""
    if to is JobRunStatus.RUNNING:
        claim(connection, run)
        return
    with connection.transaction():
        connection.execute(
            """
            update job_run set status = %(to)s,
              cancel_requested_at = case when %(to)s in ('CANCEL_REQUESTED', 'CANCELLED')
                then coalesce(cancel_requested_at, clock_timestamp()) else cancel_requested_at end,
              finished_at = case
                when %(to)s in ('SUCCEEDED', 'FAILED', 'CANCELLED', 'RETRY_SCHEDULED')
                then coalesce(finished_at, clock_timestamp()) end,
              error_code = case when %(to)s in ('FAILED', 'RETRY_SCHEDULED')
                then coalesce(error_code, 'handler_error') end
            where id = %(run)s
            """,
            {"run": run, "to": str(to)},
        )
        if to is JobRunStatus.RETRY_SCHEDULED:
            replace(connection, run)


def replace(connection: Connection, run: UUID) -> UUID:
    row = connection.execute(
        """
        insert into job_run (job_id, previous_run_id, root_run_id, attempt)
        select job_id, id, root_run_id, attempt + 1 from job_run where id = %s returning id
        """,
        (run,),
    ).fetchone()
    assert row is not None
    return row["id"]  # type: ignore[return-value]


PATHS: dict[JobRunStatus, tuple[JobRunStatus, ...]] = {
    JobRunStatus.PENDING: (),
    JobRunStatus.RUNNING: (JobRunStatus.RUNNING,),
    JobRunStatus.CANCEL_REQUESTED: (JobRunStatus.RUNNING, JobRunStatus.CANCEL_REQUESTED),
    JobRunStatus.SUCCEEDED: (JobRunStatus.RUNNING, JobRunStatus.SUCCEEDED),
    JobRunStatus.FAILED: (JobRunStatus.RUNNING, JobRunStatus.FAILED),
    JobRunStatus.CANCELLED: (JobRunStatus.CANCELLED,),
    JobRunStatus.RETRY_SCHEDULED: (JobRunStatus.RUNNING, JobRunStatus.RETRY_SCHEDULED),
}


def run_in(connection: Connection, job: UUID, state: JobRunStatus) -> UUID:
    run = new_run(connection, job)
    for step in PATHS[state]:
        move(connection, run, step)
    return run


def status_of(connection: Connection, run: UUID) -> object:
    row = connection.execute("select status from job_run where id = %s", (run,)).fetchone()
    assert row is not None
    return row["status"]


@pytest.mark.parametrize(
    ("old", "new"),
    [pair for pair in itertools.product(JobRunStatus, repeat=2) if pair[0] != pair[1]],
)
def test_only_legal_transitions_pass__R_S2(
    connection: Connection, job: UUID, old: JobRunStatus, new: JobRunStatus
) -> None:
    run = run_in(connection, job, old)
    if (old, new) in TRANSITIONS:
        move(connection, run, new)
        assert status_of(connection, run) == new
    else:
        with pytest.raises(errors.CheckViolation):
            move(connection, run, new)
        assert status_of(connection, run) == old


TERMINAL = [s for s in JobRunStatus if s.is_finished]


@pytest.mark.parametrize("state", TERMINAL)
@pytest.mark.parametrize(
    "change",
    [
        "finished_at = finished_at + interval '1 second'",
        "rows_processed = 7",
        "error_message = 'another story'",
        "available_at = clock_timestamp()",
        "result = '1'",
        "cancellation_warning = 'x'",
        "triggered_by = 'somebody'",
    ],
)
def test_a_finished_run_never_changes__R_S1(
    connection: Connection, job: UUID, state: JobRunStatus, change: str
) -> None:
    run = run_in(connection, job, state)
    with pytest.raises(errors.CheckViolation):
        connection.execute(
            sql.SQL("update job_run set {} where id = %s").format(sql.SQL(change)),  # type: ignore[arg-type]
            (run,),
        )


@pytest.mark.parametrize(
    "change",
    [
        "lease_token = null",
        "lease_token = gen_random_uuid()",
        "lease_until = null",
        "executor = null",
        "executor = 'elsewhere:1:b:2'",
        "fence = fence + 1",
        "fence = null",
        "started_at = null",
        "job_snapshot = null",
        """job_snapshot = '{"job": "another"}'""",
        "source_snapshot = null",
        'source_snapshot = source_snapshot || \'{"ciphertext": "b3RoZXI="}\'',
        "source_datasource_id = gen_random_uuid()",
        "datasources_resolved_at = clock_timestamp()",
        "finished_at = clock_timestamp()",
        "slot_key = 'warehouse'",
        "slot_no = 1",
        "id = gen_random_uuid()",
        "root_run_id = gen_random_uuid()",
        "previous_run_id = gen_random_uuid()",
        "attempt = 2",
        """params = '{"day": "another"}'""",
        "job_name = 'another'",
        "job_id = null",
        "status = 'DONE'",
        "priority = 10",
        "committed_watermark = '7'",
    ],
)
def test_a_held_run_stays_whole__R_S2(connection: Connection, job: UUID, change: str) -> None:
    run = run_in(connection, job, JobRunStatus.RUNNING)
    with pytest.raises(errors.IntegrityError):
        connection.execute(
            sql.SQL("update job_run set {} where id = %s").format(sql.SQL(change)),  # type: ignore[arg-type]
            (run,),
        )


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "RUNNING"},
        {"status": "SUCCEEDED"},
        {"status": "FAILED", "finished_at": "2026-11-01T00:00:00Z", "error_code": "handler_error"},
        {"lease_token": "00000000-0000-0000-0000-000000000001"},
        {"finished_at": "2026-11-01T00:00:00Z"},
        {"attempt": 0},
        {"priority": 10},
        {"priority": -1},
        {"max_attempts": 0},
        {"params": "[]"},
        {"chain": "{}"},
        {"error_code": "unheard_of"},
        {"slot_no": 1},
        {"source_snapshot": "{}"},
        {"root_run_id": "00000000-0000-0000-0000-000000000001"},
        {"previous_run_id": "00000000-0000-0000-0000-000000000001"},
    ],
)
def test_a_malformed_row_is_refused__R_S2(
    connection: Connection, job: UUID, columns: dict[str, object]
) -> None:
    names = ["job_id", *columns]
    statement = sql.SQL("insert into job_run ({}) values ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(", ").join(sql.Placeholder() * len(names)),
    )
    with pytest.raises(errors.IntegrityError):
        connection.execute(statement, [job, *columns.values()])
    row = connection.execute("select count(*) as n from job_run").fetchone()
    assert row == {"n": 0}


def test_an_insert_of_only_job_id_is_a_whole_pending_run(connection: Connection) -> None:
    job = connection.execute(
        """
        insert into job (name, handler, overlap, queue, priority, max_attempts)
        values ('nightly', 'report', 'skip', 'slow', 4, 5) returning id
        """
    ).fetchone()
    assert job is not None
    run = new_run(connection, job["id"])  # type: ignore[arg-type]
    row = connection.execute("select * from job_run where id = %s", (run,)).fetchone()
    assert row is not None
    assert (row["status"], row["job_name"], row["queue"], row["priority"]) == (
        "PENDING",
        "nightly",
        "slow",
        4,
    )
    assert (row["max_attempts"], row["attempt"], row["root_run_id"]) == (5, 1, run)
    with pytest.raises(errors.UniqueViolation):  # `skip` is an index, not a habit (R-T6)
        new_run(connection, job["id"])  # type: ignore[arg-type]


def test_a_run_of_an_unknown_job_is_refused(connection: Connection) -> None:
    with pytest.raises(errors.IntegrityError):
        new_run(connection, uuid4())


def test_one_replacement_for_an_attempt__R_R2(connection: Connection, job: UUID) -> None:
    run = run_in(connection, job, JobRunStatus.RETRY_SCHEDULED)
    with pytest.raises(errors.UniqueViolation):
        replace(connection, run)


def test_a_retry_without_its_attempt_does_not_commit__R_S2(
    connection: Connection, job: UUID
) -> None:
    run = run_in(connection, job, JobRunStatus.RUNNING)
    with pytest.raises(errors.CheckViolation, match="without its new attempt"):
        connection.execute(
            "update job_run set status = 'RETRY_SCHEDULED', error_code = 'timeout',"
            " finished_at = clock_timestamp() where id = %s",
            (run,),
        )
    assert status_of(connection, run) == "RUNNING"


@pytest.mark.parametrize(
    "state", [s for s in JobRunStatus if s is not JobRunStatus.RETRY_SCHEDULED]
)
def test_only_a_retry_is_replaced__R_S2(
    connection: Connection, job: UUID, state: JobRunStatus
) -> None:
    run = run_in(connection, job, state)
    with pytest.raises(errors.CheckViolation):
        replace(connection, run)


def test_an_attempt_stays_in_its_lineage__R_S2(connection: Connection, job: UUID) -> None:
    run = run_in(connection, job, JobRunStatus.FAILED)
    skips_an_attempt = """
    with retried as (update job_run set status = 'RETRY_SCHEDULED' where id = %(run)s returning *)
    insert into job_run (job_id, previous_run_id, root_run_id, attempt)
    select job_id, id, root_run_id, attempt + 4 from retried
    """
    with pytest.raises(errors.CheckViolation, match="lineage"):
        connection.execute(skips_an_attempt, {"run": run})
    assert status_of(connection, run) == "FAILED"


@pytest.mark.parametrize("state", [s for s in TERMINAL if s is not JobRunStatus.CANCELLED])
def test_a_data_key_may_be_rewrapped_and_nothing_else__R_X3(
    connection: Connection, job: UUID, state: JobRunStatus
) -> None:
    run = run_in(connection, job, state)
    rewrapped = {**ENVELOPE, "key_version": "v2", "wrapped_key": "bmV3"}
    connection.execute(
        "update job_run set source_snapshot = %s where id = %s", (json.dumps(rewrapped), run)
    )
    row = connection.execute("select source_snapshot from job_run where id = %s", (run,)).fetchone()
    assert row == {"source_snapshot": rewrapped}
    with pytest.raises(errors.CheckViolation):
        connection.execute(
            "update job_run set source_snapshot = %s where id = %s",
            (json.dumps({**rewrapped, "ciphertext": "b3RoZXI="}), run),
        )


@pytest.mark.parametrize("state", [JobRunStatus.RUNNING, JobRunStatus.SUCCEEDED])
@pytest.mark.parametrize("column", ["source_snapshot", "sink_snapshot"])
@pytest.mark.parametrize("key", ["wrapped_key", "key_version"])
@pytest.mark.parametrize("without", ["{0} - '{1}'", """{0} || '{{"{1}": null}}'"""])
def test_a_data_key_is_not_taken_away__R_S2__R_X3(
    connection: Connection, job: UUID, state: JobRunStatus, column: str, key: str, without: str
) -> None:
    run_in(connection, job, state)
    with pytest.raises(errors.CheckViolation, match="never removed"):
        connection.execute(f"update job_run set {column} = {without.format(column, key)}")  # type: ignore[arg-type]  # noqa: S608
    row = connection.execute("select source_snapshot, sink_snapshot from job_run").fetchone()
    assert row == {"source_snapshot": ENVELOPE, "sink_snapshot": ENVELOPE}


def test_times_may_be_moved_by_hand__R_S2(connection: Connection, job: UUID) -> None:
    run = run_in(connection, job, JobRunStatus.RUNNING)
    connection.execute("update job_run set lease_until = clock_timestamp() where id = %s", (run,))
    waiting = run_in(connection, job, JobRunStatus.PENDING)
    connection.execute(
        "update job_run set available_at = clock_timestamp() + interval '1 day' where id = %s",
        (waiting,),
    )


@pytest.mark.parametrize("state", [s for s in JobRunStatus if s.is_active])
def test_what_is_active_is_not_removed__R_S3(
    connection: Connection, job: UUID, state: JobRunStatus
) -> None:
    run = run_in(connection, job, state)
    with pytest.raises(errors.CheckViolation):
        connection.execute("delete from job_run where id = %s", (run,))
    with pytest.raises(errors.CheckViolation):
        connection.execute("delete from job where id = %s", (job,))


def test_a_removed_job_leaves_its_finished_runs__R_S3(connection: Connection, job: UUID) -> None:
    runs = [run_in(connection, job, s) for s in (JobRunStatus.SUCCEEDED, JobRunStatus.FAILED)]
    connection.execute("delete from job where id = %s", (job,))
    rows = connection.execute("select id, job_id, job_name from job_run").fetchall()
    assert {row["id"] for row in rows} == set(runs)
    assert {(row["job_id"], row["job_name"]) for row in rows} == {(None, "orders")}


def test_a_datasource_in_use_is_not_removed__R_S3(connection: Connection) -> None:
    datasource = uuid4()
    connection.execute(
        "insert into datasource (id, name, connector, envelope)"
        " values (%s, 'shop', 'postgresql', %s)",
        (datasource, json.dumps({**ENVELOPE, "datasource": str(datasource)})),
    )
    connection.execute(
        "insert into job (name, handler, source_id) values ('orders', 'replicate', %s)",
        (datasource,),
    )
    with pytest.raises(errors.ForeignKeyViolation):
        connection.execute("delete from datasource where id = %s", (datasource,))


def test_an_envelope_stays_with_its_datasource__R_X1(connection: Connection) -> None:
    one, other = uuid4(), uuid4()
    for name, id in (("shop", one), ("warehouse", other)):
        connection.execute(
            "insert into datasource (id, name, connector, envelope)"
            " values (%s, %s, 'postgresql', %s)",
            (id, name, json.dumps({**ENVELOPE, "datasource": str(id)})),
        )
    with pytest.raises(errors.CheckViolation):
        connection.execute(
            "update datasource set envelope = (select envelope from datasource where id = %s)"
            " where id = %s",
            (one, other),
        )


@pytest.mark.parametrize(
    "columns",
    [
        {"cron": "0 3 * * *"},
        {"timezone": "UTC"},
        {"cron": "0 3 * * *", "timezone": "UTC", "every_seconds": 5},
        {"every_seconds": 0},
        {"every_seconds": 5, "misfire": "whatever"},
        {"every_seconds": 5, "enabled": False, "next_fire_at": "2026-12-01T00:00:00Z"},
    ],
)
def test_a_malformed_schedule_is_refused__R_D2(
    connection: Connection, job: UUID, columns: dict[str, object]
) -> None:
    names = ["job_id", "name", *columns]
    statement = sql.SQL("insert into job_schedule ({}) values ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(", ").join(sql.Placeholder() * len(names)),
    )
    with pytest.raises(errors.IntegrityError):
        connection.execute(statement, [job, "nightly", *columns.values()])


def test_a_run_log_is_bounded__R_X5(connection: Connection, job: UUID) -> None:
    run = new_run(connection, job)
    with pytest.raises(errors.CheckViolation):
        connection.execute(
            "insert into run_log (run_id, head) values (%s, %s)", (run, "é" * 98_305)
        )
    with pytest.raises(errors.CheckViolation):
        connection.execute(
            "insert into run_log (run_id, tail) values (%s, %s)", (run, "x" * 65_537)
        )


@pytest.mark.parametrize("scope", ["", "queue:", "orders", "job", "everything"])
def test_notify_refuses_an_unknown_scope__R_D6(connection: Connection, scope: str) -> None:
    with pytest.raises(errors.RaiseException, match="scope must be"):
        connection.execute("select claimcheck_notify(%s)", (scope,))


def test_notify_tells_kind_and_scope__R_D6(connection: Connection) -> None:
    connection.execute("listen claimcheck")
    connection.execute("select claimcheck_notify('queue:runs', 'work')")
    connection.execute("select claimcheck_notify('job:orders')")
    heard = [n.payload for n in connection.notifies(timeout=5, stop_after=2)]
    assert heard == ["work queue:runs", "deadlines job:orders"]
