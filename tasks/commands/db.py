"""``celery -A tasks db``: the control database's version, and what a restore needs."""

from __future__ import annotations

from typing import Any

import click

from db import migrations, session, settings, statements
from dispatch import fence
from tasks.commands import console, control
from tasks.commands.console import Output

_SQL = statements.load("database")
DEFAULT_BUMP = 1_000_000


@click.group()
def db() -> None:
    """The control database: bring it up to date, and see where it stands."""


@db.command()
@console.command
def upgrade(out: Output) -> None:
    """Apply the migrations that are missing.

    Any number of processes may do so at once.
    """
    engine = session.engine()
    before = migrations.status(engine)
    after = migrations.upgrade(engine)
    if before.current == after.current:
        out.say(f"the control database is at version {after.current} already")
    else:
        out.say(
            f"upgraded the control database from {before.current or 'empty'} to {after.current}"
        )
    if out.as_json:
        out.document({"from": before.current, "to": after.current})


@db.command()
@console.command
def status(out: Output) -> int:
    """Show its version.

    Exit 1 where an upgrade is missing.
    """
    control.require_state()
    endpoints = settings.services()
    engine = session.engine()
    found = migrations.status(engine)
    facts: dict[str, Any] = {
        "current": found.current,
        "head": found.head,
        "is_current": found.is_current,
        "embedded": endpoints.embedded_database,
    }
    with session.transaction() as connection:
        facts |= statements.row(connection, _SQL["server"]) or {}
        if found.is_current:
            facts |= statements.row(connection, _SQL["volume"]) or {}
    if out.as_json:
        out.document(facts)
    else:
        out.facts(facts)
    if not found.is_current:
        out.warn("run: celery -A tasks db upgrade")
    return 0 if found.is_current else 1


@db.command("bump-fence")
@click.option(
    "--by",
    type=click.IntRange(1, 10**15),
    default=DEFAULT_BUMP,
    show_default=True,
    help="How far to move on: more than the claims since the backup was taken.",
)
@console.command
def bump_fence(out: Output, by: int) -> None:
    """Move the fence on, after a restore.

    A restored database hands out fence numbers that lost attempts have used already, and sinks
    refuse attempts that are not above the highest number they recorded (R-F5).
    """
    control.require_database()
    following = fence.move_on(by, actor=console.actor())
    out.say(f"the next fence number is {following:,}")
    if out.as_json:
        out.document({"next_fence": following})
