"""Progress of a replication: rows, bytes and a total, from the first second."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from mysql_kit import MySQLHarness, a_database
from replication_kit import Database, Job, definition
from sqlite_kit import SQLiteHarness
from support.waiting import until

from dispatch.context import Progress, RunContext, RunStopped
from tasks.replicate import meter, modes
from tasks.replicate.connector import Batch, ReadRequest, Relation
from tasks.replicate.connectors.mysql import MySQL
from tasks.replicate.connectors.sqlite import SQLite

Make = Callable[..., Job]
ROWS = 20_000


def told(context: RunContext) -> list[Progress]:
    """All that is reported from here on."""
    found: list[Progress] = []
    report = context.progress

    def record(*numbers: Any, **more: Any) -> None:
        report(*numbers, **more)
        taken = context.take_progress()
        assert taken is not None
        found.append(taken)

    context.progress = record  # type: ignore[method-assign]
    return found


def test_progress_is_told_before_the_source_answers(job: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        task = job("complete")
        task.source = {"url": f"postgresql://root@127.0.0.1:{silent.getsockname()[1]}/nothing"}
        context = task.context()

        def run() -> None:
            with pytest.raises(RunStopped):
                modes.run(context)

        thread = threading.Thread(target=run)
        thread.start()
        taken = until("the first progress", context.take_progress, 5)
        assert taken == Progress(0, phase="connecting")
        assert thread.is_alive()
        context.stop("cancelled")
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_rows_bytes_and_an_estimate_are_told_while_rows_move(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute("insert into t select i, repeat('x', 90) from generate_series(1, 20000) i")
    source.execute("analyze t")
    context = job("complete", bandwidth="1MB").context()
    found = told(context)
    modes.run(context)
    phases = list(dict.fromkeys(progress.phase for progress in found))
    assert phases == ["connecting", "describing", "starting", "reading", "finishing"]
    reading = [progress for progress in found if progress.phase == "reading"]
    assert len(reading) > 5
    assert {(progress.total, progress.total_is_estimate) for progress in reading} == {(ROWS, True)}
    assert [p.done for p in reading] == sorted(p.done for p in reading)
    assert reading[0].bytes


def test_an_estimate_that_is_too_low_grows_with_the_rows(job: Make) -> None:
    context = job("complete").context()
    counted = meter.Meter(context, Relation((), rows=10, size=1), bandwidth=None)
    list(counted.through([Batch([], 12, 1)]))
    counted.report("reading")
    assert context.take_progress() == Progress(12, 12, True, 1, "reading")


def csv(path: Path, end: str = "\n", encoding: str = "utf-8", mark: str = ",") -> None:
    lines = [mark.join(("id", "name", "note"))]
    lines += [mark.join((str(n), "ünï" * 9, "x" * 40)) for n in range(10_000, 10_000 + ROWS)]
    path.write_text(end.join([*lines, ""]), encoding=encoding, newline="")


def jsonl(path: Path) -> None:
    name = "ünï" * 9
    lines = [f'{{"id": {n}, "name": "{name}"}}\n' for n in range(10_000, 10_000 + ROWS)]
    path.write_text("".join(lines), encoding="utf-8")


def unequal(path: Path) -> None:
    """Long records first, so that they foretell too few rows."""
    lines = ["name\n", *["x" * 400 + "\n"] * 1_000, *["y\n"] * (ROWS - 1_000)]
    path.write_text("".join(lines))


FILES = {
    "as it is": ("csv", csv, {}, {}),
    "some columns": ("csv", csv, {}, {"columns": ["note", "id"]}),
    "CR LF": ("csv", lambda path: csv(path, "\r\n"), {}, {}),
    "row by row": ("csv", lambda path: csv(path, mark=";"), {"delimiter": ";"}, {}),
    "latin-1": ("csv", lambda path: csv(path, "\n", "latin-1"), {"encoding": "latin-1"}, {}),
    "JSON lines": ("jsonl", jsonl, {}, {}),
    "unequal": ("csv", unequal, {}, {}),
}


@pytest.mark.parametrize("which", FILES)
def test_a_text_files_rows_are_estimated_by_the_bytes_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    kind, make, options, reads = FILES[which]
    monkeypatch.setattr(meter, "REPORT_SECONDS", 0.0)
    path = tmp_path / f"t.{kind}"
    make(path)
    sink = {"path": str(tmp_path / "out.csv"), "format": "csv"}
    work = definition({"table": "t", **reads}, {"table": "out"}, "complete", create=True)
    task = Job({"path": str(path), "format": kind, **options}, sink, work, ("file", "file"))
    context = task.context()
    found = told(context)
    modes.run(context)
    reading = [progress for progress in found if progress.phase == "reading"]
    size = path.stat().st_size
    assert len(reading) >= 3
    for progress in reading:
        assert progress.total_is_estimate
        assert progress.total is not None
        assert progress.bytes is not None
        assert progress.done <= progress.total
        assert progress.done / progress.total == pytest.approx(progress.bytes / size, abs=0.001)
    assert reading[-1].done == ROWS
    assert reading[-1].total == pytest.approx(ROWS, rel=0.01)
    if which == "unequal":
        assert reading[0].total < ROWS / 5
    else:
        assert reading[0].total == pytest.approx(ROWS, rel=0.01)


def request(table: str, where: str | None = None, since: str | None = None) -> ReadRequest:
    return ReadRequest((table,), where=where, watermark="at", since=since)


def planned(server: MySQLHarness, **more: Any) -> int | None:
    with MySQL().source(server.config) as source:
        return source.describe(request("t", **more)).rows


def test_of_a_part_of_a_mysql_table_the_plan_tells_the_rows() -> None:
    with a_database() as server:
        began = datetime(2026, 1, 1)
        rows = [(n, str(began + timedelta(minutes=n)), n % 7) for n in range(5_000)]
        server.make("t", {"id": "int", "at": "datetime", "n": "int"}, rows, ["id"])
        server.sql("create index at on t (at)")
        server.sql("analyze table t")
        assert planned(server) == pytest.approx(5_000, rel=0.1)
        # From minute 4,800 on, and what has no time.
        assert planned(server, since="2026-01-04 08:00:00") == pytest.approx(200, abs=20)
        assert planned(server, where="id < 100") == pytest.approx(100, abs=20)
        both = planned(server, where="n = 1", since="2026-01-04 08:00:00")
        assert both is not None
        assert both <= 220
        assert planned(server, where="id in (select n from t)") is None
        assert planned(server, where="id < 0") in (None, 0, 1)
        if server.sql("select version() like '%mariadb%'")[0][0]:
            assert planned(server, where="n = 1") is None
            server.sql("analyze table t persistent for all")
            assert planned(server, where="n = 1") == pytest.approx(700, rel=0.5)


def test_sqlite_tells_no_total_for_a_part_of_a_table(tmp_path: Path) -> None:
    harness = SQLiteHarness(tmp_path / "a.db")
    rows = [(n, f"2026-01-01 00:{n:02}:00") for n in range(60)]
    harness.make("t", {"id": "INTEGER", "at": "TIMESTAMP"}, rows)
    with SQLite().source(harness.config) as source:
        assert source.describe(request("t")).rows == 60
        assert source.describe(request("t", where="id < 3")).rows is None
        assert source.describe(request("t", since="2026-01-01 00:50:00")).rows is None
