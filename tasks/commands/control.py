"""The control database and the keyring, as a command finds them: usable, or a message (exit 1)."""

from __future__ import annotations

from db import keyring, migrations, session, settings
from db.keyring import Keyring


def require_database() -> None:
    """The control database answers and is migrated; the embedded one is brought up to date.

    Raises SettingsError, EmbeddedError, MigrationMissing, and the driver's errors.
    """
    endpoints = settings.services()
    engine = session.engine()
    if migrations.status(engine).is_current:
        return
    if endpoints.embedded_database:
        migrations.upgrade(engine)
    migrations.require_current(engine)


def open_keyring() -> Keyring:
    """The keyring in force, created on first use beside the embedded database only.

    Raises SettingsError and KeyringError.
    """
    found = settings.settings()
    path = found.keyring_path()
    return keyring.load_or_init(path) if found.keyring_may_be_created else Keyring.load(path)
