"""Misfire policies: what fires, what is skipped, and that all of it leaves a trace (R-D1, R-D2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dispatch.firetimes import Cron, Every
from dispatch.misfires import Misfire, settle

MINUTE = timedelta(minutes=1)
T0 = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
MINUTELY = Cron("* * * * *", "UTC")


@pytest.mark.parametrize("policy", Misfire)
def test_nothing_is_settled_before_its_time__R_D1(policy):
    result = settle(MINUTELY, T0, T0 - timedelta(microseconds=1), policy)
    assert (result.fire, result.skipped, result.more_skipped) == ((), (), 0)
    assert result.next_fire_at == T0


@pytest.mark.parametrize("policy", Misfire)
@pytest.mark.parametrize("late", [timedelta(0), timedelta(seconds=59), timedelta(seconds=60)])
def test_a_slot_settled_up_to_a_minute_late_fires_under_each_policy__R_D2(policy, late):
    hourly = Cron("0 * * * *", "UTC")
    result = settle(hourly, T0, T0 + late, policy)
    assert result.fire == (T0,)
    assert result.skipped == ()
    assert result.next_fire_at == T0 + timedelta(hours=1)


def test_a_slot_later_than_a_minute_is_missed__R_D2():
    hourly = Cron("0 * * * *", "UTC")
    now = T0 + timedelta(seconds=60, microseconds=1)
    assert settle(hourly, T0, now, Misfire.SKIP).fire == ()
    assert settle(hourly, T0, now, Misfire.FIRE_ONCE).fire == (T0,)
    assert settle(hourly, T0, now, Misfire.CATCH_UP).fire == (T0,)


def test_fire_once_fires_the_newest_missed_slot_alone__R_D2():
    hourly = Cron("0 * * * *", "UTC")
    result = settle(hourly, T0, T0 + timedelta(hours=3, minutes=10), Misfire.FIRE_ONCE)
    hours = [T0 + timedelta(hours=n) for n in range(4)]
    assert result.fire == (hours[3],)
    assert [skipped.fire_time for skipped in result.skipped] == hours[:3]
    assert hours[3].isoformat() in result.skipped[0].reason
    assert result.next_fire_at == T0 + timedelta(hours=4)


def test_a_slot_on_time_stands_for_the_missed_ones__R_D2():
    result = settle(MINUTELY, T0, T0 + 5 * MINUTE + timedelta(seconds=2), Misfire.FIRE_ONCE)
    assert result.fire == (T0 + 5 * MINUTE,)
    assert [skipped.fire_time for skipped in result.skipped] == [T0 + n * MINUTE for n in range(5)]


def test_skip_fires_only_what_is_on_time__R_D2():
    result = settle(MINUTELY, T0, T0 + 5 * MINUTE + timedelta(seconds=2), Misfire.SKIP)
    assert result.fire == (T0 + 5 * MINUTE,)
    assert len(result.skipped) == 5
    assert "skip" in result.skipped[0].reason


def test_catch_up_fires_each_missed_slot_oldest_first__R_D2():
    result = settle(MINUTELY, T0, T0 + 5 * MINUTE + timedelta(seconds=2), Misfire.CATCH_UP)
    assert result.fire == tuple(T0 + n * MINUTE for n in range(6))
    assert result.skipped == ()


@pytest.mark.parametrize(("policy", "fired"), [("catch_up", 100), ("fire_once", 1), ("skip", 1)])
def test_years_of_minutes_are_settled_in_bounded_work_and_counted__R_D1(policy, fired):
    now = T0 + timedelta(days=5 * 365, seconds=2)
    result = settle(MINUTELY, T0, now, Misfire(policy))
    total = 5 * 365 * 1440 + 1
    assert len(result.fire) == fired
    assert result.fire[-1] == now - timedelta(seconds=2)
    assert len(result.skipped) == 100
    assert len(result.fire) + len(result.skipped) + result.more_skipped == total
    assert result.first_skipped == T0
    newest_first_fired = result.fire[0]
    assert result.skipped[-1].fire_time == newest_first_fired - MINUTE
    assert result.next_fire_at == now - timedelta(seconds=2) + MINUTE


def test_several_slots_on_time_each_fire__R_D2():
    every = Every(10, T0)
    result = settle(
        every, T0 + timedelta(seconds=10), T0 + timedelta(seconds=45), Misfire.FIRE_ONCE
    )
    assert result.fire == tuple(T0 + timedelta(seconds=10 * n) for n in (1, 2, 3, 4))


def test_a_stored_obligation_is_a_slot_although_the_rules_changed__R_D1():
    """A zone's new rules, or a hand that moved it: what was promised is settled, not forgotten."""
    off_grid = T0 + timedelta(seconds=17)
    result = settle(
        Cron("0 * * * *", "UTC"), off_grid, off_grid + timedelta(seconds=1), Misfire.SKIP
    )
    assert result.fire == (off_grid,)
    assert result.next_fire_at == T0 + timedelta(hours=1)
