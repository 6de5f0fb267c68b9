"""A parallel run's processes: one for each part, none outlives the run."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dispatch.context import HandlerFailure, RunContext
from tasks.replicate.connector import Load, Part, ReadRequest
from tasks.replicate.meter import Meter

SCRIPT = Path(__file__).with_name("part_process.py")
END_SECONDS = 0.7
"""How long the processes of a run that ends have, all together; more than they take to stop."""


@dataclass(frozen=True, slots=True)
class Ends:
    """How a part opens its own two ends; the configurations hold credentials."""

    connectors: tuple[str, str]
    source: Mapping[str, Any]
    sink: Mapping[str, Any]
    name: str

    def __repr__(self) -> str:
        return f"Ends({self.connectors})"


class Team:
    """The processes of a parallel run, one for each part; the first failure ends them all.

    Its methods raise HandlerFailure, or RunStopped within a second of the stop.
    """

    def __init__(
        self,
        context: RunContext,
        meter: Meter,
        ends: Ends,
        request: ReadRequest,
        parts: Sequence[Part],
        load: Load,
        *,
        bandwidth: int | None,
    ) -> None:
        self._context = context
        self._meter = meter
        self._bandwidth = bandwidth
        self._messages: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._members = [
            _Process(
                number, _task(ends, request, part, load, bandwidth, len(parts)), self._messages
            )
            for number, part in enumerate(parts)
        ]
        self._running = set(range(len(parts)))

    @contextlib.contextmanager
    def connected(self) -> Iterator[Team]:
        """In the block, all parts have both their ends open and see the leader's snapshot."""
        try:
            with self._context.stopping(self._wake):
                for member in self._members:
                    member.start()
                waiting = set(self._running)
                while waiting:
                    number, _ = self._next()
                    waiting.discard(number)
                yield self
        finally:
            for member in self._members:
                member.let_go()
            deadline = time.monotonic() + END_SECONDS
            for member in self._members:
                member.end(deadline)

    def transfer(self) -> int:
        """Move all parts at once and return the rows written."""
        for member in self._members:
            member.tell({})
        written = 0
        while self._running:
            number, message = self._next()
            self._meter.add(message["rows"], message["bytes"])
            if "written" in message:
                written += message["written"]
                self._running.discard(number)
                if self._bandwidth is not None and self._running:
                    # The limit is one total: who is left shares all of it.
                    for other in self._running:
                        self._members[other].tell(
                            {"bandwidth": self._bandwidth / len(self._running)}
                        )
        return written

    def _wake(self) -> None:
        self._messages.put((-1, None))

    def _next(self) -> tuple[int, dict[str, Any]]:
        """A part's next report, and its number."""
        while True:
            number, message = self._messages.get()
            self._context.check_cancelled()
            if message is not None:
                if "error" in message:
                    raise _failure(message)
                return number, message
            if number in self._running:
                raise HandlerFailure(f"the process of part {number} died")


def _task(
    ends: Ends,
    request: ReadRequest,
    part: Part,
    load: Load,
    bandwidth: int | None,
    parts: int,
) -> dict[str, Any]:
    return {
        "connectors": ends.connectors,
        "source": dict(ends.source),
        "sink": dict(ends.sink),
        "name": ends.name,
        "request": request,
        "part": part,
        "load": load if load.how else replace(load, step=part.number + 1),
        "bandwidth": None if bandwidth is None else bandwidth / parts,
    }


def _report(number: int, line: bytes) -> dict[str, Any]:
    """What a part reports; a line that is no report is its failure."""
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    error = f"the process of part {number} wrote a line that is no report"
    return {"error": error, "code": "handler_error", "permanent": False}


def _failure(message: dict[str, Any]) -> HandlerFailure:
    return HandlerFailure(message["error"], code=message["code"], permanent=message["permanent"])


class _Process:
    """One part's process and the thread that reads its reports."""

    def __init__(self, number: int, task: dict[str, Any], messages: Any) -> None:
        self._number = number
        self._task = task
        self._put: Callable[[Any], None] = messages.put
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # A session of its own: a signal to the worker's process group must not end a part
        # before the worker has decided how its run ends.
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            self._process.stdin.write(pickle.dumps(self._task))
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._put((self._number, _report(self._number, line)))
        finally:
            # Whatever ends the reports: who waits for the next one must not wait for ever.
            self._put((self._number, None))

    def tell(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()

    def let_go(self) -> None:
        """Close its standard input: it stops its ends and exits."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for its end, and bring it about where it has not come by then (monotonic)."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
