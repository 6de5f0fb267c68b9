"""What a worker does with a wake-up: claim, execute, finish, and go on (R-C1, R-D8)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import psycopg

from db import session, settings
from db.envelopes import EnvelopeError
from db.failures import is_connection_lost
from db.keyring import Keyring, KeyringError
from db.link import Link
from dispatch import execution, handlers, offers
from dispatch.backoff import Backoff
from dispatch.claims import ClaimedRun, RunClaims
from dispatch.deadlines import Agenda, Scope, look
from dispatch.execution import Spawn
from dispatch.finalization import (
    Ending,
    Finished,
    FinishLost,
    FinishRefused,
    RunFinalizationService,
)
from dispatch.handlers import Handler
from dispatch.handover import Handover
from dispatch.held import HeldRun
from dispatch.keeper import Ender, LeaseKeeper
from dispatch.leases import RunLeaseService
from dispatch.policy import timeout_of
from dispatch.ports import EventKind, Offer, Ports, RunEvent
from dispatch.redaction import secrets_known
from dispatch.runlog import RunLog

CLAIM_PATIENCE_SECONDS = 10.0
"""How long a claim may take to be answered; a directed one may wait a second for an edit."""
SHORT_RUN_SECONDS = 0.1
"""A run that took less ends in one transaction with the executor's next claim, where it can."""
LAST_FINISH_SECONDS = 5.0
"""How long after a drain has stopped its runs their ends are still tried to be recorded."""

logger = logging.getLogger("claimcheck.coordinator")


