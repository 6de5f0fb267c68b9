"""What a job's definition says, read and checked key by key, and the form in which it is stored.

The stored form (``job.definition``) is resolved: the defaults of R-R4 are written out, durations
are seconds, and it holds no secret. A claim snapshots it as it is (R-C5).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dispatch.context import STORED_KEYS
from dispatch.definitions.documents import Path, Report
from dispatch.definitions.fields import Fields, check_name
from dispatch.definitions.scheduledefinition import ScheduleDefinition, parse_schedule
from dispatch.handlers import REPLICATE
from dispatch.policy import DEFAULT_BACKOFF_SECONDS, DESTRUCTIVE_MODE
from dispatch.ports import DEFAULT_QUEUE

COMMON_KEYS = (*STORED_KEYS, "schedules", "enabled", "paused")
HANDLER_KEYS = ("handler", "params", "source", "sink", *COMMON_KEYS)
_SIDE_KEYS = {
    "datasource": "source and sink",
    "table": "source and sink",
    "columns": "source or sink",
    "query": "source",
    "where": "source",
    "key": "sink",
    "table_schema": "sink",
    "staging_schema": "sink",
}
"""Replication's keys that stand one level deeper, for whoever writes them beside ``mode``."""
OVERLAPS = ("skip", "queue", "allow")
DEFAULT_MAX_ATTEMPTS = 3
MOST_ATTEMPTS = 1000
LARGEST_LIMIT = 10_000


