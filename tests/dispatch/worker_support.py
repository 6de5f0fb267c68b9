"""What tests of held runs share: a keyring, datasources, claimers, a coordinator with handlers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from uuid import UUID, uuid4

from run_support import Recorder, Rows, new_job

from db.envelopes import seal
from db.keyring import Keyring
from db.link import Link
from dispatch.claims import ClaimedRun, RunClaims
from dispatch.context import RunContext
from dispatch.coordinator import WorkerDispatchCoordinator
from dispatch.ports import Ports, RunEvent

KEYRING = Keyring("v1", {"v1": bytes(range(32))})
PASSWORD = "tr0ub4dor-and-3"


def new_datasource(rows: Rows, name: str, keyring: Keyring = KEYRING, **config: Any) -> UUID:
    """A datasource whose configuration is sealed as it is in real life."""
    datasource_id = uuid4()
    config.setdefault("url", f"postgresql://reader:{PASSWORD}@db.example/{name}")
    rows(
        "insert into datasource (id, name, connector, envelope) values (%s, %s, %s, %s)",
        datasource_id,
        name,
        "postgresql",
        json.dumps(seal(keyring, datasource_id, config)),
    )
    return datasource_id


def new_run(rows: Rows, job_id: UUID, **columns: Any) -> UUID:
    """A waiting run; further columns by name."""
    values = {"job_id": job_id, **columns}
    names = ", ".join(values)
    places = ", ".join(["%s"] * len(values))
    [row] = rows(
        f"insert into job_run ({names}) values ({places}) returning id",  # noqa: S608
        *values.values(),
    )
    return UUID(str(row["id"]))


def new_runs(rows: Rows, job_id: UUID, count: int) -> list[UUID]:
    """``count`` waiting runs of one job, each available a moment after the one before."""
    found = rows(
        """insert into job_run (job_id, available_at)
           select %s, statement_timestamp() - interval '1 hour' + n * interval '1 millisecond'
           from generate_series(1, %s) n returning id""",
        job_id,
        count,
    )
    return [UUID(str(row["id"])) for row in found]


class Claimer:
    """A claimer with a connection of its own."""

    def __init__(
        self,
        name: str = "host:1:nonce:2",
        *,
        lease: float = 60.0,
        handlers: Sequence[str] = ("report",),
        keys: Sequence[str] = ("v1",),
    ) -> None:
        self.link = Link("test claimer")
        self.claims = RunClaims(
            lambda: name, lease, handlers=lambda: handlers, key_versions=lambda: keys
        )

    def directed(self, run_id: UUID) -> ClaimedRun | None:
        return self.claims.directed(self.link, run_id)

    def next(self, queue: str = "runs") -> ClaimedRun | None:
        return self.claims.next(self.link, queue)

    def close(self) -> None:
        self.link.close()


class Worker:
    """A coordinator whose handlers are given by the test, run in a thread beside it."""

    def __init__(
        self,
        rows: Rows,
        recorder: Recorder | None = None,
        *,
        lease: float = 60.0,
        executor: str = "host:1:nonce:2",
        slot_runs: int = 100,
        **options: Any,
    ) -> None:
        self.rows = rows
        self.events: list[RunEvent] = []
        self.handlers: dict[str, Callable[[RunContext], Any]] = {}
        recorder = recorder or Recorder()
        self.ports = Ports(recorder.ports.offer, self.events.append, recorder.ports.capacity)
        self.coordinator = WorkerDispatchCoordinator(
            self.ports,
            executor=lambda: executor,
            keyring=lambda: KEYRING,
            known=lambda: sorted(self.handlers),
            handler=self.handlers.get,
            lease_seconds=lease,
            slot_runs=slot_runs,
            **options,
        )
        self._stack = ExitStack()

    def on(self, name: str, work: Callable[[RunContext], Any]) -> None:
        self.handlers[name] = work

    def job(self, name: str, work: Callable[[RunContext], Any], **columns: Any) -> UUID:
        """A job of its own handler."""
        self.on(name, work)
        return new_job(self.rows, name, handler=name, **columns)

    def run(self, run_id: UUID | None = None, queue: str = "runs") -> list[UUID]:
        return self.coordinator.run(run_id, queue)

    def close(self) -> None:
        self.coordinator.drain(0.0)
        self.coordinator.stop()
        assert self.coordinator.wait(20), "the keeper's threads did not end"
        self.coordinator.close()


class Gate:
    """Work that says when it began and goes on when it is let, heeding its context meanwhile."""

    def __init__(self, result: Any = None, *, heeds: bool = True) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.stopped: str | None = None
        self.contexts: list[RunContext] = []
        self._result = result
        self._heeds = heeds

    def __call__(self, run: RunContext) -> Any:
        self.contexts.append(run)
        self.began.set()
        deadline = time.monotonic() + 60
        while not self.go.wait(0.01):
            assert time.monotonic() < deadline, "nobody let the work go on"
            if self._heeds:
                run.check_cancelled()
        return self._result
