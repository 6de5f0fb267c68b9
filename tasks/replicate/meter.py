"""Counting what flows: progress, the stop check and the bandwidth limit, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from dispatch.context import RunContext
from tasks.replicate.connector import Batch

REPORT_SECONDS = 0.1
NAP_SECONDS = 0.1


class Meter:
    """One run's flow, over all its parts. Time is monotonic."""

    def __init__(self, context: RunContext, total: int | None, *, bandwidth: int | None) -> None:
        self._context = context
        self._total = total
        self._bandwidth = bandwidth
        self._started = time.monotonic()
        self._reported = 0.0
        self.rows = 0
        self.bytes = 0
        self.report("starting")

    def through(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, counted and held to the limit; raises RunStopped when asked to stop."""
        for batch in batches:
            self.add(batch.rows, batch.size)
            yield batch

    def add(self, rows: int, size: int) -> None:
        """Count a batch, report now and then, and wait where the limit asks for it."""
        self.rows += rows
        self.bytes += size
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self.report("reading")
            self._reported = now
        if self._bandwidth is not None:
            self._hold(now)

    def _hold(self, now: float) -> None:
        assert self._bandwidth is not None
        due = self._started + self.bytes / self._bandwidth
        while now < due:
            time.sleep(min(NAP_SECONDS, due - now))
            self._context.check_cancelled()
            now = time.monotonic()

    def report(self, phase: str) -> None:
        """Report rows and bytes so far; the total is the source's estimate."""
        total = self._total
        if total is not None and total < self.rows:
            total = self.rows
        self._context.progress(
            self.rows, total, estimate=total is not None, bytes=self.bytes, phase=phase
        )
