"""The caller's side of a trigger: every way in which Celery calls a task, and what is refused."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy as sa
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, TimeoutError
from support import handlers

from db import session
from dispatch.errors import InvalidParameters, JobDisabled, UnknownJob
from tasks.broker import message_priority
from tasks.results import RunResult

SECRET = "pa55phrase-of-the-test"


def wake_ups(redis: Any) -> list[dict[str, Any]]:
    """The messages of the queue ``runs``, as Redis holds them, those to be taken first first."""
    found = []
    with redis.client() as client:
        for step in range(10):
            key = "runs" if step == 0 else f"runs\x06\x16{step}"
            found += [json.loads(text) for text in reversed(client.lrange(key, 0, -1))]
    return found


def body(message: dict[str, Any]) -> Any:
    return json.loads(base64.b64decode(message["body"]))


# --- ways in ------------------------------------------------------------------------------------


def test_delay_stores_the_run_before_it_returns__R_T1(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    result = trigger.delay("noop", day="2026-11-01")
    [run] = rows("select * from job_run")
    assert (str(run["id"]), run["status"], run["params"]) == (
        result.id,
        "PENDING",
        {"day": "2026-11-01"},
    )
    assert isinstance(result, RunResult)
    assert result.created is True
    assert result.state == "PENDING"


def test_each_way_of_calling_stores_one_run__R_T1(
    trigger: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    job("noop")
    calls = {
        "delay": lambda: trigger.delay("noop", by="delay"),
        "apply_async": lambda: trigger.apply_async(("noop",), {"by": "apply_async"}),
        "list": lambda: trigger.apply_async(["noop"], {"by": "list"}),
        "signature": lambda: trigger.s("noop", by="signature").delay(),
        "immutable": lambda: trigger.si("noop", by="immutable").apply_async(),
        "by name": lambda: celery_app.signature(
            "tasks.trigger", args=("noop",), kwargs={"by": "by name"}
        ).delay(),
        "partial": lambda: trigger.s(by="partial").delay("noop"),
        "send_task": lambda: celery_app.send_task(
            "tasks.trigger", args=["noop"], kwargs={"by": "send_task"}
        ),
    }
    for way, call in calls.items():
        result = call()
        [run] = rows("select id from job_run where params->>'by' = %s", way)
        assert result.id == str(run["id"]), way
        assert result.state == "PENDING", way


def test_wake_up_holds_the_run_id_alone__R_T3(trigger: Any, job: Any, own_redis: Any) -> None:
    job("noop")
    result = trigger.apply_async(("noop",), {"password": SECRET}, idempotency_key="a-key-to-hide")
    [message] = wake_ups(own_redis)
    assert body(message) == [
        [result.id],
        {},
        {"callbacks": None, "errbacks": None, "chain": None, "chord": None},
    ]
    assert message["content-type"] == "application/json"
    assert message["headers"]["task"] == "tasks.trigger"
    assert message["headers"]["id"] == result.id
    contents = own_redis.contents()
    for hidden in (SECRET, "a-key-to-hide", "noop"):
        assert hidden.encode() not in contents


def test_higher_priority_is_taken_first_from_redis__R_C3(
    trigger: Any, job: Any, own_redis: Any
) -> None:
    job("noop")
    by_priority = {
        priority: trigger.apply_async(("noop",), {"n": priority}, priority=priority).id
        for priority in (0, 9, 4)
    }
    taken = [message["headers"]["id"] for message in wake_ups(own_redis)]
    assert taken == [by_priority[9], by_priority[4], by_priority[0]]
    assert [message["properties"]["priority"] for message in wake_ups(own_redis)] == [0, 5, 9]


def test_options_are_stored_with_the_run(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    result = trigger.apply_async(("noop",), {}, countdown=60, priority=5, queue="slow")
    [run] = rows("select *, available_at - created_at as delay from job_run")
    assert (run["queue"], run["priority"], run["delay"]) == ("slow", 5, timedelta(seconds=60))
    assert run["id"] == UUID(result.id)


def test_eta_is_an_instant(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    then = datetime(2031, 5, 1, 12, tzinfo=UTC)
    trigger.apply_async(("noop",), {}, eta=then)
    assert rows("select available_at from job_run")[0]["available_at"] == then


def test_delayed_run_publishes_nothing_yet__R_T3(trigger: Any, job: Any, own_redis: Any) -> None:
    job("noop")
    trigger.apply_async(("noop",), {}, countdown=60)
    assert wake_ups(own_redis) == []


def test_task_id_is_the_run_id__R_T7(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    wanted = str(uuid4())
    first = trigger.apply_async(("noop",), {}, task_id=wanted)
    again = trigger.apply_async(("noop",), {}, task_id=wanted)
    assert [(first.id, first.created), (again.id, again.created)] == [
        (wanted, True),
        (wanted, False),
    ]
    assert len(rows("select from job_run")) == 1


@pytest.mark.parametrize(
    "spelt",
    [
        lambda wanted: wanted.hex,
        lambda wanted: str(wanted).upper(),
        lambda wanted: f"{{{wanted}}}",
        lambda wanted: wanted.urn,
    ],
    ids=["no dashes", "upper case", "braces", "urn"],
)
def test_task_id_is_the_run_id_however_it_is_spelt__R_T7(
    trigger: Any, celery_app: Any, job: Any, rows: Any, spelt: Callable[[UUID], str]
) -> None:
    job("noop")
    wanted, later = uuid4(), uuid4()
    given = spelt(wanted)
    first = trigger.apply_async(("noop",), {}, task_id=given)
    again = trigger.apply_async(("noop",), {}, task_id=str(wanted))
    assert (first.id, again.id, again.created) == (str(wanted), str(wanted), False)
    asked = celery_app.AsyncResult(given)
    assert (asked.name, asked.state) == ("noop", "PENDING")
    other = trigger.apply_async(("noop",), {}, run_id=spelt(later))
    assert other.id == str(later)
    rows(
        "update job_run set status = 'CANCELLED', finished_at = now(), cancel_requested_at = now()"
    )
    with pytest.raises(TaskRevokedError):
        asked.get(timeout=5)


def test_task_id_of_another_form_resolves__R_T7(
    trigger: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    job("noop")
    result = trigger.apply_async(("noop",), {}, task_id="nightly-2026-11-01")
    rows("update job set enabled = false")
    assert UUID(result.id)
    assert celery_app.AsyncResult("nightly-2026-11-01").name == "noop"
    assert result.state == "PENDING"


def test_skipped_trigger_hands_back_the_active_run__R_T6(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop", overlap="skip")
    first = trigger.delay("noop")
    second = trigger.delay("noop")
    assert (second.id, second.created) == (first.id, False)
    assert len(rows("select from job_run")) == 1
    assert len(wake_ups(own_redis)) == 1


def test_id_of_a_skipped_trigger_resolves__R_T7(
    trigger: Any, celery_app: Any, job: Any, rows: Any
) -> None:
    job("noop", overlap="skip")
    first = trigger.delay("noop")
    asked = str(uuid4())
    assert trigger.apply_async(("noop",), {}, task_id=asked).id == first.id
    alias = celery_app.AsyncResult(asked)
    assert (alias.name, alias.state) == ("noop", "PENDING")
    rows(
        "update job_run set status = 'CANCELLED', finished_at = now(), cancel_requested_at = now()"
    )
    assert celery_app.AsyncResult(asked).state == "REVOKED"


def test_repeated_key_hands_back_the_first_run__R_T5(
    trigger: Any, job: Any, own_redis: Any
) -> None:
    job("noop")
    first = trigger.apply_async(("noop",), {}, idempotency_key="once")
    again = trigger.apply_async(("noop",), {}, idempotency_key="once")
    assert (again.id, again.created) == (first.id, False)
    assert len(wake_ups(own_redis)) == 1


# --- inside the caller's transaction ------------------------------------------------------------


def test_rollback_leaves_neither_run_nor_message__R_T2(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop")
    with session.engine().connect() as connection, connection.begin() as transaction:
        result = trigger.enqueue(connection, "noop", {"x": 1}, priority=3)
        transaction.rollback()
    assert rows("select from job_run") == []
    assert wake_ups(own_redis) == []
    assert result.state == "PENDING"


def test_commit_makes_the_run_durable_and_tells_the_beat__R_D3(
    trigger: Any, job: Any, rows: Any, database: str
) -> None:
    job("noop")
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("listen claimcheck")
        with psycopg.connect(database) as caller:
            result = trigger.enqueue(caller, "noop", {"x": 1})
            assert rows("select from job_run") == []
        heard = [notice.payload for notice in listener.notifies(timeout=5, stop_after=1)]
    assert heard == ["work queue:runs"]
    assert [str(run["id"]) for run in rows("select id from job_run")] == [result.id]


def test_enqueue_takes_a_session_of_sqlalchemy(trigger: Any, job: Any, rows: Any) -> None:
    from sqlalchemy.orm import Session

    job("noop")
    with Session(session.engine()) as caller, caller.begin():
        caller.execute(sa.text("create table of_the_caller ()"))
        trigger.enqueue(caller, "noop")
    assert len(rows("select from job_run")) == 1
    assert rows("select from of_the_caller") == []


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.delay(), "one positional argument"),
        (lambda t: t.delay("noop", 3), "parameters go by keyword"),
        (lambda t: t.delay(3), "one positional argument"),
        (lambda t: t.apply_async(("noop",), {}, expires=60), "does not expire"),
        (lambda t: t.apply_async(("noop",), {}, time_limit=60), "set timeout in the job"),
        (lambda t: t.apply_async(("noop",), {}, soft_time_limit=60), "set timeout in the job"),
        (lambda t: t.apply_async(("noop",), {}, routing_key="x"), "use queue="),
        (lambda t: t.apply_async(("noop",), {}, ignore_result=True), "always kept"),
        (lambda t: t.apply_async(("noop",), {}, contdown=3), "did you mean 'countdown'"),
        (lambda t: t.apply_async(("noop",), {}, countdown=1, eta=datetime.now(UTC)), "not both"),
        (lambda t: t.apply_async(("noop",), {}, eta=datetime(2031, 1, 1)), "time zone"),
        (lambda t: t.apply_async(("noop",), {}, priority=10), "0 to 9"),
        (
            lambda t: t.apply_async(("noop",), {}, task_id=str(uuid4()), run_id=str(uuid4())),
            "give one",
        ),
        (lambda t: t.apply_async(("noop",), {}, link=t.si("noop")), "cannot be linked"),
        (lambda t: t.apply_async(("noop",), {}, link_error=t.si("noop")), "cannot be linked"),
        (lambda t: t.s("noop").set(link=[t.si("noop")]).delay(), "cannot be linked"),
        (lambda t: t.map(["noop"]), "use group"),
        (lambda t: t.chunks([("noop",)], 1), "use group"),
        (lambda t: t.starmap([("noop",)]), "use group"),
    ],
)
def test_what_cannot_hold_for_a_run_is_refused_at_call_time(
    trigger: Any, job: Any, rows: Any, own_redis: Any, call: Any, says: str
) -> None:
    job("noop")
    with pytest.raises(InvalidParameters, match=says):
        call(trigger)
    assert rows("select from job_run") == []
    assert wake_ups(own_redis) == []


def test_unknown_job_is_refused_with_a_hint__R_T8(trigger: Any, job: Any) -> None:
    job("noop")
    with pytest.raises(UnknownJob, match="did you mean noop"):
        trigger.delay("noob")


def test_disabled_job_is_refused_and_stores_no_key__R_T8(trigger: Any, job: Any, rows: Any) -> None:
    job("noop", enabled=False)
    with pytest.raises(JobDisabled, match="job enable noop"):
        trigger.apply_async(("noop",), {}, idempotency_key="k")
    assert rows("select from trigger_key") == []


def test_direct_call_is_refused(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    for call in (lambda: trigger("noop"), lambda: trigger.s("noop")()):
        with pytest.raises(TypeError, match=r"use trigger\.delay"):
            call()
    assert rows("select from job_run") == []


# --- groups, chains, chords ---------------------------------------------------------------------


def test_group_stores_each_run_under_its_task_id__R_T7(trigger: Any, job: Any, rows: Any) -> None:
    job("noop")
    results = group(trigger.s("noop", n=n) for n in range(3)).apply_async()
    assert {str(run["id"]) for run in rows("select id from job_run")} == {r.id for r in results}
    assert [result.state for result in results] == ["PENDING"] * 3


def test_group_of_a_skipping_job_waits_for_its_one_run__R_T7(
    trigger: Any, job: Any, rows: Any
) -> None:
    job("noop", overlap="skip")
    results = group(trigger.s("noop"), trigger.s("noop")).apply_async()
    assert len(rows("select from job_run")) == 1
    rows(
        "update job_run set status = 'CANCELLED', finished_at = now(), cancel_requested_at = now()"
    )
    assert [result.state for result in results] == ["REVOKED", "REVOKED"]
    assert results.ready()


@pytest.mark.parametrize("spelling", ["chain", "operator", "of one"])
def test_chain_of_triggers_is_stored_with_its_first_run(
    trigger: Any, job: Any, rows: Any, own_redis: Any, spelling: str
) -> None:
    job("noop")
    steps = [
        trigger.si("noop", n=1),
        trigger.si("noop", n=2).set(priority=4, queue="slow", countdown=5),
        trigger.si("noop", n=3),
    ]
    if spelling == "of one":
        last = chain(steps[0]).apply_async()
    elif spelling == "chain":
        last = chain(*steps).apply_async()
    else:
        last = (steps[0] | steps[1] | steps[2]).delay()
    [run] = rows("select * from job_run")
    if spelling == "of one":
        assert (last.id, run["chain"]) == (str(run["id"]), None)
        return
    assert run["params"] == {"n": 1}
    assert run["chain"] == [
        [
            {
                "job": "noop",
                "run_id": last.parent.id,
                "params": {"n": 2},
                "priority": 4,
                "queue": "slow",
                "countdown": 5,
            },
            {"job": "noop", "run_id": last.id, "params": {"n": 3}},
        ]
    ]
    assert last.parent.parent.id == str(run["id"])
    assert isinstance(last, RunResult)
    assert [body(message)[0] for message in wake_ups(own_redis)] == [[str(run["id"])]]


def test_last_of_a_chain_raises_where_an_earlier_step_ended_otherwise(
    trigger: Any, job: Any, rows: Any
) -> None:
    from celery.exceptions import TaskRevokedError

    job("noop")
    last = chain(trigger.si("noop"), trigger.si("noop")).apply_async()
    rows(
        "update job_run set status = 'CANCELLED', finished_at = now(), cancel_requested_at = now()"
    )
    with pytest.raises(TaskRevokedError):
        last.get(timeout=5)


def test_mixed_canvas_is_refused_before_anything_is_stored_or_sent(
    trigger: Any, celery_app: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop")
    add = handlers.add
    a, b = trigger.si("noop"), trigger.si("noop")
    calls = {
        "other task after a trigger": lambda: chain(a, add.si(1, 1)).apply_async(),
        "trigger after another task": lambda: chain(add.si(1, 1), a).apply_async(),
        "trigger deep in a chain": lambda: chain(add.si(1, 1), add.si(1, 1), a).apply_async(),
        "result handed on": lambda: chain(a, trigger.s("noop")).apply_async(),
        "group in a chain": lambda: chain(a, group(b, b)).apply_async(),
        "group first": lambda: chain(group(a, b), a).apply_async(),
        "chord of triggers": lambda: chord([a, b], add.si(1, 1)).apply_async(),
        "chord with a trigger among others": lambda: chord([add.s(1, 1), b], add.si(1, 1))(),
        "trigger as body": lambda: chord([add.s(1, 1), add.s(2, 2)], a)(),
        "link to a trigger": lambda: add.apply_async((1, 1), link=a),
        "link_error to a trigger": lambda: add.apply_async((1, 1), link_error=a),
        "linked chain": lambda: chain(a, b).apply_async(link=add.si(1, 1)),
        "idempotency key of a later step": lambda: chain(
            a, trigger.si("noop").set(idempotency_key="k")
        ).apply_async(),
        "mapped": lambda: celery_app.signature(
            "celery.map", kwargs={"task": a, "it": [1]}
        ).apply_async(),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidParameters):
            pytest.fail(f"{name}: {call()}")
    assert rows("select from job_run") == []
    assert wake_ups(own_redis) == []


def test_group_may_mix_triggers_and_ordinary_tasks(
    trigger: Any, celery_app: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop")
    results = group(trigger.s("noop"), handlers.add.s(1, 1)).apply_async()
    assert len(rows("select from job_run")) == 1
    assert len(wake_ups(own_redis)) == 2
    assert [result.state for result in results] == ["PENDING", "PENDING"]


# --- Redis away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["stopped", "hanging"])
def test_delay_is_durable_within_a_second_and_a_half__R_T4(
    trigger: Any, job: Any, rows: Any, own_redis: Any, trouble: str, caplog: Any
) -> None:
    job("noop")
    trigger.delay("noop")  # connections and pools are warm, as in a running process
    own_redis.hang() if trouble == "hanging" else own_redis.kill()
    try:
        took = []
        for _ in range(5):
            started = time.monotonic()
            result = trigger.delay("noop")
            took.append(time.monotonic() - started)
            assert rows("select status from job_run where id = %s", result.id) == [
                {"status": "PENDING"}
            ]
        assert max(took) < 1.5
        # Only one of them waits for Redis; the others know already.
        assert sorted(took)[-2] < 0.5
        started = time.monotonic()
        group(trigger.s("noop") for _ in range(20)).apply_async()
        assert time.monotonic() - started < 3
    finally:
        own_redis.go_on() if trouble == "hanging" else own_redis.start()
    warnings = [record for record in caplog.records if "is away" in record.message]
    assert len(warnings) == 1


def test_wake_ups_flow_again_once_redis_is_back__R_T4(
    trigger: Any, job: Any, own_redis: Any, caplog: Any
) -> None:
    from support.waiting import until

    job("noop")
    trigger.delay("noop")
    own_redis.kill()
    trigger.delay("noop")
    own_redis.start()

    def offered() -> bool:
        return bool(trigger.delay("noop") and wake_ups(own_redis))

    until("a wake-up in the Redis that came back", offered)
    assert "is back" in caplog.text


def test_restart_of_redis_between_two_triggers_loses_no_wake_up(
    trigger: Any, job: Any, own_redis: Any
) -> None:
    job("noop")
    trigger.delay("noop")
    own_redis.kill()
    own_redis.start()
    result = trigger.delay("noop")
    assert [body(message)[0] for message in wake_ups(own_redis)] == [[result.id]]


def test_waiting_for_a_run_needs_no_redis(
    trigger: Any, job: Any, rows: Any, own_redis: Any
) -> None:
    job("noop")
    result = trigger.delay("noop")
    own_redis.kill()
    with pytest.raises(TimeoutError):
        result.get(timeout=0.2)
    assert result.state == "PENDING"
    own_redis.start()


def test_worker_learns_the_queue_and_the_priority_of_a_wake_up__R_C3(
    trigger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a drain gives back goes back to where it was: higher first, also in Redis."""
    taken: list[Any] = []
    monkeypatch.setattr("tasks.worker.take", lambda *given: taken.append(given))
    run_id = uuid4()
    trigger.push_request(
        called_directly=False,
        delivery_info={"routing_key": "slow", "priority": message_priority(7)},
    )
    try:
        trigger.run(str(run_id))
    finally:
        trigger.pop_request()
    assert taken == [(run_id, "slow", 7)]