class Connectors(Protocol):
    """What definitions need to know of connectors; ``tasks`` fills it with those it has."""

    def names(self) -> Collection[str]:
        """The connectors that there are."""

    def canonical(self, name: str) -> str:
        """The connector's own name for an alias. Raises ValueError, with the way out."""

    def check_config(self, connector: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is wrong with a datasource's configuration, as (key, message); holds no value of it.

        The key is empty where it is no one setting.
        """

    def secret_keys(self, connector: str) -> Collection[str]:
        """The keys of a configuration that may hold a secret."""

    def job_keys(self) -> Collection[str]:
        """Replication's own keys of a job."""

    def check_job(
        self, definition: Mapping[str, Any], source: str | None, sink: str | None
    ) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Replication's own keys as they are stored, and mistakes as (dotted key, message).

        ``source`` and ``sink`` are the two connectors; None where the datasource is not known.
        """


@dataclass(frozen=True, slots=True)
class JobDefinition:
    """A job as defined. ``enabled``, ``paused`` and ``schedules`` are None where it is silent."""

    name: str
    handler: str
    definition: dict[str, Any]
    overlap: str
    source: str | None = None
    sink: str | None = None
    enabled: bool | None = None
    paused: bool | None = None
    schedules: tuple[ScheduleDefinition, ...] | None = None
    path: Path = field(default=(), compare=False)

    @property
    def concurrency(self) -> tuple[str, int] | None:
        stated = self.definition["concurrency"]
        return None if stated is None else (stated["key"], stated["limit"])


def defaults(handler: str, mode: Any) -> dict[str, Any]:
    """What a job does where its definition is silent (R-R4, R-T6)."""
    replication = handler == REPLICATE
    repeats = not (replication and mode == DESTRUCTIVE_MODE)
    return {
        "retry": {
            "max_attempts": DEFAULT_MAX_ATTEMPTS,
            "backoff": DEFAULT_BACKOFF_SECONDS,
            "on_worker_loss": repeats,
            "on_failure": repeats,
        },
        "timeout": None,
        "overlap": "skip" if replication else "queue",
        "concurrency": None,
        "queue": DEFAULT_QUEUE,
        "priority": 0,
    }


def parse_job(
    name: str, raw: Any, path: Path, report: Report, connectors: Connectors
) -> JobDefinition | None:
    """Read a job as the definition file writes it; every mistake goes to ``report``.

    Replication's own keys are taken over as they stand: see ``resolve_replication``. None where
    there is nothing to build upon.
    """
    check_name(name, "job", path, report)
    if not isinstance(raw, dict):
        report.add(path, "must hold keys, such as handler: or mode:")
        return None
    fields = Fields(raw, path, report)
    is_handler = "handler" in raw
    if is_handler and "mode" in raw:
        report.add((*path, "handler"), "stands beside mode; a job is one or the other")
    elif not is_handler and not set(raw) & {"mode", "source", "sink"}:
        report.add(path, "needs handler: NAME, or mode: with source: and sink:")
        return None
    own = _handler_keys(fields) if is_handler else _replication_keys(fields, connectors.job_keys())
    handler = str(own["handler"]) if is_handler else REPLICATE
    usual = defaults(handler, own.get("mode"))
    definition = {
        **own,
        "retry": _retry(fields, usual["retry"]),
        "timeout": fields.duration("timeout", usual["timeout"], positive=True),
        "concurrency": _concurrency(fields),
        "queue": fields.name("queue", usual["queue"], "queue"),
        "priority": fields.integer("priority", usual["priority"], 0, 9),
    }
    overlap = _overlap(fields, usual["overlap"], replication=not is_handler)
    if raw.get("overlap") is not None:
        # Left out where it is not stated, because the default differs for schedules (R-T6).
        definition["overlap"] = overlap
    return JobDefinition(
        name=name,
        handler=handler,
        definition=definition,
        overlap=overlap,
        source=_datasource(own.get("source")),
        sink=_datasource(own.get("sink")),
        enabled=fields.boolean("enabled", None),
        paused=fields.boolean("paused", None),
        schedules=_schedules(name, raw, path, report),
        path=path,
    )


def resolve_replication(
    job: JobDefinition,
    connectors: Connectors,
    source: str | None,
    sink: str | None,
    report: Report,
) -> JobDefinition:
    """Check replication's own keys with the connectors of both sides, and store them resolved."""
    if job.handler != REPLICATE:
        return job
    rest = {key: job.definition[key] for key in job.definition if key in STORED_KEYS}
    own = {key: job.definition[key] for key in job.definition if key not in STORED_KEYS}
    resolved, problems = connectors.check_job(own, source, sink)
    for key, message in problems:
        place = tuple(key.split(".")) if key else ()
        report.add((*job.path, *place), message)
    return replace(job, definition={**resolved, **rest})


def _handler_keys(fields: Fields) -> dict[str, Any]:
    fields.refuse_unknown("a handler's job", HANDLER_KEYS)
    handler = fields.text("handler")
    place = (*fields.path, "handler")
    if not handler:
        fields.report.add(place, "must name a function that is marked with @handler")
    elif handler == REPLICATE:
        fields.report.add(place, "is the built-in replication; write mode: instead of handler:")
    own: dict[str, Any] = {"handler": handler or "", "params": fields.mapping("params") or {}}
    for side in ("source", "sink"):
        bound = fields.raw.get(side)
        if isinstance(bound, str):
            bound = {"datasource": bound}
        if bound is None:
            continue
        if not isinstance(bound, dict):
            fields.report.add((*fields.path, side), "must be the name of a datasource")
            continue
        inner = Fields(bound, (*fields.path, side), fields.report)
        inner.refuse_unknown(f"the {side} of a handler's job", ("datasource",))
        if datasource := inner.text("datasource"):
            own[side] = {"datasource": datasource}
        else:
            fields.report.add((*fields.path, side), "must name its datasource")
    return own


def _replication_keys(fields: Fields, own: Collection[str]) -> dict[str, Any]:
    known = (*own, *COMMON_KEYS, "handler")
    for key in fields.raw:
        if key == "params":
            fields.report.add((*fields.path, key), "are for a handler's job; replication has none")
        elif key in _SIDE_KEYS:
            fields.report.add((*fields.path, key), f"belongs under {_SIDE_KEYS[key]}")
        elif key not in known:
            fields.report.unknown_key((*fields.path, key), "a replication job", known)
    found = {key: fields.raw[key] for key in fields.raw if key in own}
    for side in ("source", "sink"):
        if isinstance(found.get(side), dict):
            found[side] = _keys_of_a_side(found[side], side, fields, (*own, *COMMON_KEYS))
    return found


def _keys_of_a_side(
    raw: Mapping[str, Any], side: str, fields: Fields, jobs: Collection[str]
) -> dict[str, Any]:
    """What stands under source or sink, without the job's own keys, which are reported."""
    for key in raw:
        if key in jobs:
            value = f" {str(raw[key]).lower()}" if isinstance(raw[key], bool) else ""
            fields.report.add(
                (*fields.path, side, key),
                f"belongs to the job itself: write {key}:{value} beside {side}",
            )
    return {key: raw[key] for key in raw if key not in jobs}


def _retry(fields: Fields, usual: Mapping[str, Any]) -> dict[str, Any]:
    raw = fields.mapping("retry") or {}
    inner = Fields(raw, (*fields.path, "retry"), fields.report)
    inner.refuse_unknown("retry", ("max_attempts", "backoff", "on_worker_loss", "on_failure"))
    return {
        "max_attempts": inner.integer("max_attempts", usual["max_attempts"], 1, MOST_ATTEMPTS),
        "backoff": inner.duration("backoff", usual["backoff"]),
        "on_worker_loss": inner.boolean("on_worker_loss", usual["on_worker_loss"]),
        "on_failure": inner.boolean("on_failure", usual["on_failure"]),
    }


def _overlap(fields: Fields, default: str, *, replication: bool) -> str:
    overlap = fields.text("overlap", default)
    place = (*fields.path, "overlap")
    if overlap not in OVERLAPS:
        fields.report.add(place, f"must be one of {', '.join(OVERLAPS)}")
        return default
    if overlap == "allow" and replication:
        fields.report.add(
            place, "allow would let two runs write one sink at once; write skip or queue"
        )
        return default
    return overlap


def _concurrency(fields: Fields) -> dict[str, Any] | None:
    raw = fields.mapping("concurrency", "write {key: NAME, limit: NUMBER}")
    if raw is None:
        return None
    inner = Fields(raw, (*fields.path, "concurrency"), fields.report)
    inner.refuse_unknown("concurrency", ("key", "limit"))
    for key in ("key", "limit"):
        if key not in raw:
            fields.report.add(inner.path, f"lacks {key}; write {{key: NAME, limit: NUMBER}}")
            return None
    return {
        "key": inner.name("key", "", "concurrency key"),
        "limit": inner.integer("limit", 1, 1, LARGEST_LIMIT),
    }


def _datasource(side: Any) -> str | None:
    name = side.get("datasource") if isinstance(side, dict) else None
    return name if isinstance(name, str) else None


def _schedules(
    job: str, raw: Mapping[str, Any], path: Path, report: Report
) -> tuple[ScheduleDefinition, ...] | None:
    if "schedules" not in raw:
        return None
    place = (*path, "schedules")
    entries = raw["schedules"]
    if not isinstance(entries, list):
        report.add(place, "must be a list, such as - {every: 15m}")
        return ()
    found: list[ScheduleDefinition] = []
    for index, entry in enumerate(entries):
        schedule = parse_schedule(entry, f"{job}-{index + 1}", (*place, index), report)
        if schedule is None:
            continue
        if schedule.name in {earlier.name for earlier in found}:
            report.add((*place, index), f"another schedule of this job is named {schedule.name}")
        found.append(schedule)
    return tuple(found)
