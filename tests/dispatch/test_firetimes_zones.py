"""Fire times in every zone there is, through every kind of moved clock, against the oracle (R-D2).

The slow side is the oracle, so zones whose walls show the same are asked of it once; the code under
test is run for each zone by its own name.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo, _zoneinfo, available_timezones

import pytest
from cron_oracle import Oracle, expected, wall_clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch.firetimes import Cron, Due, upcoming
from dispatch.firetimes.zones import _moves

ZONES = sorted(available_timezones() - {"localtime", "posixrules", "Factory"})
NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
EXPRESSIONS = (
    "30 2 * * *",
    "0,20,40 0-3 * * *",
    "0 0 * * *",
    "59 23 * * 6,0",
    "*/15 2 * * *",
    "*/15 * * * *",
    "10 */2 * * *",
    "45 0-23 * * *",
)


@cache
def moved_clocks(name: str) -> tuple[tuple[datetime, timedelta, timedelta], ...]:
    """Every move of the clock that the zone's file lists: when, and the offsets around it."""
    table = _zoneinfo.ZoneInfo.no_cache(name)
    moves, before = [], table._tti_before.utcoff
    for second, info in zip(table._trans_utc, table._ttinfos, strict=True):
        if info.utcoff != before:
            moves.append((datetime.fromtimestamp(second, UTC), before, info.utcoff))
        before = info.utcoff
    return tuple(moves)


def offset_at(zone: ZoneInfo, instant: datetime) -> timedelta:
    return instant.astimezone(zone).utcoffset()


def coming_moves(zone: ZoneInfo) -> list[datetime]:
    """The days (UTC midnights) in two years from NOW on within which the clock is moved."""
    days = [NOW + n * DAY for n in range(2 * 366)]
    offsets = [offset_at(zone, day) for day in days]
    return [days[n] for n in range(len(days) - 1) if offsets[n] != offsets[n + 1]]


