"""A connection as replication needs it: strict, in UTC and UTF-8, and stoppable."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.replicate.connector import CommitUnknown, SinkError, SourceError
from tasks.replicate.connectors import sockets
from tasks.replicate.connectors.mysql import drivers, faults
from tasks.replicate.opening import Opening

STOP_SECONDS = 0.4
"""How long a stop waits for KILL QUERY to work before it shuts the socket down."""
KILL_SECONDS = 2

# A bad value is an error, a zero AUTO_INCREMENT is a zero, and dates have a month and a day.
_MODES = (
    "STRICT_ALL_TABLES",
    "STRICT_TRANS_TABLES",
    "NO_ZERO_IN_DATE",
    "NO_ZERO_DATE",
    "ERROR_FOR_DIVISION_BY_ZERO",
    "NO_ENGINE_SUBSTITUTION",
    "NO_AUTO_VALUE_ON_ZERO",
)
# What the server, or its init_connect, may have set otherwise for everybody. DEFAULT would be just
# that. Slow partners are waited for: the job's own limit is the only one. A value that was rounded
# or cut is told in a note, and the messages' values are found by their English quotes.
_SETTINGS = """
set session
  sql_mode = '{modes}',
  time_zone = '+00:00',
  autocommit = 1,
  completion_type = 0,
  wait_timeout = 86400,
  net_read_timeout = 3600,
  net_write_timeout = 3600,
  sql_select_limit = 18446744073709551615,
  sql_big_selects = 1,
  sql_safe_updates = 0,
  sql_auto_is_null = 0,
  group_concat_max_len = 4294967295,
  sql_notes = 1,
  lc_messages = 'en_US',
  foreign_key_checks = 1,
  unique_checks = 1
"""
_ISOLATION = "set session transaction isolation level repeatable read"
# What not every version has, or lets every user set.
_IF_IT_CAN = {
    True: (
        "set session max_statement_time = 0, idle_transaction_timeout = 0,"
        " idle_readonly_transaction_timeout = 0, idle_write_transaction_timeout = 0,"
        " check_constraint_checks = 1, character_set_filesystem = binary, max_error_count = 65535",
        # Without it no note is made, and with more of it some are made of no value.
        "set session note_verbosity = 'basic'",
        "set session innodb_snapshot_isolation = 0",
        # A NULL into TIMESTAMP NOT NULL would else be the present time.
        "set session explicit_defaults_for_timestamp = 1",
    ),
    False: (
        "set session max_execution_time = 0",
        "set session explicit_defaults_for_timestamp = 1",
        # The pipe's name is no text of another character set.
        "set session character_set_filesystem = binary",
        "set session max_error_count = 65535",
    ),
}
# By default the server sorts by the first 1024 bytes of a text, and finds what is longer and equal
# in several groups. No key is longer than this; for a source's own ORDER BY it might be too much.
_LONG_KEYS = "set session max_sort_length = 65536"
_ABOUT = "select @@sql_mode, version(), connection_id(), database()"
_KILL = "kill query {id}"
_ESCAPES = str.maketrans(
    {"\0": "\\0", "\n": "\\n", "\r": "\\r", "\\": "\\\\", "'": "\\'", "\x1a": "\\Z"}
)


def identifier(*parts: str) -> str:
    """A quoted, possibly qualified name."""
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def literal(value: str | bytes | int | None) -> str:
    """A value as it stands in a statement."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, int):
        return str(value)
    return "'" + value.translate(_ESCAPES) + "'"


