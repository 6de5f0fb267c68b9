"""The threads that keep a process's held runs: one renews and listens, one watches the time.

The heartbeat owns a connection of its own, opened only where a run lasts (R-L4). The watch does no
input or output at all, so that stopping the work never depends on a database that hangs (R-L3).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from uuid import UUID

import psycopg

from db import session
from db.link import Link
from dispatch.held import HeldRun
from dispatch.leases import LeaseState, RunLeaseService

LINGER_SECONDS = 2.0
REPORT_SECONDS = 1.0
TICK_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 5.0
STOP_GRACE_SECONDS = 5.0
"""How long work that was told to stop may take, by default, before it is given up."""
CANCEL_GRACE_SECONDS = 30.0
RECORD_SECONDS = 3.0
"""How long recording the end of such work may take before its process is ended regardless."""
LATER_SECONDS = 3600.0
AGAIN_SECONDS = 1.0
"""How soon the watch tries again what failed."""

logger = logging.getLogger("claimcheck.keeper")

Recorder = Callable[[HeldRun, Link], None]
"""Records the end of a run whose work does not stop, under its token."""
Ender = Callable[[UUID, str], None]
"""Ends the process that works on a run; where there is none, the work cannot be ended."""


class LeaseKeeper:
    """Keeps every run that this process holds. Start, stop, and wait; safe across fork.

    ``record`` is called from the heartbeat thread for work that does not stop in its grace, then
    ``on_stuck`` from the watch thread with the run's id and the reason.
    """

    def __init__(
        self,
        service: RunLeaseService,
        *,
        record: Recorder,
        on_stuck: Ender | None = None,
        stop_grace: float = STOP_GRACE_SECONDS,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
    ) -> None:
        self._service = service
        self._record = record
        self._on_stuck = on_stuck
        self._stop_grace = stop_grace
        self._cancel_grace = cancel_grace
        self._patience = min(5.0, max(0.25, service.lease_seconds / 6))
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._held: dict[UUID, HeldRun] = {}
        lock = threading.Lock()
        self._for_heartbeat = threading.Condition(lock)
        self._for_watch = threading.Condition(lock)
        self._heartbeat_sleeps = False
        self._watch_wakes_at = float("inf")
        self._heartbeat: threading.Thread | None = None
        self._watch: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._stopping = False
        self._drain_at: float | None = None
        self._drain_grace = self._stop_grace
        self._listening: session.ControlConnection | None = None
        self._is_broken = False
        self._link = Link(
            "claimcheck heartbeat",
            patience=self._patience,
            planner={},
            listening=self._open,
        )

    # What the worker calls

    def hold(self, run: HeldRun) -> None:
        """Keep ``run`` from now on; starts the threads where they do not run yet."""
        if self._owner != os.getpid():
            self._reset()
        with self._for_watch:
            self._start()
            self._held[run.id] = run
            # A short run wakes nobody: the threads find it, or its end, when they wake anyway.
            if self._heartbeat_sleeps:
                self._for_heartbeat.notify()
            if min(self._limits(run))[0] < self._watch_wakes_at:
                self._for_watch.notify()

    def let_go(self, run: HeldRun) -> None:
        """Keep ``run`` no longer: its end is recorded, or given up."""
        run.ended.set()
        with self._for_watch:
            self._held.pop(run.id, None)

    def drain(self, seconds: float, stop_grace: float | None = None) -> None:
        """Stop every run that is still held in ``seconds`` from now with ``worker_shutdown``.

        Such work has ``stop_grace`` seconds to stop, by default what any work has.
        """
        # No lock here: a signal handler may call this, interrupting the holder of one.
        self._drain_grace = self._stop_grace if stop_grace is None else stop_grace
        at = time.monotonic() + seconds
        self._drain_at = at if self._drain_at is None else min(at, self._drain_at)
        threading.Thread(target=self._notify, name="claimcheck-drain", daemon=True).start()

    def stop(self) -> None:
        """End both threads once nothing is held any more; `wait` for it."""
        self._stopping = True
        self._notify()

    def wait(self, seconds: float) -> bool:
        """Whether both threads have ended within ``seconds``."""
        until = time.monotonic() + seconds
        for thread in (self._heartbeat, self._watch):
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    return False
        return True

    @property
    def held(self) -> list[HeldRun]:
        with self._for_watch:
            return list(self._held.values())

    @property
    def is_connected(self) -> bool:
        return self._link.is_open

    def _start(self) -> None:
        if self._wake_read < 0:
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
        if self._heartbeat is None or not self._heartbeat.is_alive():
            self._stopping = False
            self._heartbeat = threading.Thread(
                target=self._keep, name="claimcheck-heartbeat", daemon=True
            )
            self._heartbeat.start()
        if self._watch is None or not self._watch.is_alive():
            self._watch = threading.Thread(
                target=self._watch_time, name="claimcheck-watch", daemon=True
            )
            self._watch.start()

    def _notify(self) -> None:
        with self._for_watch:
            self._for_watch.notify()
            self._for_heartbeat.notify()
        self._wake()

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b".")

    # The heartbeat: all input and output

    def _keep(self) -> None:
        backoff = 0.0
        while True:
            try:
                runs = self._await_runs()
                if runs is None:
                    self._link.close()
                    return
                if not runs:
                    continue
                self._beat(runs)
                backoff = 0.0
                self._is_broken = False
            except psycopg.Error as error:
                self._link.close()
                self._is_broken = True
                backoff = min(LONGEST_BACKOFF_SECONDS, max(0.1, 2 * backoff))
                backoff = min(backoff, self._service.lease_seconds / 12)
                logger.warning(
                    "no answer from the control database for the heartbeat (%s); again in %.1f s",
                    type(error).__name__,
                    backoff,
                )
                self._pause(backoff)
            except Exception:
                # Whatever it was, the leases must go on being renewed.
                logger.exception("the heartbeat failed; it goes on")
                self._link.close()
                self._pause(1.0)

    def _await_runs(self) -> list[HeldRun] | None:
        """The held runs, once one lasts long enough to be kept; None when the thread shall end."""
        with self._for_heartbeat:
            if not self._held:
                if self._stopping:
                    return None
                # The connection stays for a moment, for the next run of a busy slot.
                self._sleep(LINGER_SECONDS if self._link.is_open else None)
            elif not self._link.is_open and not self._is_broken:
                # A short run costs no connection. One that broke is opened again at once, because
                # a cancel must be seen within a second (R-K2), not at the next renewal.
                due = min(run.renew_at for run in self._held.values()) - time.monotonic()
                if due > 0:
                    self._for_heartbeat.wait(min(due, TICK_SECONDS))
                    return []
            runs = list(self._held.values())
        if not runs:
            self._link.close()
        return runs

    def _sleep(self, seconds: float | None) -> None:
        self._heartbeat_sleeps = True
        self._for_heartbeat.wait(seconds)
        self._heartbeat_sleeps = False

    def _beat(self, runs: list[HeldRun]) -> None:
        connection = self._link.get()
        # A connection that was just opened has missed what was said before: look at every run.
        is_new, self._listening = connection is not self._listening, connection
        for run in runs:
            if run.ended.is_set() or run.recorded:
                continue
            if run.recording_since is not None:
                self._record_end(run)
            else:
                self._keep_one(run, at_once=is_new)
        named = {notify.payload for notify in connection.notifies(timeout=0)}
        if not named:
            # What came along with the answers above makes the socket no longer readable.
            self._await_news(connection, min((run.renew_at for run in runs), default=0.0))
            named = {notify.payload for notify in connection.notifies(timeout=0)}
        for run in self.held:
            if str(run.id) in named and not run.ended.is_set():
                self._keep_one(run, at_once=True)

    def _await_news(self, connection: session.ControlConnection, until: float) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        seconds = max(0.0, min(until - time.monotonic(), TICK_SECONDS))
        if self._wake_read in {fd for fd, _ in poll.poll(1000 * seconds)}:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def _keep_one(self, run: HeldRun, *, at_once: bool) -> None:
        now = time.monotonic()
        try:
            if at_once or now >= run.renew_at:
                self._renew(run)
            if now >= run.report_after:
                run.report_after = now + REPORT_SECONDS
                self._report(run)
        except psycopg.errors.LockNotAvailable:
            # Someone holds this row: the other runs' leases must not wait for it.
            run.renew_at = max(run.renew_at, now + self._patience)

    def _report(self, run: HeldRun) -> None:
        token = run.claimed.token
        if (progress := run.fresh_progress()) is not None:
            state = self._service.report(self._link, run.id, token, progress)
            self._heed(run, state, progress)
        if (delta := run.log.pending()) is not None and self._service.write_log(
            self._link, run.id, token, delta
        ):
            run.log.stored(delta)

    def _renew(self, run: HeldRun) -> None:
        progress = run.fresh_progress()
        asked_at = time.monotonic()
        state = self._service.renew(self._link, run.id, run.claimed.token, progress)
        if state.is_held:
            run.renewed(asked_at)
        self._heed(run, state, progress)

    def _heed(self, run: HeldRun, state: LeaseState, progress: object) -> None:
        if progress is not None and run.unstored is progress:
            run.unstored = None
        if run.ended.is_set():
            return
        if state is LeaseState.CANCEL_REQUESTED:
            run.stop("cancelled")
        elif not state.is_held:
            # Nothing renews it any more; the work stops, and writes nothing (R-F1).
            run.renew_at = float("inf")
            run.stop("fenced")

    def _record_end(self, run: HeldRun) -> None:
        self._record(run, self._link)
        run.renew_at = float("inf")
        with self._for_watch:
            run.recorded = True
            self._for_watch.notify()

    def _pause(self, seconds: float) -> None:
        with self._for_heartbeat:
            if self._held or not self._stopping:
                self._for_heartbeat.wait(seconds)

    def _open(self) -> session.ControlConnection:
        connection = session.connect_direct("claimcheck heartbeat", patience=self._patience)
        connection.execute(
            "select set_config('lock_timeout', %s, false)", (f"{self._patience * 500:.0f}ms",)
        )
        connection.execute("listen claimcheck_cancel")
        return connection

    # The watch: no input or output

    def _watch_time(self) -> None:
        with self._for_watch:
            while self._held or not self._stopping:
                now = time.monotonic()
                upcoming = [self._watched(run, now) for run in self._held.values()]
                self._watch_wakes_at = min(upcoming, default=float("inf"))
                self._for_watch.wait(max(0.0, self._watch_wakes_at - now) if upcoming else None)

    def _watched(self, run: HeldRun, now: float) -> float:
        """As `_look_at`; what fails there, as a thread that cannot be started, is done again."""
        try:
            return self._look_at(run, now)
        except Exception:
            logger.exception("what is due for run %s failed; it is tried again", run.id)
            return now + AGAIN_SECONDS

    def _look_at(self, run: HeldRun, now: float) -> float:
        """Do what is due for ``run``; when to look again."""
        if run.ended.is_set() or run.given_up or run.work_ended:
            return now + LATER_SECONDS
        if run.stopped_at is None:
            at, reason = min(self._limits(run))
            if now < at:
                return at
            run.stop(reason)
            return now
        reason = run.context.stop_reason or run.stopped_for or "fenced"
        last = (
            run.dead_at
            if run.recording_since is None
            else min(run.dead_at, run.recording_since + RECORD_SECONDS)
        )
        if now < last and not run.recorded:
            if run.recording_since is not None:
                return last
            give_up_at = min(last, run.stopped_at + self._grace(reason))
            if now < give_up_at:
                return give_up_at
            if reason != "fenced":
                run.recording_since = now
                self._wake()
                return now
        self._give_up(run, reason)
        return now + LATER_SECONDS

    def _limits(self, run: HeldRun) -> list[tuple[float, str]]:
        limits = [(run.fenced_at, "fenced")]
        if run.timeout_at is not None:
            limits.append((run.timeout_at, "timeout"))
        if self._drain_at is not None:
            limits.append((self._drain_at, "worker_shutdown"))
        return limits

    def _grace(self, reason: str) -> float:
        if reason == "worker_shutdown":
            return self._drain_grace
        if reason != "cancelled":
            return self._stop_grace
        # Where nothing can end the work, the run stays what it is: held, and asked to stop.
        return self._cancel_grace if self._on_stuck is not None else float("inf")

    def _give_up(self, run: HeldRun, reason: str) -> None:
        threading.Thread(
            target=self._end, args=(run, reason), name="claimcheck-end", daemon=True
        ).start()
        run.given_up = True

    def _end(self, run: HeldRun, reason: str) -> None:
        logger.error(
            "run %s was told to stop (%s) and did not: %s",
            run.id,
            reason,
            "its process is ended" if self._on_stuck else "its connections are cut",
        )
        if self._on_stuck is None:
            run.context.stop(reason)
        else:
            self._on_stuck(run.id, reason)
