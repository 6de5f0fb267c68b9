"""What people read fits their terminal: run ids stay whole, and the bar stays on its line."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from commands_support import Cli
from commands_support import cli as cli
from rich.console import Console

from tasks.commands import tables, watching
from tasks.commands.console import Output

RUN = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
HEADINGS = ["id", "job", "status", "attempt", "created", "took", "rows", "error"]
LESS = ("created", "attempt", "rows", "took", "error")


def printed(width: int, show: Any) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False
    )
    show(console)
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_run_id_stays_on_one_line(width: int) -> None:
    row = [RUN, "late-departures", "RETRY_SCHEDULED", "1/3", datetime.now(UTC), "1:02", 336_776,
           "handler_error"]  # fmt: skip
    lines = printed(width, lambda at: at.print(tables.table(HEADINGS, [row], width, LESS)))
    assert str(RUN) in lines[1]
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        assert len(lines) == 2


def test_a_column_without_values_makes_room_first() -> None:
    row = [RUN, "flights", "SUCCEEDED", "1/3", datetime.now(UTC), "1:02", 336_776, None]
    lines = printed(80, lambda at: at.print(tables.table(HEADINGS, [row], 80, LESS)))
    assert lines[0].split() == ["id", "job", "status", "attempt", "took", "rows"]


def test_times_state_their_zone() -> None:
    moment = datetime.now(UTC) - timedelta(days=200)
    offset = f"{datetime.now().astimezone():%z}"
    lines = printed(80, lambda at: at.print(tables.table(["at"], [[moment]], 80)))
    assert lines[0].split() == ["at", offset]
    assert tables.shown(moment).endswith(f"{moment.astimezone():%z}")


def test_what_is_nested_reads_as_indented_lines() -> None:
    found = {"inputs": {"definition": {"mode": "complete", "none": None, "columns": ["a", "b"]}}}
    lines = printed(80, lambda at: at.print(tables.facts(found)))
    assert [line.rstrip() for line in lines] == [
        "inputs  definition:",
        "          mode: complete",
        "          columns: a, b",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_bar_stays_on_its_line(width: int) -> None:
    output = Output()
    output.messages = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None
    )
    progress = {"done": 12_000_000, "total": 100_000_000, "total_is_estimate": True,
                "phase": "loading"}  # fmt: skip
    run = {"job_name": "flights", "status": "RUNNING", "rows_processed": None, "progress": progress}
    bar = watching._bar(output)
    shown = bar.add_task("", total=None, run=None, visible=False)
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert "".join(frame).strip() == ""
    watching._show(bar, shown, run, [])
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert len([line for line in frame if line.strip()]) == 1
    assert "12,000,000 / ~100,000,000" in frame[0]
    assert ("loading" in frame[0]) == (width == 120)


def test_a_part_of_a_run_id_is_enough_where_it_is_clear(cli: Cli, rows: Any) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    ids = ["abcdef00-0000-4000-8000-000000000001", "abcdef00-0000-4000-8000-000000000002",
           "abcdef11-0000-4000-8000-000000000003"]  # fmt: skip
    for run in ids:
        rows("insert into job_run (id, job_id) select %s, id from job", run)
    assert cli("run", "show", "ABCDEF11", "--json").done().json["id"] == ids[2]
    assert cli("run", "logs", "abcdef11-0000", "--json").done().json["run_id"] == ids[2]
    refused = cli("run", "cancel", "abcdef00").failed().stderr
    assert ids[0] in refused
    assert ids[1] in refused
    assert ids[2] not in refused
    assert cli("run", "cancel", "abcdef1", "--json").done().json["id"] == ids[2]
    assert "no run's id begins with 123456" in cli("run", "show", "123456").failed().stderr
    assert "first 6 digits" in cli("run", "show", "abcde").failed(2).stderr
    assert len(cli("audit", "list", "--run", "abcdef1", "--json").done().json) == 1


def test_the_audit_sums_a_change_up(cli: Cli) -> None:
    cli("job", "add", "report", "--handler", "report", "--priority", "2").done()
    cli("job", "edit", "report", "--priority", "4").done()
    lines = cli("audit", "list").done().stdout.splitlines()
    assert lines[1].endswith("priority: 2 -> 4")
    assert "handler: report" in lines[2]
    assert "[" not in lines[2]


def test_a_summary_is_one_line() -> None:
    from tasks.commands.audit import summary

    detail = {"source.query": [None, "select 1\n  from a"], "timeout": [60, None]}
    assert summary(detail) == "source.query: select 1 from a, timeout: 60 -> none"
