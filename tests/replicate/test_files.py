"""CSV, JSON lines and Parquet as source and sink: the suite, and what is their own."""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conformance import (
    Harness,
    Sample,
    SinkConformance,
    SourceConformance,
    batches,
    identity_plan,
    read_all,
    request_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.replicate.connector import (
    Batch,
    Column,
    ColumnPlan,
    ColumnType,
    Fenced,
    Guard,
    Kind,
    Lane,
    Load,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.file import Files
from tasks.replicate.connectors.file.places import Place
from tasks.replicate.names import split_name

WORDS = ("", "007", 'say "hi", he\nsaid\r\n', None, "ünï \U0001f600", "NULL", " x ", "\\.", "\\N")
TEXT_SAMPLES = (Sample("words", "text", Kind.TEXT, WORDS),)
PARQUET_SAMPLES = (
    Sample("tiny", "int8", Kind.INTEGER, (127, -128, None)),
    Sample("big", "int64", Kind.INTEGER, (2**63 - 1, -(2**63), None)),
    Sample("huge", "uint64", Kind.INTEGER, (2**64 - 1, 0, None)),
    Sample("flag", "bool", Kind.BOOLEAN, (True, False, None)),
    Sample("single", "float32", Kind.FLOAT, (0.10000000149011612, float("inf"), None)),
    Sample("twice", "float64", Kind.FLOAT, (0.1, float("nan"), None)),
    Sample("price", "decimal128(12,2)", Kind.DECIMAL, ("-9999999999.99", "0.10", None)),
    Sample("exact", "decimal256(60,30)", Kind.DECIMAL, ("9" * 30 + "." + "1" * 30, None, None)),
    Sample("words", "string", Kind.TEXT, ("", "nul\0 \U0001f600", None)),
    Sample("octets", "binary", Kind.BYTES, (b"", bytes(range(256)), None)),
    Sample("day", "date32", Kind.DATE, ("0001-01-01", "9999-12-31", None)),
    Sample("clock", "time64[us]", Kind.TIME, ("23:59:59.123456", "00:00:00.000000", None)),
    Sample(
        "wall",
        "timestamp[us]",
        Kind.TIMESTAMP,
        ("2026-11-01 23:59:59.123456", "0001-01-01 00:00:00.000000", None),
    ),
    Sample(
        "moment",
        "timestamp[us,UTC]",
        Kind.TIMESTAMPTZ,
        ("9999-12-31 23:59:59.999999+00", "1969-12-31 23:59:59.500000+00", None),
    ),
    Sample("ident", "uuid", Kind.UUID, ("00000000-0000-0000-0000-000000000000", None, None)),
    Sample("doc", "json", Kind.JSON, ('{"a": 1.10}', "17", None)),
)

ARROW = {
    "int8": pa.int8(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "bool": pa.bool_(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "decimal128(12,2)": pa.decimal128(12, 2),
    "decimal256(60,30)": pa.decimal256(60, 30),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "time64[us]": pa.time64("us"),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[us,UTC]": pa.timestamp("us", tz="UTC"),
    "uuid": pa.string(),
    "json": pa.string(),
}
TEXTUAL = ("decimal", "date", "time")


class FolderHarness(Harness):
    """A folder of files of one format."""

    connector = Files()
    key_type = "int64"
    text_type = "string"
    awkward_names = (*Harness.awkward_names, "semi;colon -- #", "per 100%", "tab\tbed")

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.folder = folder
        self.kind = kind
        self.config: Mapping[str, Any] = {"path": str(folder), "format": kind, **options}
        self.samples = PARQUET_SAMPLES if kind == "parquet" else TEXT_SAMPLES
        self.key_type = "int64" if kind == "parquet" else "text"

    def path(self, table: str) -> Path:
        return self.folder / f"{split_name(table)[-1]}.{self.kind}"

    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        path = self.folder / f"{table}.{self.kind}"
        names = list(columns)
        if self.kind == "csv":
            path.write_text(written_csv([tuple(names), *rows]), newline="")
        elif self.kind == "jsonl":
            lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
            path.write_text("".join(line + "\n" for line in lines))
        else:
            fields = [
                pa.field(
                    n, ARROW[t], metadata={"claimcheck.kind": t} if t in ("uuid", "json") else {}
                )
                for n, t in columns.items()
            ]
            sides = list(zip(*rows, strict=True)) or [()] * len(fields)
            made = [array(side, field) for side, field in zip(sides, fields, strict=True)]
            pq.write_table(pa.Table.from_arrays(made, schema=pa.schema(fields)), path)
        return '"' + table.replace('"', '""') + '"'

    def rows(self, table: str) -> list[Row]:
        path = self.path(table)
        if self.kind == "csv":
            found = read_csv(path.read_bytes().decode())[1:]
            return [tuple(row) for row in found]
        if self.kind == "jsonl":
            return [tuple(json.loads(line).values()) for line in path.read_text().splitlines()]
        table_ = pq.read_table(path)
        sides = [
            cells(table_[name], table_.schema.field(name).type) for name in table_.schema.names
        ]
        return list(zip(*sides, strict=True))


def array(side: Sequence[Any], field: pa.Field) -> pa.Array:
    if str(field.type).startswith(TEXTUAL):
        bare = [v[:-3] if isinstance(v, str) and v.endswith("+00") else v for v in side]
        wall = pa.timestamp("us") if pa.types.is_timestamp(field.type) else field.type
        if pa.types.is_time(field.type):
            bare, wall = [v and f"1970-01-01 {v}" for v in bare], pa.timestamp("us")
        return pa.array(bare, pa.string()).cast(wall).cast(field.type)
    return pa.array(side, field.type)


def cells(column: Any, kind: pa.DataType) -> list[Any]:
    if pa.types.is_timestamp(kind):
        text = column.cast(pa.timestamp("us")).cast(pa.string()).to_pylist()
        return [v + "+00" if v and kind.tz else v for v in text]
    if str(kind).startswith(TEXTUAL):
        return column.cast(pa.string()).to_pylist()
    return column.to_pylist()


def written_csv(rows: Sequence[Row]) -> str:
    """CSV by the plainest rule: NULL is nothing, and every text is quoted."""
    return "".join(
        ",".join("" if cell is None else '"' + str(cell).replace('"', '""') + '"' for cell in row)
        + "\n"
        for row in rows
    )


def read_csv(text: str) -> list[list[str | None]]:
    """CSV letter by letter."""
    rows: list[list[str | None]] = []
    row: list[str | None] = []
    field, quoted, inside = "", False, False
    position = 0
    while position < len(text):
        char = text[position]
        if inside:
            if char == '"' and text[position + 1 : position + 2] == '"':
                field += '"'
                position += 1
            elif char == '"':
                inside = False
            else:
                field += char
        elif char == '"':
            inside = quoted = True
        elif char in ",\n":
            row.append(field if field or quoted else None)
            field, quoted = "", False
            if char == "\n":
                rows.append(row)
                row = []
        else:
            field += char
        position += 1
    return rows


class TextSource(SourceConformance):
    """Text files hand out every cell as text, so keys are text."""

    kind = "csv"

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FolderHarness(tmp_path, self.kind)

    def test_every_kind_arrives_as_the_cells_of_the_interface(self, harness: Harness) -> None:
        rows = [(str(i), word) for i, word in enumerate(WORDS)]
        table = harness.make("kinds", {"id": "text", "words": "text"}, rows)
        with harness.connector.source(harness.config) as source:
            assert read_all(source, request_for(source, table)) == rows

    def test_awkward_names_work_as_they_are(self, harness: Harness) -> None:
        for name in harness.awkward_names:
            table = harness.make(f"t {name}", {"id": "text", name: "text"}, [("1", "a")])
            with harness.connector.source(harness.config) as source:
                request = request_for(source, table)
                assert read_all(source, request) == [("1", "a")]
                assert source.count(request) == 1

    def test_batches_hold_no_more_rows_than_the_fetch_size(self, harness: Harness) -> None:
        table = harness.make("many", {"id": "text"}, [(str(i),) for i in range(1000)])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table, fetch_size=300)
            sizes = [batch.rows for batch in source.read(request, Part(0), Lane.ROWS)]
        assert sum(sizes) == 1000
        assert max(sizes) <= 300


class TestCSVSource(TextSource):
    kind = "csv"


class TestJSONLinesSource(TextSource):
    kind = "jsonl"

    def test_an_empty_table_yields_no_row(self, harness: Harness) -> None:
        """Its columns are not known, so it is refused."""
        harness.make("empty", {"id": "text"})
        with (
            harness.connector.source(harness.config) as source,
            pytest.raises(SourceError, match="holds no object"),
        ):
            source.describe(ReadRequest(table=("empty",)))


class TestParquetSource(SourceConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FolderHarness(tmp_path, "parquet")


class TestCSVSink(SinkConformance):
    """Everything is text there, and so are the keys of these tests."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FolderHarness(tmp_path, "csv")

    def test_every_kind_is_stored_as_it_is(self, harness: Harness) -> None:
        table = harness.make("kinds", {"id": "text", "words": "text"})
        rows: list[Row] = [(str(i), word) for i, word in enumerate(WORDS)]
        self.complete(harness, table, rows)
        assert harness.rows(table) == rows

    def test_awkward_names_work_as_they_are(self, harness: Harness) -> None:
        for name in harness.awkward_names:
            table = harness.make(f"t {name}", {"id": "text", name: "text"}, [("1", "old")])
            self.complete(harness, table, [("2", "new")])
            assert harness.rows(table) == [("2", "new")]

    def test_complete_atomic_leaves_the_new_content(self, harness: Harness) -> None:
        table = harness.make("people", {"id": "text", "name": "text"}, [("1", "a")])
        new: list[Row] = [("2", "b"), ("4", None)]
        self.staged(harness, table, new, mode="complete-atomic", how="rename")
        assert harness.rows(table) == new


class TestParquetSink(SinkConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FolderHarness(tmp_path, "parquet")


class FilledJSONHarness(FolderHarness):
    """A file of JSON lines tells its columns only by its rows, so an empty one gets a row."""

    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        return super().make(table, columns, rows or [tuple("0" for _ in columns)], key)


class TestJSONLinesSink(SinkConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FilledJSONHarness(tmp_path, "jsonl")


# --- CSV ----------------------------------------------------------------------------------------


def source_rows(folder: Path, text: bytes, **options: Any) -> list[Row]:
    (folder / "t.csv").write_bytes(text)
    config = {"path": str(folder), "format": "csv", **options}
    with Files().source(config) as source:
        return read_all(source, request_for(source, "t"))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (b'a,b\n1,\n,""\n', [("1", None), (None, "")]),
        (b'a,b\n"","x""y"\n', [("", 'x"y')]),
        (b'a,b\n"1\n2","3\r\n4"\n', [("1\n2", "3\r\n4")]),
        (b"a,b\r\n1,2\r\n3,\r\n", [("1", "2"), ("3", None)]),
        (b'a,b\r\n"x\r\ny",2\r\n"",""\r\n', [("x\r\ny", "2"), ("", "")]),
        (b"a,b\n1,2", [("1", "2")]),
        (b"\xef\xbb\xbfa,b\n1,2\n", [("1", "2")]),
        (b'a\n\n""\nx\n', [(None,), ("",), ("x",)]),
        (b'a,b\n"x,"",y",\n', [('x,",y', None)]),
        (b'"a",b\n"x","y"\n', [("x", "y")]),
    ],
)
def test_null_and_nothing_stay_two_values(tmp_path, text, rows):
    assert source_rows(tmp_path, text) == rows


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'a,b\n5" disk,6" disk\n', "malformed"),
        (b'a,b\n"x"y,2\n', "malformed"),
        (b'a,b\n"x,2\n', "inside a quoted field"),
        (b"a,b\n1,2,3\n", "a record has 3 fields, and the file 2 columns"),
        (b"a,b\n1,2\n\n", "a record has 1 fields"),
        (b"a,b\n1\r2,3\n", "carriage return"),
        (b"a,b\n\xff\xfe,1\n", "not all UTF-8"),
        (b"a,a\n1,2\n", "names a twice"),
        (b"a,\n1,2\n", "column 2 has no name"),
        (b"", "is empty"),
    ],
)
def test_a_malformed_file_is_refused_and_no_data_is_told(tmp_path, text, says):
    with pytest.raises(SourceError, match=says) as caught:
        source_rows(tmp_path, text)
    assert caught.value.permanent
    assert "disk" not in str(caught.value)


def test_the_dialect_is_the_datasources(tmp_path):
    text = 'ä;b\nNULL;"NULL"\n;x,y\n'.encode("latin-1")
    options = {"delimiter": ";", "null": "NULL", "encoding": "latin-1"}
    assert source_rows(tmp_path, text, **options) == [(None, "NULL"), ("", "x,y")]
    assert source_rows(tmp_path, b"1,2\n3,4\n", header=False) == [("1", "2"), ("3", "4")]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_blocks_are_cut_between_records_wherever_they_end(tmp_path, monkeypatch, block):
    from tasks.replicate.connectors.file import csv_text

    monkeypatch.setattr(csv_text, "BLOCK", block)
    rows: list[Row] = [(f"{i}", WORDS[i % len(WORDS)]) for i in range(40)]
    text = written_csv([("id", "words"), *rows]).encode()
    assert source_rows(tmp_path, text) == rows
    for path in (tmp_path / "t.csv",):
        data = b"".join(csv_text.chunks(path, csv_text.Dialect()))
        assert data == text


PIECES = st.lists(st.sampled_from(["a", '"', '""', ",", "\n", "\r", "\\.", "ü", "\\N"]), max_size=6)
CELLS = st.none() | PIECES.map("".join)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 4).flatmap(lambda w: st.lists(st.tuples(*[CELLS] * w), min_size=1)),
    block=st.sampled_from([1, 3, 17, 100_000]),
)
def test_any_rows_are_read_as_they_were_written(tmp_path_factory, rows, block):
    from tasks.replicate.connectors.file import csv_text

    dialect, path = csv_text.Dialect(header=False), tmp_path_factory.getbasetemp() / "any.csv"
    # The first line decides of CR LF, so it has no carriage return of its own.
    first = tuple("x" for _ in rows[0])
    path.write_bytes(csv_text.encode([first, *rows], dialect))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_text, "BLOCK", block)
        chunks = list(csv_text.chunks(path, dialect))
    width = len(first)
    assert [r for c in chunks for r in csv_text.parse(c, width, dialect, path)] == [first, *rows]
    assert sum(csv_text.checked(c, dialect, path)[1] for c in chunks) == len(rows) + 1


@settings(max_examples=500, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", '"', '""', ",", "\n", "\r\n"]), max_size=12).map("".join)
)
def test_any_text_is_read_letter_by_letter_alike_or_refused(tmp_path_factory, text):
    from tasks.replicate.connectors.file import csv_text
    from tasks.replicate.connectors.file.formats import BadFile

    dialect, path = csv_text.Dialect(header=False), tmp_path_factory.getbasetemp() / "text.csv"
    path.write_bytes(text.encode())
    try:
        chunks = list(csv_text.chunks(path, dialect))
        counted = sum(csv_text.checked(c, dialect, path)[1] for c in chunks)
        rows = [row for c in chunks for row in csv_text.parse(c, None, dialect, path)]
    except BadFile:
        return
    assert counted == len(rows)
    assert rows == [tuple(row) for row in read_csv(b"".join(chunks).decode())]


def test_the_byte_lane_carries_the_file_and_counts_its_rows(tmp_path):
    rows: list[Row] = [(str(i), WORDS[i % len(WORDS)]) for i in range(500)]
    harness = FolderHarness(tmp_path, "csv")
    harness.make("t", {"id": "text", "words": "text"}, rows)
    with Files().source(harness.config) as source:
        request = request_for(source, "t")
        found = list(source.read(request, Part(0), Lane.COPY_CSV))
        data = b"".join(batch.data for batch in found)
        assert sum(batch.rows for batch in found) == 500
        assert data == written_csv(rows).encode()
        # Another order of columns, and fewer of them, are written anew.
        turned = replace(request, columns=request.columns[::-1])
        data = b"".join(b.data for b in source.read(turned, Part(0), Lane.COPY_CSV))
        assert read_csv(data.decode()) == [[words, number] for number, words in rows]


def test_what_postgresql_takes_for_the_end_is_quoted_in_the_byte_lane(tmp_path):
    (tmp_path / "t.csv").write_text('a\nx\n\\.\n"\n\\.\n"\ny\n')
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        request = request_for(source, "t")
        data = b"".join(b.data for b in source.read(request, Part(0), Lane.COPY_CSV))
    assert data == b'x\n"\\."\n"\n\\.\n"\ny\n'


def test_guards_hold_in_the_byte_lane_too(tmp_path):
    (tmp_path / "t.csv").write_text('a,b\n1.25,"x"\n,\n1.234,y\n')
    number = Column("n", ColumnType(Kind.DECIMAL, "numeric(4,2)", precision=4, scale=2))
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        assert Lane.COPY_CSV in source.guarded_lanes
        request = request_for(source, "t")
        first = ColumnPlan(request.columns[0].source, number, guards=(Guard("scale", 4, 2),))
        request = replace(request, columns=(first, request.columns[1]))
        with pytest.raises(SourceError, match="column a: a value has more than 2 digits"):
            list(source.read(request, Part(0), Lane.COPY_CSV))
        (tmp_path / "t.csv").write_text('a,b\n1.25,"x"\n,\n')
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        assert sum(b.rows for b in source.read(request, Part(0), Lane.COPY_CSV)) == 2


def load_of(config: Mapping[str, Any], table: str, **changes: Any) -> Load:
    with Files().sink(config) as sink:
        relation = sink.describe((table,))
        assert relation is not None
        load = Load((table,), identity_plan(relation), "complete", Lane.ROWS, "r", "s", 1)
        return replace(load, relation=relation, **changes)


def write(config: Mapping[str, Any], load: Load, found: Any) -> int:
    with Files().sink(config) as sink:
        sink.begin(load)
        written: int = sink.write(load, found, staging=False)
        assert sink.count(load) == written
        sink.commit()
    return written


def test_every_kind_has_a_text_and_is_compared_by_its_kind(tmp_path):
    columns = [
        Column(kind.value, ColumnType(kind, kind.value))
        for kind in (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT, Kind.BYTES, Kind.TEXT)
    ]
    row: Row = (True, 5, float("-inf"), b"\0\xff", "")
    config = {"path": str(tmp_path), "format": "csv"}
    with Files().sink(config) as sink:
        sink.create(("t",), columns, [], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        plans = tuple(map(ColumnPlan, columns, relation.columns))
        assert all(sink.fit(p.source, p.sink, "postgresql").refusal is None for p in plans)
        load = Load(("t",), plans, "complete", Lane.ROWS, "r", "s", 1, relation=relation)
        sink.begin(load)
        sink.write(load, batches([row, (None,) * 5]), staging=False)
        found = [r for batch in sink.scan(load) for r in batch.data]
        sink.commit()
    assert found == [row, (None,) * 5]
    assert (tmp_path / "t.csv").read_text().splitlines()[1] == 't,5,-Infinity,\\x00ff,""'


def test_bytes_of_another_order_are_put_in_the_files(tmp_path):
    (tmp_path / "t.csv").write_text("b,c,a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    plans = {plan.sink.name: plan for plan in load.columns}
    load = replace(load, columns=(plans["a"], plans["b"]), lane=Lane.COPY_CSV)
    blocks = [b'1,"x\n', b'y"\n2', b",\n"]
    assert write(config, load, [Batch(data, 0, 1) for data in blocks]) == 2
    assert read_csv((tmp_path / "t.csv").read_text()) == [
        ["b", "c", "a"],
        ["x\ny", None, "1"],
        [None, None, "2"],
    ]


def test_a_character_that_the_encoding_lacks_is_refused_by_column(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n")
    config = {"path": str(tmp_path), "format": "csv", "encoding": "latin-1"}
    with pytest.raises(SinkError, match="column b: a text has a character"):
        write(config, load_of(config, "t"), batches([("ok", "\U0001f600")]))
    assert (tmp_path / "t.csv").read_text() == "a,b\n"


def test_what_is_written_is_read_by_pythons_csv_too(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n")
    config = {"path": str(tmp_path), "format": "csv"}
    rows: list[Row] = [(str(i), word) for i, word in enumerate(WORDS)]
    write(config, load_of(config, "t"), batches(rows))
    with (tmp_path / "t.csv").open(newline="") as file:
        found = list(csv.reader(file))[1:]
    assert found == [[number, word or ""] for number, word in rows]


# --- JSON lines ---------------------------------------------------------------------------------


def json_rows(folder: Path, text: str, kinds: Mapping[str, Kind] | None = None) -> list[Row]:
    (folder / "t.jsonl").write_text(text)
    with Files().source({"path": str(folder), "format": "jsonl"}) as source:
        request = request_for(source, "t")
        columns = [
            ColumnPlan(p.source, Column(p.sink.name, ColumnType(kinds[p.sink.name], "x")))
            if kinds and p.sink.name in kinds
            else p
            for p in request.columns
        ]
        return read_all(source, request.planned(columns))


def test_numbers_and_documents_keep_their_text(tmp_path):
    line = '{"n": 1.10, "big": 123456789012345678901234567890.5, "doc": {"a" :1.10}, "t": true}\n'
    assert json_rows(tmp_path, line) == [
        ("1.10", "123456789012345678901234567890.5", '{"a" :1.10}', True)
    ]


def test_a_string_that_goes_into_json_stays_a_string(tmp_path):
    line = '{"a": "17", "b": null, "c": true}\n'
    kinds = dict.fromkeys("abc", Kind.JSON)
    assert json_rows(tmp_path, line, kinds) == [('"17"', None, "true")]
    assert json_rows(tmp_path, line) == [("17", None, True)]


def test_an_absent_member_is_null_and_order_does_not_matter(tmp_path):
    assert json_rows(tmp_path, '{"a": 1, "b": 2}\n\n{"b": 3}\n') == [(1, 2), (None, 3)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}\n[1]\n', "object 2 is no JSON object"),
        ('{"a": 1} x\n', "object 1 is no JSON object"),
        ('{"a": NaN}\n', "object 1 is no JSON object"),
        ('{"a": 01}\n', "object 1 is no JSON object"),
        ('{"a": "x\n', "object 1 is no JSON object"),
        ("{'a': 1}\n", "object 1 is no JSON object"),
        ('{"a": 1, "a": 2}\n', "names a twice"),
        ('{"a": ' + "[" * 100_000 + "\n", "object 1 is no JSON object"),
    ],
)
def test_what_is_no_object_on_a_line_is_refused(tmp_path, text, says):
    with pytest.raises(SourceError, match=says):
        json_rows(tmp_path, text)


def test_a_name_that_comes_late_is_an_error_and_not_left_out(tmp_path):
    lines = '{"a": 1}\n' * 1000 + '{"a": 1, "late": 2}\n'
    with pytest.raises(SourceError, match=r"object 1001 has the name late"):
        json_rows(tmp_path, lines)


def test_every_kind_is_written_as_json_and_read_back(tmp_path):
    columns = [
        Column(kind.value, ColumnType(kind, kind.value))
        for kind in (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL, Kind.BYTES, Kind.JSON)
    ]
    rows: list[Row] = [
        (True, 2**70, 0.1, "1.10", b"\0", '{"a":\n1.10}'),
        (None, None, float("nan"), "NaN", None, '"text"'),
    ]
    config = {"path": str(tmp_path), "format": "jsonl"}
    with Files().sink(config) as sink:
        sink.create(("t",), columns, [], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        plans = tuple(map(ColumnPlan, columns, relation.columns))
        load = Load(("t",), plans, "complete", Lane.ROWS, "r", "s", 1, relation=relation)
        sink.begin(load)
        sink.write(load, batches(rows), staging=False)
        found = [row for batch in sink.scan(load) for row in batch.data]
        sink.commit()
    assert found[0] == (True, 2**70, 0.1, "1.10", b"\0", '{"a": 1.10}')
    assert found[1][3:] == ("NaN", None, '"text"')
    first = (tmp_path / "t.jsonl").read_text().splitlines()[0]
    assert '"decimal": 1.10' in first
    assert json.loads(first)["json"] == {"a": 1.1}


def test_a_text_that_is_no_document_is_refused_by_column(tmp_path):
    config = {"path": str(tmp_path), "format": "jsonl"}
    column = Column("j", ColumnType(Kind.JSON, "json"))
    with Files().sink(config) as sink:
        sink.create(("t",), [column], [], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        plans = (ColumnPlan(column, relation.columns[0]),)
        load = Load(("t",), plans, "complete", Lane.ROWS, "r", "s", 1, relation=relation)
        sink.begin(load)
        with pytest.raises(SinkError, match="column j: a value is no JSON document"):
            sink.write(load, batches([("{secret",)]), staging=False)
        sink.rollback()


# --- Parquet ------------------------------------------------------------------------------------


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


# --- places, patterns and changes ---------------------------------------------------------------


def test_many_files_by_a_pattern_are_one_table(tmp_path):
    (tmp_path / "orders-1.csv").write_text("a,b\n1,2\n")
    (tmp_path / "orders-2.csv").write_text("b,a\n4,3\n")
    (tmp_path / "other.csv").write_text("x\n1\n")
    config = {"path": str(tmp_path / "orders-*.csv"), "format": "csv"}
    with Files().source(config) as source:
        assert source.tables() == [("orders",)]
        request = request_for(source, "orders")
        assert read_all(source, request) == [("1", "2"), ("3", "4")]
        data = b"".join(b.data for b in source.read(request, Part(0), Lane.COPY_CSV))
        assert data == b"1,2\n3,4\n"
        assert source.count(request) == 2
    (tmp_path / "orders-3.csv").write_text("a,c\n1,2\n")
    with (
        Files().source(config) as source,
        pytest.raises(SourceError, match=r"orders-3\.csv: its columns are not those"),
    ):
        request_for(source, "orders")


def test_a_table_of_another_name_is_not_the_file(tmp_path):
    (tmp_path / "orders.csv").write_text("a\n1\n")
    config = {"path": str(tmp_path / "orders.csv"), "format": "csv"}
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "orders")) == [("1",)]
        assert read_all(source, request_for(source, "orders.csv")) == [("1",)]
        with pytest.raises(SourceError, match="its table is orders"):
            request_for(source, "customers")


@pytest.mark.parametrize("name", ["../secret", "a/b", ".hidden", "/etc/passwd"])
def test_a_table_cannot_leave_its_folder(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret.csv").write_text("a\n1\n")
    config = {"path": str(folder), "format": "csv"}
    with Files().source(config) as source, pytest.raises(SourceError):
        source.describe(ReadRequest(table=(name,)))
    with Files().sink(config) as sink, pytest.raises(SinkError, match="no name of a file"):
        sink.describe((name,))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a\n1\n")
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        request = request_for(source, "t")
        with path.open("a") as file:
            file.write("2\n")
        with pytest.raises(SourceError, match="was changed while it was read"):
            read_all(source, request)


def test_hidden_files_and_other_formats_are_no_tables(tmp_path):
    for name in ("a.csv", ".b.csv", "c.jsonl", "d.csv.gz"):
        (tmp_path / name).write_text("a\n1\n")
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        assert source.tables() == [("a",)]


def test_a_stopped_source_ends_at_its_next_block(tmp_path):
    harness = FolderHarness(tmp_path, "csv")
    harness.make("t", {"id": "text"}, [("x" * 100,) for _ in range(20_000)])
    with Files().source(harness.config) as source:
        pages = source.read(request_for(source, "t", fetch_size=10), Part(0), Lane.ROWS)
        next(pages)
        source.stop()
        with pytest.raises(SourceError, match="stopped"):
            list(pages)


# --- the sink's change, its fence and what is left behind ---------------------------------------


def test_readers_see_the_old_file_until_the_commit(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a\nold\n")
    path.chmod(0o640)
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t", mode="complete-atomic", how="rename")
    with Files().sink(config) as sink:
        sink.stage(load)
        sink.write(load, batches([("new",)]), staging=True)
        sink.begin(load)
        assert sink.publish(load).inserted == 1
        assert path.read_text() == "a\nold\n"
        sink.commit()
        sink.unstage(load)
    assert path.read_text() == "a\nnew\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {
        "t.csv",
        ".claimcheck_fence",
        ".claimcheck_lock",
    }


def test_a_rollback_and_a_failed_load_leave_the_old_file(tmp_path):
    (tmp_path / "t.csv").write_text("a\nold\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")

    def broken() -> Any:
        yield Batch([("x",)], 1, 1)
        raise RuntimeError("the source broke")

    with Files().sink(config) as sink:
        sink.begin(load)
        with pytest.raises(RuntimeError):
            sink.write(load, broken(), staging=False)
        sink.rollback()
    assert (tmp_path / "t.csv").read_text() == "a\nold\n"
    assert not [p for p in tmp_path.iterdir() if "new" in p.name]


def test_complete_empties_first_and_fills_then(tmp_path):
    (tmp_path / "t.csv").write_text("a\nold\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    with Files().sink(config) as sink:
        sink.begin(load)
        sink.truncate(load)
        sink.commit()
        assert (tmp_path / "t.csv").read_text() == "a\n"
        last = replace(load, step=1)
        sink.begin(last)
        sink.write(last, batches([("new",)]), staging=False)
        sink.commit()
    assert (tmp_path / "t.csv").read_text() == "a\nnew\n"


def test_an_older_attempt_replaces_nothing_after_a_newer_one__R_F5(tmp_path):
    (tmp_path / "t.csv").write_text("a\nold\n")
    config = {"path": str(tmp_path), "format": "csv"}
    old_load = load_of(config, "t")
    new_load = replace(old_load, fence=2, run_id="newer")
    with Files().sink(config) as old:
        old.begin(old_load)
        old.truncate(old_load)
        old.commit()
        write(config, new_load, batches([("new",)]))
        for step in (0, 1):
            with pytest.raises(Fenced):
                old.begin(replace(old_load, step=step))
            old.rollback()
    assert (tmp_path / "t.csv").read_text() == "a\nnew\n"


def test_two_attempts_are_never_between_begin_and_commit_at_once__R_F5(tmp_path):
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    with Files().sink(config) as one, Files().sink(config) as two:
        one.begin(load)
        timer = threading.Timer(0.3, two.stop)
        timer.start()
        started = time.monotonic()
        with pytest.raises(SinkError, match="stopped"):
            two.begin(replace(load, fence=2))
        assert 0.2 < time.monotonic() - started < 1.3
        one.rollback()
        timer.join(timeout=5)


def test_settle_tells_whether_the_file_was_replaced__R_F5(tmp_path):
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    with Files().sink(config) as sink:
        sink.begin(load)
        sink.truncate(load)
        sink.rollback()
        assert sink.settle(load) is False
        sink.begin(load)
        sink.truncate(load)
        sink.commit()
        assert sink.settle(load) is True
        assert sink.settle(replace(load, step=1)) is False


def test_staging_of_older_attempts_is_swept(tmp_path):
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t", mode="complete-atomic", how="rename")
    others = [replace(load, run_id="x", fence=n, scope=s) for n, s in ((1, "s"), (1, "other"))]
    with Files().sink(config) as sink:
        for other in others:
            sink.write(other, batches([("x",)]), staging=True)
        sink.stage(replace(load, fence=2))
    left = [p.name for p in tmp_path.iterdir() if "stage" in p.name]
    assert left == [".claimcheck_stage.other.1.x.t.csv"]


def test_a_symbolic_link_stays_one(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "data.csv").write_text("a\n")
    (tmp_path / "t.csv").symlink_to(real / "data.csv")
    config = {"path": str(tmp_path), "format": "csv"}
    write(config, load_of(config, "t"), batches([("x",)]))
    assert (tmp_path / "t.csv").is_symlink()
    assert (real / "data.csv").read_text() == "a\nx\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):  # pragma: no cover
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    tmp_path.chmod(0o500)
    with Files().sink(config) as sink:
        assert "must be writable" in sink.refusals(load)[0]
    tmp_path.chmod(0o700)


def test_a_pattern_is_no_sink(tmp_path):
    config = {"path": str(tmp_path / "*.csv"), "format": "csv"}
    with Files().sink(config) as sink, pytest.raises(SinkError, match="is a pattern"):
        sink.describe(("t",))


# --- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"format": "csv"}, "path: is missing"),
        ({"path": "/x"}, "format: must be one of csv, jsonl, parquet"),
        ({"path": "/x", "format": "orc"}, "format: must be one of"),
        ({"path": "/x", "format": "csv", "colour": 1}, "colour: is no setting"),
        ({"path": "/x", "format": "jsonl", "null": "x"}, "null: is only for csv"),
        ({"path": "/x", "format": "csv", "delimiter": ";;"}, "delimiter: must be one character"),
        ({"path": "/x", "format": "csv", "encoding": "latin-77"}, "encoding: is not known"),
        ({"path": "/x", "format": "csv", "encoding": "utf-16"}, "encoding: UTF-16"),
        ({"path": "/x", "format": "csv", "header": "yes"}, "header: must be true or false"),
    ],
)
def test_a_bad_configuration_is_explained(config, says):
    assert any(says in problem for problem in Files().check_config(config))


def test_a_good_configuration_is_tested_by_looking(tmp_path):
    (tmp_path / "a.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    assert Files().check_config(config) == []
    assert Files().test(config) == f"1 csv file at {tmp_path}"
    with pytest.raises(SourceError, match="is no folder"):
        Files().test({"path": str(tmp_path / "no" / "where.csv"), "format": "csv"})


def test_parquet_without_pyarrow_tells_the_install_command(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = Files().check_config({"path": "/x", "format": "parquet"})
    assert any("pip install 'celery-claimcheck[parquet]'" in problem for problem in problems)


def test_names_of_patterns_are_what_they_begin_with(tmp_path):
    for path, name in (
        ("orders-*.csv", "orders"),
        ("2026_?.csv", "2026"),
        ("*.csv", tmp_path.name),
        ("x.csv", "x"),
    ):
        place = Place({"path": str(tmp_path / path), "format": "csv"})
        assert place.own_name() == name
