"""The suite that every connector passes, whoever wrote it.

A connector's test module makes a :class:`Harness` and inherits the two classes of tests (one is
enough for a connector that is only a source or only a sink)::

    class TestMySQLSource(SourceConformance):
        @pytest.fixture
        def harness(self): ...

Nothing here knows an engine: the harness makes tables by means of its own (not of the connector).
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from tasks.replicate.connector import (
    Batch,
    Cell,
    Column,
    ColumnPlan,
    Connector,
    Counts,
    Fenced,
    Kind,
    Lane,
    Load,
    Part,
    ReadRequest,
    Relation,
    Row,
    Sink,
    SinkError,
    Source,
    SourceError,
)
from tasks.replicate.names import split_name


@dataclass(frozen=True)
class Sample:
    """A column to try: the engine's type, and cells that it must hand out and take unchanged."""

    name: str
    native: str
    kind: Kind
    cells: tuple[Cell, ...]


class Harness(ABC):
    """One engine with an empty place of its own, made fresh for each test."""

    connector: Connector
    config: Mapping[str, Any]
    samples: Sequence[Sample] = ()
    """One for each kind the engine has; each with as many cells, NULL and extremes among them."""
    key_type = "integer"
    text_type = "varchar(100)"
    awkward_names: tuple[str, ...] = (
        "select",
        "Mixed Case",
        'with "quotes"',
        "per%cent",
        "ünïcode",
    )
    """Table and column names that must work as they are."""

    @abstractmethod
    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        """Make a table (name -> native type), fill it, and return its name as a job writes it."""

    @abstractmethod
    def rows(self, table: str) -> list[Row]:
        """All rows of a table, whoever made it, sorted by the first column, as cells."""

    @abstractmethod
    def hold(self) -> Any:
        """A context manager within which a read of ``blocked`` hangs, or None where none can: a
        file is not waited for. Not for a server: what waits for it must be seen to stop."""


def identity_plan(source: Relation, sink: Relation | None = None) -> tuple[ColumnPlan, ...]:
    """Every column onto the one of the same name."""
    target = sink or source
    return tuple(
        ColumnPlan(column, target.column(column.name) or column)
        for column in source.columns
        if not column.generated
    )


def read_all(source: Source, request: ReadRequest, parts: Sequence[Part] = (Part(0),)) -> list[Row]:
    """All rows of some parts through the row lane."""
    found: list[Row] = []
    for part in parts:
        for batch in source.read(request, part, Lane.ROWS):
            assert isinstance(batch.data, list)
            assert batch.rows == len(batch.data)
            found.extend(batch.data)
    return found


def request_for(source: Source, table: str, **changes: Any) -> ReadRequest:
    """A planned request for every column of a table."""
    request = ReadRequest(table=split_name(table), **changes)
    return request.planned(identity_plan(source.describe(request)))


