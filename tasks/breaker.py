"""A rest after a failed call to Redis, so that callers in a row do not each wait for it (R-T4)."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("claimcheck.redis")

FIRST_REST_SECONDS = 0.5
LONGEST_REST_SECONDS = 5.0


class Breaker:
    """Tells whether Redis is worth a call; while it rests, one caller at a time finds out.

    Safe between threads. Times are monotonic. The first failure of an outage is logged, and the
    end of the outage.
    """

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self.reset()

    def reset(self) -> None:
        """Forget what was learned; a forked child starts anew."""
        self._lock = threading.Lock()
        self._rest = 0.0
        self._until = 0.0

    def allows(self) -> bool:
        """Whether to call now. After a rest, one caller is let through to find out."""
        now = time.monotonic()
        with self._lock:
            if self._rest == 0.0:
                return True
            if now < self._until:
                return False
            self._until = now + self._rest
            return True

    def failed(self, error: BaseException) -> None:
        """The call failed: rest, each time twice as long up to LONGEST_REST_SECONDS."""
        with self._lock:
            first = self._rest == 0.0
            self._rest = min(max(FIRST_REST_SECONDS, self._rest * 2), LONGEST_REST_SECONDS)
            self._until = time.monotonic() + self._rest
        if first:
            logger.warning("Redis (REDIS_URL) is away: %s. %s", _reason(error), self._consequence)

    def succeeded(self) -> None:
        if self._rest == 0.0:
            return
        with self._lock:
            self._rest = 0.0
        logger.warning("Redis (REDIS_URL) is back.")


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
