"""Why a run waits, for `run show`, `run trigger` and `run watch`: one answer for all of them."""

from __future__ import annotations

from uuid import UUID

from db import session
from db.failures import first_line
from dispatch import waiting
from dispatch.waiting import Wait
from tasks import inspection
from tasks.app import app

ASK_AFTER_SECONDS = 3.0
"""How long a run may be due before the workers are asked, which takes a second."""


def why(run_id: UUID) -> str | None:
    """Why a run waits, in a sentence; None where it does not wait.

    The workers are asked where nothing stored explains it and it could have started for a while.
    """
    found = stored(run_id)
    if found is None or found.reasons or found.due_seconds < ASK_AFTER_SECONDS:
        return None if found is None else str(found)
    try:
        takers = inspection.ask(app)
    except Exception as error:  # whatever the broker's client raises
        return f"it waits: Redis (REDIS_URL) does not answer, {first_line(error)}"
    with session.transaction() as connection:
        found = waiting.explain(connection, run_id, takers)
    return None if found is None else str(found)


def stored(run_id: UUID) -> Wait | None:
    """What the control database knows of it, without asking the workers."""
    with session.transaction() as connection:
        return waiting.explain(connection, run_id)
