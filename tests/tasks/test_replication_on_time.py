"""A replication at full speed in a real worker: its lease, progress and cancel stay on time."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from commands_support import Cli
from commands_support import cli as cli
from psycopg.conninfo import conninfo_to_dict
from support.waiting import until

LEASE_SECONDS = 3
WATCH_SECONDS = 4
ENDLESS = {
    "postgresql": "select id, md5(id::text) as note"
    " from (select generate_series(1::int8, 2000000000) as id) g",
    # Through Python, row by row.
    "sqlite": "with recursive g(id) as (select 1 union all select id + 1 from g)"
    " select id, 'customer ' || id as note from g",
}


@pytest.fixture
def definitions(cli: Cli, database: str, rows: Any, tmp_path: Path) -> None:
    """A job for each kind of source, from an endless query into a table."""
    parts = conninfo_to_dict(database)
    given = "&".join(f"{name}={value}" for name, value in parts.items() if name != "dbname")
    sqlite3.connect(tmp_path / "source.sqlite").close()
    text = f"""
datasources:
  postgresql: {{connector: postgresql, url: "postgresql:///{parts["dbname"]}?{given}"}}
  sqlite: {{connector: sqlite, url: "sqlite:///{tmp_path}/source.sqlite"}}
jobs:
"""
    for name, query in ENDLESS.items():
        rows(f"create table from_{name} (id bigint, note text)")
        text += f"""
  {name}:
    source: {{datasource: {name}, query: "{query}"}}
    sink: {{datasource: postgresql, table: public.from_{name}}}
    mode: complete
"""
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    cli("apply", str(path)).done()


@pytest.mark.parametrize("source", list(ENDLESS))
@pytest.mark.usefixtures("definitions")
def test_lease_progress_and_cancel_stay_on_time_under_full_load__R_L1(
    worker: Any, trigger: Any, rows: Any, source: str
) -> None:
    look = """select status, extract(epoch from clock_timestamp() - heartbeat_at)::float8 as silent,
        extract(epoch from lease_until - clock_timestamp())::float8 as left,
        coalesce((progress->>'done')::bigint, 0) as done from job_run"""
    with worker(CLAIMCHECK_LEASE_SECONDS=str(LEASE_SECONDS), concurrency=1):
        result = trigger.delay(source)
        until("rows to flow", lambda: rows(look)[0]["done"] > 0)
        seen = []
        began = time.monotonic()
        while time.monotonic() - began < WATCH_SECONDS:
            seen.append(rows(look)[0])
            time.sleep(0.1)
        assert {one["status"] for one in seen} == {"RUNNING"}
        # A third of the lease between renewals leaves two for whatever comes in between.
        assert min(one["left"] for one in seen) > LEASE_SECONDS / 3
        assert max(one["silent"] for one in seen) < LEASE_SECONDS / 2
        told = sorted({one["done"] for one in seen})
        assert len(told) >= WATCH_SECONDS, "progress is told every second"
        assert told[-1] - told[0] > 100_000
        result.revoke()
        until("the cancel", lambda: rows(look)[0]["status"] == "CANCELLED")
    [run] = rows(
        "select attempt, cancellation_warning,"
        " extract(epoch from finished_at - cancel_requested_at)::float8 as took from job_run"
    )
    assert run["attempt"] == 1
    assert run["took"] < 1
    assert "the sink was emptied" in run["cancellation_warning"]
