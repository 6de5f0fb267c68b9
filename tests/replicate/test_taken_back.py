"""What ``create`` made is no data: it goes where its first run fails with nothing committed."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from conformance import Harness
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure
from tasks.replicate import ends
from tasks.replicate.connector import CommitUnknown, SinkError
from tasks.replicate.names import split_name


@pytest.fixture(scope="module")
def made(
    database_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[engines.Engines]:
    with engines.Engines(database_server, tmp_path_factory.mktemp("engines")) as found:
        yield found


@pytest.fixture
def table() -> str:
    return f"t{uuid.uuid4().hex[:10]}"


def job(source: Database, sink: Harness, table: str, mode: str, query: str, **more: Any) -> Job:
    work = definition(
        {"query": query},
        {"table": table, "key": ["id"]},
        mode,
        create=True,
        **({"watermark": "id", "lag": 0} if mode == "incremental" else {}),
        **more,
    )
    return Job(source.config, sink.config, work, ("postgresql", sink.connector.name))


GOOD = "select n as id, 'x' as name from generate_series(1, 5) n"
# The last row fails while it is read.
BAD = "select n as id, (10 / (5 - n))::text as name from generate_series(1, 5) n"


def is_there(sink: Harness, table: str) -> bool:
    with sink.connector.sink(sink.config) as end:
        return end.describe(split_name(table)) is not None


CASES = [
    (engine, mode)
    for engine in engines.NAMES
    for mode in ("complete-atomic", "incremental")
    if mode != "incremental" or engine not in engines.FILES
]


@pytest.mark.parametrize(("engine", "mode"), CASES)
def test_a_failed_first_run_leaves_no_table(
    made: engines.Engines, source: Database, table: str, engine: str, mode: str
) -> None:
    sink = made.sink(engine)
    with pytest.raises(HandlerFailure, match="division by zero"):
        job(source, sink, table, mode, BAD).run()
    assert not is_there(sink, table)
    assert job(source, sink, table, mode, GOOD).run().rows_processed == 5
    # A table that was there stays, whatever fails.
    with pytest.raises(HandlerFailure, match="division by zero"):
        job(source, sink, table, mode, BAD).run()
    assert len(sink.rows(table)) == 5


@contextlib.contextmanager
def changed(
    monkeypatch: pytest.MonkeyPatch, sink: Harness, **methods: Callable[..., Any]
) -> Iterator[None]:
    """The connector's sinks with other methods."""
    with sink.connector.sink(sink.config) as end:
        kind = type(end)
    with monkeypatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(kind, name, method)
        yield


@pytest.mark.parametrize("engine", engines.NAMES)
def test_rows_that_somebody_has_put_there_meanwhile_stay(
    made: engines.Engines,
    source: Database,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    engine: str,
) -> None:
    sink = made.sink(engine)

    def publish(end: Any, load: Any) -> Any:
        end.rollback()
        with monkeypatch.context() as patch:
            patch.undo()
            job(source, sink, table, "complete", GOOD).run()
        raise SinkError("broken")

    with (
        changed(monkeypatch, sink, publish=publish),
        pytest.raises(HandlerFailure, match="broken"),
    ):
        job(source, sink, table, "complete-atomic", GOOD).run()
    assert len(sink.rows(table)) == 5


@pytest.mark.parametrize("engine", engines.NAMES)
@pytest.mark.parametrize("settled", [False, None])
def test_a_table_whose_commit_is_not_known_stays(
    made: engines.Engines,
    source: Database,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    engine: str,
    settled: bool | None,
) -> None:
    sink = made.sink(engine)
    monkeypatch.setattr(ends, "SETTLE_SECONDS", 0.0)

    def commit(end: Any) -> None:
        end.rollback()
        raise CommitUnknown("broken")

    def settle(end: Any, load: Any) -> bool:
        if settled is None:
            raise SinkError("not known")
        return settled

    with (
        changed(monkeypatch, sink, commit=commit, settle=settle),
        pytest.raises(HandlerFailure, match=r"not known|nothing of it remained"),
    ):
        job(source, sink, table, "complete-atomic", GOOD).run()
    assert is_there(sink, table) == (settled is None)


def test_a_complete_run_that_emptied_the_table_leaves_it(
    made: engines.Engines, source: Database, table: str
) -> None:
    sink = made.sink("postgresql")
    with pytest.raises(HandlerFailure, match="division by zero"):
        job(source, sink, table, "complete", BAD).run()
    assert sink.rows(table) == []


def test_a_file_that_cannot_hold_a_value_is_not_there_afterwards(
    source: Database, tmp_path: Path
) -> None:
    source.execute("create table bad (id int primary key, ti time)")
    source.execute("insert into bad values (1, '24:00')")
    folder = {"path": str(tmp_path), "format": "parquet"}
    work = definition({"table": "bad"}, {"table": "bad"}, "complete-atomic", create=True)
    with pytest.raises(HandlerFailure, match="column ti"):
        Job(source.config, folder, work, ("postgresql", "file")).run()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
