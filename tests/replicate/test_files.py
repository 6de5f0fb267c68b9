"""Files as source and sink: the suite, places and patterns, and how a target is replaced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance import (
    Harness,
    SinkConformance,
    SourceConformance,
    batches,
    read_all,
    request_for,
)
from files_kit import (
    WORDS,
    FolderHarness,
    load_of,
    write,
)
from replication_kit import Job, definition

from dispatch.context import HandlerFailure
from tasks.replicate.connector import (
    Batch,
    Fenced,
    Lane,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.file import Files
from tasks.replicate.connectors.file.fence import Fence
from tasks.replicate.connectors.file.places import Place


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
        """Nor does it know a column."""
        harness.make("empty", {"id": "text"})
        with harness.connector.source(harness.config) as source:
            request = ReadRequest(table=("empty",))
            found = source.describe(request)
            assert (found.columns, found.blank is None) == ((), False)
            assert source.count(request) == 0
            assert list(source.read(request, Part(0), Lane.ROWS)) == []


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
        with pytest.raises(SourceError, match="was changed while the run was at work"):
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


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize("link", ["symbolic", "hard", "folder"])
def test_a_sink_that_is_a_source_file_by_a_link_is_refused(tmp_path, link, pattern, mode):
    there = tmp_path / "there"
    there.mkdir()
    for name in ("orders-1", "orders-2"):
        (there / f"{name}.csv").write_text("a\nkept\n")
    target = tmp_path / "target.csv"
    if link == "folder":
        (tmp_path / "target").symlink_to(there)
        target = tmp_path / "target" / "orders-2.csv"
    elif link == "symbolic":
        target.symlink_to(there / "orders-2.csv")
    else:
        target.hardlink_to(there / "orders-2.csv")
    reads = there / ("orders-*.csv" if pattern else "orders-2.csv")
    job = Job(
        {"path": str(reads), "format": "csv"},
        {"path": str(target), "format": "csv"},
        definition({"table": reads.name}, {"table": target.name}, mode),
        connectors=("file", "file"),
    )
    with pytest.raises(HandlerFailure, match="both source and sink") as caught:
        job.run()
    assert caught.value.permanent
    assert (there / "orders-2.csv").read_text() == "a\nkept\n"
    assert not list(there.glob(".claimcheck*"))


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


def test_a_stop_breaks_the_wait_for_the_folders_lock__R_K2(tmp_path):
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    with Files().sink(config) as sink, Fence(tmp_path / "t.csv").locked(lambda: None):
        timer = threading.Timer(0.3, sink.stop)
        timer.start()
        started = time.monotonic()
        with pytest.raises(SinkError, match="stopped"):
            sink.begin(load)
        assert 0.2 < time.monotonic() - started < 1.3
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


def test_a_load_that_was_killed_leaves_no_file_for_ever(tmp_path):
    (tmp_path / "t.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    load = load_of(config, "t")
    killed = Files().sink(config)
    killed.begin(load)
    killed.truncate(load)
    killed.commit()
    killed.write(replace(load, step=1), batches([("x",)]), staging=False)
    assert [p.name for p in tmp_path.iterdir() if "_new." in p.name] != []
    with Files().sink(config) as sink:
        sink.begin(replace(load, fence=2))
        sink.truncate(replace(load, fence=2))
        sink.rollback()
    assert [p.name for p in tmp_path.iterdir() if "_new." in p.name] == []


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
        ({"path": "/x", "format": "csv", "encoding": "hex"}, "encoding: is not known"),
        ({"path": "/x", "format": "jsonl", "encoding": "rot13"}, "encoding: is not known"),
        ({"path": "/x", "format": "csv", "encoding": "punycode"}, "encoding: punycode does not"),
        ({"path": "/x", "format": "csv", "null": "a,b"}, "null: must not have the delimiter"),
        (
            {"path": "/x", "format": "csv", "null": "|", "delimiter": "|"},
            "null: must not have the delimiter",
        ),
        ({"path": "/x", "format": "csv", "null": 'a"'}, "null: must be a text without quotes"),
        ({"path": "/x", "format": "csv", "null": "a\n"}, "null: must be a text without quotes"),
        (
            {"path": "/x", "format": "csv", "null": "–", "encoding": "latin-1"},
            "null: has a character that latin-1 does not keep",
        ),
        ({"path": "/x", "format": "csv", "header": "yes"}, "header: must be true or false"),
    ],
)
def test_a_bad_configuration_is_explained(config, says):
    assert any(str(problem).startswith(says) for problem in Files().check_config(config))


def test_a_good_configuration_is_tested_by_looking(tmp_path):
    (tmp_path / "a.csv").write_text("a\n")
    config = {"path": str(tmp_path), "format": "csv"}
    assert Files().check_config(config) == []
    assert Files().test(config) == f"1 csv file at {tmp_path}"
    with pytest.raises(SourceError, match="is no folder"):
        Files().test({"path": str(tmp_path / "no" / "where.csv"), "format": "csv"})


def test_a_path_that_does_not_exist_is_told_as_such(tmp_path):
    folder = {"path": str(tmp_path / "in"), "format": "csv"}
    with pytest.raises(SourceError, match="in does not exist: make the folder"):
        Files().test(folder)
    with Files().source(folder) as source:
        with pytest.raises(SourceError, match="in does not exist"):
            request_for(source, "people")
        with pytest.raises(SourceError, match="in does not exist"):
            source.tables()
    with Files().sink(folder) as sink, pytest.raises(SinkError, match="in does not exist: make"):
        sink.describe(("people",))
    file = {"path": str(tmp_path / "people.csv"), "format": "csv"}
    assert "does not exist yet" in Files().test(file)
    with Files().sink(file) as sink:
        assert sink.describe(("people",)) is None


@pytest.mark.parametrize("columns", [None, ["id"]])
def test_a_file_of_another_delimiter_is_told_as_such(tmp_path, columns):
    (tmp_path / "people.csv").write_text("id;name\n1;a\n")
    (tmp_path / "sink.csv").write_text("id,name\n")
    reads = {"table": "people", **({"columns": columns} if columns else {})}
    config = {"path": str(tmp_path), "format": "csv"}
    task = Job(
        config, config, definition(reads, {"table": "sink"}, "complete"), connectors=("file",) * 2
    )
    with pytest.raises(HandlerFailure, match="one column; is its delimiter ';'"):
        task.run()
    task.source = {**config, "delimiter": ";"}
    task.run()
    assert (tmp_path / "sink.csv").read_text().startswith("id")


def test_parquet_without_pyarrow_tells_the_install_command(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = Files().check_config({"path": "/x", "format": "parquet"})
    assert problem.key == "format"
    assert "pip install 'celery-claimcheck[parquet]'" in problem.message


def test_names_of_patterns_are_what_they_begin_with(tmp_path):
    for path, name in (
        ("orders-*.csv", "orders"),
        ("2026_?.csv", "2026"),
        ("*.csv", tmp_path.name),
        ("x.csv", "x"),
    ):
        place = Place({"path": str(tmp_path / path), "format": "csv"})
        assert place.own_name() == name
