"""Memory is bounded by batches, not by tables or values (both lanes)."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from replication_kit import Database, Job, definition

Make = Callable[..., Job]

# Reports the peak of its own memory: VmHWM begins anew with each program.
MEASURED = """
import json, sys, pathlib
sys.path[:0] = json.loads(sys.argv[1])
import replication_kit
from tasks.replicate import modes
from tasks.replicate.connector import Lane
from tasks.replicate.connectors.postgresql.source import PostgreSQLSource
task = json.loads(sys.stdin.read())
if task.pop("rows_lane"):
    PostgreSQLSource.lanes = (Lane.ROWS,)
modes.run(replication_kit.Job(**task).context())
status = pathlib.Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


def _peak_mb(job: Job, rows_lane: bool) -> int:
    task = {
        "source": job.source,
        "sink": job.sink,
        "definition": job.definition,
        "connectors": job.connectors,
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps([str(Path(__file__).parent), *sys.path])],
        input=json.dumps(task | {"rows_lane": rows_lane}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("rows_lane", [False, True])
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_peak_memory_does_not_grow_with_the_table(
    source: Database, sink: Database, job: Make, rows_lane: bool, mode: str
) -> None:
    for database in (source, sink):
        database.execute("create unlogged table t (id int, name text)")
    source.execute("insert into t select i, repeat('x', 200) from generate_series(1, 5000) i")
    small = _peak_mb(job(mode), rows_lane)
    source.execute("insert into t select i, repeat('x', 200) from generate_series(1, 300000) i")
    large = _peak_mb(job(mode), rows_lane)
    # The table grew by 60 MB.
    assert large < small + 12


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_wide_values_do_not_fill_the_memory(source: Database, sink: Database, job: Make) -> None:
    for database in (source, sink):
        database.execute("create unlogged table t (id int, name text)")
    source.execute("insert into t select i, repeat('x', 1000000) from generate_series(1, 300) i")
    assert _peak_mb(job("complete", fetch_size=100_000), True) < 400
    assert _peak_mb(job("complete"), False) < 200


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_wide_values_behind_narrow_ones_do_not_fill_the_memory(
    sink: Database, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as file, file:
        file.execute("create table t (id integer primary key, v text)")
        rows = ((i, "x" if i < 20 else "y\t" * 500_000) for i in range(170))
        file.executemany("insert into t values (?, ?)", rows)
    sink.execute("create unlogged table t (id bigint, v text)")
    work = definition({"table": "t"}, {"table": "t"}, "complete")
    job = Job(
        {"url": f"sqlite:///{tmp_path}/t.sqlite"}, sink.config, work, ("sqlite", "postgresql")
    )
    # A page of them is 150 MB.
    assert _peak_mb(job, False) < 300
    assert sink.value("select sum(length(v)) from t") == 150_000_020
