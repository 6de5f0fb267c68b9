"""Redis is down while runs are triggered: all are durable, and all run afterwards (R-T4).

    python -m tests.scenarios.redis_outage --minutes 5

No process is restarted. Schedules go on, and a worker that is lost meanwhile is recovered.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from datetime import datetime
from typing import Any

from support.waiting import until

from scenarios import fleet as fleets
from scenarios.curves import Curves
from scenarios.fleet import Fleet

JOBS = """
jobs:
  plain: {handler: plain, overlap: allow, params: {seconds: 0.05}, retry: {backoff: 1s}}
  often:
    handler: plain
    overlap: allow
    params: {seconds: 0}
    schedules: [{name: often, every: 2s, misfire: catch_up}]
"""
SLOWEST_TRIGGER_SECONDS = 1.5


def redis_outage(minutes: float, hang: bool, each: float) -> None:
    with Fleet(lease_seconds=5) as fleet:
        fleet.define(JOBS)
        members = [fleet.worker("one"), fleet.worker("two", pool="threads"), fleet.beat()]
        client = fleet.client()
        fleet.await_status(client.trigger("plain"), "SUCCEEDED")
        held = client.trigger("plain", {"seconds": 3600})
        fleet.await_status(held, "RUNNING")

        curves = Curves(
            {
                "runs that wait": lambda: fleet.rows(
                    "select count(*) as n from job_run where status = 'PENDING'"
                )[0]["n"]
            }
        )
        began = time.monotonic()
        began_at = fleet.rows("select clock_timestamp() as now")[0]["now"]
        if hang:
            fleet.redis.hang()
        else:
            fleet.redis.kill()
        slowest, triggered = _trigger_on(fleet, client, began + minutes * 60, each, members[0])
        print(f"{len(triggered)} triggers without Redis; the slowest took {slowest:.2f} s")
        if hang:
            fleet.redis.go_on()
        else:
            fleet.redis.start()
        back = time.monotonic()
        client.ask("cancel", run=held)
        try:
            until(
                "every run that was triggered to succeed",
                lambda: _ended(fleet) >= len(triggered),
                120,
            )
        finally:
            curves.stop()
            curves.show()
        print(f"all of them ended {time.monotonic() - back:.1f} s after Redis was back")
        for member in members:
            assert len(member.starts) == 1, f"{member.name} had to be started again"
            assert member.is_alive(), f"{member.name} ended by itself"
        assert slowest <= SLOWEST_TRIGGER_SECONDS, f"a trigger took {slowest:.2f} s"
        _judge(fleet, held, began_at)


def _trigger_on(
    fleet: Fleet, client: Any, until_time: float, each: float, worker: Any
) -> tuple[float, list[str]]:
    slowest, triggered = 0.0, []
    while time.monotonic() < until_time:
        asked = time.monotonic()
        triggered.append(client.trigger("plain"))
        slowest = max(slowest, time.monotonic() - asked)
        if len(triggered) == 5:
            # A child that dies: its parent or the sweep starts a new attempt, without Redis.
            for child in worker.children():
                fleet.note("kill", pid=child)
                _kill(child)
        due = asked + each
        until("the next trigger", lambda due=due: time.monotonic() >= due, each + 1)
    return slowest, triggered


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _ended(fleet: Fleet) -> int:
    [found] = fleet.rows(
        """select count(*) as n from job_run where job_name = 'plain' and status = 'SUCCEEDED'
           and triggered_by = 'api'"""
    )
    # The first one ended before the outage.
    return int(found["n"]) - 1


def _judge(fleet: Fleet, held: str, began_at: datetime) -> None:
    last = fleet.await_status(held, "CANCELLED", "SUCCEEDED", "FAILED")
    assert last["status"] == "CANCELLED", last
    [gaps] = fleet.rows(
        """select count(*) as n from (select fire_at - lag(fire_at) over (order by fire_at) as step
             from schedule_slot) steps where step > interval '2 seconds'"""
    )
    [late] = fleet.rows(
        "select max(settled_at - fire_at) as most from schedule_slot where fire_at > %s", began_at
    )
    print(f"no slot of the schedule was left out; the latest was settled after {late['most']}")
    assert gaps["n"] == 0
    assert late["most"].total_seconds() < 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.redis_outage")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--each", type=float, default=2.0, help="seconds between triggers")
    parser.add_argument("--hang", action="store_true", help="Redis hangs instead of being gone")
    chosen = parser.parse_args()
    fleets.main(lambda: redis_outage(chosen.minutes, chosen.hang, chosen.each))


if __name__ == "__main__":
    main()