class SourceConformance:
    """What every source does."""

    @pytest.fixture
    def harness(self) -> Harness:
        raise NotImplementedError

    def test_every_kind_arrives_as_the_cells_of_the_interface(self, harness: Harness) -> None:
        columns = {"id": harness.key_type} | {s.name: s.native for s in harness.samples}
        cells = [s.cells for s in harness.samples]
        rows = [(i, *row) for i, row in enumerate(zip(*cells, strict=True))]
        table = harness.make("kinds", columns, rows, key=["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table)
            kinds = {c.source.name: c.source.type.kind for c in request.columns}
            assert {s.name: kinds[s.name] for s in harness.samples} == {
                s.name: s.kind for s in harness.samples
            }
            source.snapshot()
            found = sorted(read_all(source, request), key=lambda row: row[0])
        for row, wanted in zip(found, rows, strict=True):
            for cell, want in zip(row, wanted, strict=True):
                assert same(cell, want), (cell, want)

    def test_awkward_names_work_as_they_are(self, harness: Harness) -> None:
        for name in harness.awkward_names:
            columns = {"id": harness.key_type, name: harness.text_type}
            table = harness.make(f"t {name}", columns, [(1, "a")], key=["id"])
            with harness.connector.source(harness.config) as source:
                request = request_for(source, table)
                source.snapshot()
                assert read_all(source, request) == [(1, "a")]
                assert source.count(request) == 1

    def test_a_missing_table_is_a_permanent_source_error(self, harness: Harness) -> None:
        with (
            harness.connector.source(harness.config) as source,
            pytest.raises(SourceError, match="nowhere") as caught,
        ):
            source.describe(ReadRequest(table=("nowhere",)))
        assert caught.value.permanent

    def test_an_empty_table_yields_no_row(self, harness: Harness) -> None:
        table = harness.make("empty", {"id": harness.key_type}, key=["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table)
            source.snapshot()
            assert read_all(source, request) == []

    def test_where_limits_the_rows(self, harness: Harness) -> None:
        if not harness.connector.capabilities.queries:
            pytest.skip("this connector has no where")
        table = harness.make("numbers", {"id": harness.key_type}, [(i,) for i in range(10)], ["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table, where="id >= 7 or id = 1")
            source.snapshot()
            assert sorted(read_all(source, request)) == [(1,), (7,), (8,), (9,)]

    def test_a_query_is_a_source(self, harness: Harness) -> None:
        if not harness.connector.capabilities.queries:
            pytest.skip("this connector has no queries")
        harness.make("numbers", {"id": harness.key_type}, [(i,) for i in range(10)], ["id"])
        with harness.connector.source(harness.config) as source:
            request = ReadRequest(query="select id, id * 2 as twice from numbers where id > 7")
            request = request.planned(identity_plan(source.describe(request)))
            assert [c.source.name for c in request.columns] == ["id", "twice"]
            source.snapshot()
            assert sorted(read_all(source, request)) == [(8, 16), (9, 18)]

    def test_since_is_inclusive_and_keeps_rows_without_a_watermark(self, harness: Harness) -> None:
        if "incremental" not in harness.connector.capabilities.source_modes:
            pytest.skip("this connector has no incremental reads")
        rows: list[Row] = [(1, 10), (2, 20), (3, 30), (4, None)]
        columns = {"id": harness.key_type, "version": harness.key_type}
        table = harness.make("versions", columns, rows, key=["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table, watermark="version", since="20")
            source.snapshot()
            assert sorted(row[0] for row in read_all(source, request)) == [2, 3, 4]

    def test_parts_are_the_whole_each_row_once(self, harness: Harness) -> None:
        if not harness.connector.capabilities.parallel_source:
            pytest.skip("this connector is read by one reader")
        rows: list[Row] = [(i,) for i in range(5000)]
        table = harness.make("many", {"id": harness.key_type}, rows, key=["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table)
            source.snapshot()
            parts = source.split(request, 3)
            assert 1 < len(parts) <= 3
            found = []
            for part in parts:
                with harness.connector.source(harness.config) as reader:
                    reader.join(request, part)
                    found.extend(read_all(reader, request, [part]))
        assert sorted(found) == rows

    def test_batches_hold_no_more_rows_than_the_fetch_size(self, harness: Harness) -> None:
        rows: list[Row] = [(i,) for i in range(1000)]
        table = harness.make("many", {"id": harness.key_type}, rows, key=["id"])
        with harness.connector.source(harness.config) as source:
            request = request_for(source, table, fetch_size=300)
            source.snapshot()
            sizes = [batch.rows for batch in source.read(request, Part(0), Lane.ROWS)]
        assert sum(sizes) == 1000
        assert max(sizes) <= 300

    def test_stop_breaks_a_read_within_a_second__R_K2(self, harness: Harness) -> None:
        holder = harness.hold()
        if holder is None:
            pytest.skip("nothing makes this engine block")
        with holder, harness.connector.source(harness.config) as source:
            request = request_for(source, "blocked")
            source.snapshot()
            stopped: list[float] = []

            def stop() -> None:
                stopped.append(time.monotonic())
                source.stop()

            timer = threading.Timer(0.3, stop)
            timer.start()
            with pytest.raises(SourceError):
                read_all(source, request)
            assert time.monotonic() - stopped[0] < 1.0
            timer.join(timeout=5)


class SinkConformance:
    """What every sink does."""

    key: ClassVar[tuple[str, ...]] = ("id",)

    @pytest.fixture
    def harness(self) -> Harness:
        raise NotImplementedError

    def load(self, harness: Harness, table: str, relation: Relation, **changes: Any) -> Load:
        """A load of every column of a table, in the row lane."""
        load = Load(
            table=split_name(table),
            columns=identity_plan(relation),
            mode="complete",
            lane=Lane.ROWS,
            run_id=str(uuid.uuid4()),
            scope=str(uuid.uuid4()),
            fence=10,
            key=relation.key,
            relation=relation,
        )
        return replace(load, **changes)

    def needs(self, harness: Harness, mode: str, way: str | None = None) -> None:
        capabilities = harness.connector.capabilities
        if mode not in capabilities.sink_modes:
            pytest.skip(f"no mode {mode}")
        if way is not None and way not in capabilities.atomic:
            pytest.skip(f"no way {way}")

    def test_the_target_is_known_among_what_a_source_reads(self, harness: Harness) -> None:
        connector = harness.connector
        if not connector.capabilities.source_modes:
            pytest.skip("this connector is no source")
        table = harness.make("target", {"id": harness.key_type}, [(1,)], key=["id"])
        other = harness.make("other", {"id": harness.key_type}, [(1,)], key=["id"])
        with connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            written = sink.writes(relation)
        requests = {ReadRequest(table=split_name(table)): True}
        requests[ReadRequest(table=split_name(other))] = False
        if connector.capabilities.queries:
            query = "select id from other where id < (select max(id) from target)"
            where = query.partition(" where ")[2]
            requests[ReadRequest(query=query)] = True
            requests[ReadRequest(table=split_name(other), where=where)] = True
        with connector.source(harness.config) as source:
            for request, reads in requests.items():
                source.describe(request)
                assert (written in source.reads(request)) is reads, request

    def test_every_kind_is_stored_as_it_is(self, harness: Harness) -> None:
        columns = {"id": harness.key_type} | {s.name: s.native for s in harness.samples}
        cells = [s.cells for s in harness.samples]
        rows = [(i, *row) for i, row in enumerate(zip(*cells, strict=True))]
        table = harness.make("kinds", columns, key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)
            sink.begin(load)
            sink.truncate(load)
            sink.commit()
            sink.begin(replace(load, step=1))
            assert sink.write(load, batches(rows, 2), staging=False) == len(rows)
            sink.commit()
        for row, wanted in zip(harness.rows(table), rows, strict=True):
            for cell, want in zip(row, wanted, strict=True):
                assert same(cell, want), (cell, want)

    def test_a_load_leaves_the_columns_as_they_were(self, harness: Harness) -> None:
        columns = {"id": harness.key_type} | {s.name: s.native for s in harness.samples}
        cells = [s.cells for s in harness.samples]
        rows = [(i, *row) for i, row in enumerate(zip(*cells, strict=True))]
        table = harness.make("kept", columns, key=["id"])
        before = self.described(harness, table)
        self.complete(harness, table, rows)
        after = self.described(harness, table)
        assert (after.columns, after.key) == (before.columns, before.key)

    def described(self, harness: Harness, table: str) -> Relation:
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
        assert relation is not None
        return relation

    def test_awkward_names_work_as_they_are(self, harness: Harness) -> None:
        for name in harness.awkward_names:
            columns = {"id": harness.key_type, name: harness.text_type}
            table = harness.make(f"t {name}", columns, [(1, "old")], key=["id"])
            self.complete(harness, table, [(2, "new")])
            assert harness.rows(table) == [(2, "new")]

    def complete(self, harness: Harness, table: str, rows: Sequence[Row], fence: int = 10) -> None:
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, fence=fence)
            assert sink.refusals(load) == []
            sink.begin(load)
            sink.truncate(load)
            sink.commit()
            sink.begin(replace(load, step=1))
            sink.write(load, batches(rows), staging=False)
            assert sink.count(load) == len(rows)
            sink.commit()

    def staged(self, harness: Harness, table: str, rows: Sequence[Row], **changes: Any) -> Counts:
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, **changes)
            assert sink.refusals(load) == []
            sink.stage(load)
            sink.write(load, batches(rows), staging=True)
            before = harness.rows(table)
            sink.begin(load)
            counts = sink.publish(load)
            assert sorted(scan(sink.scan(load))) == sorted(
                rows if load.how != "merge" else {row[0]: row for row in rows}.values()
            )
            sink.commit()
            sink.unstage(load)
            assert before is not None
            return counts

    def test_describe_of_a_missing_table_is_none(self, harness: Harness) -> None:
        with harness.connector.sink(harness.config) as sink:
            assert sink.describe(("nowhere",)) is None

    @pytest.mark.parametrize("way", ["delete", "diff", "truncate", "rename"])
    def test_complete_atomic_leaves_the_new_content(self, harness: Harness, way: str) -> None:
        self.needs(harness, "complete-atomic", way)
        columns = {"id": harness.key_type, "name": harness.text_type}
        table = harness.make("people", columns, [(1, "a"), (2, "b")], key=["id"])
        new: list[Row] = [(2, "b"), (3, "c"), (4, None)]
        self.staged(harness, table, new, mode="complete-atomic", how=way)
        assert harness.rows(table) == new

    def test_merge_inserts_updates_and_leaves_equal_rows(self, harness: Harness) -> None:
        self.needs(harness, "incremental")
        columns = {"id": harness.key_type, "name": harness.text_type}
        table = harness.make("people", columns, [(1, "a"), (2, "b"), (3, None)], key=["id"])
        rows: list[Row] = [(2, "B"), (3, None), (4, "d")]
        counts = self.staged(harness, table, rows, mode="incremental", how="merge")
        assert harness.rows(table) == [(1, "a"), (2, "B"), (3, None), (4, "d")]
        assert (counts.inserted, counts.updated, counts.unchanged) == (1, 1, 1)

    def test_merge_takes_the_newest_of_two_staged_rows(self, harness: Harness) -> None:
        self.needs(harness, "incremental")
        columns = {"id": harness.key_type, "version": harness.key_type}
        table = harness.make("versions", columns, [(1, 1)], key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, mode="incremental", how="merge")
            load = replace(load, watermark="version")
            sink.stage(load)
            sink.write(load, batches([(1, 3), (1, 2)]), staging=True)
            sink.begin(load)
            sink.publish(load)
            sink.commit()
            sink.unstage(load)
        assert harness.rows(table) == [(1, 3)]

    def test_diff_refuses_two_staged_rows_with_one_key(self, harness: Harness) -> None:
        self.needs(harness, "complete-atomic", "diff")
        columns = {"id": harness.key_type, "version": harness.key_type}
        table = harness.make("versions", columns, [(1, 1)], key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, mode="complete-atomic", how="diff")
            sink.stage(load)
            sink.write(load, batches([(1, 3), (2, 2), (1, 2)]), staging=True)
            sink.begin(load)
            with pytest.raises(
                SinkError, match="key column id: 1 key stands in several rows"
            ) as caught:
                sink.publish(load)
            assert caught.value.permanent
            sink.rollback()
            sink.unstage(load)
        assert harness.rows(table) == [(1, 1)]

    def test_merge_of_a_table_that_is_all_key(self, harness: Harness) -> None:
        self.needs(harness, "incremental")
        table = harness.make("links", {"a": harness.key_type, "b": harness.key_type}, [(1, 1)])
        table = harness.make(
            "all_key", {"a": harness.key_type, "b": harness.key_type}, [(1, 1)], key=["a", "b"]
        )
        rows: list[Row] = [(1, 1), (1, 2)]
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, mode="incremental", how="merge")
            sink.stage(load)
            sink.write(load, batches(rows), staging=True)
            sink.begin(load)
            counts = sink.publish(load)
            sink.commit()
            sink.unstage(load)
        assert sorted(harness.rows(table)) == rows
        assert counts.inserted == 1

    def test_merge_without_a_key_is_refused_by_name(self, harness: Harness) -> None:
        self.needs(harness, "incremental")
        table = harness.make("keyless", {"id": harness.key_type})
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation, mode="incremental", how="merge")
            assert any("key" in refusal for refusal in sink.refusals(load))

    def test_rollback_leaves_the_old_content(self, harness: Harness) -> None:
        if not harness.connector.capabilities.transactional:
            pytest.skip("not transactional")
        columns = {"id": harness.key_type, "name": harness.text_type}
        table = harness.make("people", columns, [(1, "a")], key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)
            sink.begin(load)
            sink.truncate(load)
            sink.write(load, batches([(2, "b")]), staging=False)
            sink.rollback()
        assert harness.rows(table) == [(1, "a")]

    def test_an_older_attempt_writes_nothing_after_a_newer_one__R_F5(
        self, harness: Harness
    ) -> None:
        if not harness.connector.capabilities.transactional:
            pytest.skip("not transactional")
        table = harness.make("people", {"id": harness.key_type}, [(1,)], key=["id"])
        with (
            harness.connector.sink(harness.config) as old,
            harness.connector.sink(harness.config) as new,
        ):
            relation = old.describe(split_name(table))
            assert relation is not None
            stale = self.load(harness, table, relation, fence=10)
            fresh = replace(stale, fence=11, run_id=str(uuid.uuid4()))
            old.begin(stale)
            old.truncate(stale)
            old.commit()
            new.begin(fresh)
            new.truncate(fresh)
            new.write(fresh, batches([(2,)]), staging=False)
            new.commit()
            for step in (0, 1):
                with pytest.raises(Fenced):
                    old.begin(replace(stale, step=step))
                old.rollback()
        assert harness.rows(table) == [(2,)]

    def test_two_jobs_with_one_target_do_not_mix_their_rows(self, harness: Harness) -> None:
        if not harness.connector.capabilities.transactional:
            pytest.skip("not transactional")
        table = harness.make("people", {"id": harness.key_type}, [(1,)], key=["id"])
        with (
            harness.connector.sink(harness.config) as first,
            harness.connector.sink(harness.config) as second,
        ):
            relation = first.describe(split_name(table))
            assert relation is not None
            one, two = (self.load(harness, table, relation, fence=n) for n in (11, 10))
            for sink, load in ((first, one), (second, two)):
                sink.begin(load)
                sink.truncate(load)
                sink.commit()
            with pytest.raises(SinkError, match=f"run {two.run_id} has begun to write people"):
                first.begin(replace(one, step=1))
            first.rollback()
            second.begin(replace(two, step=1))
            waits = threading.Thread(target=self._whole, args=(first, one))
            waits.start()
            second.write(two, batches([(2,)]), staging=False)
            second.commit()
            waits.join(timeout=20)
            assert not waits.is_alive()
        assert harness.rows(table) == [(3,)]

    @staticmethod
    def _whole(sink: Sink, load: Load) -> None:
        sink.begin(load)
        sink.truncate(load)
        sink.write(load, batches([(3,)]), staging=False)
        sink.commit()

    def test_settle_tells_whether_the_commit_landed__R_F5(self, harness: Harness) -> None:
        if not harness.connector.capabilities.transactional:
            pytest.skip("not transactional")
        table = harness.make("people", {"id": harness.key_type}, [(1,)], key=["id"])
        for step in (0, 1):
            for commit in (True, False):
                with harness.connector.sink(harness.config) as sink:
                    relation = sink.describe(split_name(table))
                    assert relation is not None
                    load = self.load(harness, table, relation)
                    if step:
                        sink.begin(load)
                        sink.commit()
                    load = replace(load, step=step)
                    sink.begin(load)
                    sink.truncate(load)
                    if commit:
                        sink.commit()
                    else:
                        sink.rollback()
                    assert sink.settle(load) is commit

    def test_stop_ends_a_write_within_a_second__R_K2(self, harness: Harness) -> None:
        """One whose rows come slowly: none of its own calls waits for long."""
        table = harness.make("slow", {"id": harness.key_type}, key=["id"])
        stopped: list[float] = []

        def slowly() -> Iterator[Batch]:
            for number in range(60):
                yield from batches([(number,)])
                time.sleep(0.05)

        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)

            def stop() -> None:
                stopped.append(time.monotonic())
                sink.stop()

            sink.begin(load)
            timer = threading.Timer(0.3, stop)
            timer.start()
            with pytest.raises(SinkError):
                sink.write(load, slowly(), staging=False)
            assert time.monotonic() - stopped[0] < 1.0
            timer.join(timeout=5)
            sink.rollback()
        if harness.connector.capabilities.transactional:
            assert harness.rows(table) == []

    def test_what_was_created_is_taken_back_unless_it_has_rows(self, harness: Harness) -> None:
        if not harness.connector.capabilities.create:
            pytest.skip("this connector creates no tables")
        columns = {"id": harness.key_type, "name": harness.text_type}
        model = self.described(harness, harness.make("model", columns, key=["id"]))
        with harness.connector.sink(harness.config) as sink:
            for filled in (False, True):
                sink.create(("made",), model.columns, model.key, sink.dialect)
                relation = sink.describe(("made",))
                assert relation is not None
                if filled:
                    load = self.load(harness, "made", relation)
                    sink.begin(load)
                    sink.write(load, batches([(1, "a")]), staging=False)
                    sink.commit()
                sink.uncreate(("made",))
                with harness.connector.sink(harness.config) as other:
                    assert (other.describe(("made",)) is not None) is filled
        assert len(harness.rows("made")) == 1

    def test_a_target_that_is_not_what_was_planned_is_told(self, harness: Harness) -> None:
        if not harness.connector.capabilities.transactional:
            pytest.skip("not transactional")
        columns = {"id": harness.key_type, "name": harness.text_type}
        table = harness.make("people", columns, key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)
            *kept, last = load.columns
            planned = {
                "another type": replace(
                    last.sink, type=replace(last.sink.type, name="another", kind=Kind.OTHER)
                ),
                "a column that is gone": replace(last.sink, name="gone"),
                "a plain column": replace(last.sink, generated=True),
            }
            sink.begin(load)
            assert not sink.altered(load)
            for what, column in planned.items():
                stale = replace(load, columns=(*kept, replace(last, sink=column)))
                assert sink.altered(stale), what
            sink.rollback()

    @pytest.mark.parametrize("analyze", [False, True])
    def test_finish_returns_its_warnings(self, harness: Harness, analyze: bool) -> None:
        table = harness.make("people", {"id": harness.key_type}, key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)
            sink.begin(load)
            sink.write(load, batches([(1,)]), staging=False)
            sink.commit()
            assert sink.finish(load, analyze=analyze) == []
        assert len(harness.rows(table)) == 1

    def test_a_value_that_does_not_fit_is_an_error_naming_the_column(
        self, harness: Harness
    ) -> None:
        columns = {"id": harness.key_type, "name": harness.text_type}
        table = harness.make("people", columns, key=["id"])
        with harness.connector.sink(harness.config) as sink:
            relation = sink.describe(split_name(table))
            assert relation is not None
            load = self.load(harness, table, relation)
            if relation.columns[0].type.loose:
                pytest.skip("this engine binds no value to a type")
            sink.begin(load)
            with pytest.raises(SinkError, match="id") as caught:
                sink.write(load, batches([("secret words", "a")]), staging=False)
            sink.rollback()
        assert "secret words" not in str(caught.value)


def batches(rows: Sequence[Row], size: int = 1000) -> Iterator[Batch]:
    """Rows as a source hands them out."""
    for start in range(0, len(rows), size):
        share = list(rows[start : start + size])
        yield Batch(share, len(share), 100 * len(share))


def scan(found: Iterator[Batch]) -> list[Row]:
    rows: list[Row] = []
    for batch in found:
        assert isinstance(batch.data, list)
        rows.extend(batch.data)
    return rows


def same(cell: Cell, wanted: Cell) -> bool:
    """Equal and of one type; NaN equals NaN."""
    if isinstance(cell, float) and isinstance(wanted, float) and cell != cell:
        return wanted != wanted
    return type(cell) is type(wanted) and cell == wanted


def column(relation: Relation, name: str) -> Column:
    found = relation.column(name)
    assert found is not None
    return found
