"""Connections to PostgreSQL as replication needs them: one time zone, one style, stoppable."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import conninfo, sql

from dispatch.redaction import redact, secrets_of
from tasks.replicate.connector import SinkError, SourceError
from tasks.replicate.connectors import sockets, urls

SESSION = "session"
POOLED = (
    "a pooler such as PgBouncer answers there. Settings, snapshots and locks need a session "
    "of their own: give the server's own address or, where each client of the pooler keeps its "
    "session until it leaves (pool_mode = session), add pooler: session"
)

CONNECT_SECONDS = 10
CANCEL_SECONDS = 0.3

# Text must mean the same at both ends, a filter by row security must be an error and not a
# hole in the data, and the job's own time limit is the only one.
_SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "array_nulls": "on",
    "bytea_output": "hex",
    "extra_float_digits": "3",
    "xmloption": "content",
    # Rows that an index would leave out at random.
    "gin_fuzzy_search_limit": "0",
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "standard_conforming_strings": "on",
    # Nobody reads notices, of which a trigger may send one for each row.
    "client_min_messages": "error",
    # Names of types are compared, and quoted only where they must be.
    "quote_all_identifiers": "off",
}
# A worker that dies is noticed by its backend within a second, also inside a long statement, or
# while that waits for a lock. Each look is one system call, and only while a statement runs.
_NEWER_SETTINGS = {
    140000: {"client_connection_check_interval": "250ms", "idle_session_timeout": "0"},
    170000: {"transaction_timeout": "0"},
}

_SET = """
select pg_catalog.pg_backend_pid(),
  array(select set_config(name, value, false) from unnest(%s::text[], %s::text[]) s (name, value))
