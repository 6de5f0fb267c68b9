"""Servers that go away and come back: workers, beat and Flower go on without a restart.

python -m tests.scenarios.outages [--redis-minutes 2] [--postgres-seconds 20]
"""

from __future__ import annotations

import argparse
import http.client
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from support import processes
from support.waiting import until

from scenarios import fleet as fleets
from scenarios.fleet import Client, Fleet
from scenarios.invariants import WATCH_WATERMARKS, Accepted, breaches

JOBS = """
jobs:
  work: {handler: work, overlap: allow, retry: {max_attempts: 9, backoff: 200ms}}
  plain: {handler: plain, overlap: allow, retry: {max_attempts: 9, backoff: 200ms}}
  tick: {handler: plain, params: {seconds: 0.1}, schedules: [{name: tick, every: 2s}]}
"""
TRIGGER_SECONDS = 1.5
"""A trigger returns in about a second at worst while Redis is away (R-T4)."""
BACK_SECONDS = 15.0
"""How long after a server is back everything must go on."""


class Flower:
    """Flower on a port of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.port = processes.free_port()
        self.running = processes.start(
            [sys.executable, "-m", "celery", "-A", "tasks", "flower",
             f"--port={self.port}", "--address=127.0.0.1", "--persistent=False"],
            fleet.folder / "flower.log",
            **{**fleet.environment, "FLOWER_UNAUTHENTICATED_API": "true"},
        )  # fmt: skip

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def knows(self, run_id: str) -> bool:
        """Whether it shows the run, within a second, as a task that succeeded."""

        def look() -> bool:
            with suppress(OSError, http.client.HTTPException):
                status, text = self.get(f"/api/task/info/{run_id}")
                return status == 200 and '"SUCCESS"' in text
            return False

        with suppress(AssertionError):
            return until(f"Flower to know run {run_id}", look, 1.0)
        return False

    def end(self) -> None:
        self.running.end()


class Outage:
    """A fleet of two workers, a beat and a Flower; none of them may be started twice."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        fleet.define(JOBS)
        fleet.rows(WATCH_WATERMARKS)
        self.flower = Flower(fleet)
        members = [
            fleet.worker("prefork", ready=False),
            fleet.worker("threads", pool="threads", ready=False),
            fleet.beat(ready=False),
        ]
        for member in members:
            member.await_ready()
        self.client: Client = fleet.client()
        self.accepted = Accepted()
        until("Flower to answer", self._flower_answers, 40)
        self.works("before the outage", 20)

    def _flower_answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.flower.get("/workers")[0] == 200
        return False

    def trigger(self, job: str, **params: Any) -> str:
        run_id = self.client.trigger(job, params)
        self.accepted.runs.append(run_id)
        return run_id

    def works(self, what: str, seconds: float, flower_waits: float = 0.0) -> float:
        """A new run is executed, a schedule fires, and Flower hears of it; how long that took.

        ``flower_waits`` is how much longer Flower may take.
        """
        began = time.monotonic()
        fired = self.fleet.rows("select clock_timestamp() as now")[0]["now"]
        run_id = self.trigger("plain", seconds=0.1)
        self.fleet.await_status(run_id, "SUCCEEDED", seconds=seconds)
        took = time.monotonic() - began

        def ticked() -> bool:
            return bool(
                self.fleet.rows(
                    """select from job_run where job_name = 'tick' and status = 'SUCCEEDED'
                       and scheduled_for > %s""",
                    fired,
                )
            )

        until(f"the schedule to fire {what}", ticked, seconds)
        until(f"Flower to know a run {what}", self._flower_knows, seconds + flower_waits)
        return took

    def _flower_knows(self) -> bool:
        """Flower hears of what ends from now on; it is behind only while it does not listen."""
        run_id = self.trigger("plain", seconds=0)
        self.fleet.await_status(run_id, "SUCCEEDED")
        return self.flower.knows(run_id)

    def judge(self) -> None:
        for member in self.fleet.members.values():
            assert member.is_alive(), f"{member.name} ended: {_end_of(member.running)}"
            assert len(member.starts) == 1
        assert self.flower.running.process.poll() is None, _end_of(self.flower.running)
        self.fleet.command("schedule", "disable", "tick")
        self.fleet.settle(30)
        found = breaches(self.fleet, self.accepted)
        assert not found, "\n".join(["", *found])


def _end_of(running: processes.Running | None) -> str:
    return "" if running is None else running.output()[-1500:]


