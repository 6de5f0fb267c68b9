"""``revoke`` of a run is a cancel: recorded in Postgres before anything is signalled (R-K1)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from celery import group
from celery.exceptions import TaskRevokedError
from support import handlers
from support.waiting import until

from dispatch.errors import NotCancellable


def started(folder: Path) -> int:
    mark = folder / "started-1"
    return int(until("the run to start", lambda: mark.exists() and mark.read_text()))


def test_waiting_run_is_cancelled_at_once_without_a_worker__R_K1(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop")
    result = trigger.delay("noop")
    own_redis.kill()  # nothing is signalled, so nothing is needed
    result.revoke()
    assert result.state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=1)
    result.revoke()  # again: no error, no second record
    assert len(rows("select from audit_event where action = 'run.cancel'")) == 1
    own_redis.start()


@pytest.mark.parametrize(("pool", "handler"), [("prefork", "wait"), ("threads", "query")])
def test_running_core_stops_within_a_second__R_K2(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, pool: str, handler: str
) -> None:
    job(handler)
    with worker(pool=pool) as running:
        result = trigger.delay(handler, at=str(tmp_path))
        child = started(tmp_path)
        began = time.monotonic()
        result.revoke(terminate=True, signal="SIGKILL")
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
        assert time.monotonic() - began < 2
        assert trigger.delay(handler, seconds=0).get(timeout=20) in ("attempt 1", None)
        if pool == "prefork":
            assert child in running.children()  # its process goes on to other work
    cancelled = rows("select * from job_run where status = 'CANCELLED'")[0]
    took = cancelled["finished_at"] - cancelled["cancel_requested_at"]
    assert took.total_seconds() < 1


def test_finished_run_is_refused_with_its_end__R_K1(worker: Any, trigger: Any, job: Any) -> None:
    job("noop")
    with worker():
        result = trigger.delay("noop")
        result.get(timeout=20)
        with pytest.raises(NotCancellable, match="SUCCEEDED"):
            result.revoke()
        assert result.state == "SUCCESS"


def test_group_is_revoked_past_those_that_have_ended(
    trigger: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    job("noop")
    results = group(trigger.s("noop") for _ in range(3)).apply_async()
    results[0].revoke()
    rows("update job set enabled = false")
    results.revoke()
    assert [result.state for result in results] == ["REVOKED"] * 3


def test_broadcast_of_another_program_cancels_the_run_and_kills_nobody(
    worker: Any, trigger: Any, celery_app: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    """As ``celery control revoke`` does it: it aims at the wake-up and means the run."""
    job("wait")
    with worker(concurrency=1) as running:
        result = trigger.delay("wait", at=str(tmp_path))
        child = started(tmp_path)
        celery_app.control.broadcast("revoke", {"task_id": result.id, "terminate": True})
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
        assert running.children() == [child]


def test_wake_up_whose_id_was_revoked_still_serves_its_run(
    worker: Any, trigger: Any, celery_app: Any, job: Any
) -> None:
    """Only Postgres says whether a run is cancelled; a worker's memory of revokes does not."""
    from uuid import uuid4

    job("noop")
    run_id = str(uuid4())
    with worker() as running:
        celery_app.control.broadcast("revoke", {"task_id": run_id}, reply=True, timeout=2)
        until("the worker to know", lambda: run_id in str(celery_app.control.inspect().revoked()))
        result = trigger.apply_async(("noop",), {"result": 1}, task_id=run_id)
        assert result.get(timeout=10) == 1
        assert "Discarding revoked task" not in running.output()


def test_ordinary_task_is_revoked_as_in_celery(worker: Any, celery_app: Any, trigger: Any) -> None:
    with worker():
        later = handlers.add.apply_async((1, 1), countdown=3600)
        inspect = celery_app.control.inspect()
        until("the worker to hold it", lambda: later.id in str(inspect.scheduled()))
        later.revoke()
        until("the worker to know", lambda: later.id in str(inspect.revoked()))


def test_cancel_wins_over_the_executing_call__R_F4(
    trigger: Any, celery_app: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    """A revoke from another thread stops a run that ``apply`` executes in this process."""
    import threading

    job("wait")
    run_id = "7b4cf1ee-2a7e-4d4a-9d2f-6f0f6a1b6c11"
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.append(
            trigger.apply(("wait",), {"at": str(tmp_path)}, task_id=run_id).state
        )
    )
    thread.start()
    started(tmp_path)
    celery_app.AsyncResult(run_id).revoke()
    thread.join(15)
    assert ended == ["REVOKED"]
