"""``celery -A tasks beat``: sleeps until the next known deadline, then sweeps (R-D3).

The waiting and the work are `dispatch.watch`; here they meet Celery's loop. A user's own static
``beat_schedule`` entries fire beside them. Any number of beats may run for the runs' sake; static
entries fire in each of them, as with Celery's own.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery.beat import ScheduleEntry, Scheduler

from dispatch.watch import Watch
from tasks.ports import PORTS

logger = logging.getLogger("claimcheck.beat")

FIRST_REPEAT_SECONDS = 1.0
LONGEST_REPEAT_SECONDS = 10.0


class DeadlineScheduler(Scheduler):
    """Celery's scheduler with the deadlines of runs, schedules and leases.

    A static entry whose message the broker did not take is sent again until it does, once however
    many times it came due meanwhile.
    """

    # Celery would block here until the broker is back; recovery must not wait for it.
    producer = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._watch: Watch | None = None
        self._closing = False
        self._missed: dict[str, ScheduleEntry] = {}
        self._repeat_at = 0.0
        self._repeat_length = 0.0
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, else wait for it; returns 0, for the next tick to follow at once."""
        if self._watch is None:
            # Nobody here waits for a result. To subscribe to each would block while Redis is away.
            self.app.backend.on_task_call = _unawaited
            self._watch = Watch(PORTS)
        delay = super().tick(*args, **kwargs)
        if self._missed:
            self._repeat()
            delay = min(delay, self._repeat_at - time.monotonic())
        self._watch.step(max(0.0, min(delay, self.max_interval)))
        if self._closing:
            # A signal came within a statement, and the driver's own clean-up may have hidden it.
            raise SystemExit
        if self.should_sync():
            self._do_sync()
        return 0

    def close(self) -> None:
        """Called by Celery inside its signal handler, and again at the end."""
        if self._closing and self._watch is not None:
            self._watch.close()
        self._closing = True
        super().close()

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send the message of a static entry; one that cannot be sent is sent later."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except Exception as error:
            if entry.name not in self._missed:
                logger.error("static entry %s is not sent, and tried again: %s", entry.name, error)
            self._missed[entry.name] = entry
            self._repeat_length = min(
                LONGEST_REPEAT_SECONDS, max(FIRST_REPEAT_SECONDS, self._repeat_length * 2)
            )
            self._repeat_at = time.monotonic() + self._repeat_length
        else:
            if self._missed.pop(entry.name, None) is not None:
                logger.warning("static entry %s is sent now", entry.name)
            self._repeat_length = 0.0

    def _repeat(self) -> None:
        for name in list(self._missed):
            if time.monotonic() < self._repeat_at:
                return
            self.apply_entry(self._missed[name])

    @property
    def info(self) -> str:
        return "    . deadlines -> the control database (DATABASE_URL)"


def _unawaited(producer: Any, task_id: str) -> None:
    return None
