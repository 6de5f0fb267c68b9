"""Run ids on the command line: whole, or the first six or more of their digits."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import click

from db import session
from db.runs import JobRunRepository
from dispatch.errors import UnknownRun

FEWEST_DIGITS = 6
_MOST_NAMED = 5
_PREFIX = re.compile(r"[0-9a-f]{6,32}")


class RunId(click.ParamType):
    """A whole run id as a UUID, or the beginning of one as its bare digits; see ``resolve``."""

    name = "run id"

    def convert(self, value: Any, param: Any, ctx: Any) -> UUID | str:
        if isinstance(value, UUID):
            return value
        digits = str(value).strip().lower().replace("-", "")
        if not _PREFIX.fullmatch(digits):
            self.fail(
                f"{value!r} is no run id: give it whole, or its first {FEWEST_DIGITS} digits or "
                "more. List them with: celery -A tasks run list",
                param,
                ctx,
            )
        return UUID(digits) if len(digits) == 32 else digits


RUN_ID = RunId()


def resolve(given: UUID | str) -> UUID:
    """The run id that is meant. Raises UnknownRun where none or several begin so."""
    if isinstance(given, UUID):
        return given
    with session.transaction() as connection:
        found = JobRunRepository(connection).starting_with(given, _MOST_NAMED + 1)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownRun(
            f"no run's id begins with {given}. List them with: celery -A tasks run list"
        )
    named = ", ".join(str(run_id) for run_id in found[:_MOST_NAMED])
    more = ", ..." if len(found) > _MOST_NAMED else ""
    raise UnknownRun(f"several runs' ids begin with {given}: {named}{more}. Give more of it")
