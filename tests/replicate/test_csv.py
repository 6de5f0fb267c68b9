"""CSV: NULL and nothing, quotes and line ends, and the byte lane."""

from __future__ import annotations

import codecs
import csv
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance import (
    batches,
    read_all,
    request_for,
)
from files_kit import (
    WORDS,
    FolderHarness,
    load_of,
    read_csv,
    write,
    written_csv,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.replicate.connector import (
    Batch,
    Column,
    ColumnPlan,
    ColumnType,
    Guard,
    Kind,
    Lane,
    Load,
    Part,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.file import Files, csv_text
from tasks.replicate.connectors.file.formats import BLOCK, BadFile


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
        (b'a,b\n1,2\n"x,2\n', "t.csv, line 3: a record ends inside a quoted field"),
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

    monkeypatch.setattr(csv_text, "BLOCK", block)
    rows: list[Row] = [(f"{i}", WORDS[i % len(WORDS)]) for i in range(40)]
    text = written_csv([("id", "words"), *rows]).encode()
    assert source_rows(tmp_path, text) == rows
    for path in (tmp_path / "t.csv",):
        data = b"".join(chunk for chunk, _ in csv_text.chunks(path, csv_text.Dialect()))
        assert data == text


PIECES = st.lists(st.sampled_from(["a", '"', '""', ",", "\n", "\r", "\\.", "ü", "\\N"]), max_size=6)
CELLS = st.none() | PIECES.map("".join)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 4).flatmap(lambda w: st.lists(st.tuples(*[CELLS] * w), min_size=1)),
    block=st.sampled_from([1, 3, 17, 100_000]),
)
def test_any_rows_are_read_as_they_were_written(tmp_path_factory, rows, block):

    dialect, path = csv_text.Dialect(header=False), tmp_path_factory.getbasetemp() / "any.csv"
    # The first line decides of CR LF, so it has no carriage return of its own.
    first = tuple("x" for _ in rows[0])
    path.write_bytes(csv_text.written([first, *rows], dialect).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_text, "BLOCK", block)
        chunks = [chunk for chunk, _ in csv_text.chunks(path, dialect)]
    width = len(first)
    assert [r for c in chunks for r in csv_text.parse(c, width, dialect, path)] == [first, *rows]
    assert sum(map(csv_text.count_records, chunks)) == len(rows) + 1


@settings(max_examples=500, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", '"', '""', ",", "\n", "\r\n"]), max_size=12).map("".join)
)
def test_any_text_is_read_letter_by_letter_alike_or_refused(tmp_path_factory, text):

    dialect, path = csv_text.Dialect(header=False), tmp_path_factory.getbasetemp() / "text.csv"
    path.write_bytes(text.encode())
    try:
        chunks = [chunk for chunk, _ in csv_text.chunks(path, dialect)]
        counted = sum(map(csv_text.count_records, chunks))
        rows = [row for c in chunks for row in csv_text.parse_carefully(c, None, dialect, path)]
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


@pytest.mark.parametrize(
    ("files", "columns"),
    [
        ({"t-1.csv": "n,x,y\n1.234,a,b\n"}, ["n", "x"]),
        ({"t-1.csv": "n,x\n1.234,a\n"}, ["x", "n"]),
        ({"t-1.csv": "n,x\n1.23,a\n", "t-2.csv": "x,n\nb,1.234\n"}, ["n", "x"]),
    ],
)
def test_guards_hold_where_the_columns_are_others_than_the_file_s(tmp_path, files, columns):
    number = Column("n", ColumnType(Kind.DECIMAL, "numeric(4,2)", precision=4, scale=2))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with Files().source({"path": str(tmp_path / "t-*.csv"), "format": "csv"}) as source:
        request = request_for(source, "t")
        plans = {plan.source.name: plan for plan in request.columns}
        plans["n"] = ColumnPlan(plans["n"].source, number, guards=(Guard("scale", 4, 2),))
        request = replace(request, columns=tuple(plans[name] for name in columns))
        with pytest.raises(SourceError, match="column n: a value has more than 2 digits"):
            list(source.read(request, Part(0), Lane.COPY_CSV))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a,b\n1,2\n3\n4,5,6\n", "line 3: a record has 1 fields, and the file 2 columns"),
        (b"a,b\n1,2\n3,\xff\n", "line 3: is not all UTF-8"),
        (b'a,b\n"1\n2",2\n3,x"y"\n', "line 4: a record is malformed"),
    ],
)
@pytest.mark.parametrize("lane", [Lane.ROWS, Lane.COPY_CSV])
@pytest.mark.parametrize("block", [4, 100_000])
def test_a_malformed_record_goes_in_no_lane(tmp_path, monkeypatch, text, says, lane, block):
    monkeypatch.setattr(csv_text, "BLOCK", block)
    (tmp_path / "t.csv").write_bytes(text)
    with Files().source({"path": str(tmp_path), "format": "csv"}) as source:
        request = request_for(source, "t")
        with pytest.raises(SourceError, match=f"t.csv, {says}"):
            list(source.read(request, Part(0), lane))


