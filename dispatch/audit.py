"""The record of an accepted action, in the action's own transaction, and its reading (R-X4)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.models import AuditEvent


def record(
    session: Session,
    *,
    actor: str,
    action: str,
    subject: str,
    outcome: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Write who did what to which subject; ``action`` reads ``job.disable``, ``datasource.edit``.

    A refusal or a repetition that changed nothing has no record. ``detail`` holds no secret.
    """
    session.add(
        AuditEvent(
            actor=actor,
            action=action,
            subject_type=action.partition(".")[0],
            subject=subject,
            outcome=outcome,
            detail=None if detail is None else dict(detail),
        )
    )


def newest(
    session: Session,
    limit: int,
    *,
    action: str | None = None,
    subject: str | None = None,
    actor: str | None = None,
    run_id: UUID | None = None,
    since: datetime | None = None,
) -> list[dict[str, Any]]:
    """The records that match, the newest first; an ``action`` such as ``run.`` means all of its."""
    query = select(*AuditEvent.__table__.columns).order_by(
        AuditEvent.at.desc(), AuditEvent.id.desc()
    )
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
        query = query.where(AuditEvent.at >= since)
    return [dict(row) for row in session.execute(query.limit(limit)).mappings()]
