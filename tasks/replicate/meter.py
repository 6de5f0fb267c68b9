"""Counting what flows: progress, the stop check and the bandwidth limit, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from dispatch.context import RunContext
from tasks.replicate.connector import Batch, Relation

REPORT_SECONDS = 0.1
NAP_SECONDS = 0.1
BURST_SECONDS = 0.25


class Throttle:
    """A limit of bytes a second (None: no limit). Time is monotonic; the limit may change."""

    def __init__(self, limit: float | None, check: Callable[[], None]) -> None:
        self.limit = limit
        self._check = check
        self._free_at = time.monotonic()

    def spend(self, size: int) -> None:
        """Wait until ``size`` more bytes are within the limit; ``check`` may raise meanwhile."""
        if self.limit is None:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + size / self.limit
        while now < self._free_at:
            time.sleep(min(NAP_SECONDS, self._free_at - now))
            self._check()
            now = time.monotonic()


class Meter:
    """One run's flow, over all its parts."""

    def __init__(self, context: RunContext, source: Relation, *, bandwidth: int | None) -> None:
        self._context = context
        self._source = source
        self._throttle = Throttle(bandwidth, context.check_cancelled)
        self._reported = 0.0
        self.rows = 0
        self.bytes = 0
        self.report("starting")

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, counted and held to the limit; raises RunStopped when asked to stop."""
        for batch in batches:
            self.add(batch.rows, batch.size)
            self._throttle.spend(batch.size)
            yield batch

    def add(self, rows: int, size: int) -> None:
        """Count, and report now and then."""
        self.rows += rows
        self.bytes += size
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self.report("reading")
            self._reported = now

    def report(self, phase: str) -> None:
        """Report rows and bytes so far, with an estimate of all rows where there is one."""
        total = self._total()
        self._context.progress(
            self.rows, total, estimate=total is not None, bytes=self.bytes, phase=phase
        )

    def _total(self) -> int | None:
        """The source's estimate, or as many rows as its bytes hold if all are like those so far;
        never fewer than were read."""
        total = self._source.rows
        if total is None and self._source.size and self.rows and self.bytes:
            total = self.rows * self._source.size // self.bytes
        return None if total is None else max(total, self.rows)
