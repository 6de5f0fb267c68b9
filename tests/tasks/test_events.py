"""Telling observers of runs: never waited for, bounded, redacted, under the job's name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from support.waiting import until

from dispatch.ports import RunEvent
from tasks import events


def event(kind: Any = "started", run_id: UUID | None = None, **fields: Any) -> RunEvent:
    found = run_id or uuid4()
    return RunEvent(
        kind=kind,
        run_id=found,
        root_run_id=found,
        previous_run_id=None,
        job="orders",
        attempt=1,
        queue="runs",
        fields=fields,
    )


@contextmanager
def heard(app: Any) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """What an observer such as Flower receives meanwhile, by the run's id."""
    found: dict[str, list[dict[str, Any]]] = {}
    ready = threading.Event()
    connection = app.connection_for_read()
    receiver = app.events.Receiver(
        connection,
        handlers={"*": lambda told: found.setdefault(told.get("uuid"), []).append(told)},
    )
    receiver.on_consume_ready = lambda *_, **__: ready.set()
    thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False}, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield found
    receiver.should_stop = True
    thread.join(10)
    connection.release()


def test_events_arrive_in_order_under_the_job_s_name(celery_app: Any) -> None:
    run_id = uuid4()
    with heard(celery_app) as found:
        events.emit(event("received", run_id))
        events.emit(event("started", run_id))
        events.emit(event("succeeded", run_id, runtime=1.5, rows=7))
        until("the events", lambda: len(found.get(str(run_id), ())) == 3)
    told = found[str(run_id)]
    assert [one["type"] for one in told] == ["task-received", "task-started", "task-succeeded"]
    assert {one["name"] for one in told} == {"orders"}
    assert (told[2]["runtime"], told[2]["result"]) == (1.5, "{'rows': 7}")


def test_message_of_a_failure_is_redacted_and_bounded__R_X2(celery_app: Any) -> None:
    run_id = uuid4()
    message = "no postgresql://me:s3cret@host/db " + "x" * 5000
    with heard(celery_app) as found:
        events.emit(event("failed", run_id, error_code="source_error", message=message))
        until("the event", lambda: str(run_id) in found)
    [told] = found[str(run_id)]
    assert told["exception"].startswith("source_error: no postgresql://me:***@host/db")
    assert "s3cret" not in str(told)
    assert len(told["exception"]) < 1100


@pytest.mark.parametrize("trouble", ["stopped", "hanging"])
def test_emitting_waits_for_no_broker_and_keeps_a_bounded_number(
    celery_app: Any, own_redis: Any, trouble: str
) -> None:
    own_redis.hang() if trouble == "hanging" else own_redis.kill()
    began = time.monotonic()
    for _ in range(3 * events.MAX_WAITING):
        events.emit(event())
    assert time.monotonic() - began < 3
    assert len(events._sender._waiting) <= events.MAX_WAITING
    own_redis.go_on() if trouble == "hanging" else own_redis.start()

    # And they flow again, without anybody's doing.
    with heard(celery_app) as found:

        def again() -> bool:
            events.emit(event("started", UUID(int=1)))
            return bool(found.get(str(UUID(int=1))) or time.sleep(0.2))

        until("an event after the outage", again, 30)


def test_flush_ends_in_its_time_whatever_redis_does(celery_app: Any, own_redis: Any) -> None:
    own_redis.hang()
    events.emit(event())
    began = time.monotonic()
    events.flush(0.3)
    assert time.monotonic() - began < 1
    own_redis.go_on()
