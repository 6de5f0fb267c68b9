"""What a wake-up is: the task ``tasks.trigger`` with one run id, and nothing else (R-T3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

TASK = "tasks.trigger"


def run_id_of(args: object, kwargs: object) -> UUID | None:
    """The run that a wake-up's arguments name, or None where they hold anything else."""
    if kwargs or not isinstance(args, Sequence) or isinstance(args, str) or len(args) != 1:
        return None
    return uuid_of(args[0])


def uuid_of(value: object) -> UUID | None:
    """The UUID that ``value`` spells in full, with its dashes; None for anything else."""
    if isinstance(value, UUID):
        return value
    if not isinstance(value, str) or len(value) != 36:
        return None
    try:
        found = UUID(value)
    except ValueError:
        return None
    return found if str(found) == value.lower() else None


def is_wake_up(args: object, kwargs: object) -> bool:
    return run_id_of(args, kwargs) is not None


def is_bare(payload: object, headers: Mapping[str, Any]) -> bool:
    """Whether a received message is a wake-up and no more: no callback, chain, delay or limit.

    ``payload`` is the decoded body of Celery's second message protocol.
    """
    if not isinstance(payload, list | tuple) or len(payload) != 3:
        return False
    args, kwargs, embedded = payload
    if not is_wake_up(args, kwargs) or not isinstance(embedded, Mapping | None):
        return False
    if any((embedded or {}).values()) or any(headers.get("timelimit") or ()):
        return False
    return not headers.get("eta") and not headers.get("expires")
