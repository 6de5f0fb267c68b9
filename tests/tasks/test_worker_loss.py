"""Workers and children that die or are told to end: no run is lost, none is left without owner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.processes import Running
from support.proxy import before_database
from support.waiting import until

AT_ONCE = {"retry": {"backoff": 0}}


def started(folder: Path, attempt: int = 1) -> int:
    """The process id that an attempt runs in, once it does."""
    mark = folder / f"started-{attempt}"
    return int(until(f"attempt {attempt} to start", lambda: mark.exists() and mark.read_text()))


def statuses(rows: Any) -> list[str]:
    return [run["status"] for run in rows("select status from job_run order by attempt")]


@pytest.fixture
def beat(environment: dict[str, str], tmp_path: Path) -> Iterator[Running]:
    with processes.celery(tmp_path / "beat.log", "beat", "-l", "INFO", **environment) as running:
        running.await_line("beat: Starting")
        yield running


# --- a child that dies --------------------------------------------------------------------------


def test_killed_child_is_noticed_and_its_run_tried_again_at_once__R_L5(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    """With a lease of ten minutes and no beat: the parent alone does it."""
    job("die")
    with worker(CLAIMCHECK_LEASE_SECONDS="600") as running:
        result = trigger.delay("die", at=str(tmp_path))
        child = started(tmp_path)
        killed = time.monotonic()
        assert result.get(timeout=30) == "attempt 2"
        assert time.monotonic() - killed < 10
        assert started(tmp_path, 2) != child
        until("the two children", lambda: len(running.children()) == 2)
    first, second = rows("select * from job_run order by attempt")
    assert (first["status"], first["error_code"]) == ("RETRY_SCHEDULED", "worker_lost")
    assert (second["status"], second["previous_run_id"]) == ("SUCCEEDED", first["id"])
    assert first["executor"].split(":")[-1] == str(child)


def test_run_that_keeps_killing_its_child_stops_at_its_limit__R_R6(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, beat: Running
) -> None:
    job("die", definition=AT_ONCE)
    with worker() as running:
        result = trigger.delay("die", at=str(tmp_path), times=99)
        until("the last attempt to fail", lambda: result.state == "FAILURE", 60)
        until("the two children", lambda: len(running.children()) == 2)
        assert trigger.delay("die", times=0).get(timeout=20) == "attempt 1"
    assert statuses(rows)[-1] == "FAILED" or "SUCCEEDED" in statuses(rows)
    failed = rows("select * from job_run where status = 'FAILED'")
    assert [(run["attempt"], run["error_code"]) for run in failed] == [(3, "worker_lost")]
    assert "attempt 3 of 3" in failed[0]["error_message"]


def test_parents_loop_waits_a_second_for_the_release_of_a_lease__R_L5(
    celery_app: Any,
    trigger: Any,
    job: Any,
    rows: Any,
    database: str,
    configure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its children wait with it; the release itself goes on, and the next one is skipped."""
    from tasks import identity, request

    monkeypatch.setattr(request._Rest, "until", 0.0)
    job("noop")
    trigger.delay("noop")
    rows(
        """update job_run set status = 'RUNNING', executor = %s, lease_token = gen_random_uuid(),
             lease_until = clock_timestamp() + interval '1 h', heartbeat_at = clock_timestamp(),
             fence = nextval('fence_seq'), started_at = clock_timestamp(), job_snapshot = '{}',
             datasources_resolved_at = clock_timestamp()""",
        identity.executor_of_child(77),
    )
    with before_database(database) as (slow, through):
        configure(DATABASE_URL=through)
        slow.hang()
        for longest in (1.5, 0.1):
            began = time.monotonic()
            request.release(77)
            assert time.monotonic() - began < longest
        assert statuses(rows) == ["RUNNING"]
        slow.resume()
        until("its release", lambda: len(statuses(rows)) == 2)
    assert statuses(rows) == ["RETRY_SCHEDULED", "PENDING"]


def test_killed_worker_is_recovered_within_a_lease__R_R1(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, beat: Running
) -> None:
    job("wait", definition=AT_ONCE)
    with worker(name="a", CLAIMCHECK_LEASE_SECONDS="3") as first:
        result = trigger.delay("wait", at=str(tmp_path))
        child = started(tmp_path)
        with worker(name="b", CLAIMCHECK_LEASE_SECONDS="3"):
            first.signal(signal.SIGKILL)
            # Its children go with it: PR_SET_PDEATHSIG.
            until("its children to go", lambda: not Path(f"/proc/{child}/exe").exists())
            killed = time.monotonic()
            started(tmp_path, 2)
            assert time.monotonic() - killed < 8
            (tmp_path / "go").touch()
            assert result.get(timeout=20) == "attempt 2"
    assert rows("select error_code from job_run where attempt = 1") == [
        {"error_code": "lease_expired"}
    ]


# --- shutting down ------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_sigterm_lets_an_active_run_end__R_D8(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, pool: str
) -> None:
    job("wait")
    with worker(pool=pool) as running:
        trigger.delay("wait", at=str(tmp_path))
        started(tmp_path)
        running.signal(signal.SIGTERM)
        running.await_line("Warm shutdown")
        (tmp_path / "go").touch()
        assert running.await_end() == 0
    assert statuses(rows) == ["SUCCEEDED"]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_run_that_outlasts_the_shutdown_is_stopped_and_tried_again__R_K3(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path, pool: str
) -> None:
    job("wait")
    with worker(pool=pool, CLAIMCHECK_SHUTDOWN_SECONDS="1") as running:
        trigger.delay("wait", at=str(tmp_path))
        started(tmp_path)
        began = time.monotonic()
        running.signal(signal.SIGTERM)
        running.await_end()
        assert 0.9 < time.monotonic() - began < 10
    first, second = rows("select * from job_run order by attempt")
    assert (first["status"], first["error_code"]) == ("RETRY_SCHEDULED", "worker_shutdown")
    assert second["status"] == "PENDING"
    assert second["available_at"] <= rows("select now()")[0]["now"]


