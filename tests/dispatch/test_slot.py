"""A slot that goes from run to run: the end of one and the claim of the next in one transaction.

R-C1, R-C4, R-F1, R-F2, R-R7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from run_support import Recorder, Rows, new_job, run
from support.proxy import Proxy, before_database
from support.waiting import until
from worker_support import Worker, new_run, new_runs

from db import session
from dispatch import chains, enqueue
from dispatch.context import Outcome, RunContext


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder)
    yield made
    made.close()


def statuses(rows: Rows, ids: list[UUID]) -> list[str]:
    return [run(rows, run_id)["status"] for run_id in ids]


def commits(rows: Rows) -> int:
    """Transactions of the server that wrote something: each has an id of its own."""
    [row] = rows("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as n")
    return int(row["n"])


def test_a_short_run_costs_one_transaction__R_C1(rows: Rows, worker: Worker) -> None:
    job = worker.job("quick", lambda run: None, overlap="allow")
    taken = []
    # Others may write on a given server meanwhile.
    for _ in range(3):
        ids = new_runs(rows, job, 20)
        before = commits(rows)
        assert worker.run(ids[0]) == ids
        taken.append(commits(rows) - before)
        assert set(statuses(rows, ids)) == {"SUCCEEDED"}
    # The first claim, and then one each: its end together with the next claim.
    assert min(taken) <= 22
    assert [event.kind for event in worker.events] == ["received", "started", "succeeded"] * 60


def test_a_value_that_is_refused_ends_its_run_and_not_the_slot__R_F2(
    rows: Rows, worker: Worker
) -> None:
    def work(run: RunContext) -> Any:
        return Outcome(rows_processed=2**70) if run.params else None

    job = worker.job("odd", work, overlap="allow")
    ids = [new_run(rows, job, params=params) for params in ("{}", '{"odd": 1}', "{}")]
    assert worker.run(ids[0]) == ids
    assert statuses(rows, ids) == ["SUCCEEDED", "FAILED", "SUCCEEDED"]


def test_a_fenced_end_writes_nothing_and_the_slot_goes_on__R_F1(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> None:
        if run.params:
            rows(
                """update job_run set status = 'FAILED', error_code = 'lease_expired',
                     finished_at = clock_timestamp() where id = %s""",
                run.id,
            )

    job = worker.job("lost", work, overlap="allow")
    ids = [new_run(rows, job, params=params) for params in ('{"lose": 1}', "{}")]
    assert worker.run(ids[0]) == ids
    assert statuses(rows, ids) == ["FAILED", "SUCCEEDED"]
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 1


def test_a_chain_that_comes_in_between_is_not_missed__R_F2(
    rows: Rows, recorder: Recorder, worker: Worker
) -> None:
    step = chains.Step("report")
    new_job(rows, "report", "allow")

    def work(run: RunContext) -> None:
        enqueue.submit(recorder.ports, "orders", chain=chains.stored([step]))

    job = worker.job("orders", work, overlap="skip")
    run_id = new_run(rows, job)
    following = new_run(rows, worker.job("other", lambda run: None))
    assert worker.run(run_id) == [run_id, following]
    assert run(rows, step.run_id)["status"] == "PENDING"
    assert statuses(rows, [run_id, following]) == ["SUCCEEDED"] * 2


def test_a_claim_that_loses_a_race_does_not_take_the_end_with_it__R_C8(
    database: str, rows: Rows, worker: Worker
) -> None:
    """The next claim runs into a turn that another transaction has taken and not committed."""
    free = worker.job("free", lambda run: None)
    contended = worker.job("contended", lambda run: None)
    other = new_run(rows, contended)
    with psycopg.connect(database) as rival:

        def work(run: RunContext) -> None:
            rival.execute(
                """update job_run set status = 'RUNNING', exclusive = true, executor = 'x:1:n:1',
                     lease_token = gen_random_uuid(), lease_until = now() + interval '1 minute',
                     heartbeat_at = now(), started_at = now(), fence = nextval('fence_seq'),
                     job_snapshot = '{}', datasources_resolved_at = now() where id = %s""",
                [other],
            )
            new_run(rows, contended)

        worker.on("free", work)
        first = new_run(rows, free)
        assert worker.run(first) == [first]
        assert run(rows, first)["status"] == "SUCCEEDED"
        rival.rollback()


@pytest.fixture
def cutter(database: str, rows: Rows, configure: Callable[..., Any]) -> Iterator[Proxy]:
    with before_database(database) as (made, through):
        configure(DATABASE_URL=through, REDIS_URL="redis://127.0.0.1:1/0")
        session.dispose()
        yield made
        session.dispose()


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_cut_between_two_runs_loses_and_doubles_neither__R_R7(
    rows: Rows, recorder: Recorder, cutter: Proxy, answered: bool
) -> None:
    seen: list[UUID] = []

    def work(run: RunContext) -> None:
        seen.append(run.id)
        if len(seen) == 2:
            # The statements are prepared: what is sent next is the end and the claim, in one.
            cutter.cut_when(lambda data: b"COMMIT" in data, answered=answered)

    worker = Worker(rows, recorder)
    try:
        ids = new_runs(rows, worker.job("quick", work, overlap="allow"), 5)
        assert worker.run(ids[0]) == ids
    finally:
        worker.close()
    assert cutter.cuts == 1
    assert seen == ids
    assert statuses(rows, ids) == ["SUCCEEDED"] * 5
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 5
    kinds = [event.kind for event in worker.events]
    assert kinds == ["received", "started", "succeeded"] * 5
    until(
        "no run without an owner",
        lambda: not rows("select 1 from job_run where status = 'RUNNING'"),
    )
