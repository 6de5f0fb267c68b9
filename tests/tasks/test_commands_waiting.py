"""Why a run waits: `run show`, `run trigger` and `run watch` say it, with the way out (R-C2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from commands_support import Cli, claim, end
from commands_support import cli as cli
from support.waiting import until


@pytest.fixture
def next_of(cli: Cli) -> Callable[[str], str]:
    return lambda run: str(cli("run", "show", run, "--json").done().json["next"])


def triggered(cli: Cli, job: str, *words: str) -> str:
    return str(cli("run", "trigger", job, "--json", *words).done().json["id"])


def test_each_switch_is_named_with_its_command__R_C2(cli: Cli, next_of: Any, rows: Any) -> None:
    rows("insert into datasource (name, connector, envelope) "
         "values ('shop', 'postgresql', '{\"key_version\": \"v1\"}')")  # fmt: skip
    cli("job", "add", "report", "--handler", "report", "--set", "source.datasource=shop").done()
    cli("job", "pause", "report").done()
    answer = cli("run", "trigger", "report", "--json").done()
    assert "celery -A tasks job resume report" in answer.stderr
    run = answer.json["id"]
    assert "job report is paused: celery -A tasks job resume report" in next_of(run)
    cli("job", "resume", "report").done()
    for off, on in (
        (("job", "disable", "report"), ("job", "enable", "report")),
        (
            ("job", "disable", "report", "--binding", "source"),
            ("job", "enable", "report", "--binding", "source"),
        ),
        (("datasource", "disable", "shop"), ("datasource", "enable", "shop")),
    ):
        cli(*off).done()
        assert f"disabled: celery -A tasks {' '.join(on)}" in next_of(run)
        cli(*on).done()
    assert next_of(run) == "it waits for a worker of queue runs that knows the handler report"


def test_turns_and_slots_name_the_runs_that_have_them__R_C8(
    cli: Cli, next_of: Any, rows: Any
) -> None:
    cli("job", "add", "one", "--handler", "x", "--overlap", "queue").done()
    first, second, third = (triggered(cli, "one") for _ in range(3))
    assert f"1 other run of it goes first, next {first}" in next_of(second)
    claim(rows, first)
    assert f"{first} is RUNNING" in next_of(third)
    end(rows, first, "SUCCEEDED")
    cli("job", "add", "a", "--handler", "x", "--concurrency", "key=1").done()
    cli("job", "add", "b", "--handler", "x", "--concurrency", "key=1").done()
    taker, waiter = triggered(cli, "a"), triggered(cli, "b")
    claim(rows, taker)
    rows("update job_run set slot_key = 'key', slot_no = 1 where id = %s", taker)
    assert f"the only slot of concurrency key taken by {taker}" in next_of(waiter)


def test_delay_and_backoff_name_their_time__R_R4(cli: Cli, next_of: Any, rows: Any) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    later = triggered(cli, "report", "--countdown", "1h")
    assert "it is delayed until 20" in next_of(later)
    assert "celery -A tasks beat" in next_of(later)
    failed = triggered(cli, "report")
    claim(rows, failed)
    (retry,) = rows(
        "with ended as (update job_run set status = 'RETRY_SCHEDULED', "
        "error_code = 'handler_error', finished_at = clock_timestamp() where id = %s returning *) "
        "insert into job_run (job_id, previous_run_id, root_run_id, attempt, available_at) "
        "select job_id, id, root_run_id, attempt + 1, clock_timestamp() + interval '1 hour' "
        "from ended returning id",
        failed,
    )
    assert "attempt 1 ended early, so it is in backoff until 20" in next_of(str(retry["id"]))


def test_a_due_run_that_a_worker_could_take_waits_for_a_beat__R_R4(
    cli: Cli, rows: Any, worker: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.commands import waits

    monkeypatch.setattr(waits, "ASK_AFTER_SECONDS", 0.0)
    with worker(pool="solo"):
        cli("job", "add", "report", "--handler", "nobody-knows-it").done()
        cli("job", "add", "noop", "--handler", "noop").done()
        unknown, able = (
            str(made["id"])
            for made in rows(
                "insert into job_run (job_id, available_at) "
                "select id, clock_timestamp() + make_interval(secs => 1) from job "
                "order by name desc returning id"
            )
        )
        assert "which is not running: celery -A tasks beat" in str(waits.why(able))
        until("it is due", lambda: "no beat is running to tell" in str(waits.why(able)), 20)
        assert str(waits.why(able)).endswith("to tell them: celery -A tasks beat")
        assert "knows the handler nobody-knows-it" in str(waits.why(unknown))
        with psycopg.connect(database, application_name="claimcheck-beat test"):
            assert "beat" not in str(waits.why(able))


def test_a_watcher_is_told_what_the_workers_lack__R_C2(
    cli: Cli, rows: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.commands import waits, watching

    monkeypatch.setattr(watching, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(waits, "ASK_AFTER_SECONDS", 0.0)
    cli("job", "add", "report", "--handler", "nobody-knows-it").done()
    run = triggered(cli, "report")
    elsewhere = triggered(cli, "report", "--queue", "slow")
    assert "no worker answers: celery -A tasks worker" in waits.why(run)  # type: ignore[operator]
    told: list[str] = []
    monkeypatch.setattr("tasks.commands.console.Output.warn", lambda self, text: told.append(text))
    with worker(pool="solo"):
        until("it answers", lambda: "no worker answers" not in str(waits.why(run)), 20)
        assert "no worker takes from queue slow: celery -A tasks worker -Q slow" in str(
            waits.why(elsewhere)
        )
        watcher = threading.Thread(target=lambda: cli("run", "watch", run, "--json"))
        watcher.start()
        until("the watcher is told", lambda: told, 20)
        cli("run", "cancel", run).done()
        watcher.join(timeout=20)
    assert "knows the handler nobody-knows-it (CLAIMCHECK_HANDLERS)" in told[0]
