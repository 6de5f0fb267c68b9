"""What a schedule's definition says: cron in a time zone or an interval, and what a miss means."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dispatch.definitions.documents import Path, Report
from dispatch.definitions.fields import Fields
from dispatch.durations import InvalidDuration, format_duration, parse_duration
from dispatch.firetimes import Cron, Every, InvalidInterval
from dispatch.firetimes.crontab import InvalidCron
from dispatch.firetimes.zones import UnknownZone
from dispatch.misfires import Misfire

SCHEDULE_KEYS = ("name", "cron", "timezone", "every", "misfire", "enabled")


@dataclass(frozen=True, slots=True)
class ScheduleDefinition:
    """One schedule of a job; ``enabled`` is None where the definition leaves it as it is."""

    name: str
    cron: str | None = None
    timezone: str | None = None
    every_seconds: float | None = None
    misfire: str = Misfire.FIRE_ONCE.value
    enabled: bool | None = None

    def described(self) -> str:
        """``*/15 * * * * Europe/Madrid`` or ``every 15m``."""
        if self.every_seconds is not None:
            return f"every {format_duration(self.every_seconds)}"
        return f"{self.cron} {self.timezone}"


def parse_schedule(
    raw: Any, default_name: str, path: Path, report: Report
) -> ScheduleDefinition | None:
    """Read one schedule; every mistake goes to ``report``."""
    if not isinstance(raw, dict):
        report.add(path, 'must hold keys, such as {cron: "*/15 * * * *", timezone: Europe/Madrid}')
        return None
    fields = Fields(raw, path, report)
    fields.refuse_unknown("a schedule", SCHEDULE_KEYS)
    cron, timezone = fields.text("cron"), fields.text("timezone")
    every = raw.get("every")
    seconds: float | None = None
    if (cron is None) == (every is None):
        if "cron" not in raw or every is not None:
            report.add(path, "needs one of cron (with timezone) and every, not both or neither")
    elif every is not None:
        if timezone is not None:
            report.add((*path, "timezone"), "goes with cron; an interval knows no time zone")
        seconds = _interval(every, (*path, "every"), report)
    elif cron is not None:
        if timezone is None:
            report.add(path, "lacks timezone; name one, such as Europe/Madrid or UTC")
        _check_cron(cron, timezone, path, report)
    misfire = fields.text("misfire", Misfire.FIRE_ONCE.value) or ""
    if misfire not in [policy.value for policy in Misfire]:
        known = ", ".join(policy.value for policy in Misfire)
        report.add((*path, "misfire"), f"must be one of {known}")
    return ScheduleDefinition(
        name=fields.name("name", default_name, "schedule"),
        cron=None if cron is None else " ".join(cron.split()),
        timezone=timezone,
        every_seconds=seconds,
        misfire=misfire,
        enabled=fields.boolean("enabled", None),
    )


def _interval(every: Any, path: Path, report: Report) -> float | None:
    try:
        seconds = parse_duration(every, what="").total_seconds()
        Every(seconds, datetime(2000, 1, 1, tzinfo=UTC))
    except (InvalidDuration, InvalidInterval) as error:
        report.add(path, str(error).strip())
        return None
    return seconds


def _check_cron(cron: str, timezone: str | None, path: Path, report: Report) -> None:
    try:
        Cron(cron, "UTC")
    except InvalidCron as error:
        report.add((*path, "cron"), error.problem)
    if timezone is not None:
        try:
            Cron("@daily", timezone)
        except UnknownZone as error:
            report.add((*path, "timezone"), str(error))
