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

from tasks.commands import progress as told
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
                "bytes": 1_234_567_890, "phase": "reading"}  # fmt: skip
    run = {"job_name": "flights", "status": "RUNNING", "rows_processed": None, "progress": progress}
    bar = watching._bar(output)
    shown = bar.add_task("", total=None, run=None, visible=False)
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert "".join(frame).strip() == ""
    watching._show(bar, shown, run, [])
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert len([line for line in frame if line.strip()]) == 1
    assert "12 %  12,000,000 / ~100,000,000  1.2 GB" in frame[0]
    assert ("reading" in frame[0]) == (width == 120)
    verifying = {**run, "progress": {**progress, "phase": "verifying"}}
    watching._show(bar, shown, verifying, [])
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert len([line for line in frame if line.strip()]) == 1
    assert "verifying" in frame[0]
    first = {**run, "progress": {"done": 0, "total_is_estimate": False, "phase": "connecting"}}
    watching._show(bar, shown, first, [])
    frame = printed(width, lambda at: at.print(bar.get_renderable()))
    assert "flights RUNNING" in frame[0]
    assert "connecting" in frame[0]
    assert "%" not in frame[0]


@pytest.mark.parametrize(
    ("status", "progress", "rows", "percent", "says"),
    [
        ("PENDING", None, None, None, ""),
        ("RUNNING", {"done": 0, "phase": "connecting"}, 0, None, "connecting"),
        ("RUNNING", {"done": 7, "bytes": 900, "phase": "reading"}, 7, None,
         "7 rows, 900 bytes, reading"),
        ("RUNNING", {"done": 1_999, "total": 4_000, "total_is_estimate": True}, 1_999, 49,
         "49 %, 1,999 / ~4,000 rows"),
        # All are read, or more than there should be, and they are not in place yet.
        ("RUNNING", {"done": 50, "total": 50, "total_is_estimate": True}, 50, 99,
         "99 %, 50 / ~50 rows"),
        ("CANCEL_REQUESTED", {"done": 60, "total": 50}, 60, 99, "99 %, 60 / 50 rows"),
        ("FAILED", {"done": 50, "total": 50, "phase": "publishing"}, 50, 99,
         "99 %, 50 / 50 rows, publishing"),
        ("SUCCEEDED", {"done": 50, "total": 70, "bytes": 4_200, "phase": "finishing"}, 48, 100,
         "100 %, 48 rows, 4.2 kB"),
        ("SUCCEEDED", {"done": 0}, 0, 100, "100 %, 0 rows"),
        ("SUCCEEDED", None, None, 100, "100 %"),
    ],
)  # fmt: skip
def test_progress_is_rows_percent_and_bytes(
    status: str, progress: Any, rows: int | None, percent: int | None, says: str
) -> None:
    run = {"status": status, "progress": progress, "rows_processed": rows}
    assert told.percent(run) == percent
    assert told.told(run) == says


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
