"""``celery -A tasks run``: start runs, see how they stand, and stop them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from db import session
from db.runs import Filter, JobRunRepository
from dispatch import cancel as cancelling
from dispatch import catalog, enqueue
from dispatch import retry as retrying
from dispatch.durations import InvalidDuration, parse_duration
from dispatch.enqueue import RunHandle
from dispatch.lifecycle import JobRunStatus
from tasks.commands import console, control, loglines, progress, runs, values, waits, watching
from tasks.commands.console import Output, usage
from tasks.commands.runids import RUN_ID, resolve
from tasks.ports import PORTS

FOLLOW_SECONDS = 0.5


@click.group()
def run() -> None:
    """Runs: start them, see how they stand, stop them."""


@run.command()
@click.argument("job")
@click.option("--param", multiple=True, metavar="KEY=VALUE", help="JSON, or else text.")
@click.option(
    "--wait", is_flag=True, help="Follow it to its end; exit 1 on FAILED, 3 on CANCELLED."
)
@click.option("--idempotency-key", metavar="KEY", help="A repetition hands back the first run.")
@click.option("--countdown", metavar="DURATION", help="Not before so long from now.")
@click.option("--priority", type=click.IntRange(0, 9), help="A higher one runs first.")
@click.option("--queue", metavar="NAME")
@console.command
def trigger(
    out: Output,
    job: str,
    param: tuple[str, ...],
    wait: bool,
    idempotency_key: str | None,
    countdown: str | None,
    priority: int | None,
    queue: str | None,
) -> int:
    """Start a run; it is durable at once."""
    params = _params(param)
    delay = None
    if countdown is not None:
        try:
            delay = parse_duration(countdown, what="--countdown").total_seconds()
        except InvalidDuration as error:
            usage(str(error))
    control.require_database(may_create=True)
    handle = enqueue.submit(
        PORTS,
        job,
        params,
        actor=console.actor(),
        idempotency_key=idempotency_key,
        countdown=delay,
        priority=priority,
        queue=queue,
    )
    if handle.created:
        out.say(f"created run {handle.run_id}")
    else:
        out.say(f"handed back run {handle.run_id}: {_why_none(handle)}")
    held_up = waits.stored(handle.run_id)
    if held_up is not None and (held_up.reasons or held_up.behind):
        out.warn(str(held_up))
    if wait:
        return watching.watch(out, handle.run_id, extra={"created": handle.created})
    if out.as_json:
        with session.transaction() as connection:
            found = runs.named(JobRunRepository(connection), handle.run_id)
        out.document({**runs.as_json(found), "created": handle.created})
    return 0


@run.command("list")
@click.option("--limit", "-n", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--job", help="Of one job.")
@click.option(
    "--status",
    multiple=True,
    type=click.Choice([str(status) for status in JobRunStatus], case_sensitive=False),
    help="In one of these states.",
)
@click.option("--queue", help="In one queue.")
@click.option("--active", is_flag=True, help="Waiting, running or being cancelled.")
@click.option("--latest", is_flag=True, help="Only the last attempt of each run.")
@click.option("--since", type=click.DateTime(), help="Created at this local time or later.")
@console.command
def list_(
    out: Output,
    limit: int,
    job: str | None,
    status: tuple[str, ...],
    queue: str | None,
    active: bool,
    latest: bool,
    since: datetime | None,
) -> None:
    """List attempts, the newest first."""
    statuses = {one.upper() for one in status}
    if active:
        statuses |= {str(one) for one in JobRunStatus if one.is_active}
    wanted = Filter(
        job=job,
        statuses=statuses,
        queue=queue,
        latest_only=latest,
        since=None if since is None else since.astimezone(),
    )
    control.require_database()
    with session.transaction() as connection:
        reader = JobRunRepository(connection)
        found = reader.newest(wanted, limit)
        # Runs keep the name of a job that was removed.
        unknown = job is not None and not found and not reader.newest(Filter(job=job), 1)
    if job is not None and unknown:
        with catalog.reading() as reading:
            catalog.job(reading, job)
    if out.as_json:
        out.document([runs.as_json(one) for one in found])
        return
    out.table(
        ["id", "job", "status", "attempt", "created", "took", "rows", "error"],
        [
            [
                one["id"],
                one["job_name"],
                runs.styled(one["status"]),
                f"{one['attempt']}/{one['max_attempts']}",
                one["created_at"],
                runs.took(one),
                one["rows_processed"],
                one["error_code"],
            ]
            for one in found
        ],
        "no runs; start one with: celery -A tasks run trigger JOB",
        ("created", "attempt", "rows", "took", "error"),
    )


@run.command()
@click.argument("run_id", type=RUN_ID)
@console.command
def show(out: Output, run_id: UUID | str) -> None:
    """Show all of one run.

    Its inputs, holder and attempts, why it failed, what happens next.
    """
    control.require_database()
    found = runs.with_lineage(resolve(run_id))
    if out.as_json:
        out.document(found)
        return
    lineage, children = found.pop("lineage"), found.pop("children")
    found["progress"] = progress.told(found)
    found.pop("percent")
    found["status"] = runs.styled(found["status"])
    first = {key: found.pop(key) for key in ("id", "job", "status", "next")}
    out.facts({**first, "took": runs.took(found), **found})
    if len(lineage) > 1:
        out.say("\nattempts", "bold")
        out.table(
            ["attempt", "id", "status", "created", "took", "error"],
            [
                [
                    attempt["attempt"],
                    attempt["id"],
                    runs.styled(attempt["status"]),
                    attempt["created_at"],
                    runs.took(attempt),
                    attempt["error_code"],
                ]
                for attempt in lineage
            ],
            "",
            ("created", "took", "error"),
        )
        # Below it: beside an id there is no room for a sentence. Its own is told above.
        for attempt in lineage:
            if attempt["error_code"] and attempt["id"] != first["id"]:
                out.say(f"attempt {attempt['attempt']}: {runs.failure(attempt)}")
    if children:
        out.say(f"\n{runs.together(children)}", "bold")
        out.table(
            ["job", "id", "status", "took", "rows", "error"],
            [
                [
                    child["job"],
                    child["id"],
                    runs.styled(child["status"]),
                    runs.took(child),
                    child["rows_processed"],
                    child["error_code"],
                ]
                for child in children["runs"]
            ],
            "",
            ("took", "rows", "error"),
        )
        for text in runs.failures(children):
            out.say(text)


@run.command()
@click.argument("run_id", type=RUN_ID)
@console.command
def watch(out: Output, run_id: UUID | str) -> int:
    """Follow a run and its retries to the end.

    Exit 0 on SUCCEEDED, 1 on FAILED, 3 on CANCELLED.
    """
    control.require_database()
    return watching.watch(out, resolve(run_id))


@run.command()
@click.argument("run_id", type=RUN_ID)
@click.option("--follow", "-f", is_flag=True, help="Go on until the attempt has ended.")
@console.command
def logs(out: Output, run_id: UUID | str, follow: bool) -> None:
    """Show what one attempt logged.

    With -f and --json: a JSON line for each line.
    """
    control.require_database()
    found_id = resolve(run_id)
    with session.transaction() as connection:
        reader = JobRunRepository(connection)
        found = runs.named(reader, found_id)
        log = reader.log(found["id"])
    if out.as_json and not follow:
        out.document(
            {
                "run_id": found["id"],
                "lines": [loglines.as_json(text) for text in loglines.lines(log)],
                "dropped_bytes": log["dropped_bytes"] if log else 0,
            }
        )
        return
    told = False
    for text in _followed(found["id"]) if follow else loglines.lines(log):
        told = True
        if out.as_json:
            out.line(loglines.as_json(text))
        else:
            click.echo(text)
    if not told:
        out.warn(_no_lines(found["id"]))


def _no_lines(run_id: UUID) -> str:
    found = runs.with_lineage(run_id)
    status, code = found["status"], found["error_code"]
    text = f"no lines: attempt {found['attempt']} ({run_id}) is {status}"
    if code is not None:
        text += f" ({code})"
    if code == "worker_lost":
        text += ", and what it logged since its last renewal went with its worker"
    return f"{text}. Next: {found['next']}"


@run.command()
@click.argument("run_id", type=RUN_ID)
@console.command
def cancel(out: Output, run_id: UUID | str) -> None:
    """Cancel a run, by any attempt's id."""
    control.require_database()
    answer = cancelling.cancel(PORTS, resolve(run_id), actor=console.actor())
    if answer.status is JobRunStatus.CANCELLED:
        out.say(f"run {answer.run_id} is CANCELLED")
    else:
        out.say(
            f"run {answer.run_id} is asked to stop; follow it with: celery -A tasks run watch "
            f"{answer.run_id}"
        )
    if answer.cancellation_warning:
        out.warn(answer.cancellation_warning)
    if out.as_json:
        out.document(_stands(answer.run_id, changed=answer.changed))


