"""The noun run: what it starts, shows, follows and stops, and with which exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from commands_support import Cli, claim, end
from commands_support import cli as cli
from support.waiting import until

CONTRACT = {
    "id", "job", "status", "attempt", "previous_run_id", "root_run_id", "queue", "priority",
    "available_at", "created_at", "started_at", "finished_at", "heartbeat_at", "lease_until",
    "executor", "rows_processed", "committed_watermark", "error_code", "error_message",
    "cancellation_warning", "datasources_resolved_at", "result",
}  # fmt: skip


@pytest.fixture
def started(cli: Cli) -> Callable[..., str]:
    """``started()`` triggers the job ``report`` and tells the run's id."""
    cli("job", "add", "report", "--handler", "report").done()

    def trigger(*words: str) -> str:
        return str(cli("run", "trigger", "report", "--json", *words).done().json["id"])

    return trigger


def retried(rows: Callable[..., Any], run_id: str) -> str:
    """End an attempt as RETRY_SCHEDULED with its next one; the next one's id."""
    claim(rows, run_id)
    found = rows(
        "with ended as (update job_run set status = 'RETRY_SCHEDULED', error_code = 'worker_lost', "
        "error_message = 'it is gone', finished_at = clock_timestamp() where id = %s returning *) "
        "insert into job_run (job_id, previous_run_id, root_run_id, attempt) "
        "select job_id, id, root_run_id, attempt + 1 from ended returning id",
        run_id,
    )
    return str(found[0]["id"])


def test_a_trigger_tells_the_run_and_whether_it_made_it(cli: Cli, started: Any, rows: Any) -> None:
    params = ("--param", "day=2026-11-02", "--param", "n=3", "--param", 'list=[1,"a"]')
    once = ("--priority", "7", "--idempotency-key", "k", "--json")
    answer = cli("run", "trigger", "report", *params, *once)
    found = answer.done().json
    assert set(found) >= CONTRACT | {"created"}
    assert (found["created"], found["status"], found["priority"]) == (True, "PENDING", 7)
    (stored,) = rows("select params, triggered_by from job_run")
    assert stored["params"] == {"day": "2026-11-02", "n": 3, "list": [1, "a"]}
    assert stored["triggered_by"].startswith("cli:")
    assert datetime.fromisoformat(found["created_at"]).utcoffset() is not None
    again = cli("run", "trigger", "report", "--idempotency-key", "k", "--json").done().json
    assert (again["created"], again["id"]) == (False, found["id"])
    told = cli("run", "trigger", "report", "--idempotency-key", "k").done().stdout
    assert f"handed back run {found['id']}: the same idempotency key was given before" in told
    cli("job", "edit", "report", "--overlap", "skip").done()
    told = cli("run", "trigger", "report").done().stdout
    assert f"handed back run {found['id']}: it is still active" in told
    assert rows("select count(*) as count from job_run") == [{"count": 1}]


def test_a_trigger_that_is_refused_stores_nothing__R_T8(cli: Cli, started: Any, rows: Any) -> None:
    answer = cli("run", "trigger", "reprot", "--json").failed()
    assert "did you mean report?" in answer.json["error"]
    cli("job", "disable", "report").done()
    assert "job enable report" in cli("run", "trigger", "report").failed().stderr
    assert rows("select from job_run") == []
    cli("run", "trigger", "report", "--param", "x").failed(2)
    cli("run", "trigger", "report", "--countdown", "soon").failed(2)
    cli("run", "trigger", "report", "--priority", "10").failed(2)


def test_runs_are_listed_newest_first_and_filtered(cli: Cli, started: Any, rows: Any) -> None:
    first, second, third = started(), started(), started()
    cli("job", "add", "other", "--handler", "x").done()
    other = cli("run", "trigger", "other", "--queue", "slow", "--json").done().json["id"]
    end(rows, first, "SUCCEEDED", rows_processed=12)
    end(rows, second, "FAILED")

    def ids(*words: str) -> list[str]:
        found = cli("run", "list", "--json", *words).done().json
        assert all(set(run) >= CONTRACT for run in found)
        return [run["id"] for run in found]

    assert ids() == [other, third, second, first]
    assert ids("-n", "2") == [other, third]
    assert ids("--job", "report") == [third, second, first]
    assert ids("--status", "failed") == [second]
    assert ids("--status", "FAILED", "--status", "SUCCEEDED") == [second, first]
    assert ids("--active") == [other, third]
    assert ids("--queue", "slow") == [other]
    assert ids("--since", "2200-01-01") == []
    table = cli("run", "list").done().stdout
    assert "SUCCEEDED" in table
    assert "handler_error" in table


