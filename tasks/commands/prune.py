"""``celery -A tasks prune``: forget what has outlived its retention now, not at the beat's time."""

from __future__ import annotations

import click

from db import session
from dispatch import retention
from tasks.commands import console, control
from tasks.commands.console import Output


@click.command()
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    help="Keep finished runs for so many days; default: CLAIMCHECK_RETENTION_DAYS, 0 keeps all.",
)
@console.command
def prune(out: Output, days: float | None) -> None:
    """Remove finished runs and their logs that are older than their retention, in small batches.

    A run stays as long as its idempotency key is honoured.
    """
    control.require_database()
    connection = session.connect("claimcheck prune")
    try:
        removed = retention.prune(
            connection, days=days, longest_seconds=None, actor=console.actor()
        ).runs
    finally:
        connection.close()
    out.say(f"removed {removed:,} finished runs")
    if out.as_json:
        out.document({"removed": removed})
