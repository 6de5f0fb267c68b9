"""Many runs wait and every wake-up is lost: they are offered again steadily, in bounds (R-D5).

python -m tests.scenarios.lost_wakeups --runs 100000
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from support.waiting import until

from scenarios import fleet as fleets
from scenarios.curves import Curves
from scenarios.fleet import Fleet

WORKERS = 2
SLOTS = 2
JOBS = """
jobs:
  plain: {handler: plain, overlap: allow, params: {seconds: 0}}
"""


def bound() -> int:
    """Twice the slots, as they are counted before the workers have told of themselves (R-D5)."""
    return 2 * 16


def lost_wakeups(runs: int, again: bool, patience: float, curves_file: Path | None) -> None:
    with Fleet(lease_seconds=60, settings={"CLAIMCHECK_OFFER_GRACE_SECONDS": "10"}) as fleet:
        fleet.define(JOBS)
        client = fleet.client()
        for _ in range(200):
            client.trigger("plain")
        stored = fleet.redis.queue_length()
        assert 0 < stored <= bound(), f"200 triggers left {stored} wake-ups"
        # The rest as their callers would have left them: offered, and then lost.
        fleet.rows(
            """insert into job_run (job_id, offered_at, offer_count)
               select id, clock_timestamp(), 1 from job, generate_series(1, %s)""",
            runs - 200,
        )
        with fleet.redis.client() as redis:
            redis.flushall()
        curves = Curves(
            {
                "runs that wait": lambda: fleet.rows(
                    "select count(*) as n from job_run where status = 'PENDING'"
                )[0]["n"],
                "wake-ups in Redis": fleet.redis.queue_length,
                "offers in all": lambda: fleet.rows(
                    "select coalesce(sum(offer_count), 0)::bigint as n from job_run"
                )[0]["n"],
            }
        )
        began = time.monotonic()
        fleet.beat()
        for number in range(WORKERS):
            fleet.worker(f"w{number}", concurrency=SLOTS, ready=False)
        try:
            if again:
                until(
                    "half of the runs to end",
                    lambda: (
                        fleet.rows("select count(*) as n from job_run where status = 'PENDING'")[0][
                            "n"
                        ]
                        < runs / 2
                    ),
                    120 + runs / 50,
                )
                with fleet.redis.client() as redis:
                    redis.flushall()
            fleet.settle(patience)
        finally:
            curves.stop()
            curves.show()
            if curves_file is not None:
                curves.write(curves_file)
        took = time.monotonic() - began
        [ends] = fleet.rows(
            """select count(*) as runs, count(*) filter (where status = 'SUCCEEDED') as succeeded,
                 sum(offer_count) - %s as offers from job_run""",
            runs - 200,
        )
        print(
            f"{ends['succeeded']} of {runs} runs succeeded in {took:.0f} s "
            f"({runs / took:.0f} a second), with {ends['offers']} offers; at most "
            f"{curves.most('wake-ups in Redis'):g} wake-ups in Redis"
        )
        assert ends["runs"] == ends["succeeded"] == runs
        assert curves.most("wake-ups in Redis") <= bound() + WORKERS * SLOTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.lost_wakeups")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--once", action="store_true", help="lose the wake-ups at the start only")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long it may take at most")
    parser.add_argument("--curves", type=Path, help="write the curves to this file as JSON")
    chosen = parser.parse_args()
    fleets.main(
        lambda: lost_wakeups(chosen.runs, not chosen.once, chosen.minutes * 60, chosen.curves)
    )


if __name__ == "__main__":
    main()
