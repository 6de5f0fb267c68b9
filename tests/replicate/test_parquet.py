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
from replication_kit import Database, Job, definition

from tasks.replicate.connector import (
    Batch,
    Lane,
    Load,
    Row,
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


def loaded(folder: Path, table: pa.Table, sink: Database, column: str) -> list[Any]:
    """The table's one column ``a`` in PostgreSQL, as text."""
    pq.write_table(table, folder / "t.parquet")
    sink.execute(f"drop table if exists t; create table t (a {column})")
    config = {"path": str(folder), "format": "parquet"}
    task = definition({"table": "t"}, {"table": "public.t"}, "complete")
    outcome = Job(config, sink.config, task, connectors=("file", "postgresql")).run()
    assert outcome.result["lane"] == "copy-binary"
    return [row[0] for row in sink.execute("select a::text from t order by a")]


# From 1970, in days and microseconds. Its last timestamp is beyond 64 bits counted from there.
FIRST_DAY, LAST_DAY = -2_440_588, 2_145_042_905
FIRST_MOMENT = -210_866_803_200_000_000


@pytest.mark.parametrize(
    "number", [-(2**31), -2147472692, -2147472691, FIRST_DAY - 1, LAST_DAY + 1]
)
def test_a_date_beyond_postgresqls_calendar_is_refused_by_column(tmp_path, sink, number):
    table = pa.table({"a": pa.array([0, number, None], pa.int32()).cast(pa.date32())})
    with pytest.raises(SourceError, match="column a: a value is no date"):
        loaded(tmp_path, table, sink, "date")


@pytest.mark.parametrize("zone", [None, "UTC"])
@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1000, FIRST_MOMENT - 1])
def test_a_moment_beyond_postgresqls_calendar_is_refused_by_column(tmp_path, sink, number, zone):
    kind = pa.timestamp("us", zone)
    table = pa.table({"a": pa.array([0, number, None], pa.int64()).cast(kind)})
    with pytest.raises(SourceError, match="column a: a value is no timestamp"):
        loaded(tmp_path, table, sink, "timestamptz" if zone else "timestamp")


def test_the_ends_of_postgresqls_calendar_arrive(tmp_path, sink):
    days = pa.array([FIRST_DAY, LAST_DAY, None], pa.int32()).cast(pa.date32())
    assert loaded(tmp_path, pa.table({"a": days}), sink, "date") == [
        "4714-11-24 BC",
        "5874897-12-31",
        None,
    ]
    moments = pa.array([FIRST_MOMENT, 2**63 - 1, None], pa.int64()).cast(pa.timestamp("us"))
    assert set(loaded(tmp_path, pa.table({"a": moments}), sink, "timestamp")) == {
        "4714-11-24 00:00:00 BC",
        "294247-01-10 04:00:54.775807",
        None,
    }


