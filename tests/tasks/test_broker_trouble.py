"""A worker's parent process while its broker hangs or flaps: it goes on watching and listening."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.app import forget_connections
from support.processes import Redis
from support.waiting import until

from db import embedded
from db.embedded.server import peer_pid


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that the embedded servers' account may pass through, and short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="cc-test-"))
    made.chmod(0o711)
    try:
        yield made
    finally:
        if (made / "home" / "place.json").exists():
            embedded.remove(made / "home")
        shutil.rmtree(made, ignore_errors=True)


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server outlives its supervisor")
def test_an_embedded_valkey_is_brought_back_by_whoever_misses_it__R_T4(
    worker: Any, trigger: Any, job: Any, configure: Any, folder: Path
) -> None:
    """The database is a given one, so nothing but the broker's own failure tells of it."""
    job("noop", overlap="allow")
    home = folder / "home"
    configure(REDIS_URL=None, CLAIMCHECK_HOME=home)
    forget_connections()
    with worker(REDIS_URL="", CLAIMCHECK_HOME=str(home)):
        assert trigger.delay("noop", result=1).get(timeout=20) == 1
        sockets = embedded.status(home).sockets
        assert sockets is not None
        supervisor = peer_pid(sockets.parent / "control")
        assert supervisor
        os.kill(supervisor, signal.SIGKILL)
        until("it to be gone", lambda: peer_pid(sockets / "valkey.sock") is None)
        until("the worker to bring it back", lambda: embedded.status(home).servers == ("valkey",))
