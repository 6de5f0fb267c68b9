"""JSON lines: digits and documents as they were written."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from conformance import (
    batches,
    read_all,
    request_for,
)
from files_kit import load_of, write

from tasks.replicate.connector import (
    Column,
    ColumnPlan,
    ColumnType,
    Kind,
    Lane,
    Load,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.file import Files


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
        ('{"a": {"b": [NaN]}}\n', "object 1 is no JSON object"),
        ('{"a": [-Infinity]}\n', "object 1 is no JSON object"),
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


def test_one_half_of_a_surrogate_pair_is_refused_by_column(tmp_path):
    line = '{"id": 1, "a": "\\ud83d\\ude00", "doc": {"a": "\\ud800"}}\n'
    assert json_rows(tmp_path, line) == [(1, "\U0001f600", '{"a": "\\ud800"}')]
    with pytest.raises(
        SourceError, match=r"t\.jsonl: column a: a text of object 2 .*half"
    ) as caught:
        json_rows(tmp_path, line + '{"id": 2, "a": "secret \\ude00"}\n')
    assert caught.value.permanent
    assert "secret" not in str(caught.value)
    with pytest.raises(SourceError, match=r"t\.jsonl: a name of object 1 has one half"):
        json_rows(tmp_path, '{"\\udc00": 1}\n')


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


@pytest.mark.parametrize("text", ["{secret", '{"a": NaN}', "[-Infinity]", "NaN"])
def test_a_text_that_is_no_document_is_refused_by_column(tmp_path, text):
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
            sink.write(load, batches([(text,)]), staging=False)
        sink.rollback()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "iso2022_jp"])
def test_rows_in_many_batches_are_read_as_they_were_written(tmp_path, encoding):
    config = {"path": str(tmp_path), "format": "jsonl", "encoding": encoding}
    (tmp_path / "t.jsonl").write_text('{"id": 0, "a": "x"}\n')
    rows: list[Row] = [(i, "日本") for i in range(50)]
    write(config, load_of(config, "t"), batches(rows, 7))
    assert (tmp_path / "t.jsonl").read_bytes().count(codecs.BOM_UTF8) == (encoding == "utf-8-sig")
    with Files().source(config) as source:
        assert read_all(source, request_for(source, "t")) == rows


def test_a_character_that_the_encoding_lacks_is_refused_by_column(tmp_path):
    config = {"path": str(tmp_path), "format": "jsonl", "encoding": "latin-1"}
    (tmp_path / "t.jsonl").write_text('{"id": 0, "a": "x"}\n')
    with pytest.raises(SinkError, match="column a: a text has a character that iso8859-1 cannot"):
        write(config, load_of(config, "t"), batches([(1, "日")]))
