"""The beat's scenarios in their short forms; each module says how to run it for its full time."""

from __future__ import annotations

import pytest

from scenarios.idle import idle
from scenarios.lost_wakeups import lost_wakeups
from scenarios.redis_outage import redis_outage


def test_an_idle_fleet_sends_no_statement__R_D3() -> None:
    idle(minutes=0.1, backstop=0, beats=1, deadlines=0)


def test_with_every_wake_up_lost_all_runs_end_and_the_queue_stays_short__R_D5() -> None:
    lost_wakeups(runs=400, again=True, patience=150, curves_file=None)


@pytest.mark.parametrize("hang", [False, True], ids=["down", "hung"])
def test_runs_that_are_triggered_without_redis_all_run_afterwards__R_T4(hang: bool) -> None:
    redis_outage(minutes=0.2, hang=hang, each=1.0)
