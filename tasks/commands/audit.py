"""``celery -A tasks audit``: who did what, when, and with what outcome (R-X4)."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import click
from sqlalchemy import select

from db.models import AuditEvent
from dispatch import catalog
from tasks.commands import console, control
from tasks.commands.console import Output


@click.group()
def audit() -> None:
    """The record of every accepted action and every end of a run."""


@audit.command("list")
@click.option("--limit", "-n", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--action", help="Such as run.cancel, or run. for all of them.")
@click.option("--subject", help="The name of a job, a datasource, a schedule.")
@click.option("--actor", help="Who did it.")
@click.option("--run", "run_id", type=click.UUID, help="Of one attempt.")
@click.option("--since", type=click.DateTime(), help="Not older than this local time.")
@console.command
def list_(
    out: Output,
    limit: int,
    action: str | None,
    subject: str | None,
    actor: str | None,
    run_id: UUID | None,
    since: datetime | None,
) -> None:
    """List audit records, the newest first."""
    query = select(AuditEvent).order_by(AuditEvent.at.desc(), AuditEvent.id.desc()).limit(limit)
    if action:
        matches = AuditEvent.action.startswith(action, autoescape=True)
        query = query.where(matches if action.endswith(".") else AuditEvent.action == action)
    if subject:
        query = query.where(AuditEvent.subject == subject)
    if actor:
        query = query.where(AuditEvent.actor == actor)
    if run_id:
        query = query.where(AuditEvent.run_id == run_id)
    if since:
        query = query.where(AuditEvent.at >= since.astimezone())
    control.require_database()
    with catalog.reading() as session:
        found = [
            {
                "id": event.id,
                "at": event.at,
                "actor": event.actor,
                "action": event.action,
                "subject_type": event.subject_type,
                "subject": event.subject,
                "run_id": event.run_id,
                "outcome": event.outcome,
                "detail": event.detail,
            }
            for event in session.scalars(query)
        ]
    if out.as_json:
        out.document(found)
    else:
        out.table(
            ["at", "actor", "action", "subject", "outcome", "run", "detail"],
            [
                [
                    row["at"],
                    row["actor"],
                    row["action"],
                    row["subject"],
                    row["outcome"],
                    row["run_id"],
                    row["detail"] or None,
                ]
                for row in found
            ],
            "no records",
        )
