"""The messages of errors that a user can meet and mend."""

from __future__ import annotations

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db.embedded import EmbeddedError
from db.envelopes import EnvelopeError
from db.failures import first_line, is_connection_lost, sqlstate
from db.keyring import KeyringError
from db.migrations import MigrationMissing
from db.urls import SettingsError
from dispatch.context import HandlerFailure
from dispatch.definitions.documents import DefinitionError
from dispatch.errors import ClaimcheckError
from tasks.replicate.registry import MissingExtra, UnknownConnector

_PLAIN = (
    ClaimcheckError,
    EmbeddedError,
    EnvelopeError,
    HandlerFailure,
    KeyringError,
    MigrationMissing,
    MissingExtra,
    SettingsError,
    UnknownConnector,
)


def explain(error: BaseException) -> str | None:
    """What to tell the user, or None for an error that no user can have caused."""
    if isinstance(error, DefinitionError):
        return mistakes(error)
    if isinstance(error, _PLAIN):
        return str(error) or (type(error).__doc__ or "").strip()
    if isinstance(error, PoolTimeout):
        return "all connections of this process to the control database are busy"
    if not isinstance(error, psycopg.Error | DBAPIError):
        return None
    if is_connection_lost(error):
        return f"DATABASE_URL: the control database cannot be reached: {first_line(error)}"
    return _refused.get(sqlstate(error) or "") or _other(error)


def mistakes(error: DefinitionError) -> str:
    """Every mistake on a line of its own, each with the file's name and its line."""
    lines = []
    for problem in error.problems:
        lines.append(str(problem) if error.source is None else f"{error.source}: {problem}")
    count = len(lines)
    if count == 1:
        return lines[0]
    return f"{count} mistakes; nothing was changed\n" + "\n".join(f"  {line}" for line in lines)


_refused = {
    "42P01": "the control database (DATABASE_URL) lacks Claimcheck's tables. "
    "Run: celery -A tasks db upgrade",
    "55P03": "another open transaction holds what this needs; nothing was changed. Try again",
    "57014": "the control database took too long and gave up; nothing was changed",
    "42501": "the role of DATABASE_URL lacks a right on the control database; grant it, or use "
    "the role that owns the tables",
    "25006": "the control database is read-only; point DATABASE_URL at the primary",
}


def _other(error: BaseException) -> str | None:
    code = sqlstate(error)
    if isinstance(error, psycopg.OperationalError) or code is None:
        return f"DATABASE_URL: the control database cannot be used: {first_line(error)}"
    return None
