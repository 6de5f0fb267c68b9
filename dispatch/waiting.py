"""Why a waiting run waits: each obstacle in words, with the command that takes it away (R-C2).

The control database knows most of them. What workers can take is not stored; a caller that has
asked them hands their answers over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from db import statements
from db.statements import AnyConnection
from dispatch.handlers import REPLICATE
from dispatch.ports import DEFAULT_QUEUE

_SQL = statements.load("waiting")
_COMMAND = "celery -A tasks"
_MOST_NAMED = 3
OFFERED_WITHIN_SECONDS = 2.0
"""How long after it is due a run may be on its way to a worker that could take it."""


@dataclass(frozen=True, slots=True)
class Taker:
    """What one worker says of itself; ``handlers`` and ``key_versions`` are None where unknown."""

    queues: Collection[str]
    handlers: Collection[str] | None = None
    key_versions: Collection[str] | None = None
    free_executors: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """What a run waits for. ``reasons`` is empty where it only waits for a worker to take it."""

    queue: str
    handler: str
    due_seconds: float
    """How long it could have started, by the database's clock; negative where it may not yet."""
    reasons: tuple[str, ...]
    behind: str | None = None
    """Which runs of its job go first; it explains nothing where those wait as well."""

    def __str__(self) -> str:
        reasons = [*self.reasons, *([self.behind] if self.behind else [])]
        if reasons:
            return "it waits: " + "; ".join(reasons)
        needed = "" if self.handler == REPLICATE else f" that knows the handler {self.handler}"
        return f"it waits for a worker of queue {self.queue}{needed}"


def explain(
    connection: AnyConnection, run_id: UUID, takers: Sequence[Taker] | None = None
) -> Wait | None:
    """Why a run waits; None where it does not. ``takers`` are the workers, None where unasked."""
    row = statements.row(connection, _SQL["obstacles"], {"run_id": str(run_id)})
    if row is None:
        return None
    reasons = [*_time(row), *_switches(row), *_turn(row)]
    if takers is not None and not reasons:
        reasons = _workers(row, takers) or _unoffered(row)
    return Wait(
        row["queue"], row["handler"], row["due_for"].total_seconds(), tuple(reasons), _behind(row)
    )


def moment(at: datetime) -> str:
    """A time as people read it: in their own zone, with its offset."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _time(row: dict[str, Any]) -> list[str]:
    if not row["is_later"]:
        return []
    at = moment(row["available_at"])
    if row["previous_code"] == "snoozed":
        text = f"its handler gave it back until {at}"
    elif row["previous_attempt"] is not None:
        text = f"attempt {row['previous_attempt']} ended early, so it is in backoff until {at}"
    else:
        text = f"it is delayed until {at}"
    if not row["beats"]:
        text += f", and then needs a beat, which is not running: {_COMMAND} beat"
    return [text]


def _switches(row: dict[str, Any]) -> list[str]:
    job = row["job"]
    found = []
    if not row["enabled"]:
        found.append(f"job {job} is disabled: {_COMMAND} job enable {job}")
    if row["paused"]:
        found.append(f"job {job} is paused: {_COMMAND} job resume {job}")
    for side in ("source", "sink"):
        if not row[f"{side}_enabled"]:
            found.append(
                f"the {side} of job {job} is disabled: {_COMMAND} job enable {job} --binding {side}"
            )
    closed = [row[side] for side in ("source", "sink") if row[f"{side}_open"] is False]
    for name in dict.fromkeys(closed):
        found.append(f"datasource {name} is disabled: {_COMMAND} datasource enable {name}")
    return found


def _turn(row: dict[str, Any]) -> list[str]:
    found = []
    job = row["job"]
    if row["held_by"] is not None:
        found.append(f"job {job} runs once at a time, and {row['held_by']} is {row['held_status']}")
    holders, slots = row["holders"], row["slots"]
    if slots is not None and len(holders) >= slots:
        named = ", ".join(holders[:_MOST_NAMED])
        more = f" and {len(holders) - _MOST_NAMED} more" if len(holders) > _MOST_NAMED else ""
        slot = "the only slot" if slots == 1 else f"all {slots:,} slots"
        found.append(f"{slot} of concurrency {row['concurrency_key']} taken by {named}{more}")
    return found


def _behind(row: dict[str, Any]) -> str | None:
    if row["held_by"] is not None or not row["ahead"]:
        return None
    go = "run of it goes" if row["ahead"] == 1 else "runs of it go"
    return (
        f"job {row['job']} runs once at a time, and {row['ahead']:,} other {go} first, next "
        f"{row['ahead_first']}"
    )


def _workers(row: dict[str, Any], takers: Sequence[Taker]) -> list[str]:
    queue, handler = row["queue"], row["handler"]
    option = "" if queue == DEFAULT_QUEUE else f" -Q {queue}"
    if not takers:
        return [f"no worker answers: {_COMMAND} worker{option}"]
    serving = [taker for taker in takers if queue in taker.queues]
    if not serving:
        return [f"no worker takes from queue {queue}: {_COMMAND} worker{option}"]
    knowing = [t for t in serving if t.handlers is None or handler in t.handlers]
    if not knowing:
        return [
            f"it needs a worker of queue {queue} that knows the handler {handler} "
            "(CLAIMCHECK_HANDLERS)"
        ]
    keys = {row["source_key"], row["sink_key"]} - {None}
    able = [t for t in knowing if t.key_versions is None or keys <= set(t.key_versions)]
    if not able:
        return [
            f"it needs a worker whose keyring holds {', '.join(sorted(keys))}: "
            f"{_COMMAND} keyring status"
        ]
    if all(taker.free_executors == 0 for taker in able):
        return [f"every executor of queue {queue} is busy"]
    return []


def _unoffered(row: dict[str, Any]) -> list[str]:
    """Workers can take it: what a delay or a retry needs then is a beat that tells them."""
    if row["beats"] or row["due_for"].total_seconds() < OFFERED_WITHIN_SECONDS:
        return []
    return [
        f"it is due, workers could take it, and no beat is running to tell them: {_COMMAND} beat"
    ]
