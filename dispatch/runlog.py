"""A run's own log: its lines only, redacted before they are kept, bounded (R-X5)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from dispatch.redaction import RedactingFilter

HEAD_BYTES = 192 * 1024
"""The first three quarters of 256 KiB."""
TAIL_BYTES = 64 * 1024
"""The last quarter: the newest lines that no longer fit the first three."""


@dataclass(frozen=True, slots=True)
class LogDelta:
    """What is to be written: ``head`` goes on at character ``offset``, ``tail`` replaces the old.

    It holds all that is not known to be stored, so that what an unanswered one stored is within.
    """

    offset: int
    head: str
    tail: str
    dropped_bytes: int
    version: int


class RunLog:
    """The lines of one run, collected in memory until they are stored. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new_head: list[str] = []
        self._head_bytes = 0
        self._stored_length = 0
        self._head_is_full = False
        self._tail: deque[str] = deque()
        self._tail_bytes = 0
        self._dropped = 0
        self._version = 0
        self._stored_version = 0

    def add(self, line: str) -> None:
        """Keep a line, which is redacted already. A line that is too long loses its end."""
        text = _storable(line)
        with self._lock:
            self._version += 1
            size = len(text.encode())
            if not self._head_is_full and self._head_bytes + size <= HEAD_BYTES:
                self._new_head.append(text)
                self._head_bytes += size
                return
            # From here on the head stays as it is, so that no line stands before an older one.
            self._head_is_full = True
            self._tail.append(text)
            self._tail_bytes += size
            while self._tail_bytes > TAIL_BYTES:
                dropped = len(self._tail.popleft().encode())
                self._tail_bytes -= dropped
                self._dropped += dropped

    def pending(self) -> LogDelta | None:
        """What has not been stored yet, or None; call `stored` once it has been committed."""
        with self._lock:
            if self._version == self._stored_version:
                return None
            return LogDelta(
                offset=self._stored_length,
                head="".join(self._new_head),
                tail="".join(self._tail),
                dropped_bytes=self._dropped,
                version=self._version,
            )

    def stored(self, delta: LogDelta) -> None:
        """``delta`` is committed. A delta that overlaps one stored before changes nothing."""
        with self._lock:
            length = len(delta.head)
            if delta.offset == self._stored_length:
                self._stored_length += length
                while length > 0:
                    length -= len(self._new_head.pop(0))
            self._stored_version = max(self._stored_version, delta.version)


def _storable(line: str) -> str:
    """Text that PostgreSQL can hold, in one line's length, with its line feed."""
    data = line.replace("\x00", "\ufffd").encode("utf-8", "replace")
    if len(data) >= TAIL_BYTES // 4:
        data = data[: TAIL_BYTES // 4 - 8] + b" ..."
    return data.decode("utf-8", "ignore") + "\n"


class RunLogger(logging.Logger):
    """The logger of one run: what it logs goes to the run's log, and on to the worker's.

    It is known to nobody but the run, so that a process that executes many runs keeps none.
    """

    def __init__(self, run_id: UUID, log: RunLog) -> None:
        super().__init__(f"claimcheck.run.{run_id}", logging.INFO)
        self.parent = logging.getLogger("claimcheck.run")
        self._log_of_run = log
        self._redact = RedactingFilter()
        self._format = logging.Formatter()

    def callHandlers(self, record: logging.LogRecord) -> None:
        try:
            self._redact.filter(record)
        except Exception as error:
            # As logging itself does with a line that cannot be put together: the work goes on.
            record.msg, record.args = f"[a line that cannot be read: {type(error).__name__}]", ()
            record.exc_info = record.exc_text = None
        self._log_of_run.add(self._line(record))
        if self.parent is not None and self.parent.isEnabledFor(record.levelno):
            super().callHandlers(record)

    def _line(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return f"{at} {record.levelname} {self._format.format(record)}"
