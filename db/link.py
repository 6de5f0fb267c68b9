"""A connection that one thread keeps, and opens again when it was lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from db import session, statements
from db.session import ControlConnection

POINT_PLANS: Mapping[str, str] = {
    # What a held run does to the database are lookups by key. These keep the planner to them, also
    # with the statistics of an empty table: one plan is as good as the next, so it is made once.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}


class Link:
    """One connection to the control database, opened at first use, safe across fork.

    Not shared between threads. ``planner`` holds settings that its statements need; behind a
    transaction pooler `rows` sets them for each transaction. ``listening`` opens a connection that
    LISTENs; that one broke is noticed by its next statement only.
    """

    def __init__(
        self,
        application_name: str,
        *,
        patience: float = session.PATIENCE_SECONDS,
        planner: Mapping[str, str] = POINT_PLANS,
        listening: Callable[[], ControlConnection] | None = None,
    ) -> None:
        self._name = application_name
        self._planner = planner
        self._patience = patience
        self._listens = listening is not None
        self._open_connection = listening or self._open
        self._connection: ControlConnection | None = None
        self._owner = os.getpid()

    def get(self) -> ControlConnection:
        """The connection, opened where there is none or the server closed it.

        Raises psycopg.OperationalError; then nothing was sent.
        """
        if self._owner != os.getpid():
            # The parent's connection stays the parent's: forget it without closing it.
            self._connection, self._owner = None, os.getpid()
        if self._connection is not None:
            is_alive = self._listens or session.is_alive(self._connection)
            if self._connection.closed or not is_alive:
                self.close()
        if self._connection is None:
            self._connection = self._open_connection()
        return self._connection

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self._connection is not None and self._owner == os.getpid():
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    @property
    def is_open(self) -> bool:
        """Whether a connection is held; it may turn out to be dead."""
        return self._connection is not None and self._owner == os.getpid()

    def row(
        self,
        statement: LiteralString,
        parameters: Mapping[str, Any] | None = None,
        *,
        first: Sequence[LiteralString] = (),
    ) -> dict[str, Any] | None:
        """Run one statement and commit it; its first row, as `rows` does. Raises psycopg.Error."""
        return next(iter(self.rows(statement, parameters, first=first)), None)

    def rows(
        self,
        statement: LiteralString,
        parameters: Mapping[str, Any] | None = None,
        *,
        first: Sequence[LiteralString] = (),
    ) -> list[dict[str, Any]]:
        """Run one statement and commit it; its rows. Raises psycopg.Error.

        ``first`` are statements to run before it in its transaction, with the same parameters.
        """
        connection = self.get()
        planner = self._planner if session.is_pooled() else {}
        if not (planner or first):
            return statements.rows(connection, statement, parameters)
        with connection.transaction():
            for name, value in planner.items():
                connection.execute("select set_config(%s, %s, true)", (name, value))
            for earlier in first:
                statements.rows(connection, earlier, parameters)
            return statements.rows(connection, statement, parameters)

    def rows_of_both(
        self,
        first: tuple[LiteralString, Mapping[str, Any]],
        second: tuple[LiteralString, Mapping[str, Any]],
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Run two statements in one transaction and one round trip; the first row of each.

        Not behind a pooler, which may not take pipelines. Raises psycopg.Error; then both are
        undone, or the outcome of both is unknown.
        """
        connection = self.get()
        with connection.pipeline(), connection.transaction():
            answers = [
                connection.cursor(row_factory=dict_row).execute(statement, parameters)
                for statement, parameters in (first, second)
            ]
        one, other = (answer.fetchone() for answer in answers)
        return one, other

    def _open(self) -> ControlConnection:
        return session.connect(self._name, patience=self._patience, planner=self._planner)
