"""Opening the two ends of a run so that a stop breaks even a connect to a frozen server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dispatch.context import RunContext
from tasks.replicate.connector import Batch, End, Load, Sink, SinkError, Source, was_altered
from tasks.replicate.garbage import rarely_collected

E = TypeVar("E", bound=End)


AHEAD = 4
"""Batches that wait for the sink, where a source reads ahead."""
SETTLE_SECONDS = 30.0
"""How long a sink that broke while it committed is asked what became of it."""
_NAP_SECONDS = 0.5


@contextmanager
def reading(source: Source, batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """A read that is ended with the block, before its source is closed, also where it failed.

    Its batches come in shares that are not large. A source whose work is Python's own
    (:attr:`Source.reads_ahead`) does it in a thread, while this one waits for the sink's server.
    """
    with rarely_collected():
        try:
            if source.reads_ahead:
                with _ahead(batches) as found:
                    yield _in_shares(found)
            else:
                yield _in_shares(batches)
        finally:
            end = getattr(batches, "close", None)
            if end is not None:
                end()


def _in_shares(batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield from batch.shares()


@contextmanager
def _ahead(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    waiting: queue.Queue[Batch | BaseException | None] = queue.Queue(AHEAD)
    left = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not left.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
        except BaseException as error:
            put(error)
        else:
            put(None)

    def found() -> Iterator[Batch]:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=read, name="claimcheck-read", daemon=True)
    thread.start()
    try:
        yield found()
    finally:
        left.set()
        thread.join()


def settled(sink: Sink, load: Load, check: Callable[[], None]) -> bool:
    """Whether a commit whose answer was lost took place.

    The server may be away for a moment, in which ``check`` may raise. Raises SinkError where it
    stays away.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return sink.settle(load)
        except SinkError:
            check()
            if time.monotonic() > deadline:
                raise
        time.sleep(_NAP_SECONDS)


def refuse_changes(sink: Sink, load: Load) -> None:
    """Inside a transaction: what was described without a lock may be another table by now.

    Raises SinkError.
    """
    if sink.altered(load):
        raise SinkError(f"sink: {was_altered(load.table)}")
    if refusals := sink.refusals(load):
        raise SinkError(
            f"the sink was changed while the run was at work: {'; '.join(refusals)}",
            permanent=True,
        )


@contextmanager
def opened(context: RunContext, opener: Callable[[], E]) -> Iterator[E]:
    """Open an end, let a stop of the run break what it does, and close it.

    A driver's connect cannot be interrupted, so it runs in a thread of its own, which is left
    behind when the run is stopped meanwhile (and closes what it still opens).
    """
    done = threading.Event()
    box: list[E] = []
    failed: list[BaseException] = []
    abandoned = threading.Event()

    def connect() -> None:
        try:
            end = opener()
            box.append(end)
            if abandoned.is_set():
                end.close()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=connect, name="claimcheck-connect", daemon=True)
    with context.stopping(done.set):
        thread.start()
        done.wait()
    if context.stop_reason is not None:
        abandoned.set()
        for end in box:
            end.close()
        context.check_cancelled()
    if failed:
        raise failed[0]
    end = box[0]
    try:
        with context.stopping(end.stop):
            yield end
    finally:
        end.close()
