"""The three ways in which ``dispatch`` reaches the outside; ``tasks`` fills them.

Without Celery they do nothing, so the whole of ``dispatch`` runs with Postgres alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

DEFAULT_QUEUE = "runs"
"""Where the wake-ups go of a job that names no queue."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A wake-up to publish: the run's id and how the queue should treat it (R-T3)."""

    run_id: UUID
    queue: str
    priority: int


EventKind = Literal["received", "started", "succeeded", "failed", "retried", "cancelled"]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What an observer such as Flower is told: no parameters, credentials or token."""

    kind: EventKind
    run_id: UUID
    root_run_id: UUID
    previous_run_id: UUID | None
    job: str
    attempt: int
    queue: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """``runtime`` (seconds), ``rows``: succeeded; ``error_code``, ``message``: failed, retried."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a queue can take: the fleet's executors, and the wake-ups that it holds already."""

    executors: int = 16
    queued: int = 0


def _offer_nowhere(offers: Sequence[Offer]) -> int:
    return 0


def _emit_nowhere(event: RunEvent) -> None:
    return None


def _capacity_unknown(queue: str) -> Capacity:
    return Capacity()


@dataclass(slots=True)
class Ports:
    """``offer`` returns how many were published; neither it nor ``emit`` raises or blocks."""

    offer: Callable[[Sequence[Offer]], int] = _offer_nowhere
    emit: Callable[[RunEvent], None] = _emit_nowhere
    capacity: Callable[[str], Capacity] = _capacity_unknown
