"""The scenarios in their short form: real fleets, broken on purpose, for under a minute each."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from scenarios import chaos, group_signal, outages, recovery, rolling, stale
from scenarios.fleet import Fleet
from scenarios.invariants import WATCH_WATERMARKS


def test_random_damage_breaks_no_rule__R_S1_R_C7_R_L3_R_F1_R_F3_R_F5_R_R1_R_R2_R_D1_R_X4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with capsys.disabled():
        print()
        chaos.chaos(0.2, seed=20261130, pause=(0.3, 1.5))


def test_killed_child_is_replaced_within_seconds__R_L5() -> None:
    found = recovery.children(1)
    assert found["admitted"]["max"] < 2


def test_lost_worker_costs_a_lease_and_a_frozen_one_writes_nothing__R_L3_R_F1_R_F5() -> None:
    found = recovery.leases(1)
    assert found["kill_worker"]["admitted"]["max"] <= 3 + 1


def test_stale_replication_writes_nothing_after_its_successor__R_F5() -> None:
    stale.stale(1, seed=1, jobs=("full", "atomic", "increment"))


def test_rolling_restart_loses_and_repeats_nothing__R_D8() -> None:
    rolling.rolling(0.1)


def test_servers_come_back_and_so_does_everything__R_T4_R_D6_R_R7() -> None:
    outages.outages(
        {
            "Redis is down": lambda outage: outages.redis_away(outage, 4),
            "PostgreSQL restarts": outages.postgres_blinks,
            "PostgreSQL is down": lambda outage: outages.postgres_away(outage, 5),
        }
    )


@pytest.mark.parametrize(
    ("pool", "number", "group"),
    [("prefork", signal.SIGTERM, False), ("threads", signal.SIGINT, True)],
)
def test_signal_to_the_group_leaves_nothing_held__R_D8_R_K3(
    pool: str, number: Any, group: bool
) -> None:
    with Fleet(settings={"CLAIMCHECK_LEASE_SECONDS": "600"}) as fleet:
        fleet.define(group_signal.JOBS)
        fleet.rows(WATCH_WATERMARKS)
        group_signal.honcho(fleet, number, group=group, pool=pool)
