"""``celery -A tasks schedule``: when jobs fire by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import click

from dispatch import catalog
from dispatch.catalog import jobschedules
from dispatch.firetimes import upcoming
from tasks.commands import changes, console, control
from tasks.commands.console import Output

MOST_TIMES = 1000


@dataclass(frozen=True, slots=True)
class _Coming:
    """The coming fire times of one schedule."""

    job: str
    name: str
    timezone: str | None
    times: tuple[datetime, ...]
    enabled: bool

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone or "UTC")

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "name": self.name,
            "timezone": self.timezone,
            "enabled": self.enabled,
            "fire_times": [moment.astimezone(self.zone) for moment in self.times],
        }


@click.group()
def schedule() -> None:
    """Schedules: when jobs fire by themselves."""


@schedule.command()
@click.argument("job")
@click.option("--name", help="Default: JOB-1, JOB-2 and so on.")
@click.option("--cron", help="Five fields, or @daily and the like.")
@click.option("--timezone", help="IANA name of the zone that --cron is meant in.")
@click.option("--every", metavar="DURATION", help="An interval such as 15m, from now on.")
@click.option("--misfire", type=click.Choice(["fire_once", "skip", "catch_up"]))
@console.command
def add(out: Output, job: str, **options: Any) -> None:
    """Let a job fire by itself.

    For example: schedule add orders --cron "0 3 * * *" --timezone Europe/Madrid
    """
    raw = {key: value for key, value in options.items() if value is not None}
    control.require_database()
    with catalog.editing() as session:
        change = jobschedules.add(session, job, raw, actor=console.actor())
        _, stored = catalog.schedule(session, change.name)
        found = {"job": job, **jobschedules.as_json(stored)}
    out.say(f"added schedule {change.name}; it fires next at {_local(found['next_fire_at'])}")
    if out.as_json:
        out.document(found)


@schedule.command("list")
@click.option("--job", help="Of one job only.")
@console.command
def list_(out: Output, job: str | None) -> None:
    """List schedules, the newest first."""
    control.require_database()
    with catalog.reading() as session:
        owners = [catalog.job(session, job)] if job else catalog.all_jobs(session)
        found = [
            {"job": owner.name, **jobschedules.as_json(stored)}
            for owner in owners
            for stored in jobschedules.of_job(session, owner.id)
        ]
    found.sort(key=lambda row: row["created_at"], reverse=True)
    if out.as_json:
        out.document(found)
    else:
        out.table(
            ["job", "name", "when", "misfire", "next fire", "last fire", "state"],
            [
                [
                    row["job"],
                    row["name"],
                    _when(row),
                    row["misfire"],
                    row["next_fire_at"],
                    row["last_fire_at"],
                    _state(row),
                ]
                for row in found
            ],
            "no schedules yet; add one with: celery -A tasks schedule add JOB",
        )


@schedule.command("next")
@click.argument("name", required=False)
@click.option(
    "--count", "-n", type=click.IntRange(1, MOST_TIMES), default=5, show_default=True, help="Each."
)
@console.command
def next_(out: Output, name: str | None, count: int) -> None:
    """Show the coming fire times.

    In the schedule's zone and in yours.
    """
    control.require_database()
    with catalog.reading() as session:
        pairs = (
            [catalog.schedule(session, name)]
            if name
            else [
                (owner, stored)
                for owner in catalog.all_jobs(session)
                for stored in jobschedules.of_job(session, owner.id)
            ]
        )
        now = catalog.now(session)
        found = [
            _Coming(
                owner.name,
                stored.name,
                stored.timezone,
                tuple(_times(stored, now, count)) if stored.enabled else (),
                stored.enabled,
            )
            for owner, stored in pairs
        ]
    if out.as_json:
        out.document([row.as_json() for row in found])
        return
    rows = []
    for row in found:
        name = f"{row.job}/{row.name}"
        for moment in row.times:
            there = moment.astimezone(row.zone).strftime("%a %Y-%m-%d %H:%M:%S %Z")
            rows.append([name, there, _local(moment)])
        if not row.enabled:
            rows.append([name, "disabled", ""])
    out.table(["schedule", "in its zone", "here"], rows, "no schedules")


@schedule.command()
@click.argument("name")
@console.command
def enable(out: Output, name: str) -> None:
    """Let it fire again, from its next fire time on."""
    _switch(out, name, True)


@schedule.command()
@click.argument("name")
@console.command
def disable(out: Output, name: str) -> None:
    """Keep it, and let it not fire."""
    _switch(out, name, False)


@schedule.command()
@click.argument("name")
@console.command
def rm(out: Output, name: str) -> None:
    """Remove it; the runs it created stay."""
    control.require_database()
    with catalog.editing() as session:
        change = jobschedules.remove(session, name, actor=console.actor())
    changes.tell(out, change, f"removed schedule {change.name}")


def _times(stored: Any, now: datetime, count: int) -> list[datetime]:
    """The stored next fire, which is an obligation, and what follows it."""
    times = jobschedules.fire_times(stored)
    first = stored.next_fire_at
    if first is None:
        return list(upcoming(times, now, count))
    return [first, *upcoming(times, max(first, now), count - 1)]


def _when(row: dict[str, Any]) -> str:
    return f"every {row['every']}" if row["every"] else f"{row['cron']} {row['timezone']}"


def _state(row: dict[str, Any]) -> str:
    if not row["enabled"]:
        return "disabled"
    return f"failed {row['failures']} times" if row["failures"] else "enabled"


def _local(moment: datetime | None) -> str:
    return "never" if moment is None else moment.astimezone().strftime("%a %Y-%m-%d %H:%M:%S %Z")


def _switch(out: Output, name: str, enabled: bool) -> None:
    control.require_database()
    with catalog.editing() as session:
        change = jobschedules.set_enabled(session, name, enabled, actor=console.actor())
    changes.tell(out, change, f"{'enabled' if enabled else 'disabled'} schedule {name}")