def test_a_quote_that_is_not_closed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_text, "LONGEST", 3 << 20)
    monkeypatch.setattr(csv_text, "BLOCK", 1 << 16)
    (tmp_path / "t.csv").write_text('a,b\n1,2\n3,"x\n' + "4,5\n" * 2_000_000)
    with pytest.raises(SourceError, match="line 3: a record is longer than 3 MB; is a quote not"):
        source_rows(tmp_path, (tmp_path / "t.csv").read_bytes())


def test_a_malformed_record_of_many_quotes_is_refused_at_once(tmp_path):
    text = "a\n" + '""' * 100_000 + 'x"y"z\n'
    with pytest.raises(SourceError, match="line 2: a record is malformed"):
        source_rows(tmp_path, text.encode())


@given(
    data=st.lists(st.sampled_from([b"a", b'"', b'""', b"\n", b",\n"]), max_size=20).map(b"".join)
)
def test_a_block_is_cut_behind_its_last_record(data):
    outside = [part if i % 2 == 0 else b"" for i, part in enumerate(data.split(b'"'))]
    ends = [i + 1 for i in range(len(data)) if data[i : i + 1] == b"\n"]
    whole = [end for end in ends if data.count(b'"', 0, end) % 2 == 0]
    assert csv_text.last_end(data) == max(whole, default=0)
    assert bool(whole) == (b"\n" in b"".join(outside))


def test_a_first_record_of_many_lines_is_read_at_once(tmp_path):
    long = "some words\n" * 200_000
    found = source_rows(tmp_path, f'1,"{long}"\n2,b\n'.encode(), header=False)
    assert found == [("1", long), ("2", "b")]


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


