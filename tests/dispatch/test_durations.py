"""Durations: what is read, what is refused, and that what is written reads the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.durations import InvalidDuration, format_duration, parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("500ms", 0.5),
        ("60s", 60),
        ("5m", 300),
        ("1h", 3600),
        ("1d", 86400),
        ("1.5h", 5400),
        (".5s", 0.5),
        (" 5 m ", 300),
        ("60", 60),
        ("0.25", 0.25),
        (60, 60),
        (0.1, 0.1),
        (1e-05, 0.00001),
        (0, 0),
        ("0s", 0),
        (timedelta(minutes=2), 120),
    ],
)
def test_durations_are_read(value, seconds):
    assert parse_duration(value) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("5x", "write a number and one unit"),
        ("5 minutes", "write a number and one unit"),
        ("1h30m", "write a number and one unit"),
        ("5M", "write a number and one unit"),
        ("", "write a number and one unit"),
        ("m", "write a number and one unit"),
        ("1e3", "write a number and one unit"),
        ("nan", "write a number and one unit"),
        (float("nan"), "write a number and one unit"),
        (float("inf"), "write a number and one unit"),
        ("٣s", "write a number and one unit"),
        (True, "write a number and one unit"),
        (None, "write a number and one unit"),
        ([60], "write a number and one unit"),
        ("-5m", "negative"),
        (-1, "negative"),
        (timedelta(seconds=-1), "negative"),
        ("0.0000001", "finer than a microsecond"),
        ("36526d", "longer than a century"),
        ("9" * 5000, "longer than a century"),
        (1e300, "longer than a century"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_way_out(value, says):
    with pytest.raises(InvalidDuration, match=says):
        parse_duration(value)


def test_the_refusal_names_the_setting_and_stays_short():
    with pytest.raises(InvalidDuration, match=r"^timeout 'soon' is no duration"):
        parse_duration("soon", what="timeout")
    with pytest.raises(InvalidDuration) as caught:
        parse_duration("x" * 10_000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.5, "500ms"),
        (0.0005, "0.5ms"),
        (60, "1m"),
        (90, "90s"),
        (5400, "90m"),
        (3600, "1h"),
        (86400, "1d"),
        (36000, "10h"),
        (1.5, "1500ms"),
    ],
)
def test_durations_are_written_in_the_largest_even_unit(seconds, text):
    assert format_duration(seconds) == text


@given(st.timedeltas(timedelta(0), timedelta(days=36525)))
def test_what_is_written_reads_the_same(duration):
    assert parse_duration(format_duration(duration)) == duration
