"""Random damage to a whole fleet under load, then a look at what it left: no rule may be broken.

python -m tests.scenarios.chaos --minutes 5 --seed 1 [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from scenarios import clocks
from scenarios import fleet as fleets
from scenarios.breaking_processes import ProcessBreaker
from scenarios.breaking_servers import ServerBreaker
from scenarios.callers import Callers
from scenarios.damage import Damage
from scenarios.fleet import Fleet
from scenarios.invariants import WATCH_FENCES, breaches
from scenarios.workload import REPLICATED, SCHEDULES, Writers, compare, prepare

SETTLE_SECONDS = 150.0


def judge(fleet: Fleet, callers: Callers) -> list[str]:
    """Let everything end, replicate once more, and look at what is left."""
    client = callers.clients[0]
    callers.restore(client, ("switch", "datasource"))
    for name in SCHEDULES:
        answer = client.ask("schedule", name=name, enabled=False)
        assert "error" not in answer, answer
    took = fleet.settle(SETTLE_SECONDS)
    print(f"all runs had ended {took:.1f} s after the last damage", flush=True)
    for row in fleet.rows(
        """select r.id, r.job_name, r.attempt, r.created_at, r.available_at, r.offered_at,
             r.offer_count, r.started_at, r.finished_at, r.status, r.error_code
           from job_run r where r.root_run_id = (select root_run_id from job_run
             order by finished_at desc limit 1) order by r.created_at"""
    ):
        print(" ".join(_brief(value) for value in row.values()), flush=True)
    found = []
    for job in REPLICATED:
        end = fleet.await_status(
            client.trigger(job), "SUCCEEDED", "FAILED", "CANCELLED", seconds=60
        )
        if end["status"] != "SUCCEEDED":
            found.append(f"{job} on a sound fleet: {end['status']} {end['error_message']}")
        else:
            found += compare(fleet, job)
    for member in fleet.members.values():
        for pid in member.orphans():
            found.append(f"process {pid} of an earlier {member.name} is still there (R-D8)")
    return found + callers.surprises + breaches(fleet, callers.accepted)


def _brief(value: Any) -> str:
    return f"{value:%T.%f}"[:-3] if isinstance(value, datetime) else str(value)


def chaos(
    minutes: float,
    seed: int,
    *,
    logs: Path | None = None,
    pause: tuple[float, float] = (0.5, 3.0),
) -> None:
    """Raises AssertionError with everything that did not hold."""
    with Fleet(keep=logs) as fleet:
        prepare(fleet)
        way = fleet.way("prefork")
        fleet.worker("prefork", concurrency=3, ready=False, DATABASE_URL=way.url)
        # Only the database's clock may decide (R-L2).
        behind = clocks.wrong(-3600, fleet.folder)
        ahead = clocks.wrong(3600, fleet.folder)
        other = "solo" if seed % 3 == 0 else "threads"
        fleet.worker(other, pool=other, concurrency=2, ready=False, **behind)
        fleet.beat("beat-1", ready=False)
        fleet.beat("beat-2", ready=False, **ahead)
        for member in fleet.members.values():
            member.await_ready()
        callers = Callers(fleet, count=2, seed=seed, pause=0.4)
        for job in REPLICATED:
            fleet.await_status(callers.clients[0].trigger(job), "SUCCEEDED", seconds=40)
        fleet.rows(WATCH_FENCES, database="sink")
        writers = Writers(fleet)
        damage = Damage(fleet, seed)
        deeds = [*ProcessBreaker(damage).deeds, *ServerBreaker(damage, way).deeds]
        fleet.tend()
        callers.start()
        try:
            damage.go_on_for(minutes * 60, pause, deeds)
        finally:
            damage.repair()
            callers.stop()
            writers.stop()
        found = judge(fleet, callers)
        report(fleet, callers, damage)
        assert not found, "\n".join(["", *found])


def report(fleet: Fleet, callers: Callers, damage: Damage) -> None:
    print("damage:", dict(damage.counts))
    print("calls:", dict(callers.counts))
    for row in fleet.rows(
        """select status, coalesce(error_code, '-') as code, count(*) as n, max(attempt) as attempt
           from job_run group by 1, 2 order by 1, 2"""
    ):
        print(f"{row['n']:6} {row['status']} {row['code']} (up to attempt {row['attempt']})")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    chosen = parser.parse_args()
    print(f"chaos for {chosen.minutes:g} minutes, seed {chosen.seed}", flush=True)
    fleets.main(lambda: chaos(chosen.minutes, chosen.seed, logs=chosen.logs))


if __name__ == "__main__":
    main()
