"""Redis goes, hangs, forgets and comes back: that costs time, and no run and no restart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import group
from support import processes
from support.processes import Running
from support.waiting import until

from db import session


@pytest.fixture
def beat(environment: dict[str, str], tmp_path: Path) -> Iterator[Running]:
    soon = {"CLAIMCHECK_OFFER_GRACE_SECONDS": "1", "CLAIMCHECK_SWEEP_SECONDS": "2"}
    with processes.celery(
        tmp_path / "beat.log", "beat", "-l", "INFO", **(environment | soon)
    ) as running:
        running.await_line("beat: Starting")
        yield running


@pytest.mark.parametrize("trouble", ["stopped", "hanging"])
def test_runs_triggered_during_an_outage_run_after_it__R_T4(
    worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Any, beat: Running, trouble: str
) -> None:
    job("noop", overlap="allow")
    with worker() as running:
        trigger.delay("noop").get(timeout=20)
        own_redis.hang() if trouble == "hanging" else own_redis.kill()
        results = [trigger.delay("noop", result=n) for n in range(20)]
        assert len(rows("select from job_run")) == 21
        time.sleep(2)  # the outage itself
        own_redis.go_on() if trouble == "hanging" else own_redis.start()
        assert [result.get(timeout=60) for result in results] == list(range(20))
        assert trigger.delay("noop", result="after").get(timeout=30) == "after"
        assert running.process.poll() is None
        assert beat.process.poll() is None


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_active_run_ends_while_redis_hangs__R_T4(
    worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Any, tmp_path: Path, pool: str
) -> None:
    """A finish, its events and what it offers wait for no broker."""
    job("wait")
    with worker(pool=pool):
        results = [trigger.delay("wait", at=str(tmp_path)), trigger.delay("wait", seconds=0)]
        until("the run to start", lambda: (tmp_path / "started-1").exists())
        own_redis.hang()
        began = time.monotonic()
        (tmp_path / "go").touch()
        assert results[0].get(timeout=10) == "attempt 1"
        # The slot goes on to the next run of its queue, with no message for it.
        assert results[1].get(timeout=10) == "attempt 1"
        assert time.monotonic() - began < 5
        own_redis.go_on()


def test_lost_wake_ups_are_offered_again__R_D5(
    worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Any, beat: Running
) -> None:
    job("noop", overlap="allow")
    results = [trigger.delay("noop", result=n) for n in range(10)]
    with own_redis.client() as client:
        client.flushall()
    with worker():
        assert [result.get(timeout=60) for result in results] == list(range(10))


def test_caller_s_transaction_is_offered_after_its_commit__R_T2(
    worker: Any, trigger: Any, job: Any, beat: Running
) -> None:
    job("noop")
    with worker():
        with session.engine().begin() as connection:
            result = trigger.enqueue(connection, "noop", {"result": 7})
        began = time.monotonic()
        assert result.get(timeout=20) == 7
        assert time.monotonic() - began < 5


def test_delayed_run_starts_at_its_time__R_D3(
    worker: Any, trigger: Any, job: Any, rows: Any, beat: Running
) -> None:
    job("noop")
    with worker():
        trigger.apply_async(("noop",), {}, countdown=1.5).get(timeout=20)
    [run] = rows("select started_at - created_at as took from job_run")
    assert 1.5 <= run["took"].total_seconds() < 3.5


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_slots_work_at_the_same_time(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, pool: str
) -> None:
    job("wait", overlap="allow")
    with worker(pool=pool, concurrency=3):
        folders = [tmp_path / str(n) for n in range(3)]
        for folder in folders:
            folder.mkdir()
        results = group(trigger.s("wait", at=str(folder)) for folder in folders).apply_async()
        for folder in folders:
            until("all three to run", (folder / "started-1").exists)
        for folder in folders:
            (folder / "go").touch()
        assert results.get(timeout=20) == ["attempt 1"] * 3
    executors = {run["executor"] for run in rows("select executor from job_run")}
    assert len(executors) == 3


def test_forked_process_triggers_beside_its_parent(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    """As under a web server that loads its application and then forks."""
    job("noop")
    trigger.delay("noop")
    child = os.fork()
    if child == 0:
        try:
            for _ in range(20):
                trigger.delay("noop", by="child")
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(20):
        trigger.delay("noop", by="parent")
    assert os.waitpid(child, 0)[1] == 0
    assert len(rows("select from job_run")) == 41
    # Twice the slots of an unknown fleet; both may have seen the last place free.
    assert own_redis.queue_length() in (32, 33)


def test_priority_decides_which_run_a_freed_slot_takes__R_C3(
    worker: Any, trigger: Any, job: Any, rows: Any
) -> None:
    job("noop")
    for priority in (0, 9, 5):
        trigger.apply_async(("noop",), {}, priority=priority)
    with worker(pool="solo") as running:
        until("all to end", lambda: not rows("select from job_run where finished_at is null"))
        assert running.process.poll() is None
    ended = rows("select priority from job_run order by started_at")
    assert [run["priority"] for run in ended] == [9, 5, 0]
