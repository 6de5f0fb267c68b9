"""Pauses between attempts while the control database is away: each twice the one before."""

from __future__ import annotations

import time

LONGEST_PAUSE_SECONDS = 2.0


class Backoff:
    """The pauses of one wait that is given up after ``seconds``. All times are monotonic."""

    def __init__(self, seconds: float, first: float = 0.05) -> None:
        self._give_up_at = time.monotonic() + seconds
        self._next = first

    def pause(self) -> bool:
        """Sleep until the next attempt; False, at once, where that would come too late."""
        if time.monotonic() + self._next > self._give_up_at:
            return False
        time.sleep(self._next)
        self._next = min(2 * self._next, LONGEST_PAUSE_SECONDS)
        return True
