"""The ports by which ``dispatch`` publishes wake-ups and learns what a queue can take.

Neither ever raises. A Redis that is away costs about a second at worst, and the calls that
follow cost nothing until it is worth another try: the runs are durable, and the sweep offers
them again (R-T4, R-D5).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import kombu.pools

from dispatch.ports import Capacity, Offer
from tasks import embedded_broker, wakeup
from tasks.app import App, app
from tasks.breaker import Breaker
from tasks.broker import ANSWER_SECONDS, message_priority

EXECUTORS_UNKNOWN = 16
EXECUTORS_KNOWN_SECONDS = 30.0
_INSPECT_SECONDS = 1.0
# A broken connection of before an outage fails at once; a broker that hangs takes its second.
_AT_ONCE_SECONDS = ANSWER_SECONDS / 2

breaker = Breaker("Runs are stored all the same, and are offered when it is back.")


def publish(offers: Sequence[Offer]) -> int:
    """Publish one wake-up for each offer; how many went out for certain."""
    if not offers or not breaker.allows():
        return 0
    _after_fork()
    started = time.monotonic()
    for last in (False, True):
        try:
            with (
                app.producer_pool.acquire(block=True, timeout=ANSWER_SECONDS) as producer,
                _together(producer, len(offers)),
            ):
                for offer in offers:
                    send_wake_up(producer, offer)
            breaker.succeeded()
            return len(offers)
        except Exception as error:
            # A pooled connection from before an outage fails at once, and the next try connects
            # anew; that some wake-ups go out twice does no harm.
            if last or time.monotonic() - started > _AT_ONCE_SECONDS:
                _failed(error)
                break
    return 0


def _failed(error: Exception) -> None:
    breaker.failed(error)
    embedded_broker.bring_back()


def _together(producer: Any, count: int) -> AbstractContextManager[Any]:
    """Several messages in one round trip, where the installed kombu can (5.7)."""
    batch = getattr(producer, "batch", None)
    return nullcontext() if batch is None or count == 1 else batch()


def send_wake_up(producer: Any, offer: Offer) -> None:
    """Publish ``[run_id]``, and in the headers no more than Celery needs (R-T3)."""
    run_id = str(offer.run_id)
    super(App, app).send_task(
        wakeup.TASK,
        [run_id],
        {},
        task_id=run_id,
        root_id=run_id,
        producer=producer,
        queue=offer.queue,
        priority=message_priority(offer.priority),
        # The run's result is in Postgres; the wake-up has none.
        ignore_result=True,
        add_to_parent=False,
        retry=False,
    )


def capacity(queue: str) -> Capacity:
    """The executors of the workers that take from ``queue``, and the wake-ups that it holds.

    The workers are asked for them in the background, at most every EXECUTORS_KNOWN_SECONDS; until
    they have answered they count as EXECUTORS_UNKNOWN.
    """
    executors = _executors.of(queue)
    if not breaker.allows():
        return Capacity(executors, 0)
    _after_fork()
    started = time.monotonic()
    for last in (False, True):
        try:
            with app.pool.acquire(block=True, timeout=ANSWER_SECONDS) as connection:
                queued = _length(connection.default_channel, queue)
            breaker.succeeded()
            return Capacity(executors, queued)
        except Exception as error:
            if last or time.monotonic() - started > _AT_ONCE_SECONDS:
                _failed(error)
                break
    return Capacity(executors, 0)


def _length(channel: Any, queue: str) -> int:
    """What the queue holds in all its lists, one for each priority."""
    with channel.client.pipeline(transaction=False) as pipe:
        for step in channel.priority_steps:
            pipe.llen(channel._q_for_pri(queue, step))
        return sum(pipe.execute())


class _Executors:
    """How many runs the fleet can hold at once, by queue, as its workers last said."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._by_queue: Mapping[str, int] = {}
        self._asked: float | None = None

    def of(self, queue: str) -> int:
        with self._lock:
            now = time.monotonic()
            if self._asked is None or now - self._asked > EXECUTORS_KNOWN_SECONDS:
                self._asked = now
                threading.Thread(target=self._ask, name="claimcheck-executors", daemon=True).start()
            return self._by_queue.get(queue, EXECUTORS_UNKNOWN)

    def _ask(self) -> None:
        try:
            with app.connection_for_write() as connection:
                inspect = app.control.inspect(timeout=_INSPECT_SECONDS, connection=connection)
                pools = inspect.stats() or {}
                queues = inspect.active_queues() or {}
        except Exception:
            return
        found: dict[str, int] = {}
        for worker, stats in pools.items():
            executors = int(stats.get("pool", {}).get("max-concurrency") or 1)
            for queue in queues.get(worker, ()):
                found[queue["name"]] = found.get(queue["name"], 0) + executors
        with self._lock:
            self._by_queue = found


_executors = _Executors()
_pid = os.getpid()


def _after_fork() -> None:
    """A forked child must not write on its parent's connections."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        kombu.pools.connections.clear()
        kombu.pools.producers.clear()
        app._after_fork()


def _forget() -> None:
    breaker.reset()
    _executors.forget()


os.register_at_fork(after_in_child=_forget)
