"""Opening the two ends of a run so that a stop breaks even a connect to a frozen server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from dispatch.context import RunContext
from tasks.replicate.connector import Batch, End, Load, Sink, SinkError, Source, was_altered
from tasks.replicate.garbage import rarely_collected
from tasks.replicate.opening import Opening

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
    """Open an end, let a stop of the run break what it does, and close it."""
    context.progress(0, phase="connecting")
    opening = Opening(opener)
    with context.stopping(opening.leave):
        end = opening.wait()
    if end is None:
        context.check_cancelled()
    assert end is not None, "only a stop leaves a connect"
    try:
        with context.stopping(partial(stop_soon, end)):
            yield end
    finally:
        end.close()


def stop_soon(end: End) -> None:
    """Stop an end in a thread of its own: where both servers hang, neither is waited for first."""
    threading.Thread(target=_stop, args=(end,), name="claimcheck-stop", daemon=True).start()


def _stop(end: End) -> None:
    with suppress(Exception):
        end.stop()
