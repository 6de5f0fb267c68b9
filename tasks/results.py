"""Results: a run's from Postgres, an ordinary task's from Redis as Celery keeps it.

A run's state is read, never stored: the wake-up has no result, and its return is not the run's
end. Waiting polls: it asks again after a tenth of the time it has waited, at least every half
second, because no finish notifies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery import states
from celery.app import backends
from celery.backends.base import BaseBackend
from celery.exceptions import TaskRevokedError, TimeoutError
from celery.result import AsyncResult, GroupResult, ResultSet
from celery.utils.functional import LRUCache
from sqlalchemy.exc import DBAPIError

from db import settings
from db.failures import is_connection_lost
from dispatch import lineage
from dispatch.errors import InvalidParameters, RunFailed
from tasks import broker, canvas, options, wakeup

FIRST_NAP_SECONDS = 0.01
LONGEST_NAP_SECONDS = 0.5
NAP_SHARE = 0.1
OUTAGE_SECONDS = 60.0
"""How long a wait without a timeout outlasts a control database that is away."""

_STATES: Mapping[str, str] = {
    "PENDING": states.PENDING,
    "RUNNING": states.STARTED,
    "CANCEL_REQUESTED": states.STARTED,
    "SUCCEEDED": states.SUCCESS,
    "FAILED": states.FAILURE,
    "CANCELLED": states.REVOKED,
    "RETRY_SCHEDULED": states.RETRY,
}


class RunResult(AsyncResult):
    """What a trigger hands back. Its state comes from Postgres and follows retries.

    ``created`` is False where an active or an earlier run was handed back (R-T5, R-T6, R-T7).
    """

    created: bool = True

    def _get_task_meta(self) -> Any:
        self.backend.is_run(self)
        return super()._get_task_meta()

    def _maybe_set_cache(self, meta: Any) -> Any:
        # A failed run may be retried by hand: only what can never change is kept.
        if meta and meta["status"] == states.FAILURE:
            return meta
        return super()._maybe_set_cache(meta)


class RunBackend(BaseBackend):
    """Celery's result backend for runs; whatever is not a run is left to Redis."""

    supports_autoexpire = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._redis: Any = None
        self._is_run: LRUCache = LRUCache(limit=10_000)

    def as_uri(self, include_password: bool = False) -> str:
        return "postgresql (runs), redis (other tasks)"

    @property
    def redis(self) -> Any:
        """The stock backend of ordinary tasks, made at its first use."""
        if self._redis is None:
            url = broker.of(settings.services().redis_url).url
            cls, found = backends.by_url(url, self.app.loader)
            self._redis = cls(app=self.app, url=found)
        return self._redis

    # Runs

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        if self._is_run.get(task_id) is not False:
            row = _row(task_id)
            if row is not None:
                self._is_run[task_id] = True
                return meta_of(task_id, row)
            if self._is_run.get(task_id):
                return unknown_meta(task_id)
        super()._ensure_not_eager()
        return self.redis._get_task_meta_for(task_id)

    def _ensure_not_eager(self) -> None:
        """Nothing to warn of: a run is stored and executed alike, eager or not."""

    def task_result_exists(self, task_id: str) -> bool:
        if self.is_run(task_id):
            return _row(task_id) is not None
        return bool(self.redis.task_result_exists(task_id))

    def is_run(self, result: AsyncResult | str) -> bool:
        """Whether the id is a run's. A look at the database where this process cannot know.

        It remembers that an id is a run's, and of those it sent itself that they are a task's; that
        an id is no run's may change: a later step of a chain is stored when its turn comes.
        """
        if isinstance(result, RunResult):
            self._is_run[result.id] = True
            return True
        task_id = result.id if isinstance(result, AsyncResult) else str(result)
        known = self._is_run.get(task_id)
        if known is None:
            known = _row(task_id) is not None
            if known:
                self._is_run[task_id] = True
        return bool(known)

    def wait_for_pending(self, result: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if not self.is_run(result):
            return self.redis.wait_for_pending(result, timeout=timeout, **kwargs)
        if kwargs.get("on_message") is not None:
            raise InvalidParameters("on_message: a run sends no messages while it works")
        meta = self._wait(
            result.id, timeout, kwargs.get("interval"), kwargs.get("on_interval"), result.parent
        )
        result._maybe_set_cache(meta)
        if kwargs.get("propagate", True) and meta["status"] in states.PROPAGATE_STATES:
            raise meta["result"]
        callback = kwargs.get("callback")
        if callback is not None:
            callback(result.id, meta["result"])
        return meta["result"]

    def wait_for(self, task_id: str, timeout: float | None = None, **kwargs: Any) -> Any:
        return self._wait(task_id, timeout, kwargs.get("interval"), kwargs.get("on_interval"))

    def _wait(
        self,
        task_id: str,
        timeout: float | None,
        interval: float | None,
        on_interval: Callable[[], object] | None,
        parent: AsyncResult | None = None,
    ) -> dict[str, Any]:
        """The outcome of the lineage; raises Celery's TimeoutError after ``timeout`` seconds.

        ``parent`` is the step before it in its chain.
        """
        started = time.monotonic()
        answered = started
        status: str | None = None
        longest = min(LONGEST_NAP_SECONDS, interval or LONGEST_NAP_SECONDS)
        while True:
            waited = time.monotonic() - started
            try:
                meta = self.get_task_meta(task_id)
                status = str(meta["status"])
                answered = time.monotonic()
                if meta["status"] in states.READY_STATES:
                    return meta
                if on_interval is not None:
                    on_interval()
            except DBAPIError as error:
                away = time.monotonic() - answered
                if not is_connection_lost(error) or (timeout is None and away > OUTAGE_SECONDS):
                    raise
            if timeout is not None and waited >= timeout:
                raise TimeoutError(
                    f"run {task_id} has not ended within {timeout:g} s; it was last seen "
                    f"{status or 'never'}. What happens next: celery -A tasks run show "
                    f"{_stored_one(task_id, parent)}"
                )
            nap = min(longest, max(FIRST_NAP_SECONDS, waited * NAP_SHARE))
            time.sleep(nap if timeout is None else max(0.0, min(nap, timeout - waited)))

    # Both kinds

    def store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        **kwargs: Any,
    ) -> Any:
        if getattr(request, "task", None) == wakeup.TASK:
            return result
        return self.redis.store_result(
            task_id, result, state, traceback=traceback, request=request, **kwargs
        )

    def forget(self, task_id: str) -> None:
        """Forget an ordinary task's result. A run's history stays for retention (R-S3)."""
        self._cache.pop(task_id, None)
        if not self.is_run(task_id):
            self.redis.forget(task_id)

    def add_pending_result(self, result: Any, weak: bool = False) -> Any:
        if not isinstance(result, AsyncResult):
            for member in result.results:
                self.add_pending_result(member, weak=weak)
        elif not self.is_run(result):
            self._is_run.setdefault(result.id, False)
            self.redis.add_pending_result(result, weak=weak)
        return result

    def remove_pending_result(self, result: Any) -> Any:
        # Called whenever a result object goes away: it asks nobody, and an error would help nobody.
        if self._redis is not None and not isinstance(result, RunResult):
            with contextlib.suppress(Exception):
                self._redis.remove_pending_result(result)
        return result

    def iter_native(
        self, result: ResultSet, timeout: float | None = None, **kwargs: Any
    ) -> Iterable[tuple[str, Any]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        for member in result.results:
            if isinstance(member, ResultSet):
                yield member.id, member.results
                continue
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            yield member.id, self._wait(member.id, left, None, None)

    def get_many(self, task_ids: Iterable[str], **kwargs: Any) -> Iterable[tuple[str, Any]]:
        for task_id in list(task_ids):
            meta = self.get_task_meta(task_id)
            if meta["status"] in states.READY_STATES:
                yield task_id, meta

    # Ordinary tasks

    def on_task_call(self, producer: Any, task_id: str) -> Any:
        self._is_run[task_id] = False
        return self.redis.on_task_call(producer, task_id)

    def process_cleanup(self) -> None:
        if self._redis is not None:
            self._redis.process_cleanup()

    def cleanup(self) -> None:
        self.redis.cleanup()

    def save_group(self, group_id: str, result: GroupResult) -> Any:
        return self.redis.save_group(group_id, result)

    def restore_group(self, group_id: str, cache: bool = True) -> Any:
        return self.redis.restore_group(group_id, cache=cache)

    def delete_group(self, group_id: str) -> Any:
        return self.redis.delete_group(group_id)

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> Any:
        members = header_result_args[1]
        if canvas.holds_trigger(body) or any(self._holds_run(member) for member in members):
            canvas.refuse_links({"chord": True})
        return self.redis.apply_chord(header_result_args, body, **kwargs)

    def _holds_run(self, member: Any) -> bool:
        if isinstance(member, ResultSet):
            return any(self._holds_run(inner) for inner in member.results)
        return isinstance(member, RunResult)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> Any:
        return self.redis.on_chord_part_return(request, state, result, **kwargs)

    def set_chord_size(self, group_id: str, chord_size: int) -> Any:
        return self.redis.set_chord_size(group_id, chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> Any:
        return self.redis.add_to_chord(chord_id, result)

    def ensure_chords_allowed(self) -> None:
        self.redis.ensure_chords_allowed()


def meta_of(task_id: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What Celery is told of a run; ``row`` is the last attempt of its lineage."""
    state = _STATES[row["status"]]
    if state == states.PENDING and row["previous_run_id"] is not None:
        state = states.RETRY
    result: Any = row["result"]
    if state == states.FAILURE:
        result = RunFailed(row["error_code"], row["error_message"] or "")
    elif state == states.REVOKED:
        result = TaskRevokedError(row["cancellation_warning"] or "the run was cancelled")
    executor = row["executor"]
    return {
        "task_id": task_id,
        "status": state,
        "result": result,
        "traceback": None,
        "children": [],
        "date_done": None if row["finished_at"] is None else row["finished_at"].isoformat(),
        "name": row["job_name"],
        "args": None,
        "kwargs": None,
        "worker": None if executor is None else executor.split(":", 1)[0],
        "retries": row["attempt"] - 1,
        "queue": row["queue"],
        "parent_id": None if row["parent_run_id"] is None else str(row["parent_run_id"]),
    }


def unknown_meta(task_id: str) -> dict[str, Any]:
    """A run that is not stored yet, or no more."""
    return {
        "task_id": task_id,
        "status": states.PENDING,
        "result": None,
        "traceback": None,
        "children": [],
    }


def _stored_one(task_id: str, parent: AsyncResult | None) -> str:
    """The id to look at: a later step of a chain is no run before the one before it succeeded."""
    with contextlib.suppress(DBAPIError):
        while parent is not None and _row(task_id) is None:
            task_id, parent = parent.id, parent.parent
    return task_id


def _row(task_id: str) -> Mapping[str, Any] | None:
    return lineage.outcome(options.run_id_of_task(task_id))