def test_run_that_does_not_heed_the_shutdown_is_recorded_and_its_child_ended__R_K3(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    job("deaf", definition={"retry": {"on_worker_loss": False}})
    with worker(CLAIMCHECK_SHUTDOWN_SECONDS="0") as running:
        trigger.delay("deaf", at=str(tmp_path))
        child = started(tmp_path)
        running.signal(signal.SIGTERM)
        running.await_end()
        assert not Path(f"/proc/{child}/exe").exists()
    [run] = rows("select * from job_run")
    assert (run["status"], run["error_code"]) == ("FAILED", "worker_shutdown")


@pytest.mark.parametrize(
    ("number", "variables"),
    [
        (signal.SIGTERM, {"CLAIMCHECK_SHUTDOWN_SECONDS": "1"}),
        (signal.SIGTERM, {"HONCHO_PROCESS_NAME": "worker.1"}),
        (signal.SIGTERM, {"REMAP_SIGTERM": "SIGQUIT"}),
        (signal.SIGQUIT, {}),
    ],
    ids=["group", "honcho", "remapped", "quit"],
)
def test_signal_to_the_whole_group_leaves_no_run_without_an_owner__R_D8(
    worker: Any,
    trigger: Any,
    job: Any,
    rows: Any,
    tmp_path: Path,
    number: int,
    variables: dict[str, str],
) -> None:
    job("wait")
    with worker(**variables) as running:
        trigger.delay("wait", at=str(tmp_path))
        started(tmp_path)
        running.signal(number, group=True)
        running.await_end()
    first, second = rows("select * from job_run order by attempt")
    assert (first["status"], first["error_code"]) == ("RETRY_SCHEDULED", "worker_shutdown")
    assert second["status"] == "PENDING"
    if "HONCHO_PROCESS_NAME" in variables:
        assert 4.0 <= (first["finished_at"] - first["started_at"]).total_seconds() < 5.0


def test_under_honcho_a_deaf_run_is_recorded_before_the_kill__R_K3(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    job("deaf")
    with worker(HONCHO_PROCESS_NAME="worker.1") as running:
        trigger.delay("deaf", at=str(tmp_path))
        started(tmp_path)
        began = time.monotonic()
        running.signal(signal.SIGTERM, group=True)
        until("the end to be recorded", lambda: statuses(rows)[0] == "RETRY_SCHEDULED", 10)
        assert time.monotonic() - began < 5.0


def test_child_that_is_told_to_end_finishes_its_run_first(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    job("wait")
    with worker(concurrency=1) as running:
        result = trigger.delay("wait", at=str(tmp_path))
        child = started(tmp_path)
        os.kill(child, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert result.get(timeout=20) == "attempt 1"
        until("another child in its place", lambda: running.children() not in ([], [child]))
        assert trigger.delay("wait", seconds=0).get(timeout=20) == "attempt 1"


def test_control_shutdown_drains_too__R_D8(
    worker: Any, trigger: Any, celery_app: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    job("wait")
    with worker(CLAIMCHECK_SHUTDOWN_SECONDS="1") as running:
        trigger.delay("wait", at=str(tmp_path))
        started(tmp_path)
        celery_app.control.shutdown()
        running.await_end()
    assert statuses(rows) == ["RETRY_SCHEDULED", "PENDING"]


def test_draining_worker_hands_its_wake_up_on__R_D8(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    """What comes while a worker drains is done by another one at once, not after a sweep."""
    job("wait")
    job("noop")
    with worker(name="a", concurrency=1) as first:
        trigger.delay("wait", at=str(tmp_path))
        started(tmp_path)
        first.signal(signal.SIGTERM)
        first.await_line("Warm shutdown")
        with worker(name="b", concurrency=1):
            assert trigger.delay("noop", result=1).get(timeout=10) == 1
            (tmp_path / "go").touch()
            first.await_end()
    assert statuses(rows) == ["SUCCEEDED", "SUCCEEDED"]


def test_spawned_children_work_and_drain_like_forked_ones__R_D8(
    worker: Any, trigger: Any, job: Any, rows: Any, tmp_path: Path
) -> None:
    """The way of starting children where forking is not safe, as on macOS."""
    job("wait")
    spawn = ["--", "worker.pool_start_method=spawn"]
    with worker(CLAIMCHECK_SHUTDOWN_SECONDS="1", arguments=spawn) as running:
        assert trigger.delay("wait", seconds=0).get(timeout=60) == "attempt 1"
        trigger.delay("wait", at=str(tmp_path))
        child = started(tmp_path)
        assert child in running.children()
        running.signal(signal.SIGTERM)
        running.await_end()
    held = rows("select * from job_run where status = 'RETRY_SCHEDULED'")
    assert [run["error_code"] for run in held] == ["worker_shutdown"]
    assert held[0]["executor"].split(":")[1::2] == [str(running.pid), str(child)]
