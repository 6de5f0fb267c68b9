"""Parallel runs: one snapshot, every row once, processes that end with their run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from replication_kit import Database, Job

from dispatch.context import HandlerFailure, RunStopped
from tasks.replicate import modes

Make = Callable[..., Job]
DDL = "create table t (id int primary key, name text)"


@pytest.fixture
def filled(source: Database, sink: Database) -> None:
    source.execute(DDL)
    sink.execute(DDL)
    source.execute("insert into t select i, repeat('x', 100) from generate_series(1, 20000) i")


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize("query", [False, True])
def test_parts_bring_every_row_once(
    source: Database, sink: Database, job: Make, mode: str, query: bool
) -> None:
    reads = {"query": "select * from t"} if query else {}
    outcome = job(
        mode, None if query else "t", to="t", reads=reads, parallelism=3, verify="checksum"
    ).run()
    assert outcome.rows_processed == 20000
    assert outcome.counters["read"] == 20000
    assert sink.value("select count(distinct id) from t") == 20000


@pytest.mark.usefixtures("filled")
def test_the_first_failure_ends_all_parts(source: Database, sink: Database, job: Make) -> None:
    sink.execute("alter table t add check (id <> 19999)")
    with pytest.raises(HandlerFailure, match="violates check constraint") as caught:
        job("complete", "t", parallelism=3).run()
    assert caught.value.code == "sink_error"
    _no_sessions(sink)


@pytest.mark.usefixtures("filled")
def test_a_stop_ends_all_parts_within_a_second__R_K2(
    source: Database, sink: Database, job: Make
) -> None:
    context = job("complete", "t", parallelism=2, bandwidth="200kB").context()
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        context.stop("cancelled")

    progress = threading.Thread(target=_wait_for_rows, args=(context, stop))
    progress.start()
    with pytest.raises(RunStopped):
        modes.run(context)
    assert time.monotonic() - stopped[0] < 1.0
    progress.join(timeout=10)
    _no_sessions(sink)
    assert context.warning is not None


def _wait_for_rows(context, then: Callable[[], None]) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = context.take_progress()
        if seen is not None and seen.done > 0:
            break
        time.sleep(0.02)
    then()


def _no_sessions(database: Database) -> None:
    """Within two seconds no session of a run is left."""
    deadline = time.monotonic() + 2
    left = -1
    while time.monotonic() < deadline:
        left = database.value(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name like 'cc/%'"
        )
        if left == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"{left} sessions are left")