ENCODINGS = ("utf-8", "utf-8-sig", "utf-7", "gb18030", "iso2022_jp", "hz", "cp037")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("header", [True, False])
def test_rows_in_many_batches_are_read_as_they_were_written(tmp_path, encoding, header):
    config = {"path": str(tmp_path), "format": "csv", "encoding": encoding, "header": header}
    word = "日本" if encoding in ("gb18030", "iso2022_jp", "utf-8-sig") else "x~+"
    rows: list[Row] = [(str(i), word) for i in range(50)]
    with Files().sink(config) as sink:
        columns = [Column(n, ColumnType(Kind.TEXT, "x")) for n in ("column_1", "column_2")]
        sink.create(("t",), columns, [], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        plans = tuple(map(ColumnPlan, columns, relation.columns))
        load = Load(("t",), plans, "complete", Lane.ROWS, "r", "s", 1, relation=relation)
    write(config, load, batches(rows, 7))
    assert (tmp_path / "t.csv").read_bytes().count(codecs.BOM_UTF8) == (encoding == "utf-8-sig")
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == rows


@pytest.mark.parametrize("lane", [Lane.ROWS, Lane.COPY_CSV])
def test_a_first_text_that_looks_like_a_byte_order_mark_stays(tmp_path, lane):
    config = {"path": str(tmp_path), "format": "csv", "header": False}
    (tmp_path / "t.csv").write_text("x\n")
    load = replace(load_of(config, "t"), lane=lane)
    rows: list[Row] = [("\ufeffa",), ("\ufeffb",)]
    sent = batches(rows) if lane is Lane.ROWS else [Batch("\ufeffa\n\ufeffb\n".encode(), 2, 10)]
    write(config, load, sent)
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == rows


@pytest.mark.parametrize(
    "options",
    [{"null": "0"}, {"null": "-1"}, {"delimiter": "1"}, {"delimiter": "-"}, {"null": "NULL"}],
)
def test_an_integer_is_never_taken_for_null_or_for_two_fields(tmp_path, options):
    config = {"path": str(tmp_path), "format": "csv", "header": False, **options}
    (tmp_path / "t.csv").write_text("x{}x\n".format(options.get("delimiter", ",")))
    numbers = [(0, 1), (-1, 11), (10, -101)]
    write(config, load_of(config, "t"), batches(numbers))
    with Files().source(config) as source:
        found = read_all(source, request_for(source, "t"))
    assert found == [tuple(map(str, row)) for row in numbers]


def test_a_character_that_the_encoding_would_change_is_refused_by_column(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n")
    config = {"path": str(tmp_path), "format": "csv", "encoding": "shift_jis"}
    with pytest.raises(SinkError, match="column b: a text has a character that shift_jis"):
        write(config, load_of(config, "t"), batches([("\\", "5 \xa5")]))


def test_a_name_that_the_encoding_lacks_is_refused_by_column(tmp_path):
    config = {"path": str(tmp_path), "format": "csv", "encoding": "latin-1"}
    columns = [Column(n, ColumnType(Kind.TEXT, "x")) for n in ("a", "日")]
    with (
        Files().sink(config) as sink,
        pytest.raises(SinkError, match="column 日: its name has a character"),
    ):
        sink.create(("t",), columns, [], "postgresql")
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_by_pythons_csv_too(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n")
    config = {"path": str(tmp_path), "format": "csv"}
    rows: list[Row] = [(str(i), word) for i, word in enumerate(WORDS)]
    write(config, load_of(config, "t"), batches(rows))
    with (tmp_path / "t.csv").open(newline="") as file:
        found = list(csv.reader(file))[1:]
    assert found == [[number, word or ""] for number, word in rows]


def test_records_longer_than_a_block_stay_whole(tmp_path: Path) -> None:
    long = '"' + "line\r\n, of a field" * (3 * BLOCK // 16) + '"'
    records = ["id,note", f"1,{long}", "2,short", f"3,{long}", "4,last"]
    path = tmp_path / "long.csv"
    path.write_bytes("\r\n".join(records).encode())
    found = [chunk for chunk, _ in csv_text.chunks(path, csv_text.Dialect())]
    assert b"".join(found) == ("\n".join(records) + "\n").encode()
    assert all(chunk.count(b'"') % 2 == 0 for chunk in found)


@settings(max_examples=1000)
@given(
    text=st.lists(
        st.sampled_from(["a", '"', '""', '"""', '"a"', ",", ",", "\n", "\r", "\x1e", "\x1f", "N"]),
        max_size=12,
    ).map("".join),
    width=st.integers(1, 3),
    null=st.sampled_from(["", "N", "\x1f"]),
)
def test_columns_are_what_is_read_letter_by_letter(text, width, null):
    dialect = csv_text.Dialect(null=null)
    text += "\n"
    found = csv_text.columns(text, width, dialect, range(width))
    if found is not None:
        rows = csv_text.parse_carefully(text.encode(), None, dialect, Path("any"))
        assert list(zip(*found, strict=True)) == rows
        assert csv_text.columns(text, width, dialect, [width - 1]) == [found[-1]]


@pytest.mark.parametrize(
    "text",
    [
        "1,x,\n2,,y\n",
        '1,"{""k"": [1, 2]}",a\n2,"{""k"": []}",b\n',
        '"1","x","a"\n"2","y, ""z""","\nb\r\n"\n',
        '1,"x, y",a\n"2",,"b"\n',
        '1,"",""\n2,"""a"" and b","""""c"\n',
        '1,"""","x"\n2,5"",""""""\n'.replace('5""', "5"),
        '1,"\x1f",a\x1eb\n2,"",c\n',
    ],
)
def test_usual_records_are_read_by_column(text):
    dialect = csv_text.Dialect()
    found = csv_text.columns(text, 3, dialect, range(3))
    assert found is not None
    rows = csv_text.parse_carefully(text.encode(), None, dialect, Path("any"))
    assert list(zip(*found, strict=True)) == rows


@pytest.mark.parametrize("text", ["1,2\n3", "1,2\n3,", "1\n2,3,4\n", "1,2\n\n", "\n1,2,3\n"])
def test_no_records_of_another_width_are_read_by_column(text):
    assert csv_text.columns(text, 2, csv_text.Dialect(), range(2)) is None


def test_a_long_record_does_not_stand_in_memory_many_times() -> None:
    text = ('"' + 'say ""hi"" ' * 1_000_000 + '",1\n').encode()
    tracemalloc.start()
    try:
        (row,) = csv_text.parse(text, 2, csv_text.Dialect(), Path("any"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row == ('say "hi" ' * 1_000_000, "1")
    assert peak < 4 * len(text)
