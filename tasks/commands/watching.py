"""Following a run to its end: its progress, its retries, and the runs that it enqueued."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from db import session
from db.failures import is_connection_lost
from db.runs import JobRunRepository, Run
from dispatch.lifecycle import JobRunStatus
from dispatch.lineage import children_of
from tasks.commands import progress, waits
from tasks.commands.console import Output
from tasks.commands.runs import (
    EXIT_STATUS,
    as_json,
    failure,
    failures,
    named,
    summed_up,
    together,
    warnings,
)

FIRST_NAP_SECONDS = 0.05
LONGEST_NAP_SECONDS = 0.5
WAIT_SECONDS = 5.0
"""How long a run may wait before its watcher is told why; doubled each time."""
LONGEST_WAIT_SECONDS = 60.0
OUTAGE_SECONDS = 300.0
"""How long watching outlasts a control database that is away."""
ROOMY_COLUMNS = 110
"""From this width of the terminal on, the bar is long and names the phase."""
_ENDED = frozenset(EXIT_STATUS)


def watch(out: Output, run_id: UUID, *, extra: Mapping[str, Any] | None = None) -> int:
    """Follow the lineage of a run to its end; the exit status.

    Prints its progress for people, and with ``--json`` the final run, with ``extra`` in it. Of a
    pattern job the child runs are followed too, and the worst of their ends counts.
    """
    with session.transaction() as connection:
        root = named(JobRunRepository(connection), run_id)["root_run_id"]
    try:
        with _bar(out) as bar:
            last, children = _follow(out, root, bar)
    except KeyboardInterrupt:
        out.warn(f"the run goes on; stop it with: celery -A tasks run cancel {run_id}")
        raise
    if out.as_json:
        found = {**as_json(last), **(extra or {})}
        if children:
            found["children"] = summed_up(children)
        out.document(found)
    else:
        _tell_end(out, last, children)
    ends = [EXIT_STATUS[JobRunStatus(run["status"])] for run in (last, *children)]
    # A failure weighs more than a cancellation.
    return 1 if 1 in ends else max(ends)


def _follow(out: Output, root: UUID, bar: Progress) -> tuple[Run, list[Run]]:
    # Shown once there is something to say.
    shown = bar.add_task("", total=None, run=None, visible=False)
    nap = FIRST_NAP_SECONDS
    answered = time.monotonic()
    told: UUID | None = None
    patience = _Patience(out)
    while True:
        try:
            with session.transaction() as connection:
                runs = JobRunRepository(connection)
                last = runs.last(root)
                assert last is not None, "retention removes no run that is not finished for long"
                passed_on = told != last["id"] and last["previous_run_id"] is not None
                before = runs.get(last["previous_run_id"]) if passed_on else None
                ended = last["status"] in _ENDED
                children = children_of(runs, root) if ended else []
            answered = time.monotonic()
        except DBAPIError as error:
            if not is_connection_lost(error) or time.monotonic() - answered > OUTAGE_SECONDS:
                raise
        else:
            if before is not None and not ended:
                # Also of one that the watcher has not seen: a run in backoff has no other reason.
                out.say(f"attempt {before['attempt']}: {failure(before)}", "yellow")
            if told is not None and told != last["id"]:
                out.say(f"attempt {last['attempt']}: {last['id']}", "yellow")
            told = last["id"]
            _show(bar, shown, last, children)
            patience.look(_waiting(last, children))
            if ended and all(child["status"] in _ENDED for child in children):
                return last, children
        time.sleep(nap)
        nap = min(LONGEST_NAP_SECONDS, nap * 1.3)


class _Patience:
    """Tells why a run waits, once it has waited for a while, and again where that changes."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._told: str | None = None
        self._again()

    def _again(self, nap: float = WAIT_SECONDS) -> None:
        self._nap = nap
        self._due = time.monotonic() + nap

    def look(self, waiting: Run | None) -> None:
        if waiting is None:
            self._again()
            return
        if time.monotonic() < self._due:
            return
        text = waits.why(waiting["id"])
        if text is not None and waiting["parent_run_id"] is not None:
            text = f"{waiting['job_name']}: {text}"
        if text is not None and text != self._told:
            self._out.warn(text)
            self._told = text
        self._again(min(LONGEST_WAIT_SECONDS, self._nap * 2))


def _waiting(last: Run, children: list[Run]) -> Run | None:
    """The run that the watcher waits for in vain: the last attempt, or a child where none works."""
    left = [run for run in (last, *children) if run["status"] not in _ENDED]
    if any(run["status"] != JobRunStatus.PENDING for run in left):
        return None
    return next(iter(left), None)


def _show(bar: Progress, shown: Any, last: Run, children: list[Run]) -> None:
    if children:
        ended = sum(child["status"] in _ENDED for child in children)
        bar.update(
            shown,
            description=f"{last['job_name']} {ended} of {len(children)} child runs",
            completed=ended,
            total=len(children),
            run=None,
            visible=True,
        )
        return
    share = progress.percent(last)
    bar.update(
        shown,
        description=f"{last['job_name']} {last['status']}",
        completed=share or 0,
        total=None if share is None else 100,
        run=last,
        visible=True,
    )


class _Told(ProgressColumn):
    """``24 %  12,000 / ~50,000  3.4 MB``, and on a wide terminal the phase."""

    def __init__(self, with_phase: bool) -> None:
        super().__init__(Column(no_wrap=True))
        self._with_phase = with_phase

    def render(self, task: Task) -> Text:
        run = task.fields.get("run")
        if run is None:
            return Text("")
        return Text(progress.told(run, rows="", gap="  ", with_phase=self._with_phase))


def _bar(out: Output) -> Progress:
    # Progress is a message: results are what stands on standard output at the end.
    roomy = out.messages.width >= ROOMY_COLUMNS
    return Progress(
        TextColumn("  {task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=36 if roomy else 12),
        _Told(with_phase=roomy),
        TimeElapsedColumn(),
        console=out.messages,
        transient=True,
        disable=not out.messages.is_terminal,
    )


def _tell_end(out: Output, last: Run, children: list[Run]) -> None:
    from tasks.commands.runs import STYLES, took

    status = JobRunStatus(last["status"])
    text = f"{last['job_name']} {status} after {took(last) or '0 s'}"
    if last["rows_processed"] is not None:
        read = "" if status == JobRunStatus.SUCCEEDED else " read"
        text += f", {last['rows_processed']:,} rows{read}"
    out.say(text, STYLES[status])
    if last["error_code"]:
        out.say(failure(last), "red")
    if last["cancellation_warning"]:
        out.say(last["cancellation_warning"], "yellow")
    if children:
        found = summed_up(children)
        out.say(together(found))
        for text in failures(found):
            out.say(text, "red")
    _tell_warnings(out, last, children)


def _tell_warnings(out: Output, last: Run, children: list[Run]) -> None:
    """What the runs warned of; what several children say alike is told once."""
    for text in warnings(last):
        out.warn(f"warning: {text}")
    jobs: dict[str, list[str]] = {}
    for child in children:
        for text in warnings(child):
            jobs.setdefault(text, []).append(child["job_name"])
    for text, (first, *rest) in jobs.items():
        more = f" and {len(rest)} more" if rest else ""
        out.warn(f"warning: {first}{more}: {text}")
