"""Ordinary tasks of the same app keep what Celery gives them: results, groups, chords, links."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import GroupResult
from kombu.exceptions import OperationalError
from support import handlers


def test_results_of_ordinary_tasks_come_from_redis(
    worker: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    with worker():
        result = handlers.add.delay(2, 3)
        assert result.get(timeout=20) == 5
        assert celery_app.AsyncResult(result.id).get(timeout=5) == 5
        assert celery_app.AsyncResult(result.id).state == "SUCCESS"
        failed = handlers.crash.delay()
        with pytest.raises(ValueError, match="an ordinary failure"):
            failed.get(timeout=20)
        assert failed.state == "FAILURE"
        assert celery_app.AsyncResult(result.id).exists()
        result.forget()
        assert not celery_app.AsyncResult(result.id).exists()
        assert celery_app.AsyncResult("no-such-task").state == "PENDING"
    assert rows("select from job_run") == []


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_canvas_of_ordinary_tasks_works(worker: Any, celery_app: Any) -> None:
    add, total = handlers.add, handlers.total
    with worker():
        assert group(add.s(1, 1), add.s(2, 2)).apply_async().get(timeout=20) == [2, 4]
        assert chain(add.s(1, 1), add.s(10)).apply_async().get(timeout=20) == 12
        assert chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async().get(timeout=20) == 6
        linked = add.apply_async((1, 1), link=add.s(5))
        assert linked.get(timeout=20) == 2
        assert linked.children[0].get(timeout=20) == 7
        saved = group(add.s(3, 3), add.s(4, 4)).apply_async()
        saved.save()
        assert GroupResult.restore(saved.id, app=celery_app).get(timeout=20) == [6, 8]


def test_group_of_runs_and_ordinary_tasks_gives_each_its_result(
    worker: Any, trigger: Any, job: Any
) -> None:
    job("noop")
    with worker():
        results = group(trigger.s("noop", result="run"), handlers.add.s(2, 2)).apply_async()
        assert results.get(timeout=20) == ["run", 4]
        assert results.successful()


def test_ordinary_task_may_trigger_a_run(
    worker: Any, trigger: Any, celery_app: Any, job: Any
) -> None:
    job("noop")
    with worker():
        outer = handlers.start_run.delay("noop")
        run_id = outer.get(timeout=20)
        assert celery_app.AsyncResult(run_id).get(timeout=20) is None
        assert [child.id for child in outer.children] == [run_id]


def test_unpublished_ordinary_task_is_an_error_as_in_celery(
    celery_app: Any, own_redis: Any
) -> None:
    """Only runs are durable: an ordinary task that cannot be sent says so at once."""
    own_redis.kill()
    with pytest.raises(OperationalError, match="refused"):
        handlers.add.apply_async((1, 1), ignore_result=True)
    own_redis.start()
