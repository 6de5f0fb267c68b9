"""What a handler is given: the run, its inputs, and the ways to report and to be stopped.

The built-in replication and a team's own ``@handler`` functions see nothing else of Claimcheck,
so the same guarantees hold for both.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, SupportsInt
from uuid import UUID

SHORTEST_SNOOZE_SECONDS = 1.0
"""A run that gave itself back at once would come round as fast as rows can be written."""
LONGEST_SNOOZE_SECONDS = 10 * 366 * 86_400.0
_MOST = 2**63 - 1
_LONGEST_TEXT = 1_000


class RunStopped(BaseException):
    """The work must end now: the run was cancelled, fenced, drained or ran out of time.

    A ``BaseException``, so that a handler's ``except Exception`` does not swallow it.
    ``reason`` is one of ``cancelled``, ``fenced``, ``worker_shutdown`` and ``timeout``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


STORED_KEYS = ("retry", "timeout", "overlap", "concurrency", "queue", "priority")
"""The keys of every job's stored definition, whatever its handler; the rest is the handler's."""

HANDLER_CODES = ("handler_error", "permanent", "source_error", "sink_error", "verify_failed")
"""The error codes that a handler may give its failure; the others say what the system found."""


class HandlerFailure(Exception):
    """A failure with a code of HANDLER_CODES; its message is stored after redaction.

    Any other code is recorded as ``handler_error``. ``permanent`` failures are not retried
    automatically (R-R4).
    """

    def __init__(
        self, message: str, *, code: str = "handler_error", permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.permanent = permanent


class PermanentFailure(HandlerFailure):
    """A failure that another attempt would only repeat; recorded with the code ``permanent``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="permanent", permanent=True)


class Snooze(BaseException):
    """Give the run back for ``delay`` seconds (database time), counting no attempt (R-R3).

    At least SHORTEST_SNOOZE_SECONDS pass. Raises ValueError for what is no such time.
    """

    def __init__(self, delay: float) -> None:
        try:
            seconds = float(delay)
        except (TypeError, ValueError):
            raise ValueError(f"Snooze takes seconds, not {delay!r}") from None
        if not 0 <= seconds <= LONGEST_SNOOZE_SECONDS:
            raise ValueError(f"Snooze takes seconds from 0 to ten years, not {delay!r}")
        self.delay = max(SHORTEST_SNOOZE_SECONDS, seconds)
        super().__init__(f"snoozed for {self.delay:g} s")


@dataclass(frozen=True, slots=True)
class BoundDatasource:
    """A datasource as the claim resolved it: its opened snapshot, fixed for the attempt (R-C5)."""

    id: UUID
    name: str
    connector: str
    config: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler hands back, stored with the run's success in one transaction (R-F2).

    ``watermark`` is the lower bound of the next read as text; ``watermark_type`` the PostgreSQL
    type by which it is compared (R-F3). ``counters`` holds the rows read, written, inserted,
    updated and unchanged.
    """

    result: Any = None
    rows_processed: int | None = None
    watermark: str | None = None
    watermark_type: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The last progress that a handler reported; times are the heartbeat's, not its own."""

    done: int = 0
    total: int | None = None
    total_is_estimate: bool = False
    bytes: int | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class ChildJob:
    """One child of a job over many tables: its name (``JOB/schema.table``) and whole definition."""

    name: str
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spawned:
    """Which child jobs got no run from `RunContext.spawn` without having one of this run already.

    ``active`` are left to a run that they have of another trigger (R-T6); ``gone`` are enabled
    children of earlier runs that are not among the given ones.
    """

    active: Sequence[str] = ()
    gone: Sequence[str] = ()


class RunContext:
    """The run as its handler sees it. Thread-safe: the heartbeat thread reads and stops it."""

    def __init__(
        self,
        *,
        id: UUID,
        root_run_id: UUID,
        job: str,
        job_id: UUID,
        attempt: int,
        fence: int,
        definition: Mapping[str, Any],
        params: Mapping[str, Any],
        source: BoundDatasource | None = None,
        sink: BoundDatasource | None = None,
        watermark: str | None = None,
        log: logging.Logger | None = None,
        spawn: Callable[[RunContext, Sequence[ChildJob]], Spawned] | None = None,
    ) -> None:
        self.id = id
        self.root_run_id = root_run_id
        self.job = job
        self.job_id = job_id
        self.attempt = attempt
        self.fence = fence
        self.definition = definition
        self.params = params
        self.source = source
        self.sink = sink
        self.watermark = watermark
        self.log = log or logging.getLogger(f"claimcheck.run.{id}")
        self._spawn = spawn
        self._lock = threading.Lock()
        self._progress = Progress()
        self._progress_changed = threading.Event()
        self._stop_reason: str | None = None
        self._stoppers: dict[int, Callable[[], None]] = {}
        self._next_stopper = 0
        self._warning: str | None = None

    # What the handler calls

    def progress(
        self,
        done: int,
        total: int | None = None,
        *,
        estimate: bool = False,
        bytes: int | None = None,
        phase: str | None = None,
    ) -> None:
        """Report progress in rows (and bytes). No I/O: the heartbeat stores it once a second.

        Raises RunStopped where the run was asked to stop, and ValueError for what is no number of
        rows or bytes.
        """
        self._progress = Progress(
            _whole("done", done),
            None if total is None else _whole("total", total),
            bool(estimate),
            None if bytes is None else _whole("bytes", bytes),
            None if phase is None else _storable(phase),
        )
        self._progress_changed.set()
        self.check_cancelled()

    def check_cancelled(self) -> None:
        """Raise RunStopped if this run was cancelled, fenced, drained or ran out of time.

        Call it before the first write to the sink and inside the last transaction (R-K2).
        """
        if self._stop_reason is not None:
            raise RunStopped(self._stop_reason)

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """While the block runs, ``stop`` is called from another thread when the work must end.

        ``stop`` breaks a blocking call (a statement, a socket). It may be called more than once;
        its errors are logged and ignored. Raises RunStopped where the run was stopped already.
        """
        with self._lock:
            self._next_stopper += 1
            key = self._next_stopper
            self._stoppers[key] = stop
        try:
            self.check_cancelled()
            yield
        finally:
            with self._lock:
                self._stoppers.pop(key, None)

    def spawn(self, children: Sequence[ChildJob]) -> Spawned:
        """Store or update each child job and enqueue a run of each with this run as its parent.

        Returns when they are durable, and does not wait for their end. What ends this run from then
        on says that they go on. A repetition, also by a later attempt, enqueues only what is
        missing. Raises HandlerFailure where the worker gave this run no way to have children.
        """
        if self._spawn is None:
            raise HandlerFailure("this run cannot have child jobs", permanent=True)
        return self._spawn(self, children)

    def sink_indeterminate(self, warning: str | None) -> None:
        """State that the sink may be left between two contents from here on (None: no longer).

        A cancellation that follows is stored with this text as its ``cancellation_warning`` (R-F4).
        """
        self._warning = None if warning is None else _storable(warning)

    # What the worker calls

    def stop(self, reason: str) -> None:
        """Ask the work to end; the first ``reason`` stays. Breaks registered blocking calls."""
        with self._lock:
            if self._stop_reason is None:
                self._stop_reason = reason
            stoppers = list(self._stoppers.values())
        for stop in stoppers:
            try:
                stop()
            except Exception as error:
                self.log.debug("a stopper of run %s failed: %s", self.id, type(error).__name__)

    @property
    def stop_reason(self) -> str | None:
        return self._stop_reason

    @property
    def warning(self) -> str | None:
        return self._warning

    def take_progress(self) -> Progress | None:
        """The progress reported since the last call, or None."""
        if not self._progress_changed.is_set():
            return None
        self._progress_changed.clear()
        return self._progress


def _whole(name: str, value: SupportsInt) -> int:
    """A number that a bigint holds. Handlers hand over numpy's and decimal's as well."""
    try:
        number = -1 if isinstance(value, float) and not math.isfinite(value) else int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, str) or not 0 <= number <= _MOST:
        raise ValueError(f"progress: {name} is a number from 0 to 2^63 - 1, not {value!r}")
    return number


def _storable(text: object) -> str:
    """Text that PostgreSQL can hold, in bounds."""
    found = str(text)[:_LONGEST_TEXT].replace("\x00", "\ufffd")
    return found.encode("utf-8", "replace").decode()
