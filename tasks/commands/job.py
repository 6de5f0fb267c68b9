"""``celery -A tasks job``: what can be run, and whether it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import click
from sqlalchemy.orm import Session

from db.models import Datasource, Job, JobSchedule
from db.runs import Filter, JobRunRepository
from dispatch import catalog
from dispatch.catalog import jobs, jobschedules
from dispatch.handlers import REPLICATE
from dispatch.lifecycle import JobRunStatus
from tasks.commands import changes, console, control, values
from tasks.commands.console import Output, usage
from tasks.connectors import CONNECTORS
from tasks.replicate import registry
from tasks.replicate.spec import ReplicationSpec, SpecError

_FINISHED = frozenset(str(status) for status in JobRunStatus if status.is_finished)


@click.group()
def job() -> None:
    """Jobs: what can be run, from where to where, and whether it may be."""


def _definition_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The common keys of the definition file as options; ``--set`` reaches every other one."""
    for option in (
        click.option("--handler", help="The function that does the work: @handler(NAME)."),
        click.option(
            "--param", multiple=True, metavar="KEY=VALUE", help="A default parameter: JSON or text."
        ),
        click.option("--mode", help="Replication: complete, complete-atomic or incremental."),
        click.option("--source", metavar="DATASOURCE"),
        click.option("--source-table", metavar="TABLE"),
        click.option("--query", metavar="SQL", help="Read a query instead of a table."),
        click.option("--sink", metavar="DATASOURCE"),
        click.option("--sink-table", metavar="TABLE"),
        click.option("--watermark", metavar="COLUMN", help="What rises with each change."),
        click.option("--timeout", metavar="DURATION"),
        click.option("--overlap", type=click.Choice(["skip", "queue", "allow"])),
        click.option("--concurrency", metavar="KEY=LIMIT"),
        click.option("--queue", metavar="NAME"),
        click.option("--priority", type=int, help="0 to 9; a higher one runs first."),
        click.option(
            "--set",
            "given",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any key of the definition file, e.g. retry.backoff=5m or source.columns=[a,b].",
        ),
    ):
        function = option(function)
    return function


@job.command()
@click.argument("name")
@_definition_options
@console.command
def add(out: Output, name: str, given: tuple[str, ...], **options: Any) -> None:
    """Store a new job.

    For example: job add report --handler report --param day=2026-11-01
    """
    raw = _raw(given, options)
    control.require_database(may_create=True)
    with catalog.editing() as session:
        jobs.add(session, CONNECTORS, name, raw, actor=console.actor())
        found = _read(session, catalog.job(session, name))
    out.say(f"added job {name}")
    if out.as_json:
        out.document(found)


@job.command()
@click.argument("name")
@_definition_options
@click.option("--clear", multiple=True, metavar="KEY", help="Remove a key: back to its default.")
@click.option(
    "--reset-watermark", is_flag=True, help="Let the next incremental run read everything again."
)
@console.command
def edit(
    out: Output,
    name: str,
    given: tuple[str, ...],
    clear: tuple[str, ...],
    reset_watermark: bool,
    **options: Any,
) -> None:
    """Change what is named, keep the rest.

    The next claim uses it; a running attempt does not.
    """
    raw = _raw(given, options, clear)
    control.require_database()
    with catalog.editing() as session:
        change = None
        if raw or not reset_watermark:
            change = jobs.edit(session, CONNECTORS, name, raw, actor=console.actor())
        if reset_watermark:
            change = jobs.reset_watermark(session, name, actor=console.actor()) or change
    changes.tell(out, change, f"changed job {name}")


@job.command("list")
@console.command
def list_(out: Output) -> None:
    """List all jobs, the newest first."""
    control.require_database()
    with catalog.reading() as session:
        names = catalog.datasource_names(session)
        schedules = jobschedules.by_job(session)
        found = [
            as_json(stored, names, schedules.get(stored.id, []))
            for stored in catalog.all_jobs(session)
        ]
    found.sort(key=lambda row: row["created_at"], reverse=True)
    if out.as_json:
        out.document(found)
    else:
        out.table(
            ["name", "does", "source", "sink", "queue", "schedules", "state"],
            [
                [
                    row["name"],
                    row["definition"].get("mode", row["handler"]),
                    row["source"],
                    row["sink"],
                    row["queue"],
                    ", ".join(
                        schedule["every"] or f"{schedule['cron']} {schedule['timezone']}"
                        for schedule in row["schedules"]
                    ),
                    state(row),
                ]
                for row in found
            ],
            "no jobs yet; define some in a file and: celery -A tasks apply FILE",
        )


@job.command()
@click.argument("name")
@console.command
def show(out: Output, name: str) -> None:
    """Show a job and how its runs stand."""
    control.require_database()
    with catalog.reading() as session:
        stored = catalog.job(session, name)
        found = _read(session, stored)
        found["runs"] = _runs(session, stored)
        found["watermark_note"] = _watermark_note(session, stored)
        found["children"] = [
            child.name for child in catalog.with_children(session, stored) if child is not stored
        ]
    if out.as_json:
        out.document(found)
    else:
        out.facts({"state": state(found), **found})


@job.command()
@click.argument("name")
@click.option("--binding", type=click.Choice(["source", "sink"]), help="One side only.")
@console.command
def enable(out: Output, name: str, binding: str | None) -> None:
    """Accept triggers, and run what waits."""
    _switch(out, name, binding, True)


