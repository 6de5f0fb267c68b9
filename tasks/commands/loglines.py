"""A run's log as lines: the head, a mark where bytes were left out, the tail (R-X5)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


class Follower:
    """Tells which lines of a growing log are new; the log is read anew each time."""

    def __init__(self) -> None:
        self._seen = 0
        self._rest = b""

    def feed(self, log: Mapping[str, Any] | None) -> list[str]:
        """The whole lines that came since the last call; ``log`` is the row as it is now."""
        if log is None:
            return []
        head, tail, dropped = log["head"].encode(), log["tail"].encode(), log["dropped_bytes"]
        gap_ends = len(head) + dropped
        if self._seen < len(head):
            new = head[self._seen :] + _mark(dropped) + tail
        elif self._seen < gap_ends:
            new = _mark(gap_ends - self._seen) + tail
        else:
            new = tail[self._seen - gap_ends :]
        self._seen = gap_ends + len(tail)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def rest(self) -> list[str]:
        """What stands behind the last line feed."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []


def lines(log: Mapping[str, Any] | None) -> list[str]:
    """All lines of a log."""
    follower = Follower()
    return follower.feed(log) + follower.rest()


def as_json(line: str) -> dict[str, Any]:
    """A line as the run's logger wrote it, ``TIME LEVEL MESSAGE``; a further line has no time."""
    at, _, rest = line.partition(" ")
    level, _, message = rest.partition(" ")
    try:
        datetime.fromisoformat(at)
    except ValueError:
        return {"at": None, "level": None, "message": line}
    return {"at": at, "level": level, "message": message}


def _mark(dropped: int) -> bytes:
    return f"[{dropped:,} bytes left out]\n".encode() if dropped else b""
