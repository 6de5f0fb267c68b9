"""The last attempt is the one that nothing replaced, whatever number and time say (R-K1, R-T7)."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, claim, new_job
from worker_support import new_run

from db import session
from db.runs import Filter, JobRunRepository
from dispatch import lineage
from dispatch.cancel import cancel
from dispatch.lifecycle import JobRunStatus


@pytest.fixture
def attempts(database: str, rows: Rows) -> list[UUID]:
    """Three, snoozed twice, so of one number, while the database's clock stepped back."""
    found = [new_run(rows, new_job(rows, "orders"))]
    for hours in (1, 2):
        claim(rows, found[-1])
        with psycopg.connect(database) as connection:
            connection.execute(
                """update job_run set status = 'RETRY_SCHEDULED', error_code = 'snoozed',
                     finished_at = clock_timestamp() where id = %s""",
                [found[-1]],
            )
            cursor = connection.execute(
                """insert into job_run (job_id, previous_run_id, root_run_id, attempt, created_at)
                   select job_id, id, root_run_id, 1, created_at - make_interval(hours => %s)
                   from job_run where id = %s returning id""",
                [hours, found[-1]],
            )
            found += [row[0] for row in cursor]
    return found


@pytest.mark.parametrize("by", ["first", "second", "third", "alias"])
def test_every_id_of_a_lineage_leads_to_the_attempt_that_nothing_replaced__R_K1__R_R8__R_T7(
    rows: Rows, recorder: Recorder, attempts: list[UUID], by: str
) -> None:
    alias = uuid4()
    rows("insert into run_alias (id, run_id) values (%s, %s)", alias, attempts[1])
    asked = dict(zip(("first", "second", "third", "alias"), [*attempts, alias], strict=True))[by]
    outcome = lineage.outcome(asked)
    assert outcome is not None
    assert (outcome["id"], outcome["status"]) == (attempts[-1], "PENDING")
    with session.transaction() as connection:
        for look in (lineage.last_attempt, lineage.lock_last_attempt):
            found = look(connection, asked)
            assert found is not None
            assert found["id"] == attempts[-1]
    answer = cancel(recorder.ports, asked, actor="someone")
    assert (answer.run_id, answer.status) == (attempts[-1], JobRunStatus.CANCELLED)


def test_a_lineage_reads_in_the_order_of_its_replacements__R_S3(
    rows: Rows, attempts: list[UUID]
) -> None:
    with session.transaction() as connection:
        runs = JobRunRepository(connection)
        assert [run["id"] for run in runs.lineage(attempts[0])] == attempts
        last = runs.last(attempts[0])
        assert last is not None
        assert last["id"] == attempts[-1]
        assert [run["id"] for run in runs.newest(Filter(latest_only=True))] == attempts[-1:]


def test_an_unknown_id_has_no_attempt(rows: Rows) -> None:
    assert lineage.outcome(uuid4()) is None
    with session.transaction() as connection:
        assert lineage.last_attempt(connection, uuid4()) is None
        assert lineage.lock_last_attempt(connection, uuid4()) is None
