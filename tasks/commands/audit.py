"""``celery -A tasks audit``: who did what, when, and with what outcome (R-X4)."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import click
from rich.text import Text

from dispatch import audit as records
from dispatch import catalog
from tasks.commands import console, control, tables
from tasks.commands.console import Output
from tasks.commands.runids import RUN_ID, resolve


@click.group()
def audit() -> None:
    """The record of every accepted action and every end of a run."""


@audit.command("list")
@click.option("--limit", "-n", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--action", help="Such as run.cancel, or run. for all of them.")
@click.option("--subject", help="The name of a job, a datasource, a schedule.")
@click.option("--actor", help="Who did it.")
@click.option("--run", "run_id", type=RUN_ID, help="Of one attempt.")
@click.option("--since", type=click.DateTime(), help="Not older than this local time.")
@console.command
def list_(
    out: Output,
    limit: int,
    action: str | None,
    subject: str | None,
    actor: str | None,
    run_id: UUID | str | None,
    since: datetime | None,
) -> None:
    """List audit records, the newest first."""
    control.require_database()
    attempt = resolve(run_id) if run_id else None
    with catalog.reading() as session:
        found = records.newest(
            session,
            limit,
            action=action,
            subject=subject,
            actor=actor,
            run_id=attempt,
            since=since.astimezone() if since else None,
        )
    if out.as_json:
        out.document(found)
    elif not found or not out.results.is_terminal:
        # A line each, for grep.
        out.table(
            ["at", "actor", "action", "subject", "outcome", "run", "detail"],
            [
                [
                    *(row[key] for key in ("at", "actor", "action", "subject", "outcome")),
                    row["run_id"],
                    summary(row["detail"] or {}),
                ]
                for row in found
            ],
            "no records",
        )
    else:
        for row in found:
            _tell(out, row)


def _tell(out: Output, row: dict[str, Any]) -> None:
    """A record on two lines: what was done to what, then the run and what changed."""
    subject = f"{row['subject_type']} {row['subject']}"
    when = Text(f"{tables.shown(row['at'])}  ", "dim")
    said = Text.assemble(when, (row["action"], "bold"), f"  {subject}  {row['outcome']}")
    more = Text.assemble(("  by " + row["actor"], "dim"))
    if row["run_id"]:
        more.append(f"  run {row['run_id']}")
    out.one_line(said)
    out.one_line(more)
    if row["detail"]:
        out.one_line(Text(f"  {summary(row['detail'])}", "dim"))


def summary(detail: dict[str, Any]) -> str:
    """What a record tells beside who, what and when, on one line: all of it is in ``--json``.

    ``mode: complete, source.table: a`` for what was added, ``priority: 0 -> 4`` for a change.
    """
    text = ", ".join(f"{key}: {_change(value)}" for key, value in detail.items())
    return " ".join(text.split())


def _change(value: Any) -> str:
    if not (isinstance(value, list) and len(value) == 2):
        return tables.shown(value)
    before, after = value
    if before is None:
        return tables.shown(after)
    return f"{tables.shown(before)} -> {tables.shown(after) or 'none'}"