def test_runs_of_a_job_that_never_was_are_refused(cli: Cli, started: Any, rows: Any) -> None:
    assert cli("run", "list", "--job", "report", "--json").done().json == []
    run = started()
    answer = cli("run", "list", "--job", "reprot", "--json").failed()
    assert answer.json["error"].startswith("no job is named 'reprot'; did you mean report?")
    end(rows, run, "SUCCEEDED")
    cli("job", "rm", "report").done()
    kept = cli("run", "list", "--job", "report", "--json").done().json
    assert [one["id"] for one in kept] == [run]
    assert cli("run", "list", "--job", "report", "--active", "--json").done().json == []
    assert "no job is named 'nope'" in cli("run", "list", "--job", "nope").failed().stderr


def test_a_run_is_shown_with_its_lineage_and_never_its_token__R_C6(
    cli: Cli, started: Any, rows: Any
) -> None:
    first = started()
    second = retried(rows, first)
    claim(rows, second)
    found = cli("run", "show", first, "--json").done()
    assert set(found.json) >= CONTRACT
    assert [attempt["id"] for attempt in found.json["lineage"]] == [first, second]
    assert [attempt["attempt"] for attempt in found.json["lineage"]] == [1, 2]
    assert second in found.json["next"]
    shown = cli("run", "show", second).done()
    assert "attempts" in shown.stdout
    tokens = rows("select lease_token::text as token from job_run where lease_token is not null")
    assert len(tokens) == 2
    for token in tokens:
        for answer in (found, shown, cli("run", "list", "--json")):
            assert token["token"] not in answer.stdout + answer.stderr
    assert "no run has the id" in cli("run", "show", "00000000-0000-4000-8000-000000000000").failed(
    ).stderr  # fmt: skip


def test_how_far_a_run_is_stands_in_what_is_shown_of_it(cli: Cli, started: Any, rows: Any) -> None:
    run = started()
    claim(rows, run)
    stored = {"done": 12_000, "total": 48_000, "total_is_estimate": True, "bytes": 3_400_000,
              "phase": "reading"}  # fmt: skip
    rows("update job_run set progress = %s::jsonb where id = %s", json.dumps(stored), run)
    found = cli("run", "show", run, "--json").done().json
    assert (found["progress"], found["percent"]) == (stored, 25)
    lines = cli("run", "show", run).done().stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("progress")]
    assert line.split(maxsplit=1)[1] == "25 %, 12,000 / ~48,000 rows, 3.4 MB, reading"
    assert not any(line.startswith("percent") for line in lines)
    end(rows, run, "SUCCEEDED", rows_processed=50_000)
    assert cli("run", "watch", run, "--json").done().json["percent"] == 100


def test_an_alias_resolves__R_T7(cli: Cli, started: Any, rows: Any) -> None:
    run = started()
    alias = "00000000-0000-4000-8000-0000000000aa"
    rows("insert into run_alias (id, run_id) values (%s, %s)", alias, run)
    assert cli("run", "show", alias, "--json").done().json["id"] == run
    assert cli("run", "cancel", alias, "--json").done().json["id"] == run


