"""A column that passes as a whole would have passed value by value, unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.replicate.columnwise import passes
from tasks.replicate.connector import Guard, Side
from tasks.replicate.guards import GUARDS

_GUARDS = [
    Guard("scale", 5, 2),
    Guard("scale", None, 3),
    Guard("scale", 4, 0),
    Guard("scale", 2, 2),
    Guard("scale", 5, -2),
    Guard("scale", 2, 4),
    Guard("integer", 16, 0),
    Guard("integer", 8, 1),
    Guard("real", 32),
    Guard("real", 64),
    Guard("nearest", 32),
    Guard("nearest", 64),
    Guard("text", 5),
    Guard("octets", 2),
    Guard("fraction", 0),
    Guard("fraction", 3),
    *map(Guard, GUARDS),
]
_ODD = [
    *("2026-11-30", "26-11-30", "2026-11-30 BC", "12026-11-30", "infinity", "now", "٢026-11-30"),
    *(
        "23:59:59",
        "23:59:60",
        "24:00:00",
        "23:59",
        "23:59:59.1234560",
        "23:59:59.12٣4",
        "9:59:59",
        "now",
    ),
    *("2026-11-30 23:59:59", "2026-11-30T23:59:59.123+00", "2026-11-30 24:00:00-05:30"),
    *("2026-11-30 23:59:59Z", "2026-11-30 23:59:59 BC", "2026-11-30 23:59:59.100000+0530"),
    *("0", "-1.5", "+2", "1.", ".5", "1e3", "NaN", "-Infinity", "123456.789", "1.2300", "٣", ""),
    *("a\nb", "2026-11-30\n2026-11-30", "\n", "\0", "12:00:00\n", "true", "\\xab", "longer text"),
]
_DOCUMENTS = [
    *('{"a": 1}', '{"a": 12, "a": 3}', '{"a1": 1, "a2": 2}', '[{"b": {"c": 1, "c": 2}}]', "01"),
    *(r'{"\u0061": 1, "a": 2}', r'{"b": "\u0061"}', '{"a": 1', '"b": 2}', "[1,2]", "1,2", "{}"),
    *('{"a":\n 1}', "NaN", "1.5e3", '{"a": {"a": 1}}', '{"a": "\x1e"}', "[" * 5000),
]
_cells = st.one_of(
    st.sampled_from(_ODD),
    st.from_regex(r"[-+]?[0-9]{1,4}(\.[0-9]{1,4})?", fullmatch=True),
    st.from_regex(r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,8})?", fullmatch=True),
    st.text(max_size=6),
    st.integers(-(2**20), 2**20),
    st.integers(2**53 - 2, 2**53 + 2) | st.integers(-(2**24) - 2, -(2**24) + 2),
    st.floats(),
    st.booleans(),
    st.binary(max_size=3),
)


@pytest.mark.parametrize("guard", _GUARDS, ids=str)
@given(
    cells=st.lists(st.one_of(st.none(), _cells), max_size=4)
    | st.lists(st.sampled_from(_ODD))
    | st.lists(st.sampled_from(_DOCUMENTS))
)
def test_never_laxer_than_the_guard(guard, cells):
    side = Side(cells)
    if passes(side, guard):
        for cell in cells:
            if cell is not None:
                kept = GUARDS[guard.name](cell, guard.argument, guard.second)
                # A NaN is not equal to itself.
                assert kept is cell or (kept == cell and type(kept) is type(cell))


@pytest.mark.parametrize(
    ("guard", "cells"),
    [
        (Guard("scale", 12, 2), ["0.00", "-9999999999.99", None, "7"]),
        (Guard("fraction", 6), ["2026-11-30 23:59:59.123456+00", "2026-11-30 23:59:59+00"]),
        (Guard("fraction", 3), ["23:59:59.123000", "23:59:59.1"]),
        (Guard("date"), ["2026-11-30", "0001-01-01"]),
        (Guard("time"), ["23:59:59", "00:00:00.5"]),
        (Guard("clock"), ["23:59:59", "00:00:00.5"]),
        (Guard("distinct-keys"), ['{"a1": 1}', '{"a1": 20, "a2": [{"a1": 0.5}]}', None]),
        (Guard("distinct-keys"), [r'{"a": "\""}', "null"]),
        (Guard("timestamp"), ["2026-11-30 23:59:59.5", "2026-11-30T00:00:00"]),
        (Guard("timestamptz"), ["2026-11-30 23:59:59.5+00", "2026-11-30T00:00:00Z"]),
        (Guard("calendar"), ["2026-11-30 23:59:59+00", "2026-11-30"]),
        (Guard("finite"), ["1.5", "-3"]),
        (Guard("integer", 64, 0), [2**63 - 1, -(2**63), None]),
        (Guard("nearest", 64), [2**53, -(2**53), None]),
        (Guard("nearest", 32), ["0.1", None]),
    ],
    ids=str,
)
def test_ordinary_columns_pass_as_a_whole(guard, cells):
    assert passes(Side(cells), guard)
