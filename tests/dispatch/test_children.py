"""A run over many tables stores a child job for each and enqueues a run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from run_support import Recorder, Rows, ended, new_job, request_cancel, run
from worker_support import Worker, new_datasource, new_run

from db import session
from db.runs import JobRunRepository
from dispatch import children as family
from dispatch.children import spawner
from dispatch.context import ChildJob, PermanentFailure, RunContext, Snooze
from dispatch.lineage import children_of
from dispatch.ports import Offer
from dispatch.recovery import recover_expired
from dispatch.retry import retry

GO_ON = "the child runs that it started go on by themselves"


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

    def execute(
        *children: ChildJob,
        first: Callable[[RunContext], Any] = lambda run: None,
        then: Callable[[RunContext], Any] = lambda run: None,
        again: UUID | None = None,
    ) -> UUID:
        def work(run: RunContext) -> None:
            first(run)
            run.spawn(children)
            then(run)

        worker.on("all", work)
        run_id = again or new_run(rows, job)
        worker.coordinator.run_only(run_id)
        return run_id

    return execute


def of_lineage(root: UUID) -> list[tuple[str, str]]:
    """The child runs that are shown of a lineage: job and state."""
    with session.transaction() as connection:
        found = children_of(JobRunRepository(connection), root)
    return [(child["job_name"], child["status"]) for child in found]


def of_job(rows: Rows, name: str) -> list[UUID]:
    """The ids of a job's runs, the oldest first."""
    return [
        row["id"]
        for row in rows("select id from job_run where job_name = %s order by created_at", name)
    ]


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
    pattern(first=lambda run: told.extend(run.spawn([child("public.c"), child("public.d")]).gone))
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


def test_an_attempt_after_a_lost_one_starts_only_what_is_missing__R_R2__R_R3(
    rows: Rows, recorder: Recorder, pattern: Callable[..., UUID]
) -> None:
    a, b, c = child("public.a"), child("public.b"), child("public.c", overlap="queue")

    def lose(run: RunContext) -> None:
        rows("update job_run set lease_until = clock_timestamp() where id = %s", run.id)
        recover_expired(recorder.ports)

    first = pattern(a, b, c, then=lose)
    assert run(rows, first)["status"] == "RETRY_SCHEDULED"
    [done] = of_job(rows, "all/public.a")
    ended(rows, done)
    [next_one] = rows("select id from job_run where previous_run_id = %s", first)
    second = pattern(a, b, c, child("public.d"), again=next_one["id"])
    assert run(rows, second)["status"] == "SUCCEEDED"
    assert of_lineage(first) == [
        ("all/public.a", "SUCCEEDED"),
        ("all/public.b", "PENDING"),
        ("all/public.c", "PENDING"),
        ("all/public.d", "PENDING"),
    ]
    assert len(rows("select 1 from job_run where parent_run_id is not null")) == 4


def test_spawning_twice_gives_each_child_one_run(rows: Rows, pattern: Callable[..., UUID]) -> None:
    a = child("public.a", overlap="allow")
    told: list[Any] = []
    pattern(a, then=lambda run: told.append(run.spawn([a])))
    assert len(of_job(rows, "all/public.a")) == 1
    assert told[0].active == []  # its own


def test_a_snoozed_run_starts_its_children_once__R_R3(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    def snooze(run: RunContext) -> None:
        raise Snooze(1)

    a = child("public.a", overlap="queue")
    first = pattern(a, then=snooze)
    assert run(rows, first)["status"] == "RETRY_SCHEDULED"
    rows("update job_run set available_at = now() where previous_run_id = %s", first)
    [next_one] = rows("select id from job_run where previous_run_id = %s", first)
    pattern(a, again=next_one["id"])
    assert len(of_job(rows, "all/public.a")) == 1


def test_a_retry_by_hand_starts_the_children_anew__R_R8(
    rows: Rows, recorder: Recorder, pattern: Callable[..., UUID]
) -> None:
    def fail(run: RunContext) -> None:
        raise PermanentFailure("by its own doing")

    given = [child(f"public.{name}") for name in "abc"]
    first = pattern(*given, then=fail)
    assert GO_ON in run(rows, first)["error_message"]
    for name, status in (("a", "SUCCEEDED"), ("b", "FAILED")):
        ended(rows, of_job(rows, f"all/public.{name}")[0], status)
    told: list[str] = []
    second = retry(recorder.ports, first, actor="ann").run_id
    pattern(first=lambda run: told.extend(run.spawn(given).active), again=second)
    assert told == ["all/public.c"]
    counts = [len(of_job(rows, f"all/public.{name}")) for name in "abc"]
    assert counts == [2, 2, 1]
    # What the newest attempt started counts; else `run watch` would tell of b's failure for ever.
    assert of_lineage(first) == [(f"all/public.{name}", "PENDING") for name in "abc"]


def test_children_that_are_left_to_an_active_run_are_told__R_T6(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    pattern(child("public.a"), child("public.b"))
    ended(rows, of_job(rows, "all/public.b")[0])
    told: list[Any] = []
    given = [child("public.a"), child("public.b"), child("public.c")]
    second = pattern(first=lambda run: told.append(run.spawn(given)))
    assert told[0].active == ["all/public.a"]
    assert [name for name, _ in of_lineage(second)] == ["all/public.b", "all/public.c"]


def test_a_cancel_after_the_children_were_started_says_that_they_go_on__R_F4(
    rows: Rows, pattern: Callable[..., UUID]
) -> None:
    parent = pattern(child("public.a"), then=lambda run: request_cancel(rows, run.id))
    found = run(rows, parent)
    assert found["status"] == "CANCELLED"
    assert found["cancellation_warning"].startswith(GO_ON)


def test_a_large_family_is_started_in_batches_that_a_cancel_ends__R_K2(
    rows: Rows, recorder: Recorder, pattern: Callable[..., UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "BATCH", 2)
    given = [child(f"public.{number}") for number in range(5)]
    pattern(*given)
    assert len(rows("select 1 from job_run where parent_run_id is not null")) == 5
    assert len(recorder.take()) == 5

    def offered(offers: Sequence[Offer]) -> None:
        # The first batch is committed, and the next one has not begun.
        [parent] = rows("select id from job_run where status = 'RUNNING'")
        request_cancel(rows, parent["id"])

    monkeypatch.setattr(family.offers, "publish", lambda ports, found: offered(found))
    parent = pattern(*[child(f"other.{number}") for number in range(5)])
    found = run(rows, parent)
    assert (found["status"], found["rows_processed"]) == ("CANCELLED", 0)
    assert found["cancellation_warning"].startswith(GO_ON)
    assert len(of_lineage(parent)) == 2


def test_a_taken_name_in_a_later_batch_starts_none(
    rows: Rows, pattern: Callable[..., UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "BATCH", 1)
    new_job(rows, "all/public.b")
    parent = pattern(child("public.a"), child("public.b"))
    assert run(rows, parent)["error_message"].endswith("rename that one")
    assert not rows("select 1 from job where parent_job_id is not null")
