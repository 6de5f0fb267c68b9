"""The answer to a commit of the sink is lost: what became of it is asked for, and said (R-F4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from replication_kit import Database, Job

from dispatch.context import RunStopped
from tasks.replicate import ends, modes
from tasks.replicate.connector import CommitUnknown, Lane, Load, SinkError
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink
from tasks.replicate.part import Work

Make = Callable[..., Job]

MAY = {
    ("complete", 0): "it may have been emptied",
    ("complete", 1): "it is empty or holds the new rows",
    ("complete-atomic", 0): "it may hold the new rows",
}
"""What is to be said of the sink, by mode and step."""


@pytest.fixture(autouse=True)
def tables(source: Database, sink: Database) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t select generate_series(1, 100)")
    sink.execute("insert into t values (-1)")


class Losing:
    """Sinks whose commits of one step end without an answer, and which answer no question then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, away: int) -> None:
        self.asked: list[Load] = []
        begin, commit, settle = PostgreSQLSink.begin, PostgreSQLSink.commit, PostgreSQLSink.settle
        steps: list[int] = []

        def beginning(end: PostgreSQLSink, load: Load) -> None:
            steps.append(load.step)
            begin(end, load)

        def losing(end: PostgreSQLSink) -> None:
            commit(end)
            if steps[-1] == step:
                raise CommitUnknown("the connection broke")

        def settling(end: PostgreSQLSink, load: Load) -> bool:
            self.asked.append(load)
            if len(self.asked) <= away:
                raise SinkError("sink: connection refused")
            return settle(end, load)

        monkeypatch.setattr(PostgreSQLSink, "begin", beginning)
        monkeypatch.setattr(PostgreSQLSink, "commit", losing)
        monkeypatch.setattr(PostgreSQLSink, "settle", settling)


@pytest.mark.parametrize(("mode", "step"), MAY)
def test_a_lost_commit_is_asked_for_until_the_server_answers__R_F5(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    monkeypatch.setattr(ends, "_NAP_SECONDS", 0.01)
    losing = Losing(monkeypatch, step, away=2)
    context = job(mode).context()
    modes.run(context)
    assert len(losing.asked) == 3
    assert context.warning == modes.COMMITTED
    assert sink.value("select count(*) from t where id > 0") == 100


@pytest.mark.parametrize(("mode", "step"), MAY)
def test_where_no_answer_comes_it_is_said_what_the_sink_may_hold__R_F4(
    job: Make, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    monkeypatch.setattr(ends, "SETTLE_SECONDS", 0)
    Losing(monkeypatch, step, away=9)
    context = job(mode).context()
    with pytest.raises(SinkError, match="connection refused"):
        modes.run(context)
    assert context.warning == f"the answer to the sink's commit was lost: {MAY[mode, step]}"


@pytest.mark.parametrize(("mode", "step"), MAY)
def test_a_stop_while_the_sink_commits_says_what_it_may_hold__R_F4(
    job: Make, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    losing = Losing(monkeypatch, step, away=0)
    context = job(mode).context()
    lost = PostgreSQLSink.commit

    def commit(end: PostgreSQLSink) -> None:
        try:
            lost(end)
        except CommitUnknown:
            context.stop("cancelled")
            raise

    monkeypatch.setattr(PostgreSQLSink, "commit", commit)
    with pytest.raises(RunStopped):
        modes.run(context)
    assert not losing.asked
    said = f"the run was stopped while the sink committed: {MAY[mode, step]}"
    assert (context.warning or "").startswith(said)


def test_a_part_asks_until_the_server_answers_too__R_F5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_NAP_SECONDS", 0.01)
    asked = []

    class Away:
        """A sink that settles at the third question."""

        def begin(self, load: Load) -> None: ...
        def altered(self, load: Load) -> bool:
            return False

        def refusals(self, load: Load) -> list[str]:
            return []

        def write(self, load: Load, batches: Any, *, staging: bool) -> int:
            return 7

        def commit(self) -> None:
            raise CommitUnknown("the connection broke")

        def settle(self, load: Load) -> bool:
            asked.append(load)
            if len(asked) < 3:
                raise SinkError("sink: connection refused")
            return True

    load = Load(("t",), (), "complete", Lane.ROWS, "run", "job", 1, step=1)
    work = Work({"bandwidth": None}, lambda **_: None)
    assert work._write(Away(), load, iter(())) == 7  # type: ignore[arg-type]
    assert asked == [load] * 3