@cache
def oracle_fires(expression: str, walls: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(Oracle(expression).fires(list(walls), 60))


def test_every_zone_through_its_next_gaps_and_folds__R_D2():
    """For all zones: each fire that the oracle sees, no other, in order, and never a stall."""
    with_moves = 0
    stepped = set()
    for name in ZONES:
        zone = ZoneInfo(name)
        crons = [Cron(expression, name) for expression in EXPRESSIONS]
        # A zone whose clock stays as it is gets one plain window.
        moves = coming_moves(zone)
        with_moves += bool(moves)
        for day in moves or [NOW + 90 * DAY]:
            start, steps = day - 3 * HOUR, 30 * 60
            walls = tuple(wall_clock(zone, start, steps + 1, 60))
            for cron in crons:
                fires = [start + i * MINUTE for i in oracle_fires(cron.expression, walls)]
                due = cron.due(start, start + steps * MINUTE, 10**6)
                assert due == Due(len(fires), tuple(fires)), (name, cron.expression)
                key = (walls, cron.expression)
                if key in stepped:
                    continue
                stepped.add(key)
                walked = list(upcoming(cron, start, len(fires)))
                assert walked == fires, (name, cron.expression)
                # From any instant around the move, next is later than now and is the next fire.
                if moves:
                    check_next_from_each_minute(cron, fires, day - HOUR, day + 25 * HOUR)
    assert with_moves > 150, "hardly any zone moved its clock: the windows are wrong"


def check_next_from_each_minute(
    cron: Cron, fires: list[datetime], start: datetime, end: datetime
) -> None:
    index, now = 0, start
    while now < end:
        while index < len(fires) and fires[index] <= now:
            index += 1
        if index == len(fires):
            return
        found = cron.next_after(now)
        assert found is not None
        assert found > now, (cron, now, found)
        assert found == fires[index], (cron, now)
        now += 7 * MINUTE


def test_every_kind_of_move_since_1970__R_D2():
    """Each size of gap and fold at each hour of the day that any zone has had, some 380 kinds."""
    seen = set()
    for name in ZONES:
        for at, before, after in moved_clocks(name):
            shown_before, shown_after = at + before, at + after
            kind = (before, after, shown_before.time())
            whole = (before.total_seconds() % 60, after.total_seconds() % 60) == (0, 0)
            if at.year < 1970 or not whole or kind in seen:
                continue
            seen.add(kind)
            size = abs(after - before)
            start, end = at - 4 * HOUR, at + size + 4 * HOUR
            for expression in around(min(shown_before, shown_after), size):
                fires = tuple(expected(expression, ZoneInfo(name), start, end))
                cron = Cron(expression, name)
                assert cron.due(start, end, 10**6) == Due(len(fires), fires), (name, at, expression)
                assert tuple(upcoming(cron, start, len(fires))) == fires, (name, at, expression)
    assert len(seen) > 200


def around(first: datetime, size: timedelta) -> list[str]:
    """Expressions with slots in, before and behind the moved hours."""
    inside = first + size // 2
    behind = first + size
    return [
        f"{inside.minute} {inside.hour} * * *",
        f"{behind.minute} {behind.hour} * * *",
        f"5,35 {','.join(str((first + n * HOUR).hour) for n in range(-1, 3))} * * *",
        "*/20 * * * *",
    ]


@pytest.mark.parametrize(
    ("zone", "at"),
    [
        (
            "Africa/Monrovia",
            "1972-01-07T00:44:30",
        ),  # forward by 44:30, from an offset of odd seconds
        ("Europe/Amsterdam", "1937-06-30T22:40:00"),
        ("Asia/Kolkata", "1941-10-01T00:00:00"),
        ("America/Toronto", "1919-03-31T04:30:00"),  # a gap from half past eleven into the next day
        ("Asia/Manila", "1899-09-05T16:00:00"),
        ("Europe/Paris", "1911-03-10T23:50:39"),  # back by nine minutes and 21 seconds
        ("Africa/Freetown", "1939-09-05T00:40:00"),
    ],
)
def test_offsets_and_moves_of_odd_seconds__R_D2(zone, at):
    moved = datetime.fromisoformat(at).replace(tzinfo=UTC)
    start, end = moved - 2 * HOUR, moved + 2 * HOUR
    first = moved.astimezone(ZoneInfo(zone)) - 10 * MINUTE
    for expression in (
        "*/10 * * * *",
        "5,25,50 0-23 * * *",
        f"{first.minute} {first.hour} * * *",
        f"0,59 {first.hour} * * *",
    ):
        fires = tuple(expected(expression, ZoneInfo(zone), start, end, step=1))
        assert Cron(expression, zone).due(start, end, 10**6) == Due(len(fires), fires), expression


def test_no_zone_moves_its_clock_twice_within_two_days():
    """What lets the search for moves look once a day, and the furthest clock look back two days."""
    for name in ZONES:
        moves = moved_clocks(name)
        for (first, before, after), (second, _, _) in pairwise(moves):
            assert second - first > 2 * DAY, (name, first)
            assert before - after <= DAY, (name, first)


def test_the_search_finds_every_move_in_the_zones_table():
    for name in ZONES:
        listed = [
            (at.replace(tzinfo=None), after)
            for at, _, after in moved_clocks(name)
            if datetime(2004, 1, 1, tzinfo=UTC) < at <= datetime(2012, 1, 1, tzinfo=UTC)
        ]
        found = [move for year in range(2004, 2012) for move in _moves(ZoneInfo(name), year)]
        assert found == listed, name


# --- anything at all ------------------------------------------------------------------------------


def terms(low: int, high: int) -> st.SearchStrategy[str]:
    value = st.integers(low, high)
    span = st.tuples(value, value).map(sorted).map(lambda pair: f"{pair[0]}-{pair[1]}")
    step = st.integers(2, min(9, high - low - 1))
    stepped = st.tuples(st.one_of(st.just("*"), span), step).map(
        lambda pair: f"{pair[0]}/{pair[1]}"
    )
    return st.one_of(st.just("*"), value.map(str), span, stepped)


def fields(low: int, high: int) -> st.SearchStrategy[str]:
    return st.lists(terms(low, high), min_size=1, max_size=2).map(",".join)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    minute=fields(0, 59),
    hour=fields(0, 23),
    day=st.one_of(st.just("*"), fields(1, 28)),
    weekday=st.one_of(st.just("*"), fields(0, 7)),
    name=st.sampled_from(ZONES),
    start=st.datetimes(datetime(1975, 1, 1), datetime(2037, 1, 1)),
)
def test_any_expression_in_any_zone_equals_the_oracle__R_D2(
    minute, hour, day, weekday, name, start
):
    expression = f"{minute} {hour} {day} * {weekday}"
    cron = Cron(expression, name)
    begin = start.replace(second=0, microsecond=0, tzinfo=UTC)
    end = begin + 2 * DAY
    fires = tuple(expected(expression, ZoneInfo(name), begin, end))
    assert cron.due(begin, end, 10**6) == Due(len(fires), fires)
    now = start.replace(tzinfo=UTC)
    found = cron.next_after(now)
    # Days that exclude each other over the windows of this test may keep it away for years.
    assert found is not None
    assert found > now
    assert cron.due(now, found, 5) == Due(1, (found,))
    later = [fire for fire in fires if fire > now]
    if later:
        assert found == later[0]


@settings(max_examples=300, deadline=None)
@given(text=st.text("0123456789*/,-#LWSUNMOJAFEBab@ ?٣", max_size=24))
def test_any_text_is_a_schedule_or_a_clear_refusal(text):
    try:
        cron = Cron(text, "Europe/Madrid")
    except ValueError as error:
        refusal = str(error)
    else:
        fire = cron.next_after(NOW)
        assert fire is not None
        assert fire > NOW
        return
    assert refusal.startswith("cron ")
