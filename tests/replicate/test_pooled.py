"""A session that is shared with others is no place for a job's settings, snapshots and locks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from replication_kit import Database, Job, url_of
from support import pooler

from tasks.replicate import registry
from tasks.replicate.connector import Problem, SinkError, SourceError

pytestmark = pytest.mark.skipif(pooler.program() is None, reason="there is no PgBouncer here")


@pytest.fixture
def task(source: Database, sink: Database, job: Callable[..., Job]) -> Job:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t select generate_series(1, 1000)")
    return job("complete-atomic", verify="checksum")


@pytest.mark.parametrize(("end", "error"), [("source", SourceError), ("sink", SinkError)])
def test_an_end_whose_sessions_are_shared_is_refused(
    request: pytest.FixtureRequest, task: Job, end: str, error: type[Exception]
) -> None:
    database = request.getfixturevalue(end)
    with pooler.pooled(database.url) as through:
        setattr(task, end, {"url": url_of(through)})
        with pytest.raises(error, match=rf"{end}: url: a pooler .* pooler: session") as caught:
            task.run()
        assert caught.value.permanent  # type: ignore[attr-defined]
        with pytest.raises(SourceError, match="a pooler"):
            registry.test("postgresql", getattr(task, end))


def test_a_pooler_that_keeps_sessions_may_stand_between(
    source: Database, sink: Database, task: Job
) -> None:
    with (
        pooler.pooled(source.url, "session", 10) as reads,
        pooler.pooled(sink.url, "session", 10) as writes,
    ):
        task.source = {"url": url_of(reads), "pooler": "session"}
        task.sink = {"url": url_of(writes), "pooler": "session"}
        task.run()
        task.run()
    assert sink.value("select count(*) from t") == 1000


def test_another_kind_of_pooler_is_no_setting() -> None:
    config = {"url": "postgresql://a@localhost/b", "pooler": "transaction"}
    found = registry.check_config("postgresql", config)
    assert found == [Problem("pooler", "may only be session; without one leave it out")]
