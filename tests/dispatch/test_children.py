"""A run over many tables stores a child job for each and enqueues a run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from run_support import Recorder, Rows, new_job, run
from worker_support import Worker, new_datasource, new_run

from dispatch.children import spawner
from dispatch.context import ChildJob, RunContext


def child(table: str, **others: Any) -> ChildJob:
    definition = {
        "mode": "complete",
        "source": {"datasource": "shop", "table": table},
        "sink": {"datasource": "warehouse", "table": table},
        **others,
    }
    return ChildJob(f"all/{table}", definition)


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder, spawn=spawner(recorder.ports))
    yield made
    made.close()


@pytest.fixture
def pattern(rows: Rows, worker: Worker) -> Callable[..., UUID]:
    """``pattern(children)``: a new run of the job ``all``, which has these children."""
    source, sink = new_datasource(rows, "shop"), new_datasource(rows, "warehouse")
    job = worker.job("all", lambda run: None, source_id=source, sink_id=sink, overlap="allow")

    def execute(*children: ChildJob, first: Callable[[RunContext], Any] | None = None) -> UUID:
        def work(run: RunContext) -> None:
            if first is not None:
                first(run)
            run.spawn(children)

        worker.on("all", work)
        run_id = new_run(rows, job)
        worker.coordinator.run_only(run_id)
        return run_id

    return execute


def test_children_are_stored_with_a_run_each(
    rows: Rows, recorder: Recorder, pattern: Callable[..., UUID]
) -> None:
    parent = pattern(child("public.a"), child("public.b", queue="heavy", priority=3))
    assert run(rows, parent)["status"] == "SUCCEEDED"
    found = rows(
        """select j.name, j.overlap, j.queue, j.priority, p.name as parent, s.name as source,
             t.name as sink, j.definition, r.id as run, r.parent_run_id, r.status
           from job j join job p on p.id = j.parent_job_id join datasource s on s.id = j.source_id
             join datasource t on t.id = j.sink_id join job_run r on r.job_id = j.id
           order by j.name"""
    )
    assert [row["name"] for row in found] == ["all/public.a", "all/public.b"]
    for row in found:
        assert (row["parent"], row["source"], row["sink"]) == ("all", "shop", "warehouse")
        assert (row["overlap"], row["status"], row["parent_run_id"]) == ("skip", "PENDING", parent)
        assert row["definition"]["retry"]["on_failure"] is False
    assert (found[1]["queue"], found[1]["priority"]) == ("heavy", 3)
    assert {row["run"] for row in found} <= set(recorder.take())


def test_a_second_run_updates_its_children_and_leaves_the_active_ones(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    pattern(child("public.a"))
    [before] = rows("select id, watermark from job where name = 'all/public.a'")
    rows("update job set watermark = '5', watermark_type = 'bigint' where name = 'all/public.a'")
    second = pattern(child("public.a"), child("public.c"))
    assert run(rows, second)["status"] == "SUCCEEDED"
    [after] = rows("select id, watermark from job where name = 'all/public.a'")
    assert (after["id"], after["watermark"]) == (before["id"], "5")
    assert len(rows("select 1 from job_run where job_name = 'all/public.a'")) == 1
    assert len(rows("select 1 from job_run where job_name = 'all/public.c'")) == 1


def test_a_child_that_is_no_longer_among_them_is_told(
    rows: Rows, worker: Worker, pattern: Callable[..., UUID]
) -> None:
    pattern(child("public.a"), child("public.b"), child("public.c"))
    rows("update job set enabled = false where name = 'all/public.b'")
    told: list[str] = []
    pattern(first=lambda run: told.extend(run.spawn([child("public.c"), child("public.d")])))
    assert told == ["all/public.a"]
    assert len(rows("select 1 from job_run where job_name = 'all/public.a'")) == 1


def test_a_disabled_child_gets_no_run_and_stays_disabled(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    pattern(child("public.a"))
    rows("update job set enabled = false where name = 'all/public.a'")
    rows(
        """update job_run set status = 'CANCELLED', cancel_requested_at = now(), finished_at = now()
           where status = 'PENDING'"""
    )
    parent = pattern(child("public.a", verify="count"), child("public.b"))
    assert run(rows, parent)["status"] == "SUCCEEDED"
    assert rows("select enabled from job where name = 'all/public.a'") == [{"enabled": False}]
    waiting = rows("select job_name from job_run where status = 'PENDING'")
    assert waiting == [{"job_name": "all/public.b"}]


def test_a_name_that_is_taken_fails_the_run_for_good_and_stores_nothing(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    new_job(rows, "all/public.b")
    parent = pattern(child("public.a"), child("public.b"))
    found = run(rows, parent)
    assert (found["status"], found["error_code"]) == ("FAILED", "handler_error")
    assert "'all/public.b'" in found["error_message"]
    assert not rows("select 1 from job where name = 'all/public.a'")


def test_a_fenced_run_has_no_children__R_F1(rows: Rows, pattern: Callable[..., UUID]) -> None:
    def lose(run: RunContext) -> None:
        rows(
            """update job_run set status = 'FAILED', error_code = 'lease_expired',
                 finished_at = clock_timestamp() where id = %s""",
            run.id,
        )

    pattern(child("public.a"), first=lose)
    assert not rows("select 1 from job where parent_job_id is not null")


def test_a_cancelled_run_has_no_children__R_K1(rows: Rows, pattern: Callable[..., UUID]) -> None:
    def cancel(run: RunContext) -> None:
        rows(
            """update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()
               where id = %s""",
            run.id,
        )

    parent = pattern(child("public.a"), first=cancel)
    assert run(rows, parent)["status"] == "CANCELLED"
    assert not rows("select 1 from job where parent_job_id is not null")