@pytest.mark.parametrize(
    ("status", "exit_code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 3)]
)
def test_watching_ends_with_the_run_and_its_status(
    cli: Cli, started: Any, rows: Any, status: str, exit_code: int
) -> None:
    run = started()
    end(rows, run, status, rows_processed=5)
    found = cli("run", "watch", run, "--json").failed(exit_code)
    assert (found.json["id"], found.json["status"]) == (run, status)
    assert status in cli("run", "watch", run).failed(exit_code).stdout


def test_watching_follows_retries_to_the_last_attempt(cli: Cli, started: Any, rows: Any) -> None:
    first = started()
    second = retried(rows, first)
    answers: list[Any] = []
    watcher = threading.Thread(target=lambda: answers.append(cli("run", "watch", first, "--json")))
    watcher.start()
    assert answers == []
    end(rows, second, "SUCCEEDED", rows_processed=9)
    watcher.join(timeout=20)
    (answer,) = answers
    assert answer.done().json["id"] == second
    assert answer.json["rows_processed"] == 9


def test_why_an_attempt_ended_is_told_while_the_next_one_waits(
    cli: Cli, started: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started()
    second = retried(rows, first)
    assert "attempt 1: worker_lost: it is gone" in cli("run", "show", second).done().stdout
    told: list[str] = []
    monkeypatch.setattr(
        "tasks.commands.console.Output.say", lambda self, text, style="": told.append(text)
    )
    watcher = threading.Thread(target=lambda: cli("run", "watch", second))
    watcher.start()
    until("of one before the watcher came", lambda: told, 20)
    third = retried(rows, second)
    until("of one that it has seen", lambda: told[3:] or f"attempt 3: {third}" in told, 20)
    end(rows, third, "SUCCEEDED")
    watcher.join(timeout=20)
    assert told[:3] == [
        "attempt 1: worker_lost: it is gone",
        "attempt 2: worker_lost: it is gone",
        f"attempt 3: {third}",
    ]


def test_waiting_for_a_trigger_exits_as_watching_does(cli: Cli, started: Any, rows: Any) -> None:
    answers: list[Any] = []
    waiter = threading.Thread(
        target=lambda: answers.append(cli("run", "trigger", "report", "--wait", "--json"))
    )
    waiter.start()
    until("the run is stored", lambda: rows("select from job_run"), 20)
    (run,) = rows("select id from job_run")
    end(rows, run["id"], "FAILED")
    waiter.join(timeout=20)
    (answer,) = answers
    assert answer.failed(1).json["error_code"] == "handler_error"
    assert answer.json["created"] is True


def test_watching_a_pattern_job_sums_its_children_up(cli: Cli, started: Any, rows: Any) -> None:
    parent = started()
    end(rows, parent, "SUCCEEDED")
    children = [started() for _ in range(3)]
    ids = rows(
        "insert into job_run (job_id, parent_run_id) select job_id, %s from job_run "
        "where id = any(%s) returning id",
        parent,
        children,
    )
    for child, status in zip(ids, ("SUCCEEDED", "FAILED", "CANCELLED"), strict=True):
        end(rows, child["id"], status, rows_processed=10)
    answer = cli("run", "watch", parent, "--json").failed(1)
    assert answer.json["status"] == "SUCCEEDED"
    assert answer.json["children"]["by_status"] == {"SUCCEEDED": 1, "FAILED": 1, "CANCELLED": 1}
    # Of those that succeeded: what the others have read is not at the sink.
    assert answer.json["children"]["rows_processed"] == 10
    assert "3 child runs" in cli("run", "show", parent).done().stdout
    assert "3 child runs" in cli("run", "watch", parent).failed(1).stdout


def test_children_of_every_attempt_are_counted(cli: Cli, started: Any, rows: Any) -> None:
    """An attempt that lost its worker leaves its children to the next one."""
    first = started()
    second = retried(rows, first)
    end(rows, second, "SUCCEEDED")
    (child,) = rows(
        "insert into job_run (job_id, parent_run_id) select job_id, %s from job_run "
        "where id = %s returning id",
        first,
        first,
    )
    end(rows, child["id"], "FAILED")
    for attempt in (first, second):
        found = cli("run", "show", attempt, "--json").done().json
        assert found["children"]["by_status"] == {"FAILED": 1}
    assert cli("run", "watch", second, "--json").failed(1).json["children"]["count"] == 1


def test_watching_tells_a_runs_warnings_at_its_end(cli: Cli, started: Any, rows: Any) -> None:
    run = started()
    end(rows, run, "SUCCEEDED", result={"warnings": ["lag of 300 s: rows may be missed"]})
    answer = cli("run", "watch", run).done()
    assert answer.stderr == "warning: lag of 300 s: rows may be missed\n"
    assert "lag" not in answer.stdout
    found = cli("run", "watch", run, "--json").done()
    assert found.json["result"]["warnings"] == ["lag of 300 s: rows may be missed"]
    other = started()
    end(rows, other, "SUCCEEDED", result={"warnings": 3})
    assert cli("run", "watch", other).done().stderr == ""


def test_watching_tells_a_warning_of_many_children_once(cli: Cli, started: Any, rows: Any) -> None:
    parent = started()
    end(rows, parent, "SUCCEEDED", result={"warnings": ["a table is gone"]})
    ids = rows(
        "insert into job_run (job_id, parent_run_id) select job_id, %s from job_run, "
        "generate_series(1, 3) where id = %s returning id",
        parent,
        parent,
    )
    for child, warnings in zip(ids, (["lag"], ["lag", "one reads"], None), strict=True):
        end(rows, child["id"], "SUCCEEDED", result=warnings and {"warnings": warnings})
    assert cli("run", "watch", parent).done().stderr.splitlines() == [
        "warning: a table is gone",
        "warning: report and 1 more: lag",
        "warning: report: one reads",
    ]


def test_cancelling_is_durable_and_repeatable__R_K1(cli: Cli, started: Any, rows: Any) -> None:
    waiting, running, ended = started(), started(), started()
    assert cli("run", "cancel", waiting, "--json").done().json["status"] == "CANCELLED"
    again = cli("run", "cancel", waiting, "--json").done().json
    assert (again["status"], again["changed"]) == ("CANCELLED", False)
    claim(rows, running)
    asked = cli("run", "cancel", running).done()
    assert f"celery -A tasks run watch {running}" in asked.stdout
    assert cli("run", "show", running, "--json").json["status"] == "CANCEL_REQUESTED"
    end(rows, ended, "SUCCEEDED")
    assert "SUCCEEDED" in cli("run", "cancel", ended).failed().stderr
    assert len(rows("select from audit_event where action = 'run.cancel'")) == 2


def test_retrying_by_hand__R_R8(cli: Cli, started: Any, rows: Any) -> None:
    run = started()
    assert "only a FAILED run" in cli("run", "retry", run).failed().stderr
    end(rows, run, "FAILED")
    found = cli("run", "retry", run, "--json").done().json
    assert (found["previous_run_id"], found["attempt"], found["status"]) == (run, 2, "PENDING")
    assert len(cli("run", "show", run, "--json").json["lineage"]) == 2


def test_logs_are_lines_with_a_mark_where_some_were_left_out__R_X5(
    cli: Cli, started: Any, rows: Any
) -> None:
    run = started()
    assert cli("run", "logs", run, "--json").done().json == {
        "run_id": run, "lines": [], "dropped_bytes": 0,
    }  # fmt: skip
    empty = cli("run", "logs", run).done()
    assert empty.stdout == ""
    assert f"no lines: attempt 1 ({run}) is PENDING. Next: it waits for a worker" in empty.stderr
    rows(
        "insert into run_log (run_id, head, tail, dropped_bytes) values (%s, %s, %s, 1234)",
        run,
        "2026-11-01T10:00:00.000+00:00 INFO hello\nTraceback:\n",
        "2026-11-01T10:00:01.000+00:00 ERROR bye\n",
    )
    assert cli("run", "logs", run).done().stdout.splitlines() == [
        "2026-11-01T10:00:00.000+00:00 INFO hello",
        "Traceback:",
        "[1,234 bytes left out]",
        "2026-11-01T10:00:01.000+00:00 ERROR bye",
    ]
    lines = cli("run", "logs", run, "--json").done().json["lines"]
    assert lines[0] == {"at": "2026-11-01T10:00:00.000+00:00", "level": "INFO", "message": "hello"}
    assert lines[1] == {"at": None, "level": None, "message": "Traceback:"}
    end(rows, run, "SUCCEEDED")
    followed = cli("run", "logs", run, "-f", "--json").done().stdout.splitlines()
    assert [json.loads(line)["message"] for line in followed] == [
        "hello", "Traceback:", "[1,234 bytes left out]", "bye",
    ]  # fmt: skip


def test_following_logs_tells_each_line_once(cli: Cli, started: Any, rows: Any) -> None:
    from tasks.commands.loglines import Follower

    follower = Follower()

    def feed(head: str, tail: str = "", dropped: int = 0) -> list[str]:
        return follower.feed({"head": head, "tail": tail, "dropped_bytes": dropped})

    assert feed("a\nb") == ["a"]
    assert feed("a\nb\nc\n") == ["b", "c"]
    assert feed("a\nb\nc\n") == []
    assert feed("a\nb\nc\n", "d\ne\n") == ["d", "e"]
    # The tail moved on: d was left out after it had been told, e and f stand in it.
    assert feed("a\nb\nc\n", "e\nf\n", 2) == ["f"]
    # It moved on past all that had been told.
    assert feed("a\nb\nc\n", "x\n", 100) == ["[94 bytes left out]", "x"]
    assert follower.rest() == []
