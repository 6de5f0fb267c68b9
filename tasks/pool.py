"""The processes of a prefork pool: one that dies is noticed at once (R-L5)."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from tasks.app import app

AGAIN_SECONDS = (0.01, 0.05, 0.2, 1.0)


class PoolWatch(bootsteps.StartStopStep):
    """Looks at a process again after its pipe broke.

    A dying process closes its files a moment before its end can be waited for, the more so the
    more threads it has. Celery looks in that moment, sees it alive, and looks again after 5 s.
    """

    requires = ("celery.worker.components:Pool",)

    def start(self, parent: Any) -> None:
        pool = getattr(parent.pool, "_pool", None)
        notice = getattr(pool, "_event_process_exit", None)
        if pool is None or notice is None:
            return

        def noticed(hub: Any, process: Any) -> None:
            notice(hub, process)
            for seconds in AGAIN_SECONDS:
                hub.call_later(seconds, pool.maintain_pool)

        pool._event_process_exit = noticed


app.steps["worker"].add(PoolWatch)
