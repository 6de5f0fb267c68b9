"""What tests of runs share: a control database, jobs, runs in any state, ports that record."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from db import session
from dispatch.deadlines import sign_of_life
from dispatch.ports import Capacity, Offer, Ports

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def rows(database: str, configure: Callable[..., Any]) -> Iterator[Rows]:
    """``rows(sql, ...)`` on a connection of its own to the control database, committed at once."""
    configure(DATABASE_URL=database, REDIS_URL="redis://127.0.0.1:1/0")
    session.dispose()
    sign_of_life.forget()
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as connection:

        def run(query: str, *values: Any) -> list[dict[str, Any]]:
            found = connection.execute(query, values or None)  # type: ignore[call-overload]
            return [] if found.description is None else found.fetchall()

        yield run
    session.dispose()


@pytest.fixture
def heard(database: str, rows: Rows) -> Iterator[Callable[[], list[str]]]:
    """The notifications that were committed since the last call, in their order."""
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("listen claimcheck")

        def payloads() -> list[str]:
            # What committed before this answer is delivered with it.
            listener.execute("select 1")
            return [found.payload for found in listener.notifies(timeout=0)]

        yield payloads


class Recorder:
    """Ports that keep what was offered; ``taken`` limits what the broker takes, None all."""

    def __init__(self) -> None:
        self.offered: list[Offer] = []
        self.executors = 16
        self.queued = 0
        self.taken: int | None = None
        self.ports = Ports(offer=self._offer, capacity=self._capacity)

    def _offer(self, offers: Sequence[Offer]) -> int:
        taken = list(offers if self.taken is None else offers[: self.taken])
        self.offered += taken
        return len(taken)

    def _capacity(self, queue: str) -> Capacity:
        return Capacity(self.executors, self.queued)

    def take(self) -> list[UUID]:
        """The run ids that were offered since the last call."""
        found, self.offered = [offer.run_id for offer in self.offered], []
        return found


@pytest.fixture
def recorder(rows: Rows) -> Recorder:
    return Recorder()


def new_job(rows: Rows, name: str, overlap: str = "queue", **columns: Any) -> UUID:
    """A job; further columns by name, ``definition`` as a dictionary."""
    values = {"name": name, "handler": "report", "overlap": overlap, **columns}
    values["definition"] = json.dumps(values.get("definition", {}))
    names = ", ".join(values)
    places = ", ".join(["%s"] * len(values))
    [row] = rows(
        f"insert into job ({names}) values ({places}) returning id",  # noqa: S608
        *values.values(),
    )
    return UUID(str(row["id"]))


def claim(rows: Rows, run_id: UUID, lease: float = 60.0) -> None:
    """Let the run be held, as a claim leaves it, for ``lease`` seconds from now."""
    rows(
        """update job_run set status = 'RUNNING', lease_token = gen_random_uuid(),
             executor = 'here:1:a:2', heartbeat_at = clock_timestamp(),
             fence = nextval('fence_seq'),
             lease_until = clock_timestamp() + make_interval(secs => %s),
             started_at = clock_timestamp(), job_snapshot = '{}', exclusive = false,
             datasources_resolved_at = clock_timestamp() where id = %s""",
        lease,
        run_id,
    )


def request_cancel(rows: Rows, run_id: UUID) -> None:
    rows(
        """update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = clock_timestamp()
           where id = %s""",
        run_id,
    )


def finish(rows: Rows, run_id: UUID, status: str = "SUCCEEDED", ago: float = 0.0) -> None:
    """End a held run, ``ago`` seconds before now."""
    rows(
        """update job_run set status = %s, error_code = %s,
             finished_at = clock_timestamp() - make_interval(secs => %s) where id = %s""",
        status,
        None if status == "SUCCEEDED" else "handler_error",
        ago,
        run_id,
    )


def ended(rows: Rows, run_id: UUID, status: str = "SUCCEEDED") -> None:
    claim(rows, run_id)
    finish(rows, run_id, status)


def run(rows: Rows, run_id: UUID) -> dict[str, Any]:
    [found] = rows("select * from job_run where id = %s", run_id)
    return found


STORED = ("job_run", "trigger_key", "run_alias", "audit_event")


def stored(rows: Rows) -> dict[str, int]:
    return {
        table: rows(f"select count(*) as n from {table}")[0]["n"]  # noqa: S608
        for table in STORED
    }


NOTHING = dict.fromkeys(STORED, 0)


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Do ``work`` beside the test; its ``result(timeout)`` returns or raises what it did."""
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, daemon=True).start()
    return future


def wait_for_locks(rows: Rows) -> int:
    """How many sessions of this database wait for another one's lock."""
    [found] = rows(
        """select count(distinct pid) as n from pg_locks l join pg_stat_activity a using (pid)
           where not l.granted and a.datname = current_database()"""
    )
    return int(found["n"])


def waits_for_a_lock(rows: Rows) -> bool:
    """Whether some session of this database waits for another one's lock."""
    return wait_for_locks(rows) > 0
