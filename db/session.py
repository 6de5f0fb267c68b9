"""Connections to the control database, each with deadlines on both sides (R-T4, R-L3).

The server ends a statement that runs or waits too long. The client gives up by itself a little
later, so that a server or network that hangs without a word cannot hold a caller for ever.
Behind a transaction pooler (``DATABASE_DIRECT_URL`` is set) sessions are shared: nothing is
prepared, no session setting is relied upon, and LISTEN takes the direct endpoint.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg import conninfo
from psycopg.errors import _WaitTimeout  # psycopg has no public name for it
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import InvalidatePoolError

from db import settings
from db.embedded import EmbeddedError

CONNECT_SECONDS = 5
"""How long opening a connection may take, for each address of the URL."""
STATEMENT_SECONDS = 30.0
"""How long one statement may run, by the server's clock."""
LOCK_SECONDS = 5.0
"""How long one statement may wait for a lock, where it does not say otherwise."""
PATIENCE_SECONDS = STATEMENT_SECONDS + 5
"""How long a caller waits for any answer, by its own monotonic clock."""

_TRANSPORT: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_SESSION: Mapping[str, str | int] = {
    "statement_timeout": int(STATEMENT_SECONDS * 1000),
    "lock_timeout": int(LOCK_SECONDS * 1000),
    "idle_in_transaction_session_timeout": 60_000,
    # The rules lean on READ COMMITTED: a lock that was waited for shows the row as it is now.
    "default_transaction_isolation": "read committed",
    "timezone": "UTC",
}


class DeadlineExceeded(psycopg.OperationalError):
    """The control database did not answer in time; the outcome of the statement is unknown."""


class ControlConnection(psycopg.Connection[Any]):
    """A connection whose every call ends within ``patience`` seconds (monotonic).

    When they pass without an answer the socket is closed and DeadlineExceeded raised. A call
    with a timeout of its own (``notifies``) keeps it; ``notifies`` without one ends likewise.
    """

    patience: float = PATIENCE_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.patience)
        except _WaitTimeout:
            self.pgconn.finish()
        raise DeadlineExceeded(f"the control database did not answer within {self.patience:g} s")


def is_pooled() -> bool:
    """Whether ``DATABASE_URL`` is a transaction pooler: a ``DATABASE_DIRECT_URL`` differs."""
    database = _database()
    return database.direct_conninfo != database.conninfo


def connect(
    application_name: str = "claimcheck",
    *,
    patience: float = PATIENCE_SECONDS,
    planner: Mapping[str, str] | None = None,
) -> ControlConnection:
    """Open a connection in autocommit mode.

    ``planner`` holds settings for this session's plans; a pooled connection cannot keep them. With
    them each statement is prepared when it is first used, because its plan is kept.
    Raises psycopg.OperationalError, within about CONNECT_SECONDS for each address.
    """
    endpoint = _database().conninfo
    return _connect(endpoint, application_name, is_pooled(), patience, planner or {})


def connect_direct(
    application_name: str = "claimcheck", *, patience: float = PATIENCE_SECONDS
) -> ControlConnection:
    """Open a connection in autocommit mode that keeps its session, for LISTEN.

    Give ``notifies`` a timeout. Raises psycopg.OperationalError as `connect` does.
    """
    endpoint = _database().direct_conninfo
    return _connect(endpoint, application_name, False, patience, {})


def engine() -> Engine:
    """This process's engine on the control database: made at first use, safe across fork."""
    return _engines.get()


@contextmanager
def transaction(
    *, lock_seconds: float | None = None, patience: float | None = None, reading: bool = False
) -> Iterator[Connection]:
    """A transaction on the engine, committed where the block ends well.

    ``lock_seconds`` bounds each wait for a lock in it, ``patience`` each answer. One for
    ``reading`` may not write, and sees throughout what was committed at its start. Raises
    sqlalchemy.exc.DBAPIError.
    """
    with engine().connect() as connection, patient(connection, patience), connection.begin():
        if reading:
            # The first of its statements: PostgreSQL takes it from no later one.
            connection.exec_driver_sql("set transaction isolation level repeatable read read only")
        timeouts: dict[str, float] = (
            {}
            if not is_pooled()
            else {
                "statement_timeout": STATEMENT_SECONDS,
                "lock_timeout": LOCK_SECONDS,
            }
        )
        if lock_seconds is not None:
            timeouts["lock_timeout"] = lock_seconds
        for name, seconds in timeouts.items():
            connection.exec_driver_sql(
                "select set_config(%(name)s, %(value)s, true)",
                {"name": name, "value": f"{seconds * 1000:.0f}ms"},
            )
        yield connection


@contextmanager
def unhurried(connection: Connection, seconds: float) -> Iterator[None]:
    """In this block of a transaction a statement may run for ``seconds``, by the server's clock."""
    limit = "select set_config('statement_timeout', %(value)s, true)"
    before = connection.exec_driver_sql("select current_setting('statement_timeout')").scalar_one()
    connection.exec_driver_sql(limit, {"value": f"{seconds * 1000:.0f}ms"})
    with patient(connection, seconds + PATIENCE_SECONDS - STATEMENT_SECONDS):
        yield
    connection.exec_driver_sql(limit, {"value": before})


