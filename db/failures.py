"""What a failed statement means, whichever driver says it."""

from __future__ import annotations

import psycopg
from sqlalchemy.exc import DBAPIError


def driver_error(error: BaseException) -> BaseException:
    """The driver's own error, unwrapped from SQLAlchemy's."""
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code of a psycopg or psycopg2 error, or None where there is none."""
    driver = driver_error(error)
    found = getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None)
    return found if isinstance(found, str) else None


def is_connection_lost(error: BaseException) -> bool:
    """Whether the connection ended or never came to be, so that the outcome is unknown (R-R7)."""
    driver = driver_error(error)
    if not isinstance(driver, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    code = sqlstate(driver)
    # Without a code it is the transport's; else shutdown, crash, start-up, or too many connections.
    return code is None or code.startswith("08") or code in {"57P01", "57P02", "57P03", "53300"}


_PASSING = frozenset(
    {
        psycopg.errors.SerializationFailure.sqlstate,
        psycopg.errors.DeadlockDetected.sqlstate,
        psycopg.errors.LockNotAvailable.sqlstate,
        psycopg.errors.QueryCanceled.sqlstate,  # also by statement_timeout
        psycopg.errors.ReadOnlySqlTransaction.sqlstate,  # a failover: another server writes now
        psycopg.errors.IdleInTransactionSessionTimeout.sqlstate,
    }
)


def is_passing(error: BaseException) -> bool:
    """Whether the server undid the transaction for a reason that passes: it may be repeated."""
    code = sqlstate(error)
    # Class 53 is memory, disk and the like that ran out.
    return code is not None and (code in _PASSING or code.startswith("53"))


def first_line(error: BaseException) -> str:
    """The driver's message in one line, without its full stop: it goes on in ours."""
    lines = str(driver_error(error)).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