class Session:
    """One connection, in autocommit; used by one thread, stopped by any.

    ``modes`` are the server's own SQL modes, which this session does without.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        error: type[SourceError] | type[SinkError],
        *,
        name: str = "",
        loads: bool = False,
    ) -> None:
        self._config, self._error = config, error
        self._name, self._loads = name, loads
        self._stopped = False
        self._idle = threading.Event()
        self._idle.set()
        self._broken = False
        self._opening: Opening[Any] | None = None
        self._open()

    def _open(self) -> None:
        opening = self._opening = Opening(
            lambda: drivers.connect(self._config, name=self._name, loads=self._loads)
        )
        self.check()
        try:
            with self._errors():
                connection = opening.wait()
        except ValueError as error:
            raise self._error(f"{self._side}: {error}", permanent=True) from None
        if connection is None:
            raise self._error(f"{self._side}: stopped")
        self._connection = connection
        self._wire = drivers.wire(self._connection)
        try:
            modes, self.version_text, self.id, self.database = self.row(_ABOUT)
            self.modes = frozenset(modes.split(","))
            self.execute(_SETTINGS.format(modes=",".join(_MODES)))
            self.execute(_ISOLATION)
            if self._error is SinkError:
                self.execute(_LONG_KEYS)
            self.mariadb = "mariadb" in self.version_text.lower()
            found = re.search(r"(\d+)\.(\d+)\.(\d+)", self.version_text.removeprefix("5.5.5-"))
            self.version = tuple(map(int, found.groups())) if found else (0, 0, 0)
            for statement in _IF_IT_CAN[self.mariadb]:
                with contextlib.suppress(SourceError, SinkError):
                    self.execute(statement)
        except BaseException:
            self.close()
            raise

    def reopen(self) -> None:
        """Leave this connection and whatever it was doing, and open another."""
        self.cut()
        self.close()
        self._broken = False
        self._open()

    # Statements; values are written into them by literal(), never by the driver

    def execute(self, statement: str) -> int:
        """Run a statement and return the rows that it changed (or handed out)."""
        with self._busy(), contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(statement)
            return int(cursor.rowcount)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        with self._busy(), contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def row(self, statement: str) -> tuple[Any, ...]:
        """The only row of a result."""
        return self.rows(statement)[0]

    def columns(self, statement: str) -> list[tuple[str, int, int, int, int]]:
        """Name, field type, length, scale and flags of a result's columns."""
        with self._busy(), contextlib.closing(self._connection.cursor()) as cursor:
            cursor.execute(statement)
            described = zip(cursor.description, drivers.flags(cursor), strict=True)
            return [(c[0], c[1], c[3] or 0, c[5] or 0, flags) for c, flags in described]

    def pages(self, statement: str, size: int) -> Iterator[Sequence[tuple[Any, ...]]]:
        """The rows of a statement, ``size`` at a time, as the server sends them.

        A reader that leaves before the end breaks the connection: there is no other way to be
        spared the rest.
        """
        cursor = drivers.streaming_cursor(self._connection)
        done = False
        try:
            with self._busy():
                cursor.execute(statement)
            while True:
                with self._busy():
                    rows = cursor.fetchmany(size)
                if not rows:
                    break
                yield rows
            done = True
        finally:
            if done:
                cursor.close()
            else:
                self.cut()
                drivers.forget(cursor)

    def begin(self) -> None:
        self.execute("start transaction")

    def commit(self) -> None:
        """Commit; raises CommitUnknown where the connection broke meanwhile."""
        try:
            with self._busy(raw=True), contextlib.closing(self._connection.cursor()) as cursor:
                cursor.execute("commit")
        except Exception as error:
            if not self._driver_error(error):
                raise
            if faults.lost(error) or self._stopped:
                self._broken = True
                raise CommitUnknown(f"{self._side}: the connection broke at commit") from None
            self._raise(error)

    def rollback(self) -> None:
        """Undo the open transaction; never raises, and never waits for a server that hangs."""
        if self._broken or self._stopped:
            # The server takes everything back when the connection ends.
            self.cut()
            return
        with contextlib.suppress(Exception):
            self.execute("rollback")

    # Stopping and ending

    @property
    def lost(self) -> bool:
        """Whether the connection broke, and nobody asked for it."""
        return self._broken and not self._stopped

    def stop(self) -> None:
        """Break what blocks: the server is asked first, then the socket is shut down."""
        self._stopped = True
        if self._opening is not None:
            self._opening.leave()
        if not self._idle.is_set():
            threading.Thread(target=self._kill, name="claimcheck-kill", daemon=True).start()
            threading.Thread(target=self._cut_later, name="claimcheck-cut", daemon=True).start()

    def _kill(self) -> None:
        with contextlib.suppress(Exception):
            other = drivers.connect(
                self._config, name="claimcheck", seconds=KILL_SECONDS, short=True
            )
            with contextlib.closing(other), contextlib.closing(other.cursor()) as cursor:
                cursor.execute(_KILL.format(id=self.id))

    def _cut_later(self) -> None:
        if not self._idle.wait(STOP_SECONDS):
            self.cut()

    def cut(self) -> None:
        """Break the connection off; the server undoes what was not committed."""
        self._broken = True
        with contextlib.suppress(OSError):
            sockets.break_off(self._wire)

    def check(self) -> None:
        if self._stopped:
            raise self._error(f"{self._side}: stopped")

    def close(self) -> None:
        if self._broken:
            self.cut()
        with contextlib.suppress(Exception):
            self._connection.close()
        with contextlib.suppress(OSError):
            self._wire.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Errors

    @property
    def _side(self) -> str:
        return "source" if self._error is SourceError else "sink"

    @contextlib.contextmanager
    def _busy(self, *, raw: bool = False) -> Iterator[None]:
        """Marks the connection as in use; a stop that comes before is seen, one after breaks it."""
        self._idle.clear()
        try:
            self.check()
            with contextlib.nullcontext() if raw else self._errors():
                yield
        finally:
            self._idle.set()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._driver_error(error):
                raise
            self._raise(error)

    def _driver_error(self, error: Exception) -> bool:
        if isinstance(error, self._error):
            return False
        # Over a connection that a stop broke PyMySQL trips with errors of Python's own.
        drivers_own = type(error).__module__.startswith(("pymysql", "MySQLdb"))
        return self._stopped or drivers_own or isinstance(error, OSError)

    def _raise(self, error: Exception) -> None:
        if faults.lost(error):
            self._broken = True
        self.check()
        permanent = faults.permanent(faults.number(error))
        raise self._error(
            f"{self._side}: {faults.describe(error, self._config)}", permanent=permanent
        ) from None
