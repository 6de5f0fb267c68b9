"""The end of an attempt, recorded under its token in one transaction (R-F1 to R-F4, R-R7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from db import statements
from db.failures import first_line, is_connection_lost, is_passing
from db.link import Link
from dispatch import offers
from dispatch.backoff import Backoff
from dispatch.chains import enqueue_next_of_chain
from dispatch.claims import ClaimedRun, ClaimRequest
from dispatch.context import Outcome, Progress
from dispatch.errors import ClaimcheckError, InvalidParameters, TriggerBusy
from dispatch.leases import log_parameters, log_statement, progress_parameters
from dispatch.lifecycle import JobRunStatus
from dispatch.parameters import to_json
from dispatch.policy import RetryPolicy
from dispatch.ports import EventKind, Offer, Ports, RunEvent
from dispatch.redaction import redact
from dispatch.runlog import RunLog

MAX_RESULT_BYTES = 1024 * 1024
MAX_MESSAGE = 8_000
WATERMARK_BASIS = ("mode", "source", "sink", "watermark", "tables", "handler")
"""What of a job's definition a watermark rests on: what it reads, where it merges that to, and how.

Where one of these changes, the old watermark says nothing about what the sink holds (R-F3).
"""
PATIENCE_SECONDS = 900.0
"""How long a finish is repeated while the database is away; the slot could claim nothing anyway."""

logger = logging.getLogger("claimcheck.finalization")
_SQL = statements.load("finish")
_EVENTS: Mapping[JobRunStatus, EventKind] = {
    JobRunStatus.SUCCEEDED: "succeeded",
    JobRunStatus.FAILED: "failed",
    JobRunStatus.CANCELLED: "cancelled",
    JobRunStatus.RETRY_SCHEDULED: "retried",
}


class FinishRefused(ClaimcheckError):
    """The database refuses what the handler handed back; the run is recorded as failed instead."""


class FinishLost(ClaimcheckError):
    """The control database stayed away, so the end of the run may not be recorded."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a worker wants to record; a cancel that was recorded first wins over all of it (R-F4).

    ``delay`` is in seconds from the end, by the database's clock, until the new attempt.
    """

    status: JobRunStatus
    error_code: str | None = None
    error_message: str | None = None
    outcome: Outcome | None = None
    progress: Progress | None = None
    warning: str | None = None
    delay: float = 0.0

    def parameters(self) -> dict[str, Any]:
        """The parameters of the statement ``finish``. Raises FinishRefused."""
        outcome = self.outcome or Outcome()
        found = progress_parameters(self.progress)
        try:
            if outcome.rows_processed is not None:
                found["rows_processed"] = int(outcome.rows_processed)
            result = to_json(outcome.result, "the handler's result", MAX_RESULT_BYTES)
            counters = redact(to_json(dict(outcome.counters), "the run's counters"))
        except InvalidParameters as error:
            raise FinishRefused(str(error)) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise FinishRefused(f"the handler's outcome: {error}") from None
        if outcome.watermark is not None and outcome.watermark_type is None:
            raise FinishRefused("the watermark has no type by which it could be compared")
        return {
            **found,
            "status": self.status,
            "error_code": self.error_code,
            "error_message": self.error_message,
            "warning": None if self.warning is None else redact(self.warning),
            "delay": self.delay,
            "result": None if outcome.result is None else result,
            "counters": counters if outcome.counters else None,
            "watermark": outcome.watermark,
            "watermark_type": outcome.watermark_type,
            "watermark_basis": list(WATERMARK_BASIS),
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """How an attempt ended. ``offers`` are wake-ups of runs that its end created and are due."""

    run_id: UUID
    job_id: UUID | None
    job: str
    root_run_id: UUID
    previous_run_id: UUID | None
    attempt: int
    queue: str
    status: JobRunStatus
    error_code: str | None
    error_message: str | None
    rows_processed: int | None
    runtime: float | None
    next_run_id: UUID | None
    exclusive: bool
    slot_key: str | None
    offers: Sequence[Offer] = field(default=())

    @classmethod
    def of(cls, row: Mapping[str, Any], delay: float, following: Sequence[Offer] = ()) -> Finished:
        """Read a row of the statement ``finish`` or ``finish_by_token``.

        ``delay`` is the ending's, and ``following`` what the end created beside its own retry.
        """
        due = list(following)
        if row["next_run_id"] is not None and delay == 0:
            due.insert(0, Offer(row["next_run_id"], row["queue"], row["priority"]))
        return cls(
            run_id=row["id"],
            job_id=row["job_id"],
            job=row["job"],
            root_run_id=row["root_run_id"],
            previous_run_id=row["previous_run_id"],
            attempt=row["attempt"],
            queue=row["queue"],
            status=JobRunStatus(row["status"]),
            error_code=row["error_code"],
            error_message=row["error_message"],
            rows_processed=row["rows_processed"],
            runtime=row["runtime"],
            next_run_id=row["next_run_id"],
            exclusive=row["exclusive"],
            slot_key=row["slot_key"],
            offers=due,
        )

    @property
    def event(self) -> RunEvent:
        fields: dict[str, Any] = {"runtime": self.runtime, "rows": self.rows_processed}
        if self.error_code is not None:
            fields |= {"error_code": self.error_code, "message": self.error_message}
        return RunEvent(
            kind=_EVENTS[self.status],
            run_id=self.run_id,
            root_run_id=self.root_run_id,
            previous_run_id=self.previous_run_id,
            job=self.job,
            attempt=self.attempt,
            queue=self.queue,
            fields={name: value for name, value in fields.items() if value is not None},
        )


def success(
    outcome: Outcome, progress: Progress | None = None, *, warning: str | None = None
) -> Ending:
    """The work is done. ``warning`` counts where a cancel was recorded first (R-F4)."""
    return Ending(JobRunStatus.SUCCEEDED, outcome=outcome, progress=progress, warning=warning)


def failure(
    claimed: ClaimedRun,
    code: str,
    message: str,
    *,
    permanent: bool = False,
    progress: Progress | None = None,
    warning: str | None = None,
) -> Ending:
    """The attempt ended without success: FAILED, or by its policy a retry (R-R4)."""
    text = message.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()[:MAX_MESSAGE]
    policy = RetryPolicy.of(claimed.definition)
    delay = policy.next_delay(claimed.attempt, claimed.max_attempts, code, claimed.previous_code)
    return unsuccessful(
        None if permanent else delay, code, text, progress=progress, warning=warning
    )


def unsuccessful(
    delay: float | None,
    code: str,
    message: str,
    *,
    progress: Progress | None = None,
    warning: str | None = None,
) -> Ending:
    """FAILED; or tried again after ``delay`` seconds, where there is one."""
    return Ending(
        JobRunStatus.FAILED if delay is None else JobRunStatus.RETRY_SCHEDULED,
        error_code=code,
        error_message=message,
        progress=progress,
        warning=warning,
        delay=delay or 0.0,
    )


def snooze(delay: float, progress: Progress | None = None) -> Ending:
    """The handler gave the run back for ``delay`` seconds; the attempt does not count (R-R3)."""
    return Ending(
        JobRunStatus.RETRY_SCHEDULED,
        error_code="snoozed",
        error_message=f"snoozed for {delay:g} s",
        progress=progress,
        delay=delay,
    )


class RunFinalizationService:
    """Records ends of attempts, then tells of them. Safe to share between threads."""

    def __init__(self, ports: Ports, *, patience: float = PATIENCE_SECONDS) -> None:
        self._ports = ports
        self._patience = patience

    def finish(
        self,
        link: Link,
        claimed: ClaimedRun,
        ending: Ending,
        *,
        log: RunLog | None = None,
        gives_up: Callable[[], bool] = lambda: False,
        is_uncertain: bool = False,
    ) -> Finished | None:
        """Record ``ending`` under the run's token; None means FENCED: nothing was written (R-F1).

        The state, counters, watermark, audit record, log and the next attempt commit together
        (R-F2). While the database is away, or undoes it for a reason that passes, it is repeated
        for `patience` seconds or until ``gives_up``; what became of an unanswered commit, also of
        one that came before (``is_uncertain``), is read by the token (R-R7).

        Raises FinishRefused where a value does not fit, and FinishLost.
        """
        asked = _asked(claimed, ending)
        backoff = Backoff(self._patience)
        while True:
            try:
                finished = self._write(link, claimed, asked, log)
                if finished is None and is_uncertain:
                    finished = self._told_by_token(link, asked, ending)
                return finished
            except (psycopg.errors.LockNotAvailable, TriggerBusy):
                pass  # someone holds the row; it is ours to finish as soon as they let go
            except (psycopg.DataError, psycopg.IntegrityError) as error:
                raise FinishRefused(first_line(error)) from None
            except psycopg.ProgrammingError as error:
                # What psycopg cannot send has no code; else a type that the server lacks, or that
                # has no order.
                if error.sqlstate is not None and asked["watermark"] is None:
                    raise
                raise FinishRefused(f"the handler's outcome: {first_line(error)}") from None
            except psycopg.Error as error:
                is_lost = is_connection_lost(error)
                if not is_lost and not is_passing(error):
                    raise
                link.close()  # after a failover another server writes
                is_uncertain = is_uncertain or is_lost
                logger.warning(
                    "the finish of run %s is repeated: %s (%s)",
                    claimed.id,
                    "no answer" if is_lost else first_line(error),
                    type(error).__name__,
                )
            if gives_up() or not backoff.pause():
                raise FinishLost(f"the end of run {claimed.id} may not be recorded")

    def finish_and_claim(
        self, link: Link, claimed: ClaimedRun, ending: Ending, request: ClaimRequest
    ) -> tuple[Finished | None, Mapping[str, Any] | None]:
        """Record ``ending`` and make the slot's next claim, in one transaction and round trip.

        For short runs without a log or chain, whose cost it halves. A run that turns out to have a
        chain is answered by None, as one that is fenced is: `finish` tells them apart. Raises
        psycopg.Error, after which `finish` does it alone, and FinishRefused.
        """
        asked = {**_asked(claimed, ending), "in_transaction": False}
        row, taken = link.rows_of_both(
            (_SQL["finish"], asked), (request.statement, request.parameters)
        )
        if row is None or row["id"] is None:
            return None, taken
        return Finished.of(row, ending.delay), taken

    def announce(self, finished: Finished) -> None:
        """Tell of a recorded end: the wake-ups of what it created, then its event. Never raises."""
        if finished.offers:
            offers.publish(self._ports, finished.offers)
        self._ports.emit(finished.event)
        logger.info(
            "run %s of %s, attempt %d: %s%s after %.3g s",
            finished.run_id,
            finished.job,
            finished.attempt,
            finished.status,
            f" ({finished.error_code})" if finished.error_code else "",
            finished.runtime or 0.0,
        )

    def offer_freed(
        self,
        rows: Callable[[LiteralString, Mapping[str, Any]], Sequence[Mapping[str, Any]]],
        finished: Finished,
        following: ClaimedRun | None = None,
    ) -> None:
        """Offer the next runs that waited for the job's turn or the concurrency slot (R-D7).

        Not what the slot's next run, ``following``, takes itself. ``rows`` runs a statement and
        commits it. Never raises: a hint that is lost costs the time until the sweep.
        """
        exclusive = finished.exclusive and (
            following is None or following.job_id != finished.job_id
        )
        slot_key = finished.slot_key
        if following is not None and following.slot_key == slot_key:
            slot_key = None
        if finished.job_id is None or not (exclusive or slot_key is not None):
            return
        asked = {
            "job_id": finished.job_id,
            "exclusive": exclusive,
            "slot_key": slot_key,
            "offered": finished.next_run_id,
        }
        try:
            freed = rows(_SQL["offer_freed"], asked)
        except (psycopg.Error, SQLAlchemyError) as error:
            logger.warning(
                "what run %s freed was not offered: %s", finished.run_id, first_line(error)
            )
            return
        if freed:
            due = [Offer(row["id"], row["queue"], row["priority"]) for row in freed]
            offers.publish(self._ports, due)

    def _write(
        self, link: Link, claimed: ClaimedRun, asked: Mapping[str, Any], log: RunLog | None
    ) -> Finished | None:
        delta = None if log is None else log.pending()
        if delta is None and not claimed.has_chain:
            row = link.row(_SQL["finish"], {**asked, "in_transaction": False})
            assert row is not None
            if row["id"] is not None:
                return Finished.of(row, asked["delay"])
            if not row["chained"]:
                return None
        connection = link.get()
        with connection.transaction():
            if delta is not None:
                statements.rows(
                    connection, log_statement(), log_parameters(claimed.id, claimed.token, delta)
                )
            row = statements.row(connection, _SQL["finish"], {**asked, "in_transaction": True})
            assert row is not None
            if row["id"] is None:
                return None
            following: list[Offer] = []
            if row["status"] == JobRunStatus.SUCCEEDED:
                handles = enqueue_next_of_chain(connection, row["id"], row["chain"])
                following = [handle.offer for handle in handles if handle.offerable]
        if delta is not None and log is not None:
            log.stored(delta)
        return Finished.of(row, asked["delay"], following)

    def _told_by_token(
        self, link: Link, asked: Mapping[str, Any], ending: Ending
    ) -> Finished | None:
        """How the run ended where an unanswered finish had landed; None where another was first."""
        row = link.row(_SQL["finish_by_token"], asked)
        if row is None:
            return None
        # Its wake-ups may have gone with the answer; one too many is only a hint.
        found = Finished.of(row, ending.delay)
        if found.status is not JobRunStatus.CANCELLED and (found.status, found.error_code) != (
            ending.status,
            ending.error_code,
        ):
            return None  # the heartbeat recorded and told of another end before (R-K3)
        return found


def _asked(claimed: ClaimedRun, ending: Ending) -> dict[str, Any]:
    return {
        **ending.parameters(),
        "run_id": claimed.id,
        "token": claimed.token,
        "actor": claimed.executor,
    }
