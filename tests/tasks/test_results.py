"""Waiting for a run: its outcome by any of its ids, without hot polling, over an outage."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import chain
from celery.exceptions import TimeoutError
from commands_support import Cli
from commands_support import cli as cli
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from support.waiting import until

from dispatch.errors import RunFailed
from tasks.results import RunBackend


def move(rows: Any, run_id: str, status: str) -> None:
    """Move a run on by hand, as far as the database's own guards allow it (R-S2)."""
    claim = """
      update job_run set status = 'RUNNING', executor = 'e', lease_token = gen_random_uuid(),
        lease_until = clock_timestamp() + interval '1 h', heartbeat_at = clock_timestamp(),
        fence = nextval('fence_seq'), started_at = clock_timestamp(), job_snapshot = '{}',
        datasources_resolved_at = clock_timestamp()
      where id = %s"""
    if status == "RUNNING":
        rows(claim, run_id)
        return
    rows(
        """update job_run set status = %s,
             cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),
             finished_at = case when %s then clock_timestamp() end where id = %s""",
        status,
        status == "CANCELLED",
        run_id,
    )


def test_states_of_the_contract(trigger: Any, celery_app: Any, job: Any, rows: Any) -> None:
    job("noop")
    result = trigger.delay("noop")
    assert (result.state, result.ready()) == ("PENDING", False)
    move(rows, result.id, "RUNNING")
    assert (result.state, result.ready()) == ("STARTED", False)
    move(rows, result.id, "CANCEL_REQUESTED")
    assert (result.state, result.ready()) == ("STARTED", False)
    move(rows, result.id, "CANCELLED")
    assert (result.state, result.ready()) == ("REVOKED", True)


def test_waiting_asks_rarely(
    trigger: Any, job: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the time waited, and at least every half second."""
    asked = 0
    look = RunBackend._get_task_meta_for

    def counted(self: RunBackend, task_id: str) -> Any:
        nonlocal asked
        asked += 1
        return look(self, task_id)

    monkeypatch.setattr(RunBackend, "_get_task_meta_for", counted)
    job("noop")
    result = trigger.delay("noop")
    with pytest.raises(
        TimeoutError, match=f"within 3 s; it was last seen PENDING. .* run show {result.id}"
    ):
        result.get(timeout=3)
    assert asked < 60


def test_waiting_survives_a_database_that_restarts(
    trigger: Any, job: Any, rows: Any, database: str, database_server: str
) -> None:
    """As far as this test may go: every connection to the database is cut meanwhile."""
    job("noop")
    result = trigger.delay("noop")
    outcome: list[Any] = []

    def wait() -> None:
        try:
            result.get(timeout=30)
        except Exception as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    name = conninfo_to_dict(database)["dbname"]
    with psycopg.connect(database_server, autocommit=True) as server:
        for _ in range(5):
            server.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
                " and application_name = 'claimcheck'",
                [name],
            )
            time.sleep(0.2)
        forbidden = sql.SQL("alter database {} with allow_connections {}")
        server.execute(forbidden.format(sql.Identifier(str(name)), sql.Literal(False)))
        server.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s"
            " and application_name = 'claimcheck'",
            [name],
        )
        time.sleep(1)
        server.execute(forbidden.format(sql.Identifier(str(name)), sql.Literal(True)))
    assert thread.is_alive(), outcome
    move(rows, result.id, "CANCELLED")
    thread.join(20)
    assert outcome == ["TaskRevokedError"]


def test_failed_run_may_still_succeed_after_a_manual_retry__R_R8(
    worker: Any, trigger: Any, job: Any, rows: Any
) -> None:
    from dispatch import retry
    from tasks.ports import PORTS

    job("fail", definition={"retry": {"on_failure": False}})
    with worker():
        result = trigger.delay("fail", times=1)
        with pytest.raises(RunFailed):
            result.get(timeout=20)
        retry.retry(PORTS, result.id, actor="test")
        until("the retry to succeed", lambda: result.state == "SUCCESS")
        assert result.get(timeout=5) == "attempt 2"


def test_each_handle_of_a_broken_chain_tells_why__R_T7(
    worker: Any, trigger: Any, celery_app: Any, job: Any, rows: Any, cli: Cli, tmp_path: Path
) -> None:
    job("wait")
    job("mid", "noop")
    job("noop")
    with worker():
        last = chain(
            trigger.si("wait", at=str(tmp_path)), trigger.si("mid"), trigger.si("noop")
        ).apply_async()
        middle, first = last.parent, last.parent.parent
        assert [result.state for result in (middle, last)] == ["PENDING", "PENDING"]
        until("the first run to start", lambda: first.state == "STARTED")
        cli("job", "rm", "mid").done()
        (tmp_path / "go").touch()
        told = f"the chain broke after run {first.id}: job 'mid' was removed"
        for result in (last, middle, celery_app.AsyncResult(last.id)):
            with pytest.raises(RunFailed) as raised:
                result.get(timeout=20)
            assert (raised.value.error_code, raised.value.message) == ("chain_broken", told)
            assert result.state == "FAILURE"
        assert first.get(timeout=5) == "attempt 1"
    assert f"{told}, so 2 later steps were not started" in " ".join(
        cli("run", "show", first.id, "--json").done().json["next"].split()
    )
    for result in (middle, last):
        assert (
            f"no run has the id {result.id}: {told}"
            in cli("run", "show", result.id, "--json").failed().json["error"]
        )


def test_waiting_for_a_step_that_is_not_stored_yet_points_to_one_that_is(
    trigger: Any, job: Any
) -> None:
    job("noop")
    last = chain(trigger.si("noop") for _ in range(3)).apply_async()
    with pytest.raises(TimeoutError, match=f"run {last.id} .* run show {last.parent.parent.id}"):
        last.get(timeout=0.1)


def test_forgetting_leaves_the_history__R_S3(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    result = trigger.delay("noop")
    result.forget()
    assert len(rows("select from job_run")) == 1
    assert result.state == "PENDING"


def test_id_of_no_run_is_pending_as_in_celery(trigger: Any, celery_app: Any) -> None:
    unknown = celery_app.AsyncResult(str(uuid4()))
    assert unknown.state == "PENDING"
    assert not unknown.exists()


def test_existing_run_exists(trigger: Any, celery_app: Any, job: Any) -> None:
    job("noop")
    assert celery_app.AsyncResult(trigger.delay("noop").id).exists()


def test_result_survives_pickling(trigger: Any, job: Any) -> None:
    import pickle

    job("noop")
    result = trigger.delay("noop")
    again = pickle.loads(pickle.dumps(result))
    assert (again.id, again.state) == (result.id, "PENDING")
