"""Fire times, by examples: what each kind of expression does, and what is refused (R-D2)."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from dispatch.durations import InvalidDuration
from dispatch.firetimes import Cron, Due, Every, InvalidInterval, upcoming
from dispatch.firetimes.crontab import NAMES, InvalidCron
from dispatch.firetimes.zones import UnknownZone, load_zone


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local(zone: str, start: str, expression: str, count: int) -> list[str]:
    """The next fires from that wall-clock time on, on the wall with the offset."""
    place = ZoneInfo(zone)
    after = datetime.fromisoformat(start).replace(tzinfo=place).astimezone(UTC)
    after -= timedelta(seconds=1)
    fires = upcoming(Cron(expression, zone), after, count)
    return [fire.astimezone(place).strftime("%d %H:%M%z") for fire in fires]


# --- where the clock is moved -----------------------------------------------------------------


def test_named_hour_in_a_gap_fires_once_right_after_it__R_D2():
    assert local("Europe/Madrid", "2026-03-29", "30 2 * * *", 2) == [
        "29 03:00+0200",
        "30 02:30+0200",
    ]


def test_several_swallowed_slots_fire_as_one__R_D2():
    assert local("Europe/Madrid", "2026-03-29", "0,20,40 2 * * *", 2) == [
        "29 03:00+0200",
        "30 02:00+0200",
    ]
    # A slot at the end of the gap is the same instant as the late fire, and no second one.
    assert local("Europe/Madrid", "2026-03-29", "0 2,3 * * *", 2) == [
        "29 03:00+0200",
        "30 02:00+0200",
    ]


def test_starred_minute_in_a_named_hour_is_named__R_D2():
    """The hour decides, so a nightly quarter-hourly job is neither lost nor doubled."""
    assert local("Europe/Madrid", "2026-03-29", "*/15 2 * * *", 2) == [
        "29 03:00+0200",
        "30 02:00+0200",
    ]
    assert local("Europe/Madrid", "2026-10-25", "*/30 2 * * *", 3) == [
        "25 02:00+0200",
        "25 02:30+0200",
        "26 02:00+0100",
    ]


def test_named_hour_shown_twice_fires_the_first_time_only__R_D2():
    assert local("Europe/Madrid", "2026-10-25", "30 2 * * *", 2) == [
        "25 02:30+0200",
        "26 02:30+0100",
    ]


def test_next_from_within_the_second_pass_is_later_than_now__R_D2():
    """Where cronsim by itself answers with a slot of the first pass, forty minutes before now."""
    second_pass = utc("2026-10-25T01:10")  # the wall shows 02:10 for the second time
    fire = Cron("30 2 * * *", "Europe/Madrid").next_after(second_pass)
    assert fire == utc("2026-10-26T01:30")


def test_wildcard_hour_goes_on_in_real_time_through_both__R_D2():
    assert local("Europe/Madrid", "2026-03-29T01:30", "*/30 * * * *", 4) == [
        "29 01:30+0100",
        "29 03:00+0200",
        "29 03:30+0200",
        "29 04:00+0200",
    ]
    assert local("Europe/Madrid", "2026-10-25T02:00", "*/30 * * * *", 5) == [
        "25 02:00+0200",
        "25 02:30+0200",
        "25 02:00+0100",
        "25 02:30+0100",
        "25 03:00+0100",
    ]


@pytest.mark.parametrize("expression", ["0 * * * *", "@hourly", "0 */1 * * *", "0 *,3 * * *"])
def test_an_hour_that_starts_with_a_star_is_a_wildcard__R_D2(expression):
    start = utc("2026-10-24T23:30")
    hours = [start + timedelta(minutes=30 + 60 * n) for n in range(5)]
    assert list(upcoming(Cron(expression, "Europe/Madrid"), start, 5)) == hours


def test_all_hours_written_out_are_named__R_D2():
    assert local("Europe/Madrid", "2026-10-25T01:30", "30 0-23 * * *", 3) == [
        "25 01:30+0200",
        "25 02:30+0200",
        "25 03:30+0100",
    ]


@pytest.mark.parametrize(
    ("zone", "day", "expression", "fires"),
    [
        # thirty minutes, at two in the morning
        ("Australia/Lord_Howe", "2026-10-04", "15 2 * * *", ["04 02:30+1100", "05 02:15+1100"]),
        ("Australia/Lord_Howe", "2026-04-05", "45 1 * * *", ["05 01:45+1100", "06 01:45+1030"]),
        # a gap at midnight: the day begins at one
        ("America/Sao_Paulo", "2018-11-04T01:00", "0 0 * * *", ["04 01:00-0200", "05 00:00-0200"]),
        ("Africa/Cairo", "2026-04-24T01:00", "30 0 * * *", ["24 01:00+0300", "25 00:30+0300"]),
        ("Asia/Beirut", "2026-03-29T01:00", "@daily", ["29 01:00+0300", "30 00:00+0300"]),
        # a fold at midnight: the evening's last hour is shown twice
        ("America/Sao_Paulo", "2018-02-17", "30 23 * * *", ["17 23:30-0200", "18 23:30-0300"]),
        # the gap swallows the whole last hour of the day
        ("America/Nuuk", "2026-03-28", "30 23 * * *", ["29 00:00-0100", "29 23:30-0100"]),
        # two hours at once
        ("Antarctica/Troll", "2026-03-29", "30 1,2 * * *", ["29 03:00+0200", "30 01:30+0200"]),
        # a day that never was: what belongs to it fires when the next one begins
        (
            "Pacific/Apia",
            "2011-12-29",
            "0 9 * * *",
            ["29 09:00-1000", "31 00:00+1400", "31 09:00+1400"],
        ),
        ("Pacific/Apia", "2011-12-29", "0 9 30 12 *", ["31 00:00+1400"]),
        ("Pacific/Kwajalein", "1993-08-20T12:00", "0 9 * * *", ["22 00:00+1200", "22 09:00+1200"]),
    ],
)
def test_odd_transitions__R_D2(zone, day, expression, fires):
    assert local(zone, day, expression, len(fires)) == fires


def test_a_wildcard_does_not_fire_for_a_day_that_never_was__R_D2():
    fires = local("Pacific/Apia", "2011-12-29T22:00", "0 * * * *", 4)
    assert fires == ["29 22:00-1000", "29 23:00-1000", "31 00:00+1400", "31 01:00+1400"]


# --- cron without moved clocks ------------------------------------------------------------------


def test_days_match_either_unless_a_field_starts_with_a_star__R_D2():
    def days(expression: str) -> list[int]:
        return [t.day for t in upcoming(Cron(expression, "UTC"), utc("2026-05-31T12:00"), 6)]

    assert days("0 0 1,15 * MON") == [1, 8, 15, 22, 29, 1]  # 15 June 2026 is a Monday
    assert days("0 0 10 * MON") == [1, 8, 10, 15, 22, 29]
    assert days("0 0 * * MON") == [1, 8, 15, 22, 29, 6]
    assert days("0 0 10 * *") == [10, 10, 10, 10, 10, 10]
    # Debian's rule: */2 starts with a star, so a day must be odd and a Monday.
    assert days("0 0 */2 * MON") == [1, 15, 29, 13, 27, 3]


def test_names_of_months_and_days():
    assert Cron("0 0 * JAN mon-Fri", "UTC").next_after(utc("2026-01-03")) == utc("2026-01-05")
    sundays = [
        Cron(f"0 0 * * {day}", "UTC").next_after(utc("2026-06-01")) for day in ("0", "7", "SUN")
    ]
    assert sundays == [utc("2026-06-07")] * 3


@pytest.mark.parametrize("name", NAMES)
def test_at_names_equal_their_five_fields(name):
    start = utc("2026-02-03T04:05")
    spelled_out = list(upcoming(Cron(NAMES[name], "Europe/Madrid"), start, 3))
    assert list(upcoming(Cron(name.upper(), "Europe/Madrid"), start, 3)) == spelled_out


def test_a_range_of_one_value_stays_one_value():
    """cronsim by itself reads 5-5/20 as 5/20: at 5, 25 and 45."""
    fires = list(upcoming(Cron("5-5/20 * * * *", "UTC"), utc("2026-01-01"), 2))
    assert fires == [utc("2026-01-01T00:05"), utc("2026-01-01T01:05")]
    assert Cron("5/20 * * * *", "UTC").next_after(fires[0]) == utc("2026-01-01T00:25")
    assert Cron("0 0 * * SUN-0/2", "UTC").next_after(utc("2026-06-07")) == utc("2026-06-14")


def test_last_day_of_the_month():
    fires = upcoming(Cron("0 0 L * *", "UTC"), utc("2027-12-31"), 3)
    assert [fire.date().isoformat() for fire in fires] == ["2028-01-31", "2028-02-29", "2028-03-31"]


def test_the_rarest_day_is_found_over_forty_years():
    """A fifth Sunday in February: 2088 has one, and 2100 is no leap year."""
    cron = Cron("0 0 */28 2 SUN#5", "Europe/Madrid")
    assert cron.next_after(utc("2088-02-28T22:59")) == utc("2088-02-28T23:00")
    assert cron.next_after(utc("2088-02-28T23:00")) == utc("2128-02-28T23:00")


def test_next_is_strictly_later_and_ignores_the_callers_zone():
    slot = utc("2026-06-01T10:00")
    cron = Cron("0 * * * *", "UTC")
    assert cron.next_after(slot) == slot + timedelta(hours=1)
    assert cron.next_after(slot - timedelta(microseconds=1)) == slot
    assert cron.next_after(slot.astimezone(timezone(timedelta(hours=-7)))) == slot + timedelta(
        hours=1
    )
    assert cron.next_after(slot).tzinfo is UTC


def test_a_naive_instant_is_refused():
    for times in (Cron("0 * * * *", "UTC"), Every(60, utc("2026-01-01"))):
        with pytest.raises(ValueError, match="no time zone"):
            times.next_after(datetime(2026, 1, 1))


def test_the_end_of_the_calendar_is_none_not_an_error():
    end = datetime.max.replace(tzinfo=UTC)
    assert Cron("0 0 29 2 *", "Europe/Madrid").next_after(end) is None
    assert Cron("* * * * *", "Europe/Madrid").next_after(utc("9990-01-01")) is None
    assert Every(86400, utc("2026-01-01")).next_after(end) is None
    assert Cron("@yearly", "Asia/Tokyo").next_after(datetime.min.replace(tzinfo=UTC)) is not None


# --- due ----------------------------------------------------------------------------------------


def test_due_counts_all_and_gives_the_newest():
    due = Cron("*/15 * * * *", "UTC").due(utc("2026-01-01T00:00"), utc("2026-01-01T01:00"), 2)
    assert due == Due(4, (utc("2026-01-01T00:45"), utc("2026-01-01T01:00")))


def test_due_excludes_after_and_includes_until():
    cron = Cron("0 * * * *", "UTC")
    ten, eleven = utc("2026-01-01T10:00"), utc("2026-01-01T11:00")
    assert cron.due(ten, eleven, 10) == Due(1, (eleven,))
    assert cron.due(ten, eleven - timedelta(microseconds=1), 10) == Due(0, ())
    assert cron.due(eleven, ten, 10) == Due(0, ())
    assert cron.due(ten, eleven, 0) == Due(1, ())


def test_due_through_gap_and_fold_equals_stepping_through_it__R_D2():
    for expression in ("30 2 * * *", "*/20 * * * *", "0,30 1-3 * * *", "0 0 * * *"):
        cron = Cron(expression, "Europe/Madrid")
        for start in (utc("2026-03-27"), utc("2026-10-23")):
            end = start + timedelta(days=4)
            steps = [t for t in upcoming(cron, start, 500) if t <= end]
            assert cron.due(start, end, 1000) == Due(len(steps), tuple(steps))
            assert cron.due(start, end, 3).newest == tuple(steps[-3:])


def test_five_missed_years_of_minutes_cost_bounded_work():
    cron = Cron("* * * * *", "Europe/Madrid")
    start, end = utc("2021-06-01"), utc("2026-06-01")
    begin = time.perf_counter()
    due = cron.due(start, end, 100)
    took = time.perf_counter() - begin
    assert due.count == 5 * 365 * 1440 + 1440  # in real time no minute is lost: 2024 has a day more
    assert due.newest == tuple(end - timedelta(minutes=99 - n) for n in range(100))
    assert took < 2, f"{took:.3f} s: 2.6 million slots were walked through"


# --- intervals ----------------------------------------------------------------------------------


def test_an_interval_counts_from_its_anchor_without_drift__R_D2():
    anchor = utc("2026-01-01T00:00:07.123456")
    every = Every(0.7 + 0.4, anchor)  # a float that is not exactly 1.1
    for k in (1, 2, 10**6, 10**9):
        slot = anchor + k * timedelta(seconds=1, milliseconds=100)
        assert every.next_after(slot - timedelta(microseconds=1)) == slot
        assert every.next_after(slot) == slot + timedelta(seconds=1, milliseconds=100)


def test_the_first_slot_is_one_interval_after_creation__R_D2():
    anchor = utc("2026-01-01T00:00:07")
    every = Every(900, anchor)
    first = anchor + timedelta(minutes=15)
    for t in (anchor, anchor - timedelta(days=400), first - timedelta(seconds=1)):
        assert every.next_after(t) == first
    assert every.due(anchor - timedelta(days=400), anchor, 10) == Due(0, ())
    assert every.due(anchor - timedelta(days=400), first, 10) == Due(1, (first,))


def test_an_interval_goes_on_in_real_time_through_gap_and_fold__R_D2():
    every = Every(3600, utc("2026-03-28T23:30"))
    fires = list(upcoming(every, utc("2026-03-28T23:30"), 4))
    assert [b - a for a, b in itertools.pairwise(fires)] == [timedelta(hours=1)] * 3


def test_interval_due_over_centuries_is_arithmetic():
    anchor = utc("1800-01-01")
    due = Every(1, anchor).due(anchor, utc("2200-01-01"), 3)
    assert due.count == int((utc("2200-01-01") - anchor).total_seconds())
    assert due.newest == tuple(utc("2200-01-01") - timedelta(seconds=n) for n in (2, 1, 0))


def test_intervals_that_no_schedule_can_keep_are_refused():
    with pytest.raises(InvalidInterval, match="500ms is too short"):
        Every(0.5, utc("2026-01-01"))
    with pytest.raises(InvalidInterval):
        Every(0, utc("2026-01-01"))
    with pytest.raises(InvalidDuration, match="negative"):
        Every(-60, utc("2026-01-01"))
    with pytest.raises(ValueError, match="no time zone"):
        Every(60, datetime(2026, 1, 1))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("60 * * * *", r"bad minute '60': write 0-59"),
        ("* 24 * * *", r"bad hour '24': write 0-23"),
        ("* * 0 * *", r"bad day-of-month '0': write 1-31"),
        ("* * * 13 *", r"bad month '13': write 1-12 or JAN-DEC"),
        ("* * * FOO *", r"bad month 'FOO'"),
        ("* * * * 8", r"bad day-of-week '8': write 0-7"),
        ("0 0 * * FRI-SUN", r"bad day-of-week 'FRI-SUN'.*a rising range"),
        ("0 0 ? * MON", r"bad day-of-month '\?'"),
        ("1,,2 * * * *", r"bad minute '1,,2'"),
        ("*/0 * * * *", r"bad minute '\*/0'"),
        ("٣ * * * *", r"bad minute"),
        ("*/90 * * * *", r"step of minute '\*/90' spans all 60 values.*every: 90m"),
        ("0 */24 * * *", r"step of hour"),
        ("0 0 30 2 *", r"never fires"),
        ("0 0 31 2,4,6,9,11 *", r"never fires"),
        ("0 0 */30 2 1#2", r"never fires"),
        ("", r"cron is empty: write five fields"),
        ("   ", r"cron is empty"),
        ("* * * *", r"has 4 fields: it has five: minute hour day-of-month month day-of-week"),
        ("0 * * * * *", r"has 6 fields.*no field for seconds, use an interval such as every: 30s"),
        ("@reboot", r"no start-up.*run trigger JOB"),
        ("@dayly", r"did you mean @daily\?"),
        ("@every 5m", r"use every, such as every: 15m"),
        ("@nonsense", r"known are @hourly"),
        ("@daily 5", r"not known"),
    ],
)
def test_a_bad_expression_is_refused_by_field_with_the_way_out(expression, says):
    with pytest.raises(InvalidCron, match=says):
        Cron(expression, "UTC")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Europe/Madird", r"did you mean Europe/Madrid\?$"),
        ("europe/madrid", r"did you mean Europe/Madrid\?$"),
        ("Madrid", r"did you mean Europe/Madrid\?$"),
        ("new york", r"did you mean America/New_York\?$"),
        ("UTC+2", r"Etc/GMT-2"),
        ("localtime", r"unknown time zone"),
        ("right/UTC", r"unknown time zone"),
        ("posix/UTC", r"unknown time zone"),
        ("Europe", r"unknown time zone"),
        ("../../etc/passwd", r"unknown time zone"),
        ("/etc/localtime", r"unknown time zone"),
        ("a\0b", r"unknown time zone"),
        ("", r"use an IANA name such as Europe/Madrid or UTC"),
    ],
)
def test_an_unknown_zone_is_refused_with_the_nearest_name(name, says):
    with pytest.raises(UnknownZone, match=says):
        Cron("@daily", name)


def test_the_nearest_name_for_a_fixed_offset_is_that_offset():
    assert datetime(2026, 1, 1, tzinfo=load_zone("Etc/GMT-2")).utcoffset() == timedelta(hours=2)


def test_equal_schedules_compare_equal():
    assert Cron("@daily", "UTC") == Cron("@daily", "UTC")
    assert Cron("@daily", "UTC") != Cron("@daily", "Europe/Madrid")
    assert "Europe/Madrid" in repr(Cron("@daily", "Europe/Madrid"))
