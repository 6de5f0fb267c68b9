"""Numbers of any size and form: as they are in the sink, or refused, for little work."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure
from tasks.replicate.checksum import canonical
from tasks.replicate.connector import Cell, ColumnType, Kind
from tasks.replicate.fits import fit
from tasks.replicate.guards import GUARDS, MOST_FIGURES


@pytest.mark.parametrize("cell", ["1e5000", "-1e5000", "1e99999999", f"1e{MOST_FIGURES}"])
@pytest.mark.parametrize("bits", [None, 64])
def test_no_number_is_written_out_of_a_long_exponent(cell: str, bits: int | None) -> None:
    """An integer of as many figures would keep every other thread waiting, heartbeats too."""
    with pytest.raises(ValueError, match="figures"):
        GUARDS["integer"](cell, bits, 0)


@pytest.mark.parametrize(
    ("cell", "found"),
    [("0e99999999", 0), ("0e-99999999", 0), ("1e3", 1000), ("2.0", 2), ("-1e18", -(10**18))],
)
def test_a_short_whole_number_of_any_form_arrives(cell: str, found: int) -> None:
    assert GUARDS["integer"](cell, 64, 0) == found


def test_a_checksum_writes_no_long_exponent_out() -> None:
    assert len(canonical("1e99999999", Kind.DECIMAL)) < 100
    assert canonical("-120e999999", Kind.DECIMAL) == canonical("-12.0e1000000", Kind.DECIMAL)
    assert canonical("12e999999", Kind.DECIMAL) != canonical("12e999998", Kind.DECIMAL)
    assert canonical("0e999999", Kind.DECIMAL) == canonical("0", Kind.DECIMAL)


@pytest.mark.parametrize("cell", ["12345", 12345, "12300.5", "1", "12345678"])
def test_a_scale_before_the_point_refuses_what_it_would_round(cell: Cell) -> None:
    with pytest.raises(ValueError, match="digits"):
        GUARDS["scale"](cell, 5, -2)


@pytest.mark.parametrize("cell", ["12300", 12300, "1.23e4", "0", "0.00", 0, "-9999900"])
def test_a_scale_before_the_point_takes_what_it_holds(cell: Cell) -> None:
    assert GUARDS["scale"](cell, 5, -2) == cell


def test_a_small_integer_is_guarded_too_before_a_scale_before_the_point() -> None:
    sink = ColumnType(Kind.DECIMAL, "numeric(5,-2)", precision=5, scale=-2)
    assert fit(ColumnType(Kind.INTEGER, "smallint", bits=16), sink).guards


@pytest.mark.parametrize(("cell", "bits"), [("1e-50", 32), ("1e-400", 64), ("-1e-400", 32)])
def test_text_nearer_to_zero_than_any_float_is_refused(cell: str, bits: int) -> None:
    with pytest.raises(ValueError, match="nearer to 0"):
        GUARDS["real"](cell, bits, None)


def test_zero_as_text_becomes_a_number_that_the_sink_can_look_at() -> None:
    for bits in (32, 64):
        assert repr(GUARDS["real"]("-0.0", bits, None)) == "-0.0"
        assert repr(GUARDS["real"]("0e-999", bits, None)) == "0.0"


def test_the_refusal_of_what_is_no_number_does_not_show_it() -> None:
    with pytest.raises(ValueError, match=r"^is no number$"):
        GUARDS["real"]("secret", 64, None)


def _job(sink: Database, connector: str, config: dict[str, str]) -> Job:
    reads, writes = {"table": "t"}, {"table": "public.t"}
    return Job(
        config, sink.config, definition(reads, writes, "complete"), (connector, "postgresql")
    )


NEAR = [
    ("double precision", 2**53 + 1),
    ("double precision", -(2**53) - 1),
    ("real", 2**24 + 1),
]


@pytest.mark.parametrize(("kind", "number"), NEAR)
def test_whole_numbers_beyond_a_float_are_refused(
    tmp_path: Path, sink: Database, kind: str, number: int
) -> None:
    sink.execute(f"create table t (x {kind})")
    for job in _jobs(tmp_path, sink, number):
        with pytest.raises(HandlerFailure, match=r"column x: .*round"):
            job.run()
    assert sink.value("select count(*) from t") == 0


@pytest.mark.parametrize(("kind", "number"), [("double precision", 2**53), ("real", 2**24)])
def test_whole_numbers_within_a_float_arrive(
    tmp_path: Path, sink: Database, kind: str, number: int
) -> None:
    sink.execute(f"create table t (x {kind})")
    for job in _jobs(tmp_path, sink, number):
        job.run()
        assert sink.value("select x::float8 from t") == number


def _jobs(folder: Path, sink: Database, number: int) -> list[Job]:
    (folder / "t.jsonl").write_text(f'{{"x": {number}}}\n')
    path = folder / "t.db"
    connection = sqlite3.connect(path)
    connection.execute("create table t (x)")
    connection.execute("insert into t values (?)", (number,))
    connection.commit()
    connection.close()
    return [
        _job(sink, "file", {"path": str(folder), "format": "jsonl"}),
        _job(sink, "sqlite", {"url": f"sqlite:///{path}"}),
    ]
