"""A finish that the database undid for a reason that passes is repeated: R-R7, R-F2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job, run, wait_for_locks
from support.waiting import until
from worker_support import Claimer, Worker, new_run

from dispatch import chains, enqueue
from dispatch.context import Outcome, RunContext
from dispatch.finalization import RunFinalizationService, success
from dispatch.lifecycle import JobRunStatus


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder)
    yield made
    made.close()


@pytest.mark.parametrize("logs", [False, True], ids=["statement", "transaction"])
@pytest.mark.parametrize(
    "code",
    ["40P01", "40001", "57014", "25006", "53100", "53200"],
    ids=["deadlock", "conflict", "deadline", "read-only", "disk-full", "out-of-memory"],
)
def test_a_finish_that_was_undone_for_a_passing_reason_is_repeated__R_R7(
    rows: Rows, worker: Worker, code: str, logs: bool
) -> None:
    rows("create sequence refusals")
    rows(
        f"""create function refuse() returns trigger language plpgsql as $$ begin
              if nextval('refusals') <= 2 then raise 'not now' using errcode = '{code}'; end if;
              return new;
            end $$"""
    )
    rows(
        """create trigger refuse before update on job_run for each row
           when (new.finished_at is not null) execute function refuse()"""
    )

    def work(run: RunContext) -> str:
        if logs:
            run.log.info("a line makes the finish a transaction of several statements")
        return "done"

    run_id = new_run(rows, worker.job("orders", work))
    assert worker.run(run_id) == [run_id]
    found = run(rows, run_id)
    assert (found["status"], found["result"]) == ("SUCCEEDED", "done")
    assert [event.kind for event in worker.events] == ["received", "started", "succeeded"]
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 1
    kept = "".join(row["head"] for row in rows("select head from run_log"))
    assert kept.count("a line makes") == int(logs)


def test_two_ends_whose_chains_meet_are_both_recorded__R_R7__R_F2(
    database: str, rows: Rows, recorder: Recorder
) -> None:
    """Each hands the rest of its chain to the other's run: a deadlock, of which one is undone."""
    for name in ("orders", "prices"):
        new_job(rows, name, "skip")
    new_job(rows, "report", "allow")
    service = RunFinalizationService(recorder.ports, patience=20)
    reports = [chains.Step("report"), chains.Step("report")]
    with ExitStack() as stack:
        held = []
        for name, other, report in zip(
            ("orders", "prices"), ("prices", "orders"), reports, strict=True
        ):
            steps = chains.stored([chains.Step(other), report])
            handle = enqueue.submit(recorder.ports, name, chain=steps)
            claimer = Claimer()
            stack.callback(claimer.close)
            claimed = claimer.directed(handle.run_id)
            assert claimed is not None
            held.append((claimer, claimed))

        # Both hold their own run's row, and none has come to the other's.
        with psycopg.connect(database) as between:
            between.execute("select 1 from job for update")
            ends = [
                in_thread(
                    lambda claimer=claimer, claimed=claimed: service.finish(  # type: ignore[misc]
                        claimer.link, claimed, success(Outcome())
                    )
                )
                for claimer, claimed in held
            ]
            until("both ends to wait", lambda: wait_for_locks(rows) == 2, 5)
        finished = [end.result(20) for end in ends]
    assert [found.status for found in finished] == [JobRunStatus.SUCCEEDED] * 2
    # What came first let its rest follow the other's run, whose own chain then began anew.
    waiting_now = rows("select job_name from job_run where status = 'PENDING' order by job_name")
    assert [row["job_name"] for row in waiting_now] in (["orders", "report"], ["prices", "report"])
