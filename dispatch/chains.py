"""Stored chains: each next run is created in its predecessor's successful finish.

``job_run.chain`` is a list of continuations, each the list of steps that follow this run one after
another. There is more than one where a step was handed back an active run that had a chain of its
own already: both then follow it. A step's run id is drawn before the first run starts, so that
whoever waits for the last one can do so from the beginning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from db import statements
from db.statements import AnyConnection
from dispatch import enqueue
from dispatch.errors import InvalidParameters, UnknownJob

logger = logging.getLogger("claimcheck.chains")
_SQL = statements.load("enqueue")


@dataclass(frozen=True, slots=True)
class Break:
    """Why a chain ended before its last step: ``after`` is the run that was not followed."""

    after: UUID
    reason: str
    steps_lost: int

    def __str__(self) -> str:
        return f"the chain broke after run {self.after}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Step:
    """One later step: a trigger to be made once its predecessor has succeeded.

    ``countdown`` is in seconds from that success, by the database's clock.
    """

    job: str
    params: Mapping[str, Any] = field(default_factory=dict)
    run_id: UUID = field(default_factory=uuid4)
    countdown: float = 0.0
    priority: int | None = None
    queue: str | None = None


def stored(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The steps as `enqueue(chain=...)` takes and checks them."""
    found = []
    for step in steps:
        text: dict[str, Any] = {"job": step.job, "run_id": str(step.run_id)}
        if step.params:
            text["params"] = dict(step.params)
        if step.countdown:
            text["countdown"] = step.countdown
        if step.priority is not None:
            text["priority"] = step.priority
        if step.queue is not None:
            text["queue"] = step.queue
        found.append(text)
    return found


def enqueue_next_of_chain(
    connection: AnyConnection, run_id: UUID, chain: Sequence[Sequence[Mapping[str, Any]]] | None
) -> list[enqueue.RunHandle]:
    """Create what follows run ``run_id``, in the transaction that records its success.

    ``chain`` is that run's column of this name. The handles' wake-ups are published after the
    commit. As a retry would, a step of a disabled job is created and waits. A step whose job is
    gone, or takes its parameters no more, ends its chain: that is logged, and recorded under the
    id of each lost step, and the success stands. Raises TriggerBusy, and the driver's errors,
    after which the finish is to be repeated.
    """
    handles = []
    for first, *rest in chain or ():
        try:
            trigger = enqueue.Trigger.of(**first, chain=rest, actor="chain", accept_disabled=True)
            handles.append(enqueue.admit(connection, trigger, offered=True, notify=None))
        except (UnknownJob, InvalidParameters) as error:
            # Its jobs were there when the chain was triggered (R-T8).
            gone = isinstance(error, UnknownJob)
            reason = f"job {first['job']!r} was removed" if gone else str(error)
            lost = [{"job": step["job"], "run_id": step["run_id"]} for step in (first, *rest)]
            logger.error("the chain after run %s ends at job %r: %s", run_id, first["job"], reason)
            statements.rows(
                connection,
                _SQL["record_broken_chain"],
                {"reason": reason, "after": str(run_id), "lost": json.dumps(lost)},
            )
    return handles


def breaks(connection: AnyConnection, run_id: UUID) -> list[Break]:
    """Where chains broke that follow run ``run_id``, or that were to create a run of this id."""
    found = statements.rows(connection, _SQL["broken_chains"], {"run_id": str(run_id)})
    return [Break(UUID(row["after"]), row["reason"], row["steps_lost"]) for row in found]
