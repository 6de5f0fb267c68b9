"""``tasks.trigger``: the one Celery task. Calling it stores a run; receiving it claims one (R-T1).

Every way in which Celery calls a task leads to `apply_async` here: ``delay``, signatures, groups,
chains, beat entries, ``send_task`` of this app. Only the run's id is published (R-T3).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import Task

from db.statements import AnyConnection
from dispatch import chains, enqueue
from dispatch.enqueue import RunHandle
from dispatch.errors import InvalidParameters
from tasks import canvas, options, wakeup
from tasks.app import app
from tasks.broker import run_priority
from tasks.ports import PORTS
from tasks.results import RunResult

logger = logging.getLogger("claimcheck.trigger")


class Trigger(Task):
    """Start a run of a job: ``trigger.delay("report", day="2026-11-01")``."""

    name = wakeup.TASK
    Request = "tasks.request:WakeUp"
    typing = False
    # Flower is told of runs, not of their wake-ups.
    send_events = False
    ignore_result = False
    track_started = False
    acks_late = False
    reject_on_worker_lost = False
    store_errors_even_if_ignored = False
    max_retries = 0
    # A run's limits are its job's; what the app sets for ordinary tasks must not end a run.
    time_limit = 0
    soft_time_limit = 0
    rate_limit = ""

    # The caller's side

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Mapping[str, Any] | None = None, **given: Any
    ) -> RunResult:
        """Store a run of the job ``args[0]`` with the parameters ``kwargs``, then offer it.

        Durable before it returns, whether Redis is there or not (R-T4). Options: ``countdown``
        (seconds) or ``eta`` (an aware datetime), ``priority`` (0 to 9, higher first), ``queue``,
        ``idempotency_key``, ``task_id`` (the run's id, where it is a UUID), ``parent_run_id``.

        With ``task_always_eager`` the run is executed here before this returns, as by `apply`.

        Raises UnknownJob, JobDisabled, InvalidParameters, TriggerBusy, DatabaseUnavailable.
        """
        if self.app.conf.task_always_eager:
            return self.apply(args, kwargs, **given)
        handle = enqueue.submit(PORTS, *self._job(args, kwargs), **self._options(given))
        return self._result(handle, given.get("add_to_parent", True))

    def enqueue(
        self,
        connection: AnyConnection,
        job: str,
        params: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> RunResult:
        """Store a run in the caller's open transaction; it is offered after the commit (R-T2).

        ``connection`` is a SQLAlchemy Connection or Session, or a psycopg connection, to the
        control database. Options and errors as for `apply_async`; a rollback leaves nothing.
        """
        return self._result(enqueue.enqueue(connection, job, params, **self._options(given)))

    def apply(  # type: ignore[override]
        self,
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        throw: bool | None = None,
        **given: Any,
    ) -> RunResult:
        """Store a run and execute it in this process, under the same claim, lease and finish.

        Returns when it has ended. What cannot be claimed at once (it is delayed, waits its turn, or
        another process holds it) is left to the workers, and the handle says how it stands. With
        ``throw`` (default: ``task_eager_propagates``) a failure is raised.
        """
        from tasks.worker import execute_here

        for plumbing in ("logfile", "loglevel"):
            given.pop(plumbing, None)
        result = execute_here(*self._job(args, kwargs), **self._options(given))
        found = self._result(result, given.get("add_to_parent", True))
        if throw or (throw is None and self.app.conf.task_eager_propagates):
            found.maybe_throw()
        return found

    def map(self, it: Any) -> NoReturn:
        raise InvalidParameters(canvas.refusal("map"))

    starmap = map

    def chunks(self, it: Any, n: int) -> NoReturn:
        raise InvalidParameters(canvas.refusal("map"))

    def AsyncResult(self, task_id: str, **kwargs: Any) -> RunResult:
        return RunResult(task_id, backend=self.backend, app=self.app, **kwargs)

    def _job(self, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
        return options.job_of(args), dict(kwargs or {})

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        canvas.refuse_links(given)
        found = options.run(given)
        if given.get("chain"):
            found["chain"] = chains.stored(canvas.steps_of(given["chain"]))
        return found

    def _result(self, handle: RunHandle, add_to_parent: bool = False) -> RunResult:
        result = self.AsyncResult(str(handle.run_id))
        result.created = handle.created
        parent = self.app.current_worker_task
        if add_to_parent and parent is not None and parent.name != self.name:
            parent.add_trail(result)
        return result

    # The worker's side

    def run(self, *args: Any, **kwargs: Any) -> str | None:
        """Claim the run that the wake-up names, or another one of its queue, and execute it."""
        if self.request.called_directly:
            raise TypeError(
                "trigger(...) would run in this very call and leave nothing behind: use "
                "trigger.delay(...) to start a run, or trigger.apply(...) to execute it here"
            )
        from tasks.worker import take

        run_id = wakeup.run_id_of(args, kwargs)
        if run_id is None:
            logger.error("dropped a wake-up that does not hold exactly one run id")
            return None
        delivered = self.request.delivery_info or {}
        priority = run_priority(delivered.get("priority"))
        return take(run_id, delivered.get("routing_key"), priority)

    def start_strategy(self, app: Any, consumer: Any, **kwargs: Any) -> Any:
        """Celery's strategy behind a check: only a bare wake-up goes any further (R-T3)."""
        from tasks.consumer import drop

        accept = super().start_strategy(app, consumer, **kwargs)

        def receive(
            message: Any, payload: Any, ack: Any, reject: Any, *rest: Any, **more: Any
        ) -> Any:
            try:
                bare = payload is None and wakeup.is_bare(message.payload, message.headers)
            except Exception:
                bare = False
            if not bare:
                return drop(
                    message, consumer.connection_errors, "it is no wake-up: more than one run id"
                )
            return accept(message, payload, ack, reject, *rest, **more)

        return receive


trigger = app.register_task(Trigger())
