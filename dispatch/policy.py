"""Whether and when a run is tried again, read from its job's definition (R-R4)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_BACKOFF_SECONDS = 3600.0
DEFAULT_BACKOFF_SECONDS = 60.0
DESTRUCTIVE_MODE = "complete"

LOST_CODES = frozenset({"lease_expired", "worker_lost", "worker_shutdown"})
"""The error codes of an attempt that its worker did not bring to an end."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How attempts of one run follow each other; ``backoff`` in seconds of database time."""

    backoff: float = DEFAULT_BACKOFF_SECONDS
    on_worker_loss: bool = True
    on_failure: bool = True

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> RetryPolicy:
        """Read a job's definition; a missing or unusable key means R-R4's default.

        A claim snapshots what is stored, and a row that was written by hand must not keep a
        recovery from acting, so nothing here raises.
        """
        stated = definition.get("retry")
        retry: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
        repeats = definition.get("mode") != DESTRUCTIVE_MODE
        return cls(
            backoff=_seconds(retry.get("backoff")),
            on_worker_loss=_flag(retry.get("on_worker_loss"), repeats),
            on_failure=_flag(retry.get("on_failure"), repeats),
        )

    def allows(self, code: str) -> bool:
        """Whether an attempt that ended with ``code`` is tried again by itself, attempts aside."""
        if code == "permanent":
            return False
        return self.on_worker_loss if code in LOST_CODES else self.on_failure

    def next_delay(
        self, attempt: int, max_attempts: int, code: str, previous_code: str | None
    ) -> float | None:
        """`delay` until the next attempt; None where there is none after ``attempt``."""
        if attempt >= max_attempts or not self.allows(code):
            return None
        return self.delay(attempt, code, previous_code)

    def delay(self, attempt: int, code: str, previous_code: str | None) -> float:
        """Seconds until the attempt after ``attempt``, which ended with ``code``.

        ``previous_code`` is how the attempt before that one ended. The first retry after a lost
        worker or a drain is due at once; one that loses its worker again waits.
        """
        if code in LOST_CODES and previous_code not in LOST_CODES:
            return 0.0
        # Far beyond the longest backoff already, and within a float.
        doublings = min(attempt - 1, 64)
        return min(self.backoff * 2.0**doublings, LONGEST_BACKOFF_SECONDS) * random.uniform(1, 1.25)


def timeout_of(definition: Mapping[str, Any]) -> float | None:
    """How long an attempt may run, in seconds; None where the job sets no limit."""
    stated = definition.get("timeout")
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not stated > 0:
        return None
    return float(stated)


def _seconds(stated: Any) -> float:
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not stated >= 0:
        return DEFAULT_BACKOFF_SECONDS
    return float(stated)


def _flag(stated: Any, default: bool) -> bool:
    return stated if isinstance(stated, bool) else default
