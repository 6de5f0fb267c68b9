"""The work of one part: read its share, write it, and commit it where it goes to the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tasks.replicate import registry
from tasks.replicate.connector import (
    Batch,
    CommitUnknown,
    End,
    Load,
    Part,
    ReadRequest,
    Sink,
    SinkError,
)
from tasks.replicate.ends import reading, refuse_changes, settled, stop_soon
from tasks.replicate.guards import guarded
from tasks.replicate.meter import REPORT_SECONDS, Throttle


class Work:
    """A part's task, from :class:`tasks.replicate.parts.Team`."""

    def __init__(self, task: dict[str, Any], report: Callable[..., None]) -> None:
        self._task = task
        self._report = report
        self._ends: list[End] = []
        self._rows = self._bytes = 0
        self._reported = time.monotonic()
        self._stopped = False
        self._told = threading.Event()
        self.throttle = Throttle(task["bandwidth"], lambda: None)

    def begin(self) -> None:
        """From another thread: move the rows, now that all parts are connected."""
        self._told.set()

    def stop(self) -> None:
        """From another thread: break what the ends do, and commit no more."""
        self._stopped = True
        self._told.set()
        for end in list(self._ends):
            stop_soon(end)

    def run(self) -> None:
        """Raises HandlerFailure."""
        task = self._task
        request: ReadRequest = task["request"]
        part: Part = task["part"]
        load: Load = task["load"]
        name = task["name"]
        with registry.get(task["connectors"][0]).source(task["source"], name=name) as source:
            self._ends.append(source)
            with registry.get(task["connectors"][1]).sink(task["sink"], name=name) as sink:
                self._ends.append(sink)
                source.join(request, part)
                self._report(connected=True)
                self._told.wait()
                self._check()
                with reading(source, source.read(request, part, load.lane)) as batches:
                    flow = guarded(self._counted(batches), load.columns)
                    written = self._write(sink, load, flow)
        self._report(rows=self._rows, bytes=self._bytes, written=written)

    def _check(self) -> None:
        if self._stopped:
            raise SinkError("sink: stopped")

    def _write(self, sink: Sink, load: Load, flow: Iterator[Batch]) -> int:
        if load.how:
            return sink.write(load, flow, staging=True)
        try:
            sink.begin(load)
            refuse_changes(sink, load)
            written = sink.write(load, flow, staging=False)
            self._check()
        except BaseException:
            sink.rollback()
            raise
        try:
            sink.commit()
        except CommitUnknown as lost:
            if not settled(sink, load, self._check):
                raise SinkError(f"the sink broke while a part committed: {lost}") from None
        return written

    def _counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._rows += batch.rows
            self._bytes += batch.size
            now = time.monotonic()
            if now - self._reported >= REPORT_SECONDS:
                self._report(rows=self._rows, bytes=self._bytes)
                self._rows = self._bytes = 0
                self._reported = now
            self.throttle.spend(batch.size)
            yield batch
