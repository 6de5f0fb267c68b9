"""Runs that are executed in the caller's process: ``apply`` and ``task_always_eager``."""

from __future__ import annotations

import os
from typing import Any

import pytest
from celery import chain, group
from support import handlers as support_handlers

from dispatch.errors import RunFailed

assert support_handlers  # its handlers are registered by the import


def test_apply_executes_the_run_here_under_its_claim__R_C6(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("where")
    result = trigger.apply(("where",), {"n": 1})
    assert result.get(timeout=1)["pid"] == os.getpid()
    [run] = rows("select * from job_run")
    assert (str(run["id"]), run["status"], run["params"]) == (result.id, "SUCCEEDED", {"n": 1})
    assert run["lease_token"] is not None
    assert run["executor"].split(":")[1] == str(os.getpid())
    assert own_redis.queue_length() == 0


def test_apply_of_a_signature_does_the_same(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    assert trigger.si("noop", result=3).apply().get(timeout=1) == 3


def test_apply_leaves_what_it_cannot_claim_to_the_workers(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop", paused=True)
    job("wait")
    assert trigger.apply(("noop",)).state == "PENDING"
    assert trigger.apply(("wait",), {}, countdown=60).state == "PENDING"
    assert own_redis.queue_length() == 0
    rows("update job set paused = false, handler = 'of-another-worker' where name = 'noop'")
    assert trigger.apply(("noop",)).state == "PENDING"
    assert own_redis.queue_length() == 1


def test_apply_tells_a_failure_only_where_it_is_asked(
    trigger: Any, job: Any, celery_app: Any
) -> None:
    job("fail_for_good")
    assert trigger.apply(("fail_for_good",)).state == "FAILURE"
    with pytest.raises(RunFailed, match="never work"):
        trigger.apply(("fail_for_good",), throw=True)


def test_always_eager_executes_runs_in_the_calling_process(
    trigger: Any, celery_app: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("where")
    job("noop")
    celery_app.conf.task_always_eager = True
    own_redis.kill()  # eager needs no broker
    result = trigger.delay("where")
    assert result.state == "SUCCESS"
    assert result.get(timeout=1)["pid"] == os.getpid()
    several = group(trigger.s("noop", result=n) for n in range(3)).apply_async()
    assert several.get(timeout=1) == [0, 1, 2]
    last = chain(trigger.si("noop", result=1), trigger.si("noop", result=2)).apply_async()
    assert last.get(timeout=1) == 2
    assert {run["status"] for run in rows("select status from job_run")} == {"SUCCEEDED"}
    assert len(rows("select from job_run")) == 6
    own_redis.start()


def test_skipping_job_is_not_executed_twice_at_once__R_T6(
    trigger: Any, job: Any, rows: Any
) -> None:
    job("noop", overlap="skip")
    first = trigger.apply_async(("noop",), {}, countdown=60)
    second = trigger.apply(("noop",))
    assert (second.id, second.created, second.state) == (first.id, False, "PENDING")
