"""What a run checks by itself before it writes and before it commits (R-K2).

The ends' ``stop`` does nothing here: where it breaks a connection, a check that is missing is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from replication_kit import Database, Job

from dispatch.context import RunContext, RunStopped
from tasks.replicate import modes
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink
from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

Make = Callable[..., Job]
StopsIn = Callable[[RunContext, type, str], list[str]]

WRITES = ("create", "stage", "begin", "truncate", "write", "publish", "commit")


@pytest.fixture
def stops_in(monkeypatch: pytest.MonkeyPatch) -> StopsIn:
    """``stops_in(context, end, method)``: the run is stopped when the method has done its work.

    The sink's calls that write, in their order.
    """

    def arrange(context: RunContext, end: type, method: str) -> list[str]:
        calls: list[str] = []

        def noted(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                calls.append(name)
                return whole(*given, **named)

            return call

        for name in WRITES:
            monkeypatch.setattr(PostgreSQLSink, name, noted(name, getattr(PostgreSQLSink, name)))
        whole = getattr(end, method)

        def then_stops(*given: Any, **named: Any) -> Any:
            found = whole(*given, **named)
            context.stop("cancelled")
            return found

        monkeypatch.setattr(end, method, then_stops)
        for one in (PostgreSQLSource, PostgreSQLSink):
            monkeypatch.setattr(one, "stop", lambda end: None)
        return calls

    return arrange


@pytest.fixture(autouse=True)
def tables(source: Database, sink: Database) -> None:
    for database, row in ((source, 1), (sink, 7)):
        database.execute("create table t (id int primary key)")
        database.execute("insert into t values (%s)", row)


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
def test_a_run_that_is_stopped_before_its_first_write_writes_nothing__R_K2(
    sink: Database, job: Make, stops_in: StopsIn, mode: str
) -> None:
    more = {"watermark": "id"} if mode == "incremental" else {}
    context = job(mode, **more).context()
    calls = stops_in(context, PostgreSQLSource, "snapshot")
    with pytest.raises(RunStopped):
        modes.run(context)
    assert calls == []
    assert sink.execute("select id from t") == [(7,)]
    assert context.warning is None


def test_a_run_that_is_stopped_while_it_looks_at_its_sink_makes_no_table__R_K2(
    sink: Database, job: Make, stops_in: StopsIn
) -> None:
    sink.execute("drop table t")
    context = job("complete", create=True).context()
    calls = stops_in(context, PostgreSQLSink, "describe")
    with pytest.raises(RunStopped):
        modes.run(context)
    assert calls == []
    assert sink.value("select to_regclass('t')") is None


@pytest.mark.parametrize(
    ("mode", "method", "left"),
    [
        ("complete", "truncate", [(7,)]),
        ("complete", "count", []),
        ("complete-atomic", "publish", [(7,)]),
        ("incremental", "publish", [(7,)]),
    ],
)
def test_a_run_that_is_stopped_inside_a_transaction_does_not_commit_it__R_K2(
    sink: Database, job: Make, stops_in: StopsIn, mode: str, method: str, left: list[Any]
) -> None:
    # The last of what the transaction does, so that nothing else looks after it.
    more = {"watermark": "id"} if mode == "incremental" else {}
    if method == "count":
        more = {"verify": "count"}
    context = job(mode, **more).context()
    calls = stops_in(context, PostgreSQLSink, method)
    with pytest.raises(RunStopped):
        modes.run(context)
    # Of a complete run the truncate is committed first, in a transaction of its own.
    assert calls.count("commit") == (1 if method == "count" else 0)
    assert sink.execute("select id from t") == left
    assert context.warning == (modes.EMPTIED if method == "count" else None)


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
def test_a_run_that_is_stopped_after_its_commit_says_that_the_rows_are_there__R_F4(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    context = job(mode, **({"watermark": "id"} if mode == "incremental" else {})).context()
    whole, commits = PostgreSQLSink.commit, []

    def commit(end: PostgreSQLSink) -> None:
        whole(end)
        commits.append(1)
        # Of a complete run the truncate is committed first.
        if len(commits) == (2 if mode == "complete" else 1):
            context.stop("cancelled")

    monkeypatch.setattr(PostgreSQLSink, "commit", commit)
    monkeypatch.setattr(PostgreSQLSink, "stop", lambda end: None)
    with pytest.raises(RunStopped):
        modes.run(context)
    assert (1,) in sink.execute("select id from t")
    assert context.warning == modes.UNFINISHED


def test_a_driver_that_stumbles_over_its_broken_connection_is_a_stop__R_K2(
    job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = job("complete").context()

    def broken(*given: Any, **named: Any) -> Any:
        context.stop("cancelled")
        raise AttributeError("'NoneType' object has no attribute 'sendall'")

    monkeypatch.setattr(PostgreSQLSink, "write", broken)
    with pytest.raises(RunStopped):
        modes.run(context)
