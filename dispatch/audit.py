"""The record of an accepted action, in the action's own transaction (R-X4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
