"""Pauses between attempts while the control database is away: each about twice the one before."""

from __future__ import annotations

import random
import time

LONGEST_PAUSE_SECONDS = 2.0


class Backoff:
    """The pauses of one wait that is given up after ``seconds``. All times are monotonic.

    Each is shortened at random, by up to a half: two that met at a lock would meet there again.
    """

    def __init__(self, seconds: float, first: float = 0.05) -> None:
        self._give_up_at = time.monotonic() + seconds
        self._next = first

    def pause(self) -> bool:
        """Sleep until the next attempt; False, at once, where that would come too late."""
        pause = self._next * random.uniform(0.5, 1.0)
        if time.monotonic() + pause > self._give_up_at:
            return False
        time.sleep(pause)
        self._next = min(2 * self._next, LONGEST_PAUSE_SECONDS)
        return True