"""

_PATIENCE = "select set_config('lock_timeout', %s, false)"


def conninfo_of(config: Mapping[str, Any]) -> str:
    """libpq's form of the configured URL; raises `UnusableURL` without echoing it."""
    url = str(config.get("url") or "")
    url = re.sub(r"^postgres(ql)?\+\w+://", "postgresql://", url)
    if not url:
        raise urls.UnusableURL("is missing; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    try:
        options = conninfo.conninfo_to_dict(url)
    except (psycopg.ProgrammingError, UnicodeError):
        raise urls.UnusableURL(
            "is no PostgreSQL URL; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE "
            "(percent-encode special characters)"
        ) from None
    for host in str(options.get("host") or "").split(","):
        # The rest of a password with a raw @; a socket's folder or name may hold one.
        if "@" in host and not host.startswith(("/", "@")):
            raise urls.UnusableURL(urls.RAW)
    for port in str(options.get("port") or "").split(","):
        urls.check_port(port)
    return url


def connect(config: Mapping[str, Any], *, name: str) -> psycopg.Connection[Any]:
    """Open a connection in autocommit with the session settings; psycopg's errors pass.

    Raises `UnusableURL` where the session may be another one at the next statement.
    """
    connection = psycopg.connect(
        conninfo_of(config),
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        application_name=name or "claimcheck",
        client_encoding="utf8",
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        prepare_threshold=None,
    )
    try:
        settings = dict(_SETTINGS)
        for version, newer in _NEWER_SETTINGS.items():
            if connection.info.server_version >= version:
                settings |= newer
        row = connection.execute(_SET, (list(settings), list(settings.values()))).fetchone()
        # What answers for the server gives a number of its own for the session.
        if row and row[0] != connection.info.backend_pid and config.get("pooler") != SESSION:
            raise urls.UnusableURL(POOLED)
        with _wire(connection) as wire:
            sockets.widen(wire)
    except BaseException:
        connection.close()
        raise
    return connection


def interrupt(connection: psycopg.Connection[Any]) -> None:
    """End whatever blocks on the connection, for good.

    The server is asked to cancel first, so that it stops at once; then the connection is broken
    off, because a server that hangs does not answer.
    """
    if connection.closed:
        return
    # An older libpq knows no deadline for a cancel, and keeps every thread waiting meanwhile.
    if psycopg.capabilities.has_cancel_safe():
        with contextlib.suppress(Exception):
            connection.cancel_safe(timeout=CANCEL_SECONDS)
    with contextlib.suppress(Exception), _wire(connection) as wire:
        sockets.break_off(wire)


def _wire(connection: psycopg.Connection[Any]) -> socket.socket:
    """The connection's socket, to be closed; the connection keeps its own."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def close(connection: psycopg.Connection[Any]) -> None:
    """Close without ever raising."""
    with contextlib.suppress(Exception):
        connection.close()


@contextlib.contextmanager
def patience(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """What the block runs, in autocommit, waits at most so long for each lock; psycopg's errors
    pass, such as LockNotAvailable."""
    connection.execute(_PATIENCE, (f"{max(1, round(seconds * 1000))}ms",))
    try:
        yield
    finally:
        with contextlib.suppress(psycopg.Error):
            connection.execute(_PATIENCE, (_SETTINGS["lock_timeout"],))


def identifier(parts: Sequence[str]) -> sql.Identifier:
    """A quoted, possibly qualified name."""
    return sql.Identifier(*parts)


def raw(text: str) -> sql.SQL:
    """SQL that the user or this package's own tables wrote, as it stands."""
    return sql.SQL(text)


def comma(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


# As any language quotes them.
_VALUE = re.compile(r"""["«»„“”‘‚「『].*["«»„“”’‘」』]""", re.DOTALL)
# Of class 22, what names a column or an encoding; the bytes of a value may follow.
_NAMING = re.compile(
    r'missing data for column ".*"|invalid byte sequence for encoding "[^"]*"(?=: )', re.DOTALL
)
_COLUMN = re.compile(r"^COPY .*?, line \d+, column (.+?)(?:: |$)", re.MULTILINE)
# The same in another language; who may set lc_messages is the server's choice.
_COLUMN_ELSEWHERE = re.compile(r"^COPY .*?, [^\d,]+ \d+, [^\s,]+ (.+?)(?:\s?: |$)", re.MULTILINE)
_NO_EQUIVALENT = "22P05"


def describe_error(error: psycopg.Error, config: Mapping[str, Any]) -> str:
    """SQLSTATE, main message and column of a server's error, without row data and secrets.

    Messages of class 22 and 23 quote values: what stands between quotes is left out of the
    former, but for names; the latter name constraints there, which are wanted, and keep values for
    DETAIL.
    """
    diagnostic = error.diag
    message = diagnostic.message_primary
    if message is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return redact("; ".join(lines) or type(error).__name__, secrets_of(config))
    state = diagnostic.sqlstate or ""
    if state.startswith("22"):
        naming = _NAMING.match(message)
        if state == _NO_EQUIVALENT:
            # The server's own words tell the bytes of the character.
            message = "a character has no equivalent in the encoding of the database"
        else:
            message = naming.group() if naming else _VALUE.sub("(a value)", message)
    name = _column(error) or diagnostic.column_name
    where = f"column {name}: " if name else ""
    return redact(f"{where}{message} (SQLSTATE {state})", secrets_of(config))


def _column(error: psycopg.Error) -> str | None:
    """The column whose value COPY was reading."""
    context = error.diag.context or ""
    found = _COLUMN.search(context) or _COLUMN_ELSEWHERE.search(context)
    return found[1] if found else None


# Errors that another attempt would only repeat: data, constraints, logins, dependents, names,
# rights, what is too large, features, what somebody's own function raises.
_PERMANENT = ("22", "23", "28", "2B", "42", "54", "0A", "3D", "3F", "P0")
# libpq hands out no SQLSTATE of a connection that was refused, only text. What is not known, such
# as another language, is tried again.
_NO_LOGIN = re.compile(
    r'FATAL:  (?:(?:password|Peer|Ident|certificate) authentication failed for user "'
    r'|role ".*" (?:does not exist$|is not permitted to log in$)|database ".*" does not exist$'
    r"|no pg_hba\.conf entry for |pg_hba\.conf rejects connection for "
    r'|permission denied for database ")|fe_sendauth: no password supplied$'
)
_BESIDE = ("DETAIL:", "HINT:", "Multiple connection attempts failed.")
# Of reads, only a part of a parallel one waits for a limited time (PostgreSQLSource.join).
_LOCK_TIMEOUT = "55P03"
_NO_RIGHT = "42501"


def _is_permanent(error: psycopg.Error) -> bool:
    """Whether another attempt would only repeat it."""
    if error.sqlstate is not None:
        return error.sqlstate.startswith(_PERMANENT)
    lines = [line.strip() for line in str(error).splitlines()]
    failures = [line for line in lines if line and not line.startswith(_BESIDE)]
    # Of several addresses each has a line: one that is only away may answer the next time.
    return bool(failures) and all(_NO_LOGIN.search(line) for line in failures)


@contextlib.contextmanager
def errors(kind: type[SourceError] | type[SinkError], config: Mapping[str, Any]) -> Iterator[None]:
    """Turn psycopg's errors, and a URL of no use, into the end's own; everything else passes."""
    side = "source" if kind is SourceError else "sink"
    try:
        yield
    except urls.UnusableURL as error:
        raise kind(f"{side}: {error}", permanent=True) from None
    except psycopg.Error as error:
        permanent = _is_permanent(error)
        message = describe_error(error, config)
        message += _way_out(error, config) if kind is SourceError else other_value(error)
        raise kind(f"{side}: {message}", permanent=permanent) from None


def _way_out(error: psycopg.Error, config: Mapping[str, Any]) -> str:
    """What helps against an error of reading; empty where nobody can say."""
    if error.sqlstate == _LOCK_TIMEOUT:
        return "; another session waits to truncate or alter a table that this run reads"
    if error.sqlstate != _NO_RIGHT:
        return ""
    role = conninfo.conninfo_to_dict(conninfo_of(config)).get("user", "that reads")
    if "row-level security" in str(error):
        return f"; no row may be left out: alter role {role} bypassrls, or read as another"
    return f"; role {role} needs usage on the schemas and select on the tables that the job reads"


def other_value(error: psycopg.Error) -> str:
    """What helps where a loaded value is none of its column's type, as a zero date of MySQL's."""
    if not (error.sqlstate or "").startswith("22") or not _column(error):
        return ""
    return "; change the sink column, or convert the value at the source, as with nullif in a query"