@contextmanager
def autocommitting(patience: float) -> Iterator[psycopg.Connection[Any]]:
    """A pooled connection on which each statement is a transaction, so one round trip.

    It is the driver's own, spared SQLAlchemy's cost a statement. ``patience`` (seconds, monotonic)
    bounds each answer. Raises psycopg.Error; the pool forgets a connection that is not idle after.
    """
    pooled = engine().raw_connection()
    driver = cast("psycopg.Connection[Any]", pooled.driver_connection)
    try:
        driver.autocommit = True
        with patient(driver, patience):
            yield driver
    finally:
        try:
            driver.autocommit = False
        except psycopg.Error:
            pooled.invalidate()
        pooled.close()


@contextmanager
def patient(
    connection: Connection | psycopg.Connection[Any], seconds: float | None
) -> Iterator[None]:
    """While the block runs, each answer on ``connection`` is awaited for ``seconds`` only.

    Connections that are not ours (a caller's own) are left as they are.
    """
    driver: Any = connection
    if isinstance(connection, Connection):
        driver = connection.connection.driver_connection
    if seconds is None or not isinstance(driver, ControlConnection):
        yield
        return
    before = driver.patience
    driver.patience = seconds
    try:
        yield
    finally:
        driver.patience = before


def _connect(
    endpoint: str,
    application_name: str,
    pooled: bool,
    patience: float,
    planner: Mapping[str, str],
    autocommit: bool = True,
) -> ControlConnection:
    options = _options(endpoint, application_name, pooled, planner)

    def attempt() -> ControlConnection:
        return ControlConnection.connect(
            conninfo.make_conninfo("", **options),
            autocommit=autocommit,
            prepare_threshold=None if pooled else 0 if planner else 5,
        )

    try:
        connection = attempt()
    except psycopg.OperationalError:
        if not _database().is_embedded:
            raise
        with _as_away():
            _database().revive()
        connection = attempt()
    else:
        _database().keep()
    connection.patience = patience
    return connection


def _database() -> settings.Database:
    with _as_away():
        return settings.database()


@contextmanager
def _as_away() -> Iterator[None]:
    """An embedded database that does not come is to callers a database that is away."""
    try:
        yield
    except EmbeddedError as error:
        raise psycopg.OperationalError(str(error)) from error


def _options(
    endpoint: str, application_name: str, pooled: bool, planner: Mapping[str, str]
) -> dict[str, Any]:
    given = conninfo.conninfo_to_dict(endpoint)
    options = {**_TRANSPORT, **given, "application_name": application_name}
    if not pooled:
        settings_ = {**_SESSION, **planner}
        words = [f"-c {name}={_escaped(str(value))}" for name, value in settings_.items()]
        # What the user's own URL sets comes last and wins.
        options["options"] = " ".join([*words, str(given.get("options") or "")]).strip()
    return options


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


class _Engines:
    """The process's engine, made anew where the settings name another database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._endpoint: tuple[str, bool] | None = None

    def get(self) -> Engine:
        endpoint = (_database().conninfo, is_pooled())
        with self._lock:
            if self._engine is None or self._endpoint != endpoint:
                self.dispose()
                self._engine = _create_engine(*endpoint)
                self._endpoint = endpoint
            return self._engine

    def dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def forked(self) -> None:
        """In the child: the parent's connections stay the parent's; none is closed or used here."""
        self._lock = threading.Lock()
        if self._engine is not None:
            self._engine.dispose(close=False)


_engines = _Engines()
os.register_at_fork(after_in_child=_engines.forked)


def dispose() -> None:
    """Close the pooled connections; the next use opens new ones."""
    _engines.dispose()


def _create_engine(endpoint: str, pooled: bool) -> Engine:
    created = create_engine(
        "postgresql+psycopg://",
        creator=lambda: _connect(
            endpoint, "claimcheck", pooled, PATIENCE_SECONDS, {}, autocommit=False
        ),
        pool_size=2,
        max_overflow=8,
        pool_timeout=CONNECT_SECONDS,
        pool_use_lifo=True,
        hide_parameters=True,
        use_native_hstore=False,
    )

    @event.listens_for(created, "checkout")
    def refuse_a_dead_one(connection: Any, record: Any, proxy: Any) -> None:
        # A server that restarted has closed all of them; telling costs no round trip.
        if not is_alive(connection):
            raise InvalidatePoolError

    return created


def is_alive(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has said nothing since it was last asked; sends nothing, does not wait.

    Not for a connection that listens. What arrives unasked is nearly always the end: the message
    of a shutdown comes before the socket closes, and a statement sent in between would fail.
    """
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)


def driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    """The psycopg connection under a SQLAlchemy one, in the same transaction."""
    return cast("psycopg.Connection[Any]", connection.connection.driver_connection)