@run.command()
@click.argument("run_id", type=RUN_ID)
@click.option("--wait", is_flag=True, help="Follow it to its end.")
@console.command
def retry(out: Output, run_id: UUID | str, wait: bool) -> int:
    """Try a FAILED run again, at once."""
    control.require_database()
    handle = retrying.retry(PORTS, resolve(run_id), actor=console.actor())
    out.say(f"created run {handle.run_id}, the next attempt")
    if wait:
        return watching.watch(out, handle.run_id)
    if out.as_json:
        out.document(_stands(handle.run_id))
    return 0


def _stands(run_id: UUID, **extra: Any) -> dict[str, Any]:
    with session.transaction() as connection:
        return {**runs.as_json(runs.named(JobRunRepository(connection), run_id)), **extra}


def _why_none(handle: RunHandle) -> str:
    if handle.stands_for == "same_key":
        return "the same idempotency key was given before"
    return "it is still active, and the job allows one active run (overlap: skip)"


def _params(given: tuple[str, ...]) -> dict[str, Any]:
    return dict(values.parameter(text) for text in given)


def _followed(run_id: UUID) -> Iterator[str]:
    """The lines of an attempt as they come, until it has ended."""
    follower = loglines.Follower()
    while True:
        with session.transaction() as connection:
            reader = JobRunRepository(connection)
            found = reader.get(run_id)
            log = reader.log(run_id)
        yield from follower.feed(log)
        if found is None or found["finished_at"] is not None:
            yield from follower.rest()
            return
        time.sleep(FOLLOW_SECONDS)