class WorkerDispatchCoordinator:
    """Executes runs for one process; its threads share it, each with a connection of its own.

    ``executor`` names the calling thread or child (R-L5); ``keyring`` gives the keys that it holds.
    ``on_stuck`` ends the process whose run does not stop; without it its connections are cut.
    The three numbers default to the settings.
    """

    def __init__(
        self,
        ports: Ports,
        *,
        executor: Callable[[], str],
        keyring: Callable[[], Keyring],
        known: Callable[[], Sequence[str]] = handlers.known,
        handler: Callable[[str], Handler | None] = handlers.get,
        spawn: Spawn | None = None,
        on_stuck: Ender | None = None,
        lease_seconds: float | None = None,
        slot_runs: int | None = None,
        shutdown_seconds: float | None = None,
    ) -> None:
        configured = settings.settings()
        self._ports = ports
        self._executor = executor
        self._keyring = keyring
        self._handler = handler
        self._spawn = spawn
        self._lease_seconds = lease_seconds or configured.lease_seconds
        self._slot_runs = slot_runs or configured.slot_runs
        self._shutdown_seconds = (
            configured.shutdown_seconds if shutdown_seconds is None else shutdown_seconds
        )
        self._claims = RunClaims(
            executor,
            self._lease_seconds,
            handlers=known,
            key_versions=lambda: keyring().versions,
        )
        self._handover = Handover(ports, self._claims)
        self._finalization = RunFinalizationService(ports)
        self._keeper = LeaseKeeper(
            RunLeaseService(self._lease_seconds), record=self._record_stuck, on_stuck=on_stuck
        )
        self._links: dict[threading.Thread, Link] = {}
        self._links_lock = threading.Lock()
        self._drain_at: float | None = None

    # Life cycle

    def run(self, run_id: UUID | None, queue: str, priority: int = 0) -> list[UUID]:
        """Take a wake-up: the named run, else the next one of ``queue``; then go on in that queue.

        Goes on while there is work, up to a bound of runs in a row, and offers the rest (R-C1). The
        ids of the runs that were executed. Where the database is away the wake-up is waited with
        for a lease and then dropped: the sweep repeats it. While the process drains it goes back to
        its queue with ``priority``, the one that it came with.
        """
        if self.is_draining:
            if run_id is not None:
                self._ports.offer([Offer(run_id, queue, priority)])
            return []
        done: list[UUID] = []
        claimed = self._claim(run_id, queue)
        while claimed is not None:
            done.append(claimed.id)
            claimed = self._execute(claimed, queue if len(done) < self._slot_runs else None)
        if len(done) >= self._slot_runs and not self.is_draining:
            self._offer_rest(queue)
        return done

    def run_only(self, run_id: UUID) -> bool:
        """Execute the named run and no other; False where it cannot be claimed now.

        Raises psycopg.Error where the control database is away.
        """
        claimed = None if self.is_draining else self._claims.directed(self._link, run_id)
        if claimed is not None:
            self._execute(claimed, None)
        return claimed is not None

    def drain(self, seconds: float | None = None, stop_grace: float | None = None) -> None:
        """Claim nothing more; stop what still runs in ``seconds`` (default: the setting) (R-D8).

        Work that was stopped so has ``stop_grace`` seconds to end. Returns at once, and may be
        called again to shorten the time. Fit for a signal handler.
        """
        grace = self._shutdown_seconds if seconds is None else seconds
        at = time.monotonic() + grace
        self._drain_at = at if self._drain_at is None else min(at, self._drain_at)
        self._keeper.drain(grace, stop_grace)

    @property
    def is_draining(self) -> bool:
        return self._drain_at is not None

    @property
    def held(self) -> list[UUID]:
        """The ids of the runs that this process holds now."""
        return [run.id for run in self._keeper.held]

    def stop(self) -> None:
        """End the keeper's threads once nothing is held; `wait` for it."""
        self._keeper.stop()

    def wait(self, seconds: float) -> bool:
        """Whether the keeper's threads have ended within ``seconds``."""
        return self._keeper.wait(seconds)

    def close(self) -> None:
        """Close all its connections; no thread may be at work any more."""
        with self._links_lock:
            for link in self._links.values():
                link.close()
            self._links.clear()

    @property
    def _link(self) -> Link:
        thread = threading.current_thread()
        link = self._links.get(thread)
        if link is None:
            link = Link("claimcheck worker", patience=CLAIM_PATIENCE_SECONDS)
            with self._links_lock:
                for other in [other for other in self._links if not other.is_alive()]:
                    self._links.pop(other).close()
                self._links[thread] = link
        return link

    # Claiming

    def _claim(self, run_id: UUID | None, queue: str) -> ClaimedRun | None:
        backoff = Backoff(self._lease_seconds, first=0.1)
        while not self.is_draining:
            try:
                claimed = None
                if run_id is not None:
                    claimed = self._claims.directed(self._link, run_id)
                    if claimed is None:
                        self._handover.hand_on(self._link, run_id)
                return claimed or self._claims.next(self._link, queue)
            except psycopg.Error as error:
                self._link.close()
                if not is_connection_lost(error):
                    raise
                if not backoff.pause():
                    logger.warning("a wake-up is dropped: the control database is away")
                    return None
        return None

    def _next(self, queue: str | None) -> ClaimedRun | None:
        if queue is None or self.is_draining:
            return None
        try:
            return self._claims.next(self._link, queue)
        except psycopg.Error as error:
            self._link.close()
            if not is_connection_lost(error):
                raise
            return None

    def _offer_rest(self, queue: str) -> None:
        """The executor goes back to Celery: wake-ups take its place, as far as there is work."""
        try:
            agenda = Agenda()
            look(self._link.get(), agenda, [Scope(queue=queue, work=True)])
            due = agenda.of_queue(queue, time.monotonic(), regardless=True)
            offers.offer_waiting(self._ports, self._link.get(), queue, due, regardless=True)
        except psycopg.Error as error:
            self._link.close()
            logger.warning("queue %s was not offered on (%s)", queue, type(error).__name__)

    # Executing

    def _execute(self, claimed: ClaimedRun, queue: str | None) -> ClaimedRun | None:
        """Execute a run to its recorded end; the next run of ``queue``, if it may go on."""
        self._emit_start(claimed)
        try:
            inputs = execution.open_inputs(claimed, self._keyring())
        except (EnvelopeError, KeyringError) as error:
            return self._end_unheld(claimed, execution.unreadable(claimed, error), queue)
        name = str(claimed.snapshot.get("handler"))
        handler = self._handler(name)
        if handler is None:
            return self._end_unheld(claimed, execution.unknown_handler(claimed, name), queue)
        log = RunLog()
        run = HeldRun(
            claimed=claimed,
            context=execution.context_of(claimed, log, inputs, self._spawn),
            log=log,
            lease_seconds=self._lease_seconds,
            timeout=timeout_of(claimed.definition),
            good_since=claimed.asked_at,
        )
        with secrets_known(inputs.secrets):
            self._keeper.hold(run)
            try:
                ending = self._work(run, handler)
                return self._end(run, ending, queue)
            finally:
                self._keeper.let_go(run)

    def _work(self, run: HeldRun, handler: Handler) -> Ending | None:
        try:
            return execution.perform(run, handler)
        except (SystemExit, KeyboardInterrupt):
            # The process is told to end in the midst of the work: what a drain does, at once.
            self.drain(0.0)
            run.context.stop("worker_shutdown")
            self._end(run, execution.stopped_by(run, "worker_shutdown"), None)
            raise
        finally:
            run.work_ended = True

    def _end(self, run: HeldRun, ending: Ending | None, queue: str | None) -> ClaimedRun | None:
        """Record the end of a run's work, and go on."""
        if ending is None:
            logger.warning("run %s was fenced: nothing of it is recorded", run.id)
            return self._next(queue)
        is_uncertain, following = False, None
        if queue is not None and self._is_short(run):
            ended, is_uncertain, following = self._end_and_claim(run, ending, queue)
            if ended is not None:
                self._finalization.announce(ended)
                following = following or self._next(queue)
                self._finalization.offer_freed(self._link.rows, ended, following)
                return following
        try:
            finished = self._record(run.claimed, ending, run.log, is_uncertain)
        except FinishRefused as error:
            finished = self._record(run.claimed, execution.refused(run, error), run.log)
        following = following or self._next(queue)
        if finished is not None:
            self._finalization.offer_freed(self._link.rows, finished, following)
        return following

    def _end_unheld(
        self, claimed: ClaimedRun, ending: Ending, queue: str | None
    ) -> ClaimedRun | None:
        finished = self._record(claimed, ending, None)
        following = self._next(queue)
        if finished is not None:
            self._finalization.offer_freed(self._link.rows, finished, following)
        return following

    def _is_short(self, run: HeldRun) -> bool:
        return (
            time.monotonic() - run.began < SHORT_RUN_SECONDS
            and not run.claimed.has_chain
            and run.log.pending() is None
            and not self.is_draining
            and not session.is_pooled()
        )

    def _end_and_claim(
        self, run: HeldRun, ending: Ending, queue: str
    ) -> tuple[Finished | None, bool, ClaimedRun | None]:
        """End a short run and claim the next in one transaction: both, or neither, or unknown.

        The end, if it was recorded; whether that is uncertain; and the next run.
        """
        request = self._claims.request(queue)
        try:
            finished, row = self._finalization.finish_and_claim(
                self._link, run.claimed, ending, request
            )
        except FinishRefused:
            return None, False, None
        except psycopg.Error as error:
            if not is_connection_lost(error):
                return None, False, None
            self._link.close()
            try:
                return None, True, self._claims.settle(self._link, request)
            except psycopg.Error:
                self._link.close()
                return None, True, None
        return finished, False, self._claims.received(request, row)

    def _record(
        self, claimed: ClaimedRun, ending: Ending, log: RunLog | None, is_uncertain: bool = False
    ) -> Finished | None:
        try:
            finished = self._finalization.finish(
                self._link,
                claimed,
                ending,
                log=log,
                gives_up=self._is_past_drain,
                is_uncertain=is_uncertain,
            )
        except FinishLost as error:
            logger.error("%s; its lease is left to expire", error)
            return None
        if finished is None:
            logger.warning("run %s was fenced: its end is not recorded", claimed.id)
        else:
            self._finalization.announce(finished)
        return finished

    def _record_stuck(self, run: HeldRun, link: Link) -> None:
        """From the heartbeat: the end of work that does not stop (R-K3).

        Raises FinishLost and psycopg.Error, after which it is tried again.
        """
        ending = execution.stopped_by(run, run.context.stop_reason or "fenced")
        if ending is None:
            return
        finished = self._finalization.finish(
            link, run.claimed, ending, log=run.log, gives_up=lambda: True
        )
        if finished is not None:
            self._finalization.announce(finished)
            self._finalization.offer_freed(link.rows, finished)

    def _is_past_drain(self) -> bool:
        return (
            self._drain_at is not None and time.monotonic() > self._drain_at + LAST_FINISH_SECONDS
        )

    def _emit_start(self, claimed: ClaimedRun) -> None:
        kinds: tuple[EventKind, EventKind] = ("received", "started")
        for kind in kinds:
            self._ports.emit(
                RunEvent(
                    kind=kind,
                    run_id=claimed.id,
                    root_run_id=claimed.root_run_id,
                    previous_run_id=claimed.previous_run_id,
                    job=claimed.job,
                    attempt=claimed.attempt,
                    queue=claimed.queue,
                )
            )
