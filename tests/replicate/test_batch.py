"""Batches by rows and by columns, and the lines of text that databases read."""

from __future__ import annotations

import gc
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.replicate.batch import Batch, Side
from tasks.replicate.connector import Column, ColumnPlan, ColumnType, Kind, SourceError
from tasks.replicate.connectors import tabbed
from tasks.replicate.connectors.postgresql import copytext
from tasks.replicate.garbage import rarely_collected

TEXTS = st.text(alphabet="a\\\t\n\r\x1e\x1fäN", max_size=5)
CELLS = st.one_of(
    st.none(),
    TEXTS,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.binary(max_size=3),
)
COLUMN = ColumnPlan(
    Column("there", ColumnType(Kind.TEXT, "text")), Column("here", ColumnType(Kind.TEXT, "text"))
)


def copied(block: bytes) -> list[list[str | None]]:
    """Lines of COPY's text, by the rules of PostgreSQL's manual."""
    unescape = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def field(text: str) -> str | None:
        if text == "\\N":
            return None
        letters = iter(text)
        return "".join(unescape[next(letters)] if c == "\\" else c for c in letters)

    lines = block.decode().split("\n")
    assert lines.pop() == ""
    return [[field(text) for text in line.split("\t")] for line in lines]


def shown(cell: Any) -> str | None:
    """A cell as PostgreSQL takes it from text."""
    match cell:
        case None | str():
            return cell
        case bool():
            return "t" if cell else "f"
        case bytes():
            return f"\\x{cell.hex()}"
        case float():
            words = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
            return words.get(repr(cell), repr(cell))
    return str(cell)


@given(
    rows=st.lists(st.tuples(CELLS, CELLS)) | st.lists(st.tuples(TEXTS, st.floats())),
    size=st.sampled_from([0, 1, 10**6]),
)
def test_copy_reads_any_cells_as_they_are(rows, size):
    batch = Batch(rows, len(rows), size)
    found = [line for block in copytext.blocks(batch, [COLUMN] * 2) for line in copied(block)]
    assert found == [[shown(cell) for cell in row] for row in rows]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("a\0", "column there: a value holds a NUL character"),
        ("\ud800", "column there: a text is not valid Unicode"),
        (date(2026, 11, 30), "column there: .* Python's type date, which is none of a cell's"),
    ],
)
@pytest.mark.parametrize("beside", [None, "x", 1])
def test_what_no_text_holds_is_refused_by_column(cell, says, beside):
    batch = Batch([(beside,), (cell,)], 2, 10)
    with pytest.raises(SourceError, match=says) as caught:
        list(copytext.blocks(batch, [COLUMN]))
    assert caught.value.permanent
    assert "2026" not in str(caught.value)


@given(values=st.lists(CELLS))
def test_a_side_knows_its_values(values):
    side = Side(values)
    assert list(side.present) == [value for value in values if value is not None]
    assert side.kinds == {type(value) for value in side.present}
    if side.kinds <= {str}:
        assert side.joined == "\x1e".join(side.present)


@given(rows=st.lists(st.tuples(CELLS, st.integers(), st.text()), min_size=1))
def test_rows_and_columns_are_one_batch(rows):
    columns = [list(side) for side in zip(*rows, strict=True)]
    batch = Batch(rows, len(rows), 1)
    assert [list(side.values) for side in batch.sides] == columns
    assert Batch.of_columns(columns, len(rows), 1).data == rows
    changed = batch.with_sides({1: Side(columns[2])})
    assert changed.data == [(first, text, text) for first, _, text in rows]
    assert (batch.data, changed.rows) == (rows, len(rows))


def test_fetched_rows_are_converted_but_for_null():
    rows = [(1, "a"), (None, "b")]
    batch = Batch.of_rows(rows, {0: str})
    assert batch.data == [("1", "a"), (None, "b")]
    assert Batch.of_rows(rows).data == rows
    assert Batch.of_rows(rows * 50).size > 10 * batch.size > 0


def test_lines_come_a_few_at_a_time():
    fields = [["a", "b", "c"], ["1", "2", "3"]]
    assert list(tabbed.lines(fields, 2)) == [b"a\t1\nb\t2\n", b"c\t3\n"]


def test_garbage_is_searched_as_before_once_no_rows_pass():
    before = gc.get_threshold()
    one, two = rarely_collected(), rarely_collected()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] > before[0]
    two.__exit__(None, None, None)
    assert gc.get_threshold() == before


@given(
    lengths=st.lists(st.sampled_from([0, 1, 10**5, 3 * 10**6]), max_size=12),
    size=st.sampled_from([0, 1, 10**8]),
)
def test_a_large_batch_is_looked_at_in_shares_whatever_it_says_of_its_size(lengths, size):
    rows = [(number, "x" * length) for number, length in enumerate(lengths)]
    shares = list(Batch(rows, len(rows), size).shares())
    assert [row for share in shares for row in share.data] == rows
    assert sum(share.rows for share in shares) == len(rows)
    assert all(share.rows <= 1 or share.weight <= 2**21 for share in shares)
    # Small rows stay together: at each level only what weighs over 2 MB is halved.
    levels = max(len(rows) - 1, 0).bit_length()
    assert len(shares) <= 1 + levels * (Batch(rows, len(rows), size).weight // 2**21)


def test_the_weight_is_that_of_the_values():
    rows = [(1, "abc", None, b"xy", 1.5), (None, "", "four", None, True)]
    assert Batch.of_rows(rows).size == 16 + (4 + 1) + (8 + 5) + (3 + 8) + 16


def test_a_collector_that_is_off_stays_off():
    before = gc.get_threshold()
    try:
        for often, meanwhile in ((0, 0), (10**6, 10**6)):
            gc.set_threshold(often)
            with rarely_collected():
                assert gc.get_threshold()[0] == meanwhile
            assert gc.get_threshold()[0] == often
    finally:
        gc.set_threshold(*before)
