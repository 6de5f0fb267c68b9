"""Parquet: types, and whole columns to and from COPY."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conformance import (
    batches,
    read_all,
    request_for,
)
from files_kit import (
    FolderHarness,
    load_of,
    write,
)

from tasks.replicate.connector import (
    Batch,
    Lane,
    Load,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.file import Files


def parquet_load(folder: Path, columns: Mapping[str, str]) -> tuple[dict[str, Any], Load]:
    harness = FolderHarness(folder, "parquet")
    harness.make("t", columns)
    return dict(harness.config), load_of(harness.config, "t")


@pytest.mark.parametrize(
    ("native", "cell"),
    [
        ("int8", 128),
        ("uint64", -1),
        ("uint64", 2**64),
        ("float32", 0.1),
        ("decimal128(12,2)", "1.234"),
        ("decimal128(12,2)", "12345678901.0"),
        ("decimal128(12,2)", "NaN"),
        ("date32", "2026-02-30"),
        ("date32", "infinity"),
        ("timestamp[us]", "2026-01-01 00:00:00.1234567"),
        ("timestamp[us]", "0044-03-15 00:00:00 BC"),
        ("timestamp[us,UTC]", "2026-01-01 00:00:00+02"),
        ("time64[us]", "24:00:00"),
        ("string", "\ud800"),
        ("bool", "secret"),
    ],
)
def test_a_value_that_arrow_would_change_is_refused_by_column(tmp_path, native, cell):
    config, load = parquet_load(tmp_path, {"my col": native})
    with pytest.raises(SinkError, match="column my col: ") as caught:
        write(config, load, batches([(cell,)]))
    assert "secret" not in str(caught.value)


def test_nanoseconds_are_not_cut(tmp_path):
    nanoseconds = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))
    pq.write_table(pa.table({"t": nanoseconds}), tmp_path / "t.parquet")
    with Files().source({"path": str(tmp_path), "format": "parquet"}) as source:
        request = request_for(source, "t")
        assert request.columns[0].source.type.precision == 9
        assert read_all(source, request) == [("2023-11-14 22:13:20.123456789",)]


def test_other_peoples_types_are_read_or_refused(tmp_path):
    table = pa.table(
        {
            "dict": pa.array(["a", "b", "a"]).dictionary_encode(),
            "list": pa.array([[1, None], [], None]),
            "struct": pa.array([{"x": 1.5}, None, {"x": None}]),
            "half": pa.array([1.5, None, 0.5], pa.float16()),
            "day": pa.array([0, None, 86_400_000], pa.date64()),
            "zoned": pa.array([0, None, 1], pa.timestamp("s", tz="Europe/Madrid")),
            "nothing": pa.nulls(3),
            "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    with Files().source({"path": str(tmp_path), "format": "parquet"}) as source:
        found = read_all(source, request_for(source, "t"))
    assert found[0] == (
        (
            "a",
            "[1, null]",
            '{"x": 1.5}',
            1.5,
            "1970-01-01",
            "1970-01-01 00:00:00.000+00",
            None,
            b"ab",
        )
    )
    assert found[1][1:] == ("[]", None, None, None, None, None, None)
    pq.write_table(pa.table({"d": pa.array([1000], pa.duration("us"))}), tmp_path / "t.parquet")
    with (
        Files().source({"path": str(tmp_path), "format": "parquet"}) as source,
        pytest.raises(SourceError, match="column d: "),
    ):
        read_all(source, request_for(source, "t"))


CSV_COLUMNS = {
    "i": "int64",
    "b": "bool",
    "f": "float64",
    "d": "decimal128(12,2)",
    "s": "string",
    "day": "date32",
    "wall": "timestamp[us]",
    "at": "timestamp[us,UTC]",
}
CSV_LINE = (
    '1,t,0.1,-2.50,"a ""b""\n,c",2026-11-01,2026-11-01 10:00:00.5,2026-11-01 10:00:00.123456+00'
)


def test_the_byte_lane_is_read_by_whole_columns(tmp_path):
    config, load = parquet_load(tmp_path, CSV_COLUMNS)
    load = replace(load, lane=Lane.COPY_CSV)
    last = '2,f,NaN,0.00,"",0001-01-01,0001-01-01 00:00:00,1969-12-31 23:59:59+00'
    data = f"{CSV_LINE}\n,,,,,,,\n{last}\n".encode()
    blocks = [Batch(data[i : i + 7], 0, 7) for i in range(0, len(data), 7)]
    with Files().sink(config) as sink:
        sink.begin(load)
        assert sink.write(load, blocks, staging=False) == 3
        sink.commit()
    found = FolderHarness(tmp_path, "parquet").rows("t")
    assert found[0] == (
        1,
        True,
        0.1,
        "-2.50",
        'a "b"\n,c',
        "2026-11-01",
        "2026-11-01 10:00:00.500000",
        "2026-11-01 10:00:00.123456+00",
    )
    assert found[1] == (None,) * 8
    assert found[2][4] == ""


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("i", "9223372036854775808"),
        ("i", "1.0"),
        ("b", "maybe"),
        ("d", "1.234"),
        ("d", "99999999999.00"),
        ("d", "NaN"),
        ("day", "infinity"),
        ("day", "0044-03-15 BC"),
        ("day", "10000-01-01"),
        ("wall", "-infinity"),
        ("at", "294276-12-31 23:59:59.999999+00"),
    ],
)
def test_what_the_byte_lane_cannot_hold_is_refused_by_column(tmp_path, column, text):
    config, load = parquet_load(tmp_path, {column: CSV_COLUMNS[column]})
    load = replace(load, lane=Lane.COPY_CSV)
    with pytest.raises(SinkError, match=f"column {column}: a value cannot be stored"):
        write(config, load, [Batch(f"{text}\n".encode(), 1, 1)])


def test_row_groups_are_filled_and_memory_is_bounded(tmp_path, monkeypatch):
    from tasks.replicate.connectors.file import parquet_format

    monkeypatch.setattr(parquet_format, "GROUP_ROWS", 1000)
    config, load = parquet_load(tmp_path, {"id": "int64"})
    write(config, load, batches([(i,) for i in range(2500)], 300))
    metadata = pq.read_metadata(tmp_path / "t.parquet")
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(groups) == 2500
    assert max(groups) < 1300
