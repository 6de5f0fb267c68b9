"""What a worker does with a wake-up: claim, execute, finish, and go on (R-C1, R-D8)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import psycopg

from db import settings
from db.envelopes import EnvelopeError
from db.failures import is_connection_lost
from db.keyring import Keyring, KeyringError
from db.link import Link
from db.redaction import secrets_known
from dispatch import execution, handlers, offers
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
from dispatch.held import HeldRun
from dispatch.keeper import Ender, LeaseKeeper
from dispatch.leases import RunLeaseService
from dispatch.policy import timeout_of
from dispatch.ports import EventKind, Offer, Ports, RunEvent
from dispatch.runlog import RunLog

CLAIM_PATIENCE_SECONDS = 10.0
"""How long a claim may take to be answered; a directed one waits a second for each lock."""
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
        self._finalization = RunFinalizationService(ports)
        self._keeper = LeaseKeeper(
            RunLeaseService(self._lease_seconds), record=self._record_stuck, on_stuck=on_stuck
        )
        self._links: dict[threading.Thread, Link] = {}
        self._links_lock = threading.Lock()
        self._drain_at: float | None = None

    # Life cycle

    def run(self, run_id: UUID | None, queue: str) -> list[UUID]:
        """Take a wake-up: the named run, else the next one of ``queue``; then go on in that queue.

        Goes on while there is work, up to the slot's bound of runs, and hands the rest on by
        wake-ups (R-C1). The ids of the runs that were executed. Where the database is away the
        wake-up is waited with for a lease and then dropped: the sweep repeats it.
        """
        if self.is_draining:
            if run_id is not None:
                self._ports.offer([Offer(run_id, queue, 0)])
            return []
        done: list[UUID] = []
        claimed = self._claim(run_id, queue)
        while claimed is not None:
            done.append(claimed.id)
            finished = self._execute(claimed)
            may_go_on = not self.is_draining and len(done) < self._slot_runs
            claimed = self._next(queue, finished, claimed, may_go_on)
        if len(done) >= self._slot_runs and not self.is_draining:
            self._hand_on(queue)
        return done

    def run_only(self, run_id: UUID) -> bool:
        """Execute the named run and no other; False where it cannot be claimed now.

        Raises psycopg.Error where the control database is away.
        """
        claimed = None if self.is_draining else self._claims.directed(self._link, run_id)
        if claimed is not None:
            self._next(claimed.queue, self._execute(claimed), claimed, may_go_on=False)
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
        give_up_at = time.monotonic() + self._lease_seconds
        pause = 0.1
        while not self.is_draining:
            try:
                claimed = None
                if run_id is not None:
                    claimed = self._claims.directed(self._link, run_id)
                return claimed or self._claims.next(self._link, queue)
            except psycopg.Error as error:
                self._link.close()
                if not is_connection_lost(error):
                    raise
                if time.monotonic() + pause > give_up_at:
                    logger.warning("a wake-up is dropped: the control database is away")
                    return None
            time.sleep(pause)
            pause = min(2 * pause, 2.0)
        return None

    def _next(
        self, queue: str, finished: Finished | None, before: ClaimedRun, may_go_on: bool
    ) -> ClaimedRun | None:
        """The slot's next run; what the last one freed and this one does not take is offered."""
        try:
            following = self._claims.next(self._link, queue) if may_go_on else None
        except psycopg.Error as error:
            self._link.close()
            if not is_connection_lost(error):
                raise
            return None
        if finished is not None:
            self._offer_freed(finished, before, following)
        return following

    def _offer_freed(
        self, finished: Finished, before: ClaimedRun, following: ClaimedRun | None
    ) -> None:
        turn = before.exclusive and (following is None or following.job_id != before.job_id)
        slot = before.slot_key is not None and (
            following is None or following.slot_key != before.slot_key
        )
        if not turn and not slot:
            return
        try:
            self._finalization.offer_freed(self._link, finished, turn=turn, slot=slot)
        except psycopg.Error as error:
            # A hint that is lost costs the time until the sweep.
            self._link.close()
            logger.warning(
                "what run %s freed was not offered (%s)", finished.run_id, type(error).__name__
            )

    def _hand_on(self, queue: str) -> None:
        """The slot goes back to Celery: wake-ups take its place, as far as there is work."""
        try:
            agenda = Agenda()
            look(self._link.get(), agenda, [Scope(queue=queue, work=True)])
            due = agenda.of_queue(queue, time.monotonic(), regardless=True)
            offers.offer_waiting(self._ports, self._link.get(), queue, due, regardless=True)
        except psycopg.Error as error:
            self._link.close()
            logger.warning("queue %s was not offered on (%s)", queue, type(error).__name__)

    # Executing

    def _execute(self, claimed: ClaimedRun) -> Finished | None:
        self._emit_start(claimed)
        try:
            inputs = execution.open_inputs(claimed, self._keyring())
        except (EnvelopeError, KeyringError) as error:
            return self._finish_unheld(claimed, execution.unreadable(claimed, error))
        name = str(claimed.snapshot.get("handler"))
        handler = self._handler(name)
        if handler is None:
            return self._finish_unheld(claimed, execution.unknown_handler(claimed, name))
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
                return self._work(run, handler)
            finally:
                self._keeper.let_go(run)

    def _work(self, run: HeldRun, handler: Handler) -> Finished | None:
        try:
            ending = execution.perform(run, handler)
        except (SystemExit, KeyboardInterrupt):
            # The process is told to end in the midst of the work: what a drain does, at once.
            self.drain(0.0)
            run.context.stop("worker_shutdown")
            self._finish(run, execution.stopped_by(run, "worker_shutdown"))
            raise
        return self._finish(run, ending)

    def _finish(self, run: HeldRun, ending: Ending | None) -> Finished | None:
        run.work_ended = True
        if ending is None:
            logger.warning("run %s was fenced: nothing of it is recorded", run.id)
            return None
        try:
            try:
                return self._record(run.claimed, ending, run.log)
            except FinishRefused as error:
                return self._record(run.claimed, execution.refused(run, error), run.log)
        except FinishLost as error:
            logger.error("%s; its lease is left to expire", error)
            return None

    def _finish_unheld(self, claimed: ClaimedRun, ending: Ending) -> Finished | None:
        try:
            return self._record(claimed, ending, None)
        except FinishLost as error:
            logger.error("%s; its lease is left to expire", error)
            return None

    def _record(self, claimed: ClaimedRun, ending: Ending, log: RunLog | None) -> Finished | None:
        finished = self._finalization.finish(
            self._link, claimed, ending, log=log, gives_up=self._is_past_drain
        )
        if finished is None:
            logger.warning("run %s was fenced: its end is not recorded", claimed.id)
        else:
            self._finalization.announce(finished)
        return finished

    def _record_stuck(self, run: HeldRun, link: Link) -> None:
        """From the heartbeat: the end of work that does not stop (R-K3). Raises psycopg.Error."""
        ending = execution.stopped_by(run, run.context.stop_reason or "fenced")
        if ending is None:
            return
        finished = self._finalization.finish(
            link, run.claimed, ending, log=run.log, gives_up=lambda: True
        )
        if finished is not None:
            self._finalization.announce(finished)

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
