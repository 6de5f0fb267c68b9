"""Bring the control database to the version that this code needs, and tell where it stands."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, text

from db import session

# Its lines about contexts and transactional DDL tell an operator nothing.
logging.getLogger("alembic").setLevel(logging.WARNING)

SCRIPTS = Path(__file__).resolve().parent.parent / "alembic"

_REVISION = re.compile(r'^revision(?:: \w+)? = "(\w+)"', re.MULTILINE)
_FOLLOWS = re.compile(r'^down_revision(?:: [\w | ]+)? = "(\w+)"', re.MULTILINE)

# Any number of processes may migrate at once; one does, the others wait and find it done.
MIGRATION_LOCK = 0x636C61696D
UPGRADE_SECONDS = 6 * 3600.0
"""How long one statement may run, and another process be waited for: history may be long."""


class MigrationMissing(Exception):
    """The database is not at the version that this code needs. Run: celery -A tasks db upgrade"""


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """Where the database stands; ``current`` is None in an empty database."""

    current: str | None
    head: str

    @property
    def is_current(self) -> bool:
        return self.current == self.head


@functools.cache
def head() -> str:
    """The newest version that this code knows: the one that no other follows.

    Read from the files' own lines, because every command asks, and Alembic takes a while to load.
    """
    files = [path.read_text(encoding="utf-8") for path in (SCRIPTS / "versions").glob("*.py")]
    known = {found[1] for found in map(_REVISION.search, files) if found}
    followed = {found[1] for found in map(_FOLLOWS.search, files) if found}
    (newest,) = known - followed
    return newest


def status(engine: Engine) -> MigrationStatus:
    """Read the database's version."""
    with engine.connect() as connection:
        migrated = connection.scalar(text("select to_regclass('alembic_version') is not null"))
        current = (
            connection.scalar(text("select version_num from alembic_version")) if migrated else None
        )
    return MigrationStatus(current, head())


def upgrade(engine: Engine, revision: str = "head") -> MigrationStatus:
    """Apply what is missing, in one transaction, and return where the database stands then.

    Raises sqlalchemy.exc.DBAPIError, also where a table is locked for longer than LOCK_SECONDS:
    whoever waited for it further would keep all others from it meanwhile.
    """
    from alembic.config import Config

    from alembic import command

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with engine.begin() as connection, session.unhurried(connection, UPGRADE_SECONDS):
        _take_turn(connection)
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return status(engine)


def _take_turn(connection: Connection) -> None:
    """Wait for the process that migrates now; the deadline of other locks is kept from this one."""
    limit = text("select set_config('lock_timeout', :value, true)")
    before = connection.scalar(text("select current_setting('lock_timeout')"))
    connection.execute(limit, {"value": "0"})
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    connection.execute(limit, {"value": before})


def require_current(engine: Engine) -> None:
    """Raise MigrationMissing unless the database is at the version that this code needs."""
    found = status(engine)
    if not found.is_current:
        where = "has no tables yet" if found.current is None else f"is at version {found.current}"
        raise MigrationMissing(
            f"The control database (DATABASE_URL) {where}; this code needs {found.head}. "
            "Run: celery -A tasks db upgrade"
        )
