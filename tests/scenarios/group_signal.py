"""honcho signals the whole group and kills it five seconds later: by then nothing is held any more.

    python -m tests.scenarios.group_signal

A terminal's Ctrl-C reaches every process of the group too, and once more from honcho.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
from support import processes
from support.waiting import until

from scenarios import fleet as fleets
from scenarios.fleet import Fleet
from scenarios.invariants import WATCH_WATERMARKS, Accepted, breaches

JOBS = """
jobs:
  work: {handler: work, overlap: allow}
  deaf: {handler: deaf, overlap: allow}
"""
KILL_SECONDS = 5.0
"""honcho's own patience with what it has told to stop."""


def honcho(fleet: Fleet, number: int, *, group: bool, pool: str) -> float:
    """Start the Procfile's worker and beat, end them while runs are held; how long that took."""
    log = fleet.folder / f"honcho-{signal.Signals(number).name}-{pool}-{group}.log"
    procfile = fleet.folder / "Procfile"
    celery = Path(sys.executable).parent / "celery"
    lines = (processes.ROOT / "Procfile").read_text().replace(" celery ", f" {celery} ")
    procfile.write_text(lines.replace("worker --", f"worker --concurrency=3 --pool={pool} --"))
    command = [sys.executable, "-m", "honcho", "-f", str(procfile), "-d", str(processes.ROOT),
               "start", "worker", "beat"]  # fmt: skip
    running = processes.start(command, log, **fleet.environment)
    try:
        running.await_line(" ready.", 60)
        client = fleet.client()
        accepted = Accepted()
        runs = {}
        for name, job, seconds in (
            ("short", "work", 2.0),
            ("long", "work", 60),
            ("deaf", "deaf", 60),
        ):
            runs[name] = client.trigger(job, {"seconds": seconds})
        accepted.runs += runs.values()
        for run_id in runs.values():
            fleet.await_status(run_id, "RUNNING")
        family = psutil.Process(running.pid).children(recursive=True)
        began = time.monotonic()
        if group:
            # As a terminal does: all that share its foreground group, honcho among them.
            for process in family:
                os.kill(process.pid, number)
        running.signal(number)
        running.await_end(KILL_SECONDS + 10)
        took = time.monotonic() - began
        until("its processes to end", lambda: not [p for p in family if p.is_running()], 5)
    finally:
        running.end()
    held = fleet.rows(
        "select id, job_name, status from job_run where status in ('RUNNING', 'CANCEL_REQUESTED')"
    )
    assert not held, f"held by nobody after {took:.1f} s (R-D8): {held}\n{running.output()[-3000:]}"
    short = fleet.run(runs["short"])
    assert short["status"] == "SUCCEEDED", f"the short run could have ended: {short['status']}"
    for name in ("long", "deaf"):
        first = fleet.run(runs[name])
        assert (first["status"], first["error_code"]) == ("RETRY_SCHEDULED", "worker_shutdown"), (
            name,
            first["status"],
            first["error_code"],
        )
        client.ask("cancel", run=runs[name])
        fleet.await_status(runs[name], "CANCELLED")
    found = breaches(fleet, accepted)
    assert not found, "\n".join(["", *found])
    return took


def group_signals(pools: tuple[str, ...] = ("prefork", "threads")) -> None:
    # A lease that outlasts the scenario: nothing may be left to it.
    settings = {"CLAIMCHECK_LEASE_SECONDS": "600", "CLAIMCHECK_SHUTDOWN_SECONDS": "30"}
    with Fleet(settings=settings) as fleet:
        fleet.define(JOBS)
        fleet.rows(WATCH_WATERMARKS)
        for pool in pools:
            for number, group in ((signal.SIGTERM, False), (signal.SIGINT, True)):
                took = honcho(fleet, number, group=group, pool=pool)
                name = signal.Signals(number).name
                print(f"{name} under honcho, pool {pool}: ended in {took:.1f} s", flush=True)


def main() -> None:
    fleets.main(group_signals)


if __name__ == "__main__":
    main()
