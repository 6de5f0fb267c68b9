"""What is wrong in CSV files is told by file and line, also where PostgreSQL finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure


def load(folder: Path, sink: Database, mode: str = "complete") -> Job:
    sink.execute("create table if not exists t (id int, name text)")
    source = {"path": str(folder / "t-*.csv"), "format": "csv"}
    work = definition({"table": "t"}, {"table": "t"}, mode)
    return Job(source, sink.config, work, ("file", "postgresql"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"7,secret,secret\n", "a record has 3 fields, and the file 2 columns"),
        (b"7\n", "a record has 1 fields, and the file 2 columns"),
        (b"7,secret\xff\n", "is not all UTF-8"),
        (b"7,secret\xe9 sec\n", "is not all UTF-8"),
        (b'7,sec"r"et\n', "a record is malformed"),
        (b"7,secret\0\n", 'invalid byte sequence for encoding "UTF8" '),
    ],
)
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("first", [b"", b"0,x\n", b'0,"a\n\nb"\n', b'0,"a\r\nb"\n'])
def test_a_malformed_record_is_told_by_file_and_line(
    sink: Database, tmp_path: Path, record: bytes, message: str, mode: str, end: bytes, first: bytes
) -> None:
    head, rows = b'"id","name"\n', b'1,"a\nb"\n2,c\n' * 10_000
    (tmp_path / "t-1.csv").write_bytes(head + first + rows)
    (tmp_path / "t-2.csv").write_bytes((head + b"1,x\n2,y\n" + record).replace(b"\n", end))
    (tmp_path / "t-3.csv").write_bytes(head + rows)
    with pytest.raises(HandlerFailure) as caught:
        load(tmp_path, sink, mode).run()
    assert (caught.value.code, caught.value.permanent) == ("source_error", True)
    assert str(caught.value).startswith(f"source: {tmp_path}/t-2.csv, line 4: {message}")
    assert "secret" not in str(caught.value)
    assert "0x" not in str(caught.value)


def test_the_line_is_the_file_s_where_the_header_has_several_lines(
    sink: Database, tmp_path: Path
) -> None:
    sink.execute('create table t (id int, name text, "a\nb" text)')
    (tmp_path / "t-1.csv").write_text('id,name,"a\nb"\n1,x,y\n2,x\n')
    with pytest.raises(HandlerFailure, match=r"t-1\.csv, line 4: a record has 2 fields"):
        load(tmp_path, sink).run()


def test_a_value_that_does_not_fit_is_told_by_column_and_line(
    sink: Database, tmp_path: Path
) -> None:
    (tmp_path / "t-1.csv").write_text("name,id\nx,1\ny,secret\n")
    with pytest.raises(HandlerFailure) as caught:
        load(tmp_path, sink).run()
    assert caught.value.code == "sink_error"
    assert "column id: invalid input syntax" in str(caught.value)
    assert f"{tmp_path}/t-1.csv, line 3" in str(caught.value)
    assert "secret" not in str(caught.value)