def redis_away(outage: Outage, seconds: float, *, hangs: bool = False) -> dict[str, float]:
    """Redis is killed, or hangs: triggers are stored in time, and executed when it is back."""
    fleet = outage.fleet
    held = outage.trigger("work", seconds=seconds / 2)
    fleet.await_status(held, "RUNNING")
    if hangs:
        fleet.redis.hang()
    else:
        fleet.redis.kill()
    until_then = time.monotonic() + seconds
    slowest = 0.0
    waiting = []
    while time.monotonic() < until_then:
        began = time.monotonic()
        waiting.append(outage.trigger("plain", seconds=0.05))
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(min(0.5, seconds / 20))
    # What ran goes on and ends: no run needs Redis to be finished.
    fleet.await_status(held, "SUCCEEDED", seconds=5)
    assert fleet.run(held)["attempt"] == 1
    if hangs:
        fleet.redis.go_on()
    else:
        fleet.redis.start()
    back = time.monotonic()
    for run_id in waiting:
        fleet.await_status(run_id, "SUCCEEDED", seconds=BACK_SECONDS)
    caught_up = time.monotonic() - back
    # Flower's own pause between two tries doubles, so it may be as long as the outage was.
    outage.works("when Redis is back", BACK_SECONDS, flower_waits=2 * seconds)
    assert slowest < TRIGGER_SECONDS, f"a trigger took {slowest:.2f} s while Redis was away (R-T4)"
    return {"stored": len(waiting), "slowest_trigger": slowest, "caught_up": caught_up}


def postgres_blinks(outage: Outage) -> dict[str, float]:
    """A restart that is shorter than the lease: what runs is not repeated."""
    fleet = outage.fleet
    held = [outage.trigger("plain", seconds=s) for s in (0.5, 1.0, 4.0)]
    for run_id in held:
        fleet.await_status(run_id, "RUNNING", "SUCCEEDED")
    fleet.postgres.stop("fast")
    fleet.postgres.start()
    back = time.monotonic()
    for run_id in held:
        fleet.await_status(run_id, "SUCCEEDED", seconds=20)
        assert fleet.run(run_id)["status"] == "SUCCEEDED", f"{run_id} was repeated"
    return {"went_on": time.monotonic() - back}


def postgres_away(outage: Outage, seconds: float, how: Any = "immediate") -> dict[str, float]:
    """PostgreSQL is down for longer than any lease; what was held then is done again."""
    fleet = outage.fleet
    held = outage.trigger("plain", seconds=seconds + 5)
    fleet.await_status(held, "RUNNING")
    waiting = outage.trigger("plain", seconds=0.1)
    fleet.postgres.stop(how)
    down = time.monotonic()
    slowest = 0.0
    while time.monotonic() < down + seconds:
        began = time.monotonic()
        answer = outage.client.ask("trigger", job="plain", params={}, options={})
        slowest = max(slowest, time.monotonic() - began)
        assert answer.get("error") == "DatabaseUnavailable", answer
        time.sleep(0.5)
    fleet.postgres.start()
    back = time.monotonic()
    fleet.await_status(waiting, "SUCCEEDED", seconds=BACK_SECONDS)

    def again() -> bool:
        return bool(
            fleet.rows(
                "select from job_run where previous_run_id = %s and started_at is not null", held
            )
        )

    until(f"run {held} to be done again", again, BACK_SECONDS)
    took = time.monotonic() - back
    outage.client.ask("cancel", run=held)
    fleet.await_status(held, "CANCELLED", seconds=10)
    outage.works("when PostgreSQL is back", BACK_SECONDS)
    return {"refused_within": slowest, "went_on": took}


def outages(parts: dict[str, Callable[[Outage], dict[str, float]]]) -> None:
    """Each part on one fleet, one after another."""
    with Fleet() as fleet:
        outage = Outage(fleet)
        try:
            for name, part in parts.items():
                figures = part(outage)
                shown = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
                print(f"{name}: {shown}", flush=True)
            outage.judge()
        finally:
            outage.flower.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.outages")
    parser.add_argument("--redis-seconds", type=float, default=30.0)
    parser.add_argument("--postgres-seconds", type=float, default=20.0)
    chosen = parser.parse_args()
    fleets.main(
        lambda: outages(
            {
                "Redis is down": lambda o: redis_away(o, chosen.redis_seconds),
                "Redis hangs": lambda o: redis_away(o, 10, hangs=True),
                "PostgreSQL restarts": postgres_blinks,
                "PostgreSQL is down": lambda o: postgres_away(o, chosen.postgres_seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