def test_years_without_a_text_are_refused_and_years_before_christ_are_not(tmp_path):
    config = {"path": str(tmp_path), "format": "parquet"}
    days = pa.array([-735_160, -719_163, None], pa.int32()).cast(pa.date32())
    moments = pa.array([-62_135_596_800_000_001, 0, None], pa.int64()).cast(
        pa.timestamp("us", "UTC")
    )
    pq.write_table(pa.table({"a": days, "b": moments}), tmp_path / "t.parquet")
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == [
            ("0044-03-15 BC", "0001-12-31 23:59:59.999999+00 BC"),
            ("0001-12-31 BC", "1970-01-01 00:00:00.000000+00"),
            (None, None),
        ]
    far = pa.array([-(2**63)], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(pa.table({"a": far}), tmp_path / "t.parquet")
    with (
        Files().source(config) as source,
        pytest.raises(SourceError, match="column a: a time is beyond"),
    ):
        read_all(source, request_for(source, "t"))


@pytest.mark.parametrize(
    "text",
    ["  " + "0" * 30, "0" * 31, "0" * 33, "g" * 32, "0-" * 16 + "0" * 16, "", "1" * 32 + "\n"],
)
def test_a_text_that_is_no_uuid_is_refused_by_column(tmp_path, sink, text):
    table = pa.table({"a": ["1" * 32, text, None]})
    with pytest.raises(SourceError, match="column a: a value is no uuid"):
        loaded(tmp_path, table, sink, "uuid")


def test_uuids_arrive_with_and_without_hyphens(tmp_path, sink):
    table = pa.table({"a": ["1" * 32, "A0EEBC99-9C0B-4ef8-bb6d-6bb9bd380a11", None]})
    assert loaded(tmp_path, table, sink, "uuid") == [
        "11111111-1111-1111-1111-111111111111",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        None,
    ]


KEPT = pa.schema(
    [
        pa.field("ms", pa.timestamp("ms")),
        pa.field("ns", pa.timestamp("ns", "Europe/Madrid")),
        pa.field("clock", pa.time32("ms")),
        pa.field("fine", pa.time64("ns")),
        pa.field("word", pa.dictionary(pa.int8(), pa.string(), ordered=True)),
        pa.field("half", pa.float16()),
        pa.field("view", pa.string_view()),
        pa.field("large", pa.large_string()),
        pa.field("wide", pa.large_binary()),
        pa.field("fixed", pa.binary(2)),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("must", pa.int32(), nullable=False, metadata={"unit": "metre"}),
    ],
    metadata={"owner": "us"},
)
KEPT_ROW: Row = (
    "2026-11-01 10:00:00.500",
    "2026-11-01 10:00:00.123456789+00",
    "23:59:59.123",
    "23:59:59.123456789",
    "a",
    1.5,
    "b",
    "c",
    b"d",
    b"ef",
    "1.50",
    7,
)


def test_an_existing_file_keeps_its_schema_and_metadata(tmp_path):
    """Also where its columns are not those that a new file would have."""
    path = tmp_path / "t.parquet"
    pq.write_table(KEPT.empty_table(), path)
    config = {"path": str(tmp_path), "format": "parquet"}
    load = load_of(config, "t")
    rows = [KEPT_ROW, (*(None,) * 11, 8)]
    with Files().sink(config) as sink:
        assert all(sink.fit(c.source, c.sink, "file").refusal is None for c in load.columns)
    write(config, load, batches(rows))
    found = pq.ParquetFile(path).schema_arrow
    assert found.equals(KEPT, check_metadata=False)
    assert found.metadata == KEPT.metadata
    assert found.field("must").metadata[b"unit"] == b"metre"
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == rows
    with Files().sink(config) as sink:
        sink.begin(replace(load, fence=2))
        sink.truncate(replace(load, fence=2))
        sink.commit()
    assert pq.ParquetFile(path).schema_arrow.equals(KEPT, check_metadata=False)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("ms", "2026-11-01 10:00:00.5001"),
        ("ns", "3000-01-01 00:00:00+00"),
        ("clock", "23:59:59.1234"),
        ("half", 0.1),
        ("fixed", b"x"),
        ("price", "1.234"),
        ("must", None),
    ],
)
def test_what_the_existing_file_cannot_hold_is_refused_by_column(tmp_path, column, cell):
    pq.write_table(KEPT.empty_table(), tmp_path / "t.parquet")
    config = {"path": str(tmp_path), "format": "parquet"}
    row = list(KEPT_ROW)
    row[KEPT.get_field_index(column)] = cell
    with pytest.raises(SinkError, match=f"column {column}: a value "):
        write(config, load_of(config, "t"), batches([tuple(row)]))


FROM_CSV = pa.schema(
    [
        pa.field("ms", pa.timestamp("ms")),
        pa.field("ns", pa.timestamp("ns", "Europe/Madrid")),
        pa.field("word", pa.dictionary(pa.int8(), pa.string())),
        pa.field("view", pa.string_view()),
        pa.field("large", pa.large_string()),
        pa.field("must", pa.int32(), nullable=False),
    ]
)


