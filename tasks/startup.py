"""What a long-lived process checks before it starts: each failure names its setting (exit 1)."""

from __future__ import annotations

import logging
import time
from typing import NoReturn

import psycopg
from sqlalchemy.exc import DBAPIError

from db import keyring, migrations, session, settings
from db.embedded import EmbeddedError
from db.failures import first_line
from db.keyring import Keyring, KeyringError
from db.migrations import MigrationMissing
from db.urls import SettingsError
from dispatch import reencryption
from dispatch.errors import ClaimcheckError
from dispatch.redaction import redact
from tasks import handlers

PATIENCE_SECONDS = 3.0
_PAUSE_SECONDS = 0.25

logger = logging.getLogger(__name__)


def require_worker() -> None:
    """What a worker needs is there: database, keyring, broker, handlers. Raises SystemExit."""
    require_database()
    require_keys(require_keyring())
    require_broker()
    require_handlers()


def require_database() -> None:
    """The control database answers and is migrated. Raises SystemExit.

    The embedded one is brought up to date here; a given one never is, unasked.
    """
    try:
        database = settings.database()
        _reach_database()
        if database.is_embedded:
            migrations.upgrade(session.engine())
        migrations.require_current(session.engine())
    except (SettingsError, EmbeddedError, MigrationMissing) as error:
        _fail(error)
    except (psycopg.Error, DBAPIError) as error:
        _fail(f"DATABASE_URL: the control database cannot be used: {first_line(error)}")
    finally:
        # What was opened here must not be shared with the children that a worker forks.
        session.dispose()


def require_keyring() -> Keyring:
    """The keyring, created on first use beside the embedded database only. Raises SystemExit."""
    try:
        return keyring.in_force()
    except (SettingsError, KeyringError) as error:
        _fail(error)


def require_keys(keyring: Keyring) -> None:
    """The keys are those that sealed the datasources. Raises SystemExit.

    A worker with other keys of the same names would claim runs and fail them for good, which
    another worker could do. Where most open, those that do not are told and stop nothing.
    """
    try:
        for mismatch in reencryption.mismatches(keyring):
            if mismatch.is_of_most:
                _fail(f"CLAIMCHECK_KEYRING_FILE: {mismatch}")
            logger.warning("CLAIMCHECK_KEYRING_FILE: %s", mismatch)
    except (psycopg.Error, DBAPIError) as error:
        _fail(f"DATABASE_URL: the control database cannot be used: {first_line(error)}")
    finally:
        session.dispose()


def require_broker() -> None:
    """Redis answers within PATIENCE_SECONDS. Raises SystemExit.

    Once a worker runs it waits out any outage; at its start an address that leads nowhere is
    told at once.
    """
    from tasks.app import app

    try:
        settings.services()
    except EmbeddedError as error:
        _fail(error)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with app.connection_for_read() as connection:
                connection.default_channel.client.ping()
            return
        except Exception as error:
            if time.monotonic() > deadline:
                where = app.connection_for_read().as_uri()
                _fail(f"REDIS_URL: Redis does not answer at {where}: {first_line(error)}")
        time.sleep(_PAUSE_SECONDS)


def require_handlers() -> None:
    """Every handler can be imported. Raises SystemExit."""
    try:
        handlers.load()
    except ClaimcheckError as error:
        _fail(error)


def _reach_database() -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            session.connect("claimcheck start").close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def _fail(error: object) -> NoReturn:
    raise SystemExit(f"claimcheck: {redact(str(error))}") from None
