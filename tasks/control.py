"""Remote control: a revoke of a run is a cancel in Postgres first (R-K1)."""

from __future__ import annotations

from typing import Any

from celery.app.control import Control as CeleryControl

from dispatch.errors import NotCancellable, UnknownRun
from tasks import cancelling


class Control(CeleryControl):
    """Celery's control; ``AsyncResult.revoke``, groups and Flower come here too."""

    def revoke(self, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        """Cancel the runs among the ids, and revoke the other tasks as Celery does.

        One run that has ended already is refused with NotCancellable, which says how it ended; in
        a list such a run is passed over. ``terminate`` and ``signal`` do not concern a run: its
        core is told to stop, and its process goes on to other work.
        """
        if isinstance(task_id, str):
            if not cancelling.is_run(task_id):
                return super().revoke(task_id, *args, **kwargs)
            cancelling.cancel(task_id)
            return None
        others = []
        for one in list(task_id):
            try:
                if cancelling.is_run(one):
                    cancelling.cancel(one)
                else:
                    others.append(one)
            except (NotCancellable, UnknownRun):
                continue
        return super().revoke(others, *args, **kwargs) if others else None
