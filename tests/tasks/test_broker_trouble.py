"""A worker's parent process while its broker hangs or flaps: it goes on watching and listening."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from support.processes import Redis
from support.waiting import until


def started(folder: Path) -> int:
    mark = folder / "started-1"
    return int(until("the run to start", lambda: mark.exists() and mark.read_text()))


def test_parent_watches_and_ends_though_redis_hangs__R_L5__R_D8(
    worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Redis, tmp_path: Path
) -> None:
    job("wait", overlap="allow", definition={"retry": {"backoff": 600}})
    folders = [tmp_path / name for name in ("killed", "stopped")]
    with worker(CLAIMCHECK_LEASE_SECONDS="600", CLAIMCHECK_SHUTDOWN_SECONDS="1") as running:
        runs = []
        for folder in folders:
            folder.mkdir()
            runs.append(trigger.delay("wait", at=str(folder)).id)
        child, _ = (started(folder) for folder in folders)
        own_redis.hang()
        # Longer than a heartbeat's pause: what the parent sends now is not taken.
        hung = time.monotonic()
        until("heartbeats to fail", lambda: time.monotonic() - hung > 4.0)
        os.kill(child, signal.SIGKILL)
        until(
            "the lease to be released",
            lambda: rows("select from job_run where id = %s and status <> 'RUNNING'", runs[0]),
            seconds=15,
        )
        [lost] = rows("select * from job_run where id = %s", runs[0])
        assert lost["error_code"] == "worker_lost"
        running.signal(signal.SIGTERM)
        assert running.await_end(30) == 0
        own_redis.go_on()
    [stopped] = rows("select * from job_run where id = %s", runs[1])
    assert stopped["error_code"] == "worker_shutdown"


def test_broker_that_breaks_again_while_a_worker_starts_does_not_end_it(
    worker: Any, trigger: Any, job: Any
) -> None:
    job("noop")
    with worker(CLAIMCHECK_HANDLERS="support.flapping") as running:
        assert trigger.delay("noop", result=7).get(timeout=20) == 7
        assert "Timeout reading from socket" in running.output()
        assert "Unrecoverable" not in running.output()
