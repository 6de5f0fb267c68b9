"""The control database and the keyring, as a command finds them: usable, or a message (exit 1)."""

from __future__ import annotations

from db import embedded, keyring, migrations, session, settings
from db.keyring import Keyring
from db.urls import SettingsError


def require_state() -> None:
    """There is something to look at: a given database, or an embedded one that exists.

    For commands that only read or change what is there, so that one that is typed in the wrong
    folder does not answer from a new and empty database. Raises SettingsError.
    """
    found = settings.settings()
    if found.uses_embedded_database and not embedded.holds_database(found.home):
        raise SettingsError(
            f"DATABASE_URL is not set, and there is no embedded database in {found.home}. Go to "
            "the folder that has it, or set DATABASE_URL or CLAIMCHECK_HOME; to begin one here: "
            "celery -A tasks db upgrade"
        )


def require_database(*, may_create: bool = False) -> None:
    """The control database answers and is migrated; the embedded one is brought up to date.

    An embedded one that does not exist is made with ``may_create`` only. Raises SettingsError,
    EmbeddedError, MigrationMissing, and the driver's errors.
    """
    if not may_create:
        require_state()
    database = settings.database()
    engine = session.engine()
    if migrations.status(engine).is_current:
        return
    if database.is_embedded:
        migrations.upgrade(engine)
    migrations.require_current(engine)


def open_keyring() -> Keyring:
    """The keyring in force, created on first use beside the embedded database only.

    Raises SettingsError and KeyringError.
    """
    return keyring.in_force()
