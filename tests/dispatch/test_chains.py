"""Stored chains: the next run is created in its predecessor's successful finish."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import (
    NOTHING,
    Recorder,
    Rows,
    claim,
    ended,
    in_thread,
    new_job,
    run,
    stored,
    waits_for_a_lock,
)
from sqlalchemy import Connection
from support.waiting import until

from db import session
from dispatch.chains import Break, Step, breaks, enqueue_next_of_chain
from dispatch.chains import stored as steps
from dispatch.enqueue import RunHandle, enqueue, submit
from dispatch.errors import InvalidParameters, JobDisabled, TriggerBusy, UnknownJob


def succeed(rows: Rows, run_id: UUID) -> list[RunHandle]:
    """End a run and create what follows it, as a finish does in its one transaction."""
    ended(rows, run_id)
    with session.transaction() as connection:
        return enqueue_next_of_chain(connection, run_id, run(rows, run_id)["chain"])


def test_each_success_creates_the_next_run_under_the_id_it_was_given(
    rows: Rows, recorder: Recorder
) -> None:
    for name in ("extract", "load", "report"):
        new_job(rows, name, definition={"params": {"of": name}})
    second, third = Step("load", {"day": 1}, priority=7, queue="slow"), Step("report")
    first = submit(recorder.ports, "extract", chain=steps([second, third]))
    assert stored(rows)["job_run"] == 1

    [handle] = succeed(rows, first.run_id)
    found = run(rows, handle.run_id)
    assert handle.run_id == second.run_id
    assert handle.offerable
    assert (found["job_name"], found["status"], found["params"]) == (
        "load",
        "PENDING",
        {"of": "load", "day": 1},
    )
    assert (found["priority"], found["queue"], found["triggered_by"]) == (7, "slow", "chain")
    assert stored(rows)["job_run"] == 2

    [handle] = succeed(rows, second.run_id)
    assert handle.run_id == third.run_id
    assert succeed(rows, third.run_id) == []
    assert stored(rows)["audit_event"] == 3


def test_a_step_waits_its_countdown_from_the_success_before_it(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "extract")
    new_job(rows, "load")
    first = submit(recorder.ports, "extract", chain=steps([Step("load", countdown=30)]))
    [handle] = succeed(rows, first.run_id)
    [found] = rows(
        "select extract(epoch from available_at - clock_timestamp()) as wait from job_run"
        " where id = %s",
        handle.run_id,
    )
    assert not handle.offerable
    assert 20 < found["wait"] <= 30


def test_repeating_a_finish_creates_the_next_run_once__R_R7(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "extract")
    new_job(rows, "load", "skip")
    first = submit(recorder.ports, "extract", chain=steps([Step("load")]))
    [handle] = succeed(rows, first.run_id)
    with session.transaction() as connection:
        [again] = enqueue_next_of_chain(connection, first.run_id, run(rows, first.run_id)["chain"])
    assert again.run_id == handle.run_id
    assert stored(rows)["job_run"] == 2


def test_a_rolled_back_finish_leaves_no_next_run__R_F2(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "extract")
    new_job(rows, "load")
    first = submit(recorder.ports, "extract", chain=steps([Step("load")]))

    def finish(connection: Connection) -> None:
        enqueue_next_of_chain(connection, first.run_id, run(rows, first.run_id)["chain"])
        raise ArithmeticError

    with pytest.raises(ArithmeticError), session.transaction() as connection:
        finish(connection)
    assert stored(rows)["job_run"] == 1


@pytest.mark.parametrize(
    ("columns", "refusal"),
    [(None, UnknownJob), ({"enabled": False}, JobDisabled), ({"sink_enabled": False}, JobDisabled)],
)
def test_a_chain_is_refused_for_any_of_its_jobs__R_T8(
    rows: Rows, recorder: Recorder, columns: dict[str, Any] | None, refusal: type[Exception]
) -> None:
    new_job(rows, "extract")
    new_job(rows, "load")
    if columns is not None:
        new_job(rows, "report", **columns)
    with pytest.raises(refusal, match="'report'"):
        submit(recorder.ports, "extract", chain=steps([Step("load"), Step("report")]))
    assert stored(rows) == NOTHING


def test_a_step_whose_job_was_disabled_meanwhile_is_created_and_waits__R_T8(
    rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "extract")
    new_job(rows, "load")
    first = submit(recorder.ports, "extract", chain=steps([Step("load")]))
    rows("update job set enabled = false where name = 'load'")
    [handle] = succeed(rows, first.run_id)
    assert run(rows, handle.run_id)["status"] == "PENDING"


def test_a_step_whose_job_is_gone_ends_the_chain_and_says_so__R_X4(
    rows: Rows, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("extract", "load", "report"):
        new_job(rows, name)
    first = submit(recorder.ports, "extract", chain=steps([Step("load"), Step("report")]))
    rows("delete from job where name = 'load'")
    assert succeed(rows, first.run_id) == []
    records = rows("select * from audit_event where outcome = 'lost' order by id")
    assert [record["subject"] for record in records] == ["load", "report"]
    for record in records:
        assert record["detail"] == {
            "reason": "job 'load' was removed",
            "after": str(first.run_id),
            "steps_lost": 2,
        }
    assert "job 'load' was removed" in caplog.text


def test_a_broken_chain_is_known_by_each_of_its_ids__R_T7(rows: Rows, recorder: Recorder) -> None:
    for name in ("extract", "load", "report", "mail"):
        new_job(rows, name)
    after = [Step("load"), Step("report", {"day": 1}), Step("mail")]
    first = submit(recorder.ports, "extract", chain=steps(after))
    succeed(rows, first.run_id)
    rows("update job set handler = 'replicate' where name = 'report'")
    assert succeed(rows, after[0].run_id) == []

    with session.transaction() as connection:
        ids = [first.run_id, *(step.run_id for step in after)]
        [found] = {tuple(breaks(connection, run_id)) for run_id in ids}
        assert breaks(connection, uuid4()) == []
    [broken] = found
    assert broken == Break(after[0].run_id, broken.reason, 2)
    assert "takes no parameters" in broken.reason


def test_a_chain_follows_the_active_run_that_its_step_was_handed__R_T6(
    rows: Rows, recorder: Recorder
) -> None:
    for name, overlap in (("extract", "allow"), ("load", "skip"), ("report", "allow")):
        new_job(rows, name, overlap)
    after = [Step("load"), Step("report", {"chain": 1})]
    first = submit(recorder.ports, "extract", chain=steps(after))
    active = submit(recorder.ports, "load", chain=steps([Step("report", {"chain": 2})]))

    [handle] = succeed(rows, first.run_id)
    assert (handle.run_id, handle.created) == (active.run_id, False)
    [alias] = rows("select * from run_alias")
    assert (alias["id"], alias["run_id"]) == (after[0].run_id, active.run_id)

    handles = succeed(rows, active.run_id)
    assert [run(rows, found.run_id)["params"]["chain"] for found in handles] == [2, 1]
    assert handles[1].run_id == after[1].run_id


@pytest.mark.parametrize("alone", [False, True], ids=["in a transaction", "alone"])
def test_a_chain_waits_a_second_for_the_active_run_that_it_follows__R_T4(
    database: str, rows: Rows, recorder: Recorder, alone: bool
) -> None:
    new_job(rows, "load", "skip")
    new_job(rows, "report")
    active = submit(recorder.ports, "load")
    after = steps([Step("report")])
    with psycopg.connect(database) as other, psycopg.connect(database) as caller:
        other.execute("update job_run set available_at = available_at")
        # No limit of the caller's own; the second keeps the test from waiting for ever.
        caller.execute("set lock_timeout = 0")
        caller.execute("set statement_timeout = '6s'")
        trigger = partial(submit, recorder.ports) if alone else partial(enqueue, caller)
        started = time.monotonic()
        with pytest.raises(TriggerBusy):
            trigger("load", chain=after)
        assert 0.9 < time.monotonic() - started < 3
    assert run(rows, active.run_id)["chain"] is None


@pytest.mark.parametrize("ends", [False, True], ids=["active", "ended meanwhile"])
def test_a_chain_that_follows_an_active_run_leaves_the_callers_settings__R_T4(
    database: str, rows: Rows, recorder: Recorder, ends: bool
) -> None:
    new_job(rows, "load", "skip")
    new_job(rows, "report")
    active = submit(recorder.ports, "load")
    claim(rows, active.run_id)
    after = steps([Step("report")])
    with psycopg.connect(database) as other, psycopg.connect(database) as caller:
        caller.execute("set lock_timeout = '250ms'")
        if ends:
            other.execute("update job_run set status = 'SUCCEEDED', finished_at = now()")
        asked = in_thread(lambda: enqueue(caller, "load", chain=after))
        if ends:
            until("the trigger to wait", lambda: waits_for_a_lock(rows), 5)
        other.commit()
        handle = asked.result(10)
        assert caller.execute("show lock_timeout").fetchone() == ("250ms",)
    assert (handle.created, handle.run_id == active.run_id) == (ends, not ends)
    assert run(rows, handle.run_id)["chain"] == [after]


def test_a_chain_takes_no_idempotency_key(rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "extract")
    with pytest.raises(InvalidParameters, match="idempotency key"):
        submit(recorder.ports, "extract", chain=steps([Step("extract")]), idempotency_key="k")


@pytest.mark.parametrize(
    "step",
    [
        {"job": "extract"},
        {"job": "extract", "run_id": "x"},
        {"job": "extract", "run_id": str(uuid4()), "params": {"a": object()}},
        {"job": "extract", "run_id": str(uuid4()), "idempotency_key": "k"},
    ],
)
def test_a_step_is_checked_when_the_chain_is_triggered(
    rows: Rows, recorder: Recorder, step: dict[str, Any]
) -> None:
    new_job(rows, "extract")
    with pytest.raises(InvalidParameters):
        submit(recorder.ports, "extract", chain=[step])
    assert stored(rows) == NOTHING
