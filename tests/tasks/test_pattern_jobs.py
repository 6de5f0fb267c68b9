"""A job over many tables in a real worker: its children run, fail and are counted on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands_support import Cli
from commands_support import cli as cli
from psycopg.conninfo import conninfo_to_dict

from tasks.commands import watching


@pytest.fixture
def definitions(cli: Cli, database: str, rows: Any, tmp_path: Path) -> None:
    """The job ``all`` over three tables, of which the sink's ``c`` lacks a column."""
    parts = conninfo_to_dict(database)
    given = "&".join(f"{name}={value}" for name, value in parts.items() if name != "dbname")
    for schema in ("shop", "landing"):
        rows(f"create schema {schema}")
    for count, table in enumerate("abc", start=1):
        rows(f"create table shop.{table} (id bigint primary key, note text)")
        rows(
            f"insert into shop.{table} select n, 'row ' || n from generate_series(1, %s) n",  # noqa: S608
            count,
        )
    for table in "ab":
        rows(f"create table landing.{table} (id bigint primary key, note text)")
    rows("create table landing.c (id bigint primary key)")
    path = tmp_path / "jobs.yaml"
    path.write_text(f"""
datasources:
  here: {{connector: postgresql, url: "postgresql:///{parts["dbname"]}?{given}"}}
jobs:
  all:
    source: {{datasource: here}}
    sink: {{datasource: here, table_schema: landing}}
    tables: ["shop.*"]
    mode: incremental
    watermark: id
    lag: 0
""")
    cli("apply", str(path)).done()


@pytest.mark.usefixtures("definitions")
def test_one_table_that_fails_stops_no_other_and_all_are_summed_up(
    worker: Any, trigger: Any, cli: Cli, rows: Any
) -> None:
    with worker():
        run = trigger.delay("all")
        run.get(timeout=60)
        watched = cli("run", "watch", run.id, "--json").failed(1).json
        shown = cli("run", "show", run.id, "--json").done().json
        for found in (watched, shown):
            assert found["status"] == "SUCCEEDED"
            assert found["children"]["by_status"] == {"SUCCEEDED": 2, "FAILED": 1}
            assert found["children"]["rows_processed"] == 3
        told = {child["job"]: child for child in shown["children"]["runs"]}
        for command in ("watch", "show"):
            text = cli("run", command, run.id)
            words = " ".join((text.stdout + text.stderr).split())
            assert "3 child runs: 2 SUCCEEDED, 1 FAILED, 3 rows" in words
            assert "all/shop.c FAILED: sink_error: " in words
            assert f"celery -A tasks run retry {told['all/shop.c']['id']}" in words
        assert [told[f"all/shop.{table}"]["committed_watermark"] for table in "abc"] == [
            "1",
            "2",
            None,
        ]
        assert "note" in told["all/shop.c"]["error_message"]
        watermarks = rows("select name, watermark from job where name <> 'all' order by name")
        assert [found["watermark"] for found in watermarks] == ["1", "2", None]
        fences = rows(
            """select j.name, f.run_id, f.fence from landing.claimcheck_fence f
               join job j on j.id::text = f.scope where f.step = 0 order by j.name"""
        )
        assert fences == [
            {"name": name, "run_id": told[name]["id"], "fence": told[name]["fence"]}
            for name in ("all/shop.a", "all/shop.b")
        ]

        # The next run reads on from each table's own watermark.
        rows("insert into shop.b values (7, 'later')")
        rows("alter table landing.c add note text")
        again = cli("run", "trigger", "all", "--wait", "--json").done().json
        assert again["children"]["by_status"] == {"SUCCEEDED": 3}
        assert {
            child["job"]: child["committed_watermark"] for child in again["children"]["runs"]
        } == {"all/shop.a": "1", "all/shop.b": "7", "all/shop.c": "3"}
        landed = rows(
            """select (select count(*) from landing.a) as a, (select count(*) from landing.b) as b,
                 (select count(*) from landing.c) as c"""
        )
        assert landed == [{"a": 1, "b": 3, "c": 3}]


def test_whoever_waits_for_children_is_told_of_one_that_may_not_start() -> None:
    ended, paused, works = (
        {"status": status, "id": status} for status in ("SUCCEEDED", "PENDING", "RUNNING")
    )
    waiting = watching._waiting
    assert waiting(paused, []) is paused
    assert waiting(works, []) is None
    assert waiting(ended, []) is None
    assert waiting(ended, [ended, paused]) is paused
    # While others work, it waits for them.
    assert waiting(ended, [paused, works]) is None


@pytest.mark.usefixtures("definitions")
def test_a_child_that_is_active_already_is_told_to_whoever_waits__R_T6(
    worker: Any, cli: Cli, rows: Any
) -> None:
    with worker():
        cli("run", "trigger", "all", "--wait").failed(1)
        cli("job", "pause", "all/shop.a").done()
        cli("run", "trigger", "all/shop.a").done()
        answer = cli("run", "trigger", "all", "--wait", "--json").failed(1)
        assert [child["job"] for child in answer.json["children"]["runs"]] == [
            "all/shop.b",
            "all/shop.c",
        ]
        (warning,) = answer.json["result"]["warnings"]
        assert "no run was started of all/shop.a: each has an active run already" in warning
