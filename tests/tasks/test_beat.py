"""``celery -A tasks beat`` as a process: it needs no options, no broker and no other beat."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import missing, processes
from support.processes import Redis, Running
from support.waiting import until

from dispatch.watch import APPLICATION_NAME

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def beat(
    environment: dict[str, str], tmp_path: Path, rows: Rows
) -> Iterator[Callable[..., Running]]:
    """``beat()`` starts one and waits until it listens; ``prefix`` is put before its command."""
    with contextlib.ExitStack() as stopping:
        started: list[Running] = []

        def start(*prefix: str, app: str = "tasks", **settings: str) -> Running:
            settings.setdefault("CLAIMCHECK_SWEEP_SECONDS", "0")
            command = [*prefix, sys.executable, "-m", "celery", "-A", app, "beat", "-l", "INFO"]
            log = tmp_path / f"beat-{len(started)}.log"
            running = processes.start(command, log, **{**environment, **settings})
            stopping.callback(running.end)
            started.append(running)
            until(
                f"{len(started)} listening beats: {running.output()}",
                lambda: (
                    len(listeners(rows)) >= len([it for it in started if it.process.poll() is None])
                ),
                30,
            )
            return running

        yield start


def listeners(rows: Rows) -> list[dict[str, Any]]:
    return rows(
        """select pid, query_start from pg_stat_activity
           where application_name = %s and datname = current_database() and query <> ''""",
        APPLICATION_NAME,
    )


def new_schedule(rows: Rows, job: str, every: float, first: float = 1.0) -> None:
    rows(
        """insert into job_schedule (job_id, name, every_seconds, anchor_at, next_fire_at)
           select id, name || '-1', %s, moment, moment + make_interval(secs => %s)
           from job, (select clock_timestamp() as moment) as now where name = %s""",
        every,
        first,
        job,
    )
    rows("select claimcheck_notify('all')")


def slots(rows: Rows) -> int:
    return int(rows("select count(*) as n from schedule_slot")[0]["n"])


def lost_run(rows: Rows, job: str) -> Any:
    """A run that a worker holds which is gone: its lease ends in a moment."""
    [run] = rows(
        "insert into job_run (job_id) select id from job where name = %s returning id", job
    )
    rows(
        """update job_run set status = 'RUNNING', lease_token = gen_random_uuid(),
             executor = 'x:1:a:2', heartbeat_at = clock_timestamp(),
             fence = nextval('fence_seq'), job_snapshot = '{}',
             lease_until = clock_timestamp() + interval '1 second', started_at = clock_timestamp(),
             datasources_resolved_at = clock_timestamp() where id = %s""",
        run["id"],
    )
    rows("select claimcheck_notify('all')")
    return run["id"]


def test_a_beat_opens_no_keyring(
    beat: Callable[..., Running], job: Any, rows: Rows, tmp_path: Path
) -> None:
    """Recovery, retry and schedules copy what is sealed: fewer hosts need the key."""
    for name in ("noop", "other"):
        job(name, "noop", {"retry": {"backoff": 0}})
    beat(CLAIMCHECK_KEYRING_FILE=str(tmp_path / "none.json"))
    lost = lost_run(rows, "noop")
    new_schedule(rows, "other", 3600)
    until("a fired slot", lambda: slots(rows) == 1)
    until(
        "the retry of the lost run",
        lambda: rows("select from job_run where previous_run_id = %s", lost),
    )


def test_a_schedule_becomes_a_finished_run_without_further_options__R_D1(
    beat: Any, worker: Any, job: Any, rows: Rows
) -> None:
    job("noop")
    with worker(pool="threads"):
        running = beat()
        new_schedule(rows, "noop", 3600)
        until(
            f"the run to end; the beat said {running.output()}",
            lambda: rows("select id from job_run where status = 'SUCCEEDED'"),
        )
    [slot] = rows("select outcome from schedule_slot")
    assert slot["outcome"] == "run"


def test_sigterm_ends_it_promptly__R_D3(beat: Any) -> None:
    running = beat()
    started = time.monotonic()
    running.signal(signal.SIGTERM)
    assert running.await_end(10) == 0
    assert time.monotonic() - started < 3


def test_recovery_needs_no_broker__R_D3(beat: Any, job: Any, rows: Rows, own_redis: Redis) -> None:
    job("noop", overlap="allow")
    own_redis.kill()
    beat()
    lost = lost_run(rows, "noop")
    until(
        "the recovery",
        lambda: rows("select 1 from job_run where id = %s and status = 'RETRY_SCHEDULED'", lost),
        10,
    )
    own_redis.start()
    until("a wake-up for the retry", own_redis.queue_length, 30)


def test_a_hung_broker_holds_up_no_schedule__R_D3(
    beat: Any, job: Any, rows: Rows, own_redis: Redis
) -> None:
    job("noop", overlap="allow", definition={"overlap": "allow"})
    beat()
    own_redis.hang()
    new_schedule(rows, "noop", 1)
    until("five slots", lambda: slots(rows) >= 5, 20)
    [late] = rows("select max(settled_at - fire_at) as worst from schedule_slot")
    assert late["worst"].total_seconds() < 3.5
    own_redis.go_on()
    until("wake-ups for the runs", own_redis.queue_length, 30)


def test_static_entries_fire_beside_the_deadlines_and_after_an_outage__R_D3(
    beat: Any, job: Any, rows: Rows, own_redis: Redis
) -> None:
    job("noop", overlap="allow", definition={"overlap": "allow"})
    running = beat(app="support.static_beat")
    new_schedule(rows, "noop", 1)
    until("two static messages", lambda: own_redis.queue_length("static") >= 2)
    until("two slots", lambda: slots(rows) >= 2)
    own_redis.kill()
    until("the outage to be noticed", lambda: "is not sent" in running.output())
    before = slots(rows)
    until("schedules to go on", lambda: slots(rows) >= before + 2)
    own_redis.start()
    until("static messages again", lambda: own_redis.queue_length("static") >= 2, 30)
    assert running.process.poll() is None


def test_of_three_beats_one_killed_one_stopped_one_an_hour_ahead_each_slot_fires_once__R_D1(
    beat: Any, job: Any, rows: Rows
) -> None:
    if shutil.which("faketime") is None:
        missing.skip("needs faketime: apt-get install -y faketime")
    for number in range(5):
        job(f"job{number}", "noop", overlap="allow", definition={"overlap": "allow"})
        new_schedule(rows, f"job{number}", 1)
    killed, stopped = beat(), beat()
    beat("faketime", "-f", "+1h")
    until("some slots", lambda: slots(rows) >= 5)

    # One stops in the middle of whatever it does, another is killed so.
    stopped.signal(signal.SIGSTOP)
    more = slots(rows) + 10
    until("the others to go on", lambda: slots(rows) >= more, 30)
    killed.signal(signal.SIGKILL)
    more = slots(rows) + 10
    until("the one with the wrong clock to go on", lambda: slots(rows) >= more, 30)
    stopped.signal(signal.SIGCONT)
    more = slots(rows) + 10
    until("all to go on", lambda: slots(rows) >= more, 30)

    [doubled] = rows(
        """select count(*) as n from (select 1 from job_run group by schedule_id, scheduled_for
             having count(*) > 1) twice"""
    )
    [without] = rows(
        """select count(*) as n from schedule_slot s where outcome = 'run' and not exists (
             select 1 from job_run r where r.schedule_id = s.schedule_id
               and r.scheduled_for = s.fire_at)"""
    )
    [gaps] = rows(
        """select count(*) as n from (select fire_at - lag(fire_at) over (
             partition by schedule_id order by fire_at) as step from schedule_slot) steps
           where step > interval '1 second'"""
    )
    [early] = rows("select count(*) as n from schedule_slot where settled_at < fire_at")
    assert (doubled["n"], without["n"], gaps["n"], early["n"]) == (0, 0, 0, 0)


def test_a_database_that_is_away_at_the_start_is_said_without_a_traceback(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/nothing"
    with processes.celery(tmp_path / "beat.log", "beat", **environment) as running:
        assert running.await_end(30) == 1
    assert "DATABASE_URL" in running.output()
    assert "Traceback" not in running.output()


def test_it_writes_no_file_and_starts_beside_another__R_D1(
    beat: Any, environment: dict[str, str]
) -> None:
    before = set(os.listdir(processes.ROOT))
    beat()
    beat()
    assert set(os.listdir(processes.ROOT)) - before == set()