@job.command()
@click.argument("name")
@click.option("--binding", type=click.Choice(["source", "sink"]), help="One side only.")
@console.command
def disable(out: Output, name: str, binding: str | None) -> None:
    """Refuse triggers, and hold waiting runs.

    A running attempt goes on.
    """
    _switch(out, name, binding, False)


@job.command()
@click.argument("name")
@console.command
def pause(out: Output, name: str) -> None:
    """Accept triggers and let them wait."""
    _set(out, name, "paused", True, f"paused job {name}")


@job.command()
@click.argument("name")
@console.command
def resume(out: Output, name: str) -> None:
    """Let what waits run again."""
    _set(out, name, "paused", False, f"resumed job {name}")


@job.command()
@click.argument("name")
@console.command
def rm(out: Output, name: str) -> None:
    """Remove a job without active runs.

    Its schedules go with it; its finished runs are kept.
    """
    control.require_database()
    with catalog.editing() as session:
        change = jobs.remove(session, name, actor=console.actor())
    changes.tell(out, change, f"removed job {name}")


def as_json(
    stored: Job, names: Mapping[UUID, str], schedules: Sequence[JobSchedule]
) -> dict[str, Any]:
    """A job as commands show it, with the datasources' names by id and its own schedules."""
    definition = jobs.stored_definition(stored, names)
    return {
        "id": stored.id,
        "name": stored.name,
        "handler": stored.handler,
        "source": definition.source,
        "sink": definition.sink,
        "enabled": stored.enabled,
        "paused": stored.paused,
        "source_enabled": stored.source_enabled,
        "sink_enabled": stored.sink_enabled,
        "queue": stored.queue,
        "priority": stored.priority,
        "overlap": stored.overlap,
        "max_attempts": stored.max_attempts,
        "concurrency": stored.definition.get("concurrency"),
        "watermark": stored.watermark,
        "watermark_type": stored.watermark_type,
        "definition": stored.definition,
        "schedules": [jobschedules.as_json(found) for found in schedules],
        "parent_job_id": stored.parent_job_id,
        "created_at": stored.created_at,
        "updated_at": stored.updated_at,
    }


def _read(session: Session, stored: Job) -> dict[str, Any]:
    schedules = jobschedules.of_job(session, stored.id)
    return as_json(stored, catalog.datasource_names(session), schedules)


def state(row: dict[str, Any]) -> str:
    """What keeps a job from running, in a word or two."""
    if not row["enabled"]:
        return "disabled"
    sides = [side for side in ("source", "sink") if not row[f"{side}_enabled"]]
    if sides:
        return f"{' and '.join(sides)} disabled"
    return "paused" if row["paused"] else "enabled"


def _raw(
    given: tuple[str, ...], options: dict[str, Any], clear: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The keys of the definition file that the options name; None for what they ``clear``."""
    found: list[tuple[str, Any]] = []
    places = {
        "source": "source.datasource",
        "source_table": "source.table",
        "query": "source.query",
        "sink": "sink.datasource",
        "sink_table": "sink.table",
    }
    params = options.pop("param")
    concurrency = options.pop("concurrency")
    for option, value in options.items():
        if value is not None:
            found.append((places.get(option, option), value))
    if concurrency is not None:
        key, limit = values.pair(concurrency, "--concurrency")
        found += [("concurrency.key", key), ("concurrency.limit", values.typed(limit))]
    for text in given:
        key, value = values.pair(text, "--set")
        found.append((key, values.typed(value)))
    raw = values.nested([*found, *((key, None) for key in clear)])
    if params:
        if not isinstance(raw.setdefault("params", {}), dict):
            usage("params is given as a value, or cleared, too")
        for text in params:
            key, value = values.parameter(text)
            raw["params"][key] = value
    return raw


def _runs(session: Session, stored: Job) -> dict[str, Any]:
    """The active runs by state, and the last one that ended."""
    reader = JobRunRepository(session)
    last = reader.newest(Filter(job=stored.name, statuses=_FINISHED), 1)
    fields = ("id", "status", "finished_at", "rows_processed", "error_code")
    return {
        "active": reader.counts(stored.id),
        "last": {field: last[0][field] for field in fields} if last else None,
    }


def _watermark_note(session: Session, stored: Job) -> str | None:
    source = session.get(Datasource, stored.source_id) if stored.source_id else None
    if stored.handler != REPLICATE or source is None:
        return None
    try:
        spec = ReplicationSpec.parse(stored.definition)
        return registry.watermark_note(spec, source.connector, stored.watermark_type)
    except (SpecError, ValueError):
        return None


def _switch(out: Output, name: str, binding: str | None, enabled: bool) -> None:
    switch = "enabled" if binding is None else f"{binding}_enabled"
    what = f"job {name}" if binding is None else f"the {binding} of job {name}"
    _set(out, name, switch, enabled, f"{'enabled' if enabled else 'disabled'} {what}")


def _set(out: Output, name: str, switch: Any, value: bool, done: str) -> None:
    control.require_database()
    with catalog.editing() as session:
        change = jobs.set_switch(session, name, switch, value, actor=console.actor())
    changes.tell(out, change, done)