def test_the_byte_lane_keeps_the_existing_schema_too(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(FROM_CSV.empty_table(), path)
    config = {"path": str(tmp_path), "format": "parquet"}
    load = replace(load_of(config, "t"), lane=Lane.COPY_CSV)
    line = b'2026-11-01 10:00:00.5,2026-11-01 10:00:00.123456+00,a,b,"",7\n,,,,,8\n'
    write(config, load, [Batch(line, 2, len(line))])
    assert pq.ParquetFile(path).schema_arrow.equals(FROM_CSV)
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == [
            ("2026-11-01 10:00:00.500", "2026-11-01 10:00:00.123456000+00", "a", "b", "", 7),
            (*(None,) * 5, 8),
        ]
    for column, bad in (
        ("ms", b"2026-11-01 10:00:00.1234,,,,,1\n"),
        ("ns", b",3000-01-01 00:00:00+00,,,,1\n"),
        ("must", b"2026-11-01 10:00:00,,,,,\n"),
    ):
        with pytest.raises(SinkError, match=f"column {column}: a value "):
            write(config, replace(load, fence=9), [Batch(bad, 1, len(bad))])


@pytest.mark.parametrize(("index", "most"), [(pa.int8(), 128), (pa.uint8(), 256)])
def test_a_dictionary_has_as_many_values_as_it_has_numbers(tmp_path, index, most):
    """Another file could be written and never be read."""
    schema = pa.schema([pa.field("a", pa.dictionary(index, pa.string()))])
    pq.write_table(schema.empty_table(), tmp_path / "t.parquet")
    config = {"path": str(tmp_path), "format": "parquet"}
    load = load_of(config, "t")
    rows: list[Row] = [(f"word {i % most}",) for i in range(500)]
    write(config, load, batches(rows, 100))
    assert pq.read_table(tmp_path / "t.parquet")["a"].to_pylist() == [row[0] for row in rows]
    with pytest.raises(SinkError, match="column a: holds more different values than dictionary"):
        write(config, replace(load, fence=2), batches([*rows, ("more",)], 100))


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.field("element", pa.int64())), pa.duration("us"), pa.uuid()]
)
def test_a_column_that_is_not_written_is_refused_or_stays_null(tmp_path, kind):
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("a", kind)])
    pq.write_table(schema.empty_table(), tmp_path / "t.parquet")
    config = {"path": str(tmp_path), "format": "parquet"}
    load = load_of(config, "t")
    with Files().sink(config) as sink:
        for plan in load.columns[1:]:
            refusal = sink.fit(plan.source, plan.sink, "file").refusal
            assert refusal is not None
            assert f"{kind} is not written" in refusal
    write(config, replace(load, columns=load.columns[:1]), batches([(1,)]))
    found = pq.read_table(tmp_path / "t.parquet")
    assert found.schema.equals(schema)
    assert found.to_pylist() == [{"id": 1, "a": None}]


def test_what_has_no_type_there_is_refused_with_the_way_out(source: Database, tmp_path: Path):
    source.execute("create type mood as enum ('sad')")
    source.execute("create table t (id int primary key, m mood, a int[])")
    source.execute("insert into t values (1, 'sad', '{1,2}')")
    folder = {"path": str(tmp_path), "format": "parquet"}

    def job(reads: dict[str, Any]) -> Job:
        work = definition(reads, {"table": "t"}, "complete", create=True, verify="checksum")
        return Job(source.config, folder, work, ("postgresql", "file"))

    with pytest.raises(SinkError) as caught:
        job({"table": "t"}).run()
    way = "has no type of its own in a Parquet file; write its text, by a query with"
    assert f"column m: mood {way} cast(m as text) as m" in str(caught.value)
    assert f"column a: integer[] {way} cast(a as text) as a" in str(caught.value)
    job({"query": "select id, cast(m as text) as m, cast(a as text) as a from t"}).run()
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == [
        {"id": 1, "m": "sad", "a": "{1,2}"}
    ]
