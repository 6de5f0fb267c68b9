"""Real workers on a real Redis and PostgreSQL: what a run meets from its wake-up to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group
from support.waiting import until

from dispatch.errors import RunFailed

POOLS = ["prefork", "threads", "solo"]
ONCE = {"retry": {"max_attempts": 1}}
AT_ONCE = {"retry": {"backoff": 0}}


def started(folder: Path, attempt: int = 1) -> int:
    """The process id that an attempt ran in, once it runs."""
    mark = folder / f"started-{attempt}"
    return int(until(f"attempt {attempt} to start", lambda: mark.exists() and mark.read_text()))


@pytest.mark.parametrize("pool", POOLS)
def test_run_goes_from_trigger_to_result(
    worker: Any, trigger: Any, job: Any, rows: Any, pool: str
) -> None:
    job("where")
    with worker(pool=pool) as running:
        result = trigger.delay("where", n=1)
        told = result.get(timeout=20)
        assert result.state == "SUCCESS"
        [run] = rows("select * from job_run")
        children = running.children()
    assert (run["status"], run["params"], run["result"]) == ("SUCCEEDED", {"n": 1}, told)
    host, parent, nonce, child = run["executor"].split(":")
    assert (host, parent) == (os.uname().nodename, str(running.pid))
    assert len(nonce) == 8
    if pool == "prefork":
        assert told["pid"] in children
        assert child == str(told["pid"])
    else:
        assert told["pid"] == running.pid
        assert child == "main" if pool == "solo" else child.startswith("thread-")


@pytest.mark.parametrize("pool", POOLS)
def test_group_and_stored_chain_end_with_their_results(
    worker: Any, trigger: Any, job: Any, rows: Any, pool: str
) -> None:
    job("noop", overlap="allow")
    with worker(pool=pool):
        results = group(trigger.s("noop", result=n) for n in range(6)).apply_async()
        last = chain(trigger.si("noop", result=n) for n in range(3)).apply_async()
        assert results.get(timeout=20) == list(range(6))
        assert last.get(timeout=20) == 2
        assert [last.parent.parent.get(timeout=5), last.parent.get(timeout=5)] == [0, 1]
    assert {run["status"] for run in rows("select status from job_run")} == {"SUCCEEDED"}


def test_failure_reaches_the_caller_with_its_code(
    worker: Any, trigger: Any, celery_app: Any, job: Any
) -> None:
    job("fail_for_good")
    with worker():
        result = trigger.delay("fail_for_good")
        with pytest.raises(RunFailed, match="it will never work") as raised:
            result.get(timeout=20)
        assert raised.value.error_code == "permanent"
        assert result.state == "FAILURE"
        assert celery_app.AsyncResult(result.id).failed()
        assert isinstance(result.get(timeout=5, propagate=False), RunFailed)


def test_failed_step_ends_its_chain(worker: Any, trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    job("fail", definition=ONCE, max_attempts=1)
    with worker():
        last = chain(trigger.si("fail"), trigger.si("noop")).apply_async()
        with pytest.raises(RunFailed):
            last.get(timeout=20)
    assert [run["job_name"] for run in rows("select job_name from job_run")] == ["fail"]


def test_result_follows_retries_to_the_last_attempt__R_R3(
    worker: Any, trigger: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    job("fail", definition=AT_ONCE)
    with worker():
        result = trigger.delay("fail", times=2)
        assert result.get(timeout=30) == "attempt 3"
        attempts = rows("select id, attempt, status from job_run order by attempt")
        assert [run["status"] for run in attempts] == [
            "RETRY_SCHEDULED",
            "RETRY_SCHEDULED",
            "SUCCEEDED",
        ]
        for run in attempts:
            assert celery_app.AsyncResult(str(run["id"])).state == "SUCCESS"


def test_state_tells_waiting_running_and_backoff(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    job("wait")
    job("fail", definition={"retry": {"backoff": 600}})
    result = trigger.delay("wait", at=str(tmp_path))
    assert result.state == "PENDING"
    with worker():
        started(tmp_path)
        assert result.state == "STARTED"
        failing = trigger.delay("fail")
        until("the retry to be scheduled", lambda: failing.state == "RETRY")
        assert not failing.ready()
        (tmp_path / "go").touch()
        result.get(timeout=20)
        assert result.state == "SUCCESS"


def test_busy_worker_leaves_a_wake_up_to_an_idle_one__R_C9(
    worker: Any, trigger: Any, job: Any, own_redis: Any, tmp_path: Path
) -> None:
    job("wait")
    job("where")
    with worker(name="busy", concurrency=1):
        held = trigger.delay("wait", at=str(tmp_path))
        busy = started(tmp_path)
        waiting = trigger.delay("where")
        assert own_redis.queue_length() == 1
        with worker(name="idle", concurrency=1):
            assert waiting.get(timeout=10)["pid"] != busy
        (tmp_path / "go").touch()
        held.get(timeout=20)


def test_slot_goes_on_to_the_next_runs_of_its_queue__R_C1(
    worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    """Up to its bound, without a message for each; then it hands the rest on by wake-ups."""
    job("noop", overlap="allow")
    results = [trigger.delay("noop") for _ in range(25)]
    with own_redis.client() as client:
        client.ltrim("runs\x06\x169", -1, -1)
    assert own_redis.queue_length() == 1
    with worker(pool="solo", CLAIMCHECK_SLOT_RUNS="10") as running:
        for result in results:
            result.get(timeout=30)
        # Not the lines of ends: the last one may come after the last result.
        taken = running.output().count("] received")
    assert 3 <= taken <= 15


def test_handlers_that_a_worker_does_not_know_are_left_alone__R_C2(
    worker: Any, trigger: Any, job: Any
) -> None:
    job("elsewhere", handler="of-another-worker")
    job("noop")
    with worker():
        waiting = trigger.delay("elsewhere")
        assert trigger.delay("noop", result=1).get(timeout=20) == 1
        assert waiting.state == "PENDING"
