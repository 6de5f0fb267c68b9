"""A run that this process holds, as its threads share it: worker, heartbeat and watch."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from uuid import UUID

from dispatch.claims import ClaimedRun
from dispatch.context import Progress, RunContext
from dispatch.runlog import RunLog

logger = logging.getLogger("claimcheck.runs")

FIRST_LOOK_SECONDS = 0.3
"""A run that ends sooner costs no connection; a cancel must be seen within a second (R-K2)."""
SOFT_SHARE = 0.75
"""By this share of a lease without a good renewal the work is told to stop (R-L3)."""
HARD_SHARE = 0.9
"""By this share a prefork child that has not stopped is ended."""


@dataclass(eq=False, slots=True)
class HeldRun:
    """All times are monotonic, in seconds. ``good_since`` is the start of the last good renewal."""

    claimed: ClaimedRun
    context: RunContext
    log: RunLog
    lease_seconds: float
    timeout: float | None
    good_since: float
    began: float = field(default_factory=time.monotonic)
    renew_at: float = 0.0
    report_after: float = 0.0
    unstored: Progress | None = None
    stopped_at: float | None = None
    """When the work was told to end."""
    stopped_for: str | None = None
    """Why it was; the context may learn it a moment later."""
    recording_since: float | None = None
    """When the heartbeat began to record the end of work that did not stop in its grace."""
    recorded: bool = False
    work_ended: bool = False
    """Its end is left to be recorded under the token, so that lateness harms nothing (R-F1)."""
    given_up: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """The worker has recorded the end, or lost the run: nothing is left to keep."""

    def __post_init__(self) -> None:
        # The first look comes soon: it also finds a cancel that came before anyone listened.
        self.renew_at = self.began + min(FIRST_LOOK_SECONDS, self.lease_seconds / 3)

    @property
    def id(self) -> UUID:
        return self.claimed.id

    @property
    def fenced_at(self) -> float:
        """When the work has to be told to stop, unless the lease is renewed before."""
        return self.good_since + self.lease_seconds * SOFT_SHARE

    @property
    def dead_at(self) -> float:
        """When work that was told so must be gone; the lease expires a little later."""
        return self.good_since + self.lease_seconds * HARD_SHARE

    @property
    def timeout_at(self) -> float | None:
        return None if self.timeout is None else self.began + self.timeout

    def renewed(self, asked_at: float) -> None:
        """A renewal that was sent at ``asked_at`` succeeded."""
        self.good_since = asked_at
        self.renew_at = asked_at + self.lease_seconds / 3

    def stop(self, reason: str) -> None:
        """Tell the work to end. Returns at once: what breaks its calls may itself block.

        Raises RuntimeError where no thread can be started; the work was not told then.
        """
        threading.Thread(
            target=self._stop, args=(reason,), name="claimcheck-stop", daemon=True
        ).start()
        if self.stopped_at is None:
            self.stopped_for = reason
            self.stopped_at = time.monotonic()

    def _stop(self, reason: str) -> None:
        if not self.work_ended:
            logger.info("run %s is told to stop: %s", self.id, reason)
        self.context.stop(reason)

    def fresh_progress(self) -> Progress | None:
        """The progress that is not stored yet, also where storing it failed before."""
        taken = self.context.take_progress()
        if taken is not None:
            self.unstored = taken
        return self.unstored
