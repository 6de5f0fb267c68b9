"""Files that do not tell the names of their columns: CSV without a header, and files of no rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure

VERIFY = {"verify": "checksum"}


def export(source: Database, folder: Path, kind: str, **more: Any) -> Job:
    """A job from the table ``t`` into a file of that name."""
    options = more.pop("options", {})
    work = definition(
        {"table": "t", **more.pop("reads", {})},
        {"table": "t", **more.pop("writes", {})},
        more.pop("mode", "complete"),
        **{"create": True, **more},
    )
    sink = {"path": str(folder), "format": kind, **options}
    return Job(source.config, sink, work, ("postgresql", "file"))


def load(folder: Path, sink: Database, kind: str, **more: Any) -> Job:
    """A job from the file ``t`` into a table of that name."""
    options = more.pop("options", {})
    work = definition(
        {"table": "t", **more.pop("reads", {})},
        {"table": "t", **more.pop("writes", {})},
        "complete",
        **more,
    )
    return Job(
        {"path": str(folder), "format": kind, **options}, sink.config, work, ("file", "postgresql")
    )


BARE = {"header": False}


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize("more", [{}, VERIFY])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_file_without_a_header_takes_columns_by_their_order(
    source: Database, tmp_path: Path, mode: str, more: dict[str, Any], delimiter: str
) -> None:
    source.execute("create table t (id int primary key, name text)")
    source.execute("insert into t values (1, 'a')")
    options = {**BARE, "delimiter": delimiter}
    for _ in range(2):
        export(source, tmp_path, "csv", options=options, mode=mode, **more).run()
        assert (tmp_path / "t.csv").read_text() == f"1{delimiter}a\n"
    export(
        source, tmp_path, "csv", options=options, mode=mode, reads={"columns": ["name", "id"]}
    ).run()
    assert (tmp_path / "t.csv").read_text() == f"a{delimiter}1\n"


def test_a_file_without_a_header_takes_as_many_columns_as_it_has(
    source: Database, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("1,a,x\n")
    source.execute("create table t (id int primary key, name text)")
    source.execute("insert into t values (1, 'a')")
    with pytest.raises(HandlerFailure, match="3 columns without names, and the source 2"):
        export(source, tmp_path, "csv", options=BARE).run()
    writes = {"columns": {"id": "column_3", "name": "column_1"}}
    export(source, tmp_path, "csv", options=BARE, writes=writes, **VERIFY).run()
    assert (tmp_path / "t.csv").read_text() == "a,,1\n"
    with pytest.raises(HandlerFailure, match=r"column ident is missing .*; .*without a header has"):
        export(source, tmp_path, "csv", options=BARE, writes={"columns": {"id": "ident"}}).run()
    assert (tmp_path / "t.csv").read_text() == "a,,1\n"


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize(("kind", "options"), [("jsonl", {}), ("csv", BARE), ("csv", {})])
def test_a_chain_of_jobs_goes_on_on_the_day_a_table_is_empty(
    source: Database, sink: Database, tmp_path: Path, mode: str, kind: str, options: dict[str, Any]
) -> None:
    source.execute("create table t (id int primary key, name text)")
    sink.execute("create table t (id int primary key, name text, price money)")
    names = {"columns": ["id", "name"]} if options else {}
    for rows in (0, 1, 0, 2):
        source.execute("truncate t")
        source.execute("insert into t select n, 'x' from generate_series(1, %s) n", rows)
        # Only the first file has to be made.
        create = {"create": not (tmp_path / f"t.{kind}").exists()}
        export(source, tmp_path, kind, options=options, mode=mode, **create, **VERIFY).run()
        outcome = load(tmp_path, sink, kind, options=options, writes=names, **VERIFY).run()
        assert outcome.rows_processed == rows
        assert sink.value("select count(*) from t") == rows


def test_no_rows_and_no_columns_are_refused(sink: Database, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(HandlerFailure, match=r"nothing was changed: .*source\.columns") as caught:
        load(tmp_path, sink, "jsonl", create=True).run()
    assert caught.value.permanent
    assert str(tmp_path) not in str(caught.value)
    named = load(tmp_path, sink, "jsonl", create=True, reads={"columns": ["id", "name"]}, **VERIFY)
    assert named.run().rows_processed == 0
    assert sink.execute("select id, name from t") == []


def test_names_in_the_sink_are_taken_back_to_those_of_the_source(
    sink: Database, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    sink.execute("create table t (ident int primary key)")
    sink.execute("insert into t values (1)")
    load(tmp_path, sink, "jsonl", writes={"columns": {"id": "ident"}}, **VERIFY).run()
    assert sink.execute("select * from t") == []


def test_a_refused_job_leaves_an_empty_file_as_it_was(source: Database, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("")
    source.execute("create table t (id int primary key, doc json)")
    with pytest.raises(HandlerFailure, match="maps name"):
        export(source, tmp_path, "jsonl", writes={"columns": {"name": "x"}}).run()
    assert (tmp_path / "t.jsonl").read_text() == ""


def test_several_files_without_a_header_may_be_empty(sink: Database, tmp_path: Path) -> None:
    (tmp_path / "t-1.csv").write_text("")
    (tmp_path / "t-2.csv").write_text("1,a\n")
    sink.execute("create table t (id int primary key, name text)")
    job = load(tmp_path, sink, "csv", options=BARE, writes={"columns": ["id", "name"]}, **VERIFY)
    job.source = {**job.source, "path": str(tmp_path / "t-*.csv")}
    job.run()
    assert sink.execute("select * from t") == [(1, "a")]
