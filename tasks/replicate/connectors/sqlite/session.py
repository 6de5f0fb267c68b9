"""An open SQLite file: waits that can be stopped, and errors without row data."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from dispatch.redaction import redact, secrets_of
from tasks.replicate.connector import CommitUnknown, SinkError, SourceError
from tasks.replicate.connectors.urls import UnusableURL

LOCK_SECONDS = 60.0
"""How long a lock of another connection is waited for (SQLite knows one writer at a time)."""
_NAP_SECONDS = 0.02
_STEPS = 20_000
"""Instructions of SQLite's machine between two looks at whether to stop: about a millisecond."""

_WAYS_OUT: dict[type[Exception], str] = {
    SourceError: (
        "put the file in WAL mode, in which readers and the writer do not wait for each other, or "
        "write a longer ?timeout=SECONDS into the URL"
    ),
    SinkError: (
        "SQLite has one writer at a time, and outside WAL mode that one waits for readers too: "
        "write a longer ?timeout=SECONDS into the URL, or give the jobs that write the file one "
        "concurrency key with limit: 1"
    ),
}
"""Of a lock that was waited for in vain."""

_FORM = "write sqlite:///relative/path.db or sqlite:////absolute/path.db"
_BUSY = 5
_IOERR = 10
# Errors that another attempt may not meet: locks, memory, the disk.
_PASSING = frozenset({5, 6, 7, 9, 10, 13, 14, 15})


def location(config: Mapping[str, Any]) -> tuple[Path, float]:
    """The file, and the seconds to wait for locks. Raises UnusableURL without echoing the URL."""
    url = str(config.get("url") or "")
    if not url:
        raise UnusableURL(f"is missing; {_FORM}")
    scheme, _, rest = url.partition("://")
    path, _, query = rest.partition("?")
    if scheme.partition("+")[0] != "sqlite" or not path.startswith("/"):
        raise UnusableURL(f"is no SQLite URL; {_FORM}")
    path = unquote(path[1:])
    if path in ("", ":memory:"):
        raise UnusableURL(f"names no file, and a database in memory is nobody else's; {_FORM}")
    seconds = LOCK_SECONDS
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key != "timeout":
            raise UnusableURL(f"has the parameter {key}; SQLite knows timeout (seconds)")
        try:
            seconds = float(value)
        except ValueError:
            raise UnusableURL("timeout is no number of seconds") from None
    return Path(path), seconds


