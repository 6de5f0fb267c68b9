"""What Flower is told of a run: Celery's task events, under the job's name (R-T3, R-X2).

Events leave from one thread of the process, so that whoever emits one never waits for Redis.
While Redis is away they are lost, as Celery's own are; the runs are in Postgres.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from dispatch.ports import EventKind, RunEvent
from dispatch.redaction import redact
from tasks.app import app

MAX_WAITING = 2000
"""How many events may wait to be sent; beyond it the oldest are lost."""
BATCH = 50
GATHER_SECONDS = 0.05
"""How long an event may wait for others: a message costs more than the events in it."""
LAST_WORDS_SECONDS = 0.5
_REST_SECONDS = 2.0
_MESSAGE_LENGTH = 1000

_TYPES: Mapping[EventKind, str] = {
    "received": "task-received",
    "started": "task-started",
    "succeeded": "task-succeeded",
    "failed": "task-failed",
    "retried": "task-retried",
    "cancelled": "task-revoked",
}


def emit(event: RunEvent) -> None:
    """Tell observers of a run. Never raises and never waits."""
    _sender.put(_TYPES[event.kind], _fields(event))


def flush(seconds: float = LAST_WORDS_SECONDS) -> None:
    """Wait until what was emitted has been sent, at most so long."""
    _sender.flush(seconds)


def name_process(nodename: str) -> None:
    """Let the events from here on name their worker, by Celery's node name."""
    _sender.hostname = nodename


def _forget() -> None:
    """Send what waits and let the connection go; the next event opens another (tests)."""
    _sender.flush(LAST_WORDS_SECONDS)
    _sender.forget()


def _fields(event: RunEvent) -> dict[str, Any]:
    fields = event.fields
    found: dict[str, Any] = {
        "uuid": str(event.run_id),
        # In each event, so that an observer that came late knows what it sees.
        "name": event.job,
        "args": "()",
        "kwargs": f"{{'attempt': {event.attempt}, 'queue': {event.queue!r}}}",
        "root_id": str(event.root_run_id),
        "parent_id": None if event.previous_run_id is None else str(event.previous_run_id),
        "retries": event.attempt - 1,
        "routing_key": event.queue,
        "timestamp": time.time(),
    }
    if event.kind == "received":
        found |= {"eta": None, "expires": None}
    elif event.kind == "succeeded":
        rows = fields.get("rows")
        found |= {
            "result": "" if rows is None else f"{{'rows': {rows}}}",
            "runtime": fields.get("runtime"),
        }
    elif event.kind in ("failed", "retried"):
        message = redact(str(fields.get("message") or ""), limit=_MESSAGE_LENGTH)
        found |= {
            "exception": f"{fields.get('error_code')}: {message}"
            if message
            else str(fields.get("error_code")),
            "traceback": "",
            "runtime": fields.get("runtime"),
        }
    elif event.kind == "cancelled":
        found |= {"terminated": False, "signum": None, "expired": False}
    return found


class _Sender:
    """One thread and one connection of this process that send events in the order they came."""

    def __init__(self) -> None:
        self.hostname: str | None = None
        self._renew()

    def _renew(self) -> None:
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MAX_WAITING)
        self._woken = threading.Event()
        self._hurry = threading.Event()
        self._sending = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._dispatcher: Any = None
        self._connection: Any = None

    def put(self, type_: str, fields: dict[str, Any]) -> None:
        self._waiting.append((type_, fields))
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self._woken.set()

    def flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._hurry.set()
        while (self._waiting or self._sending) and time.monotonic() < deadline:
            if self._thread is None or not self._thread.is_alive():
                return
            time.sleep(0.005)

    def forget(self) -> None:
        self._waiting.clear()
        if not self._sending:
            self._disconnect()

    def forked(self) -> None:
        # The parent's connection stays the parent's: it is neither closed nor used here.
        self._renew()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._send_all, name="claimcheck-events", daemon=True
                )
                self._thread.start()

    def _send_all(self) -> None:
        while True:
            self._woken.wait()
            self._sending = True
            self._hurry.wait(GATHER_SECONDS)
            self._hurry.clear()
            self._woken.clear()
            try:
                while self._waiting:
                    count = min(BATCH, len(self._waiting))
                    self._send([self._waiting.popleft() for _ in range(count)])
            except Exception:
                self._disconnect()
                self._waiting.clear()
                self._sending = False
                time.sleep(_REST_SECONDS)
            self._sending = False

    def _send(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        is_new = self._dispatcher is None
        try:
            self._transmit(events)
        except Exception:
            if is_new:
                raise
            # The connection is from before an outage, of which nothing told.
            self._disconnect()
            self._transmit(events)

    def _transmit(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        if self._dispatcher is None:
            self._connection = app.connection_for_write()
            self._dispatcher = app.events.Dispatcher(
                self._connection,
                hostname=self.hostname or f"claimcheck@{socket.gethostname()}",
                buffer_while_offline=False,
                buffer_group=frozenset({"task"}),
                buffer_limit=BATCH + 1,
            )
        for type_, fields in events:
            self._dispatcher.send(type_, **fields)
        self._dispatcher.flush(errors=False)

    def _disconnect(self) -> None:
        connection, self._dispatcher, self._connection = self._connection, None, None
        try:
            if connection is not None:
                connection.release()
        except Exception:
            return


_sender = _Sender()
os.register_at_fork(after_in_child=_sender.forked)
atexit.register(flush)
