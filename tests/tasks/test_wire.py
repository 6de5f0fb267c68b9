"""What passes through Redis, logs and events: run ids, and nothing that must not be seen."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import kombu
import pytest
from psycopg.types.json import Jsonb
from support.processes import Redis
from support.waiting import until

from db import envelopes
from db.keyring import Keyring

SECRET = "pa55phrase-of-the-test"
PARAMETER = "a-parameter-of-the-run"


@contextmanager
def monitored(redis: Redis) -> Iterator[list[str]]:
    """Every command that Redis executes meanwhile, as MONITOR tells it."""
    heard: list[str] = []
    with redis.client() as client, client.monitor() as monitor:
        ready = threading.Event()

        def listen() -> None:
            ready.set()
            try:
                for command in monitor.listen():
                    heard.append(command["command"])
            except Exception:
                return

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        ready.wait(5)
        yield heard
        client.connection_pool.disconnect()
        monitor.connection.disconnect()
        thread.join(5)


def bodies(commands: list[str]) -> str:
    """The bodies of the messages in what MONITOR told, decoded."""
    found = re.findall(r'"body\\*": \\*"([A-Za-z0-9+/=]+)\\*"', "\n".join(commands))
    return "\n".join(base64.b64decode(body).decode() for body in found)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_neither_redis_nor_logs_nor_events_see_secrets_or_tokens__R_X2(
    worker: Any,
    trigger: Any,
    job: Any,
    rows: Any,
    own_redis: Redis,
    environment: dict[str, str],
    pool: str,
) -> None:
    source = uuid4()
    keys = Keyring.load(environment["CLAIMCHECK_KEYRING_FILE"])
    config = {"url": f"postgresql://me:{SECRET}@shop.example/shop"}
    rows(
        "insert into datasource (id, name, connector, envelope)"
        " values (%s, 'shop', 'postgresql', %s)",
        source,
        Jsonb(envelopes.seal(keys, source, config)),
    )
    job("secret", source_id=source, max_attempts=1)
    with monitored(own_redis) as commands, worker(pool=pool, arguments=["-l", "DEBUG"]) as running:
        first = trigger.delay("secret", token=PARAMETER)
        assert first.get(timeout=20) == {"host": "shop.example/shop"}
        failed = trigger.delay("secret", token=PARAMETER, fail=True)
        message = str(failed.get(timeout=20, propagate=False))

        def told_of() -> bool:
            # On a starved machine an event may be lost, as Celery's own are: then of the next one.
            if "could not connect" in bodies(commands):
                return True
            trigger.delay("secret", token=PARAMETER, fail=True).get(timeout=20, propagate=False)
            return False

        until("the event of a failure", told_of, 30)
        log = running.output()
    told = rows("select head from run_log order by updated_at")[0]
    tokens = [str(run["lease_token"]) for run in rows("select lease_token from job_run")]
    wire = "\n".join(commands) + bodies(commands) + repr(own_redis.contents())
    assert "tasks.trigger" in wire
    assert "connecting with" in log
    assert "args:" in log  # at DEBUG Celery prints the arguments of each task
    assert "connecting with" in told["head"]
    for place in (wire, log, message, told["head"]):
        assert SECRET not in place
        assert PARAMETER not in place
        for token in tokens:
            assert token not in place


def calls() -> dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]]:
    """What another program's ``send_task`` may make of ``tasks.trigger``, by its fault."""
    run_id = str(uuid4())
    callback = {"task": SECRET, "args": [], "kwargs": {}, "options": {}}
    return {
        "a job": (["orders"], {}, {}),
        "parameters": ([run_id], {"password": SECRET}, {}),
        "two arguments": ([run_id, SECRET], {}, {}),
        "a text": ([SECRET], {}, {}),
        "no argument": ([], {}, {}),
        "an object": ([{"run": SECRET}], {}, {}),
        "no dashes": ([run_id.replace("-", "")], {}, {}),
        "a callback": ([run_id], {}, {"link": callback}),
        "an errback": ([run_id], {}, {"link_error": callback}),
        "a chain": ([run_id], {}, {"chain": [callback]}),
        "a limit": ([run_id], {}, {"time_limit": 1}),
        "a delay": ([run_id], {}, {"countdown": 60}),
        "an expiry": ([run_id], {}, {"expires": 60}),
    }


def test_message_that_is_no_wake_up_is_dropped_with_one_line__R_T3(dropper: Any) -> None:
    for fault, (args, kwargs, options) in calls().items():

        def send(app: Any, call: Any = (args, kwargs), options: Any = options) -> None:
            app.send_task("tasks.trigger", *call, **options)

        lines = dropper(send)
        assert len(lines) == 1, fault


def test_message_that_cannot_be_read_is_dropped_with_one_line__R_T3(dropper: Any) -> None:
    queue = kombu.Queue("runs", kombu.Exchange("runs", "direct"), "runs")
    wake_up = {"task": "tasks.trigger", "id": "1"}
    for content_type, headers in (
        ("application/json", wake_up),
        ("application/x-python-serialize", wake_up),
        ("application/x-python-serialize", {}),
        ("application/json", {}),
        ("text/plain", {"task": "of.nobody", "id": "1"}),
    ):

        def send(app: Any, content_type: str = content_type, headers: Any = headers) -> None:
            with app.connection_for_write() as connection:
                connection.Producer(serializer="raw").publish(
                    f"[{SECRET}".encode(),
                    exchange=queue.exchange,
                    routing_key="runs",
                    declare=[queue],
                    content_type=content_type,
                    content_encoding="utf-8",
                    headers=headers,
                )

        assert len(dropper(send)) == 1, (content_type, headers)


@pytest.fixture
def dropper(worker: Any, trigger: Any, job: Any, rows: Any, own_redis: Redis) -> Iterator[Any]:
    """Sends a message from another program's app; gives the worker's new lines of level ERROR."""
    from celery import Celery

    job("noop")
    other = Celery("other", broker=own_redis.url, set_as_current=False)
    other.conf.task_default_queue = "runs"
    with worker() as running:

        def send(message: Any) -> list[str]:
            before = len(running.output())
            message(other)
            # What comes after the message is done after it: the worker is still there.
            assert trigger.delay("noop", result=1).get(timeout=20) == 1
            until("the message to be dropped", lambda: "dropped" in running.output()[before:])
            new = running.output()[before:]
            assert SECRET not in new
            assert "Traceback" not in new
            assert own_redis.queue_length() == 0
            with own_redis.client() as client:
                assert client.hlen("unacked") == 0
            return [line for line in new.splitlines() if "ERROR" in line or "CRITICAL" in line]

        yield send
        other.close()
    assert {run["status"] for run in rows("select status from job_run")} == {"SUCCEEDED"}


def test_wake_up_for_no_run_is_harmless__R_T3(
    worker: Any, celery_app: Any, trigger: Any, job: Any
) -> None:
    job("noop")
    with worker() as running:
        celery_app.send_task("tasks.trigger", [str(uuid4())])
        assert trigger.delay("noop", result=1).get(timeout=20) == 1
        assert "ERROR" not in running.output()
