"""Workers restarted one after another under load: nothing is lost, and nothing that could end in
time is repeated (R-D8).

    python -m tests.scenarios.rolling --minutes 1
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from typing import Any

from scenarios import fleet as fleets
from scenarios.fleet import Client, Fleet, Member
from scenarios.invariants import WATCH_WATERMARKS, Accepted, breaches

SHUTDOWN_SECONDS = 4.0
JOBS = """
jobs:
  work: {handler: work, overlap: allow}
  turn: {handler: work, overlap: queue}
"""


class Load:
    """Short runs without a pause, until it is stopped."""

    def __init__(self, client: Client, each: float) -> None:
        self.client = client
        self.accepted = Accepted()
        self._each = each
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        number = 0
        while not self._stop.wait(self._each):
            number += 1
            job = "turn" if number % 5 == 0 else "work"
            seconds = (0.0, 0.1, 0.4, 1.5)[number % 4] if job == "work" else 0.1
            self.accepted.runs.append(self.client.trigger(job, {"seconds": seconds}))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def restart(fleet: Fleet, member: Member, number: int = signal.SIGTERM) -> float:
    """End a worker as a deployment does, and start it again; how long the end took."""
    began = time.monotonic()
    with fleet.holding(member):
        member.kill(number)
        assert member.running is not None
        status = member.running.await_end(SHUTDOWN_SECONDS + 10)
        took = time.monotonic() - began
        assert status == 0, f"{member.name} ended with {status}: {member.running.output()[-2000:]}"
        assert took < SHUTDOWN_SECONDS + 5, f"{member.name} took {took:.1f} s to end"
        assert not member.orphans(), f"{member.name} left {member.orphans()}"
        held = fleet.rows(
            """select id, executor from job_run where status in ('RUNNING', 'CANCEL_REQUESTED')
               and split_part(executor, ':', 2) = %s""",
            str(member.running.pid),
        )
        assert not held, f"{member.name} ended and left {held} without an owner (R-D8)"
    member.start()
    member.await_ready()
    return took


def rolling(minutes: float) -> None:
    settings = {
        "CLAIMCHECK_SHUTDOWN_SECONDS": str(SHUTDOWN_SECONDS),
        # No beat's sweep and no lease shall hide what a restart lost.
        "CLAIMCHECK_LEASE_SECONDS": "600",
    }
    with Fleet(settings=settings) as fleet:
        fleet.define(JOBS)
        fleet.rows(WATCH_WATERMARKS)
        workers = [
            fleet.worker("prefork", concurrency=2, ready=False),
            fleet.worker("threads", pool="threads", concurrency=2, ready=False),
        ]
        fleet.beat()
        for worker in workers:
            worker.await_ready()
        client = fleet.client()
        load = Load(fleet.client(), each=0.25)
        long_run = client.trigger("work", {"seconds": 3600})
        fleet.await_status(long_run, "RUNNING")
        until = time.monotonic() + minutes * 60
        rounds: list[float] = []
        try:
            while time.monotonic() < until or len(rounds) < len(workers):
                rounds.append(restart(fleet, workers[len(rounds) % len(workers)]))
        finally:
            load.stop()
        _judge(fleet, client, long_run, load.accepted)
        print(
            f"{len(rounds)} restarts of up to {max(rounds):.1f} s under "
            f"{len(load.accepted.runs)} short runs"
        )


def _judge(fleet: Fleet, client: Client, long_run: str, accepted: Accepted) -> None:
    lineage = fleet.rows(
        "select status, error_code from job_run where root_run_id = %s order by fence", long_run
    )
    assert len(lineage) > 1, "the long run was never stopped by a restart"
    for attempt in lineage[:2]:
        if attempt["status"] == "RETRY_SCHEDULED":
            assert attempt["error_code"] == "worker_shutdown", lineage
    client.ask("cancel", run=long_run)
    fleet.await_status(long_run, "CANCELLED")
    accepted.runs.append(long_run)
    fleet.settle(30)
    repeated: list[dict[str, Any]] = fleet.rows(
        "select id, attempt, error_code from job_run where root_run_id <> %s and "
        "(attempt > 1 or status <> 'SUCCEEDED')",
        long_run,
    )
    found = breaches(fleet, accepted)
    assert not repeated, f"runs that could have ended were repeated or lost: {repeated[:5]}"
    assert not found, "\n".join(["", *found])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.rolling")
    parser.add_argument("--minutes", type=float, default=1.0)
    chosen = parser.parse_args()
    fleets.main(lambda: rolling(chosen.minutes))


if __name__ == "__main__":
    main()
