"""What the system has to do next, and when (R-D3)."""

from __future__ import annotations

import os
import time


class SignOfLife:
    """When this process must tell the beat that runs and leases come from it (R-D3).

    Claims and enqueues do not notify one by one; a process that does either notifies at most once
    each third of a lease. Times are monotonic, in seconds. Safe to share between threads, where
    two of them may notify at once, which does no harm.
    """

    def __init__(self) -> None:
        self._last: float | None = None

    def is_due(self, lease_seconds: float) -> bool:
        """Whether the next enqueue or claim should notify; call `given` after it has committed."""
        return self._last is None or time.monotonic() - self._last >= lease_seconds / 3

    def given(self) -> None:
        """A notification of kind `deadlines` was committed just now."""
        self._last = time.monotonic()

    def forget(self) -> None:
        """This process has given none yet."""
        self._last = None


sign_of_life = SignOfLife()
# A forked child is a process of its own, whose leases the beat has not heard of.
os.register_at_fork(after_in_child=sign_of_life.forget)