def identifier(*parts: str) -> str:
    """A quoted, possibly qualified name."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


_UNREADABLE = re.compile(r"Could not decode to UTF-8 column '(.*?)' with text '", re.DOTALL)


class Session:
    """One connection to the file, in autocommit; used by one thread, stopped by any.

    A sink's file that does not exist yet is not made before :meth:`make_file`; until then the
    session sees an empty database.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        error: type[SourceError] | type[SinkError],
        *,
        writable: bool,
    ) -> None:
        self._config, self._error = config, error
        self._stopped = self._disk_failed = False
        try:
            self.path, self._patience = location(config)
        except ValueError as problem:
            raise error(str(problem), permanent=True) from None
        self.exists = self.path.exists()
        if not self.exists and not writable:
            raise error(f"the SQLite file {self.path} does not exist", permanent=True)
        self._writable = writable
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        target = f"file:{quote(str(self.path))}?mode=rw" if self.exists else ":memory:"
        with self._errors():
            connection = sqlite3.connect(
                target, uri=True, isolation_level=None, check_same_thread=False, timeout=0
            )
            # Looked at from within SQLite, a stop cannot fall between two statements unheard.
            connection.set_progress_handler(lambda: self._stopped, _STEPS)
            connection.execute("pragma foreign_keys = on")
            connection.execute("pragma temp_store = file")
            return connection

    def make_file(self) -> None:
        """Make the file where it is missing."""
        if not self.exists:
            with contextlib.suppress(FileExistsError), self._errors():
                self.path.touch(mode=0o644, exist_ok=False)
            self.exists = True
            self._connection.close()
            self._connection = self._open()

    def reopen(self) -> None:
        """Leave this connection and whatever it was doing, and open another."""
        self.close()
        self._connection = self._open()

    def read_only(self) -> None:
        """From here on refuse to change anything."""
        self.execute("pragma query_only = on")

    def file(self) -> tuple[int, int]:
        """The file's device and number there, which are the same by every path to it."""
        with self._errors():
            found = self.path.stat()
        return found.st_dev, found.st_ino

    # Statements

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement, waiting for locks in steps that a stop can break.

        SQLite's own wait does not hear an interrupt, so it is switched off.
        """
        deadline = time.monotonic() + self._patience
        while True:
            self.check()
            try:
                return self._connection.execute(statement, parameters)
            except sqlite3.OperationalError as error:
                if _code(error) != _BUSY or time.monotonic() > deadline:
                    self._raise(error)
            except (sqlite3.Error, OverflowError, UnicodeError) as error:
                self._raise(error)
            time.sleep(_NAP_SECONDS)

    def tables_of(self, statement: str, parameters: Sequence[Any] = ()) -> set[str]:
        """The file's tables and views that a statement reads, through views as deep as they lie.

        The statement is prepared, not run.
        """
        found: set[str] = set()

        def look(
            action: int, table: str | None, column: str | None, database: str | None, by: str | None
        ) -> int:
            if action == sqlite3.SQLITE_READ and database == "main" and table is not None:
                found.add(table)
            return sqlite3.SQLITE_OK

        self._connection.set_authorizer(look)
        try:
            self.execute(f"explain {statement}", parameters).close()
        finally:
            self._connection.set_authorizer(None)
        return found

    def insert(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run an INSERT for every row; a text that is no Unicode passes as UnicodeError."""
        self.check()
        try:
            self._connection.executemany(statement, rows)
        except (sqlite3.Error, OverflowError) as error:
            self._raise(error)

    def pages(
        self, statement: str, parameters: Sequence[Any], size: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a statement, ``size`` at a time."""
        cursor = self.execute(statement, parameters)
        cursor.arraysize = size
        try:
            while True:
                self.check()
                with self._errors():
                    rows = cursor.fetchmany(size)
                if not rows:
                    return
                yield rows
        finally:
            cursor.close()

    def commit(self) -> None:
        """Commit; raises CommitUnknown where the disk failed meanwhile."""
        self._disk_failed = False
        try:
            self.execute("commit")
        except SinkError as error:
            if self._disk_failed:
                raise CommitUnknown(f"{error}; what became of the commit is not known") from None
            self.rollback()
            raise

    def rollback(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.set_progress_handler(None, 0)
                self._connection.execute("rollback")
                self._connection.set_progress_handler(lambda: self._stopped, _STEPS)

    # Stopping and ending

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(sqlite3.Error):
            self._connection.interrupt()

    def check(self) -> None:
        if self._stopped:
            raise self._error(f"{self._side}: stopped")

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Errors

    @property
    def _side(self) -> str:
        return "source" if self._error is SourceError else "sink"

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:
            self._raise(error)

    def _raise(self, error: Exception) -> None:
        """SQLite names tables, columns and constraints in its messages, and never a value; its
        driver shows a text that it cannot read."""
        code = _code(error)
        self._disk_failed = code == _IOERR
        if isinstance(error, UnicodeError):
            message, permanent = "a text is not valid Unicode", True
        elif isinstance(error, OSError):
            message, permanent = f"{self.path}: {error.strerror}", False
        elif self._stopped:
            message, permanent = "stopped", False
        else:
            name = getattr(error, "sqlite_errorname", None)
            message = f"{error} ({name})" if name and name != "unknown" else str(error)
            permanent = code is not None and code not in _PASSING
            if found := _UNREADABLE.match(message):
                message, permanent = f"column {found[1]}: a text is not valid UTF-8", True
            if code == _BUSY:
                held = f"another connection held its lock for {self._patience:g} s ({name})"
                message = f"{held}; {_WAYS_OUT[self._error]}"
        raise self._error(
            f"{self._side}: {redact(message, secrets_of(self._config))}", permanent=permanent
        ) from None


def _code(error: Exception) -> int | None:
    """SQLite's primary result code."""
    extended = getattr(error, "sqlite_errorcode", None)
    return None if extended is None else extended & 0xFF
