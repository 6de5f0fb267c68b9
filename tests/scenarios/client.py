"""A caller in a process of its own: one request a line on standard input, one answer a line.

``{"do": "trigger", "job": "work", "params": {...}, "options": {...}}`` is answered by what the
call returned, or by ``{"error": CLASS, "message": ...}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psycopg
from celery import canvas
from celery.exceptions import TaskRevokedError, TimeoutError

from db import settings
from dispatch import catalog
from dispatch.cancel import cancel as cancel_run
from dispatch.catalog import datasources, jobs, jobschedules
from dispatch.retry import retry as retry_run
from tasks import RunFailed
from tasks import trigger as trigger_run
from tasks.connectors import CONNECTORS
from tasks.ports import PORTS


def trigger(job: str, params: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    result = trigger_run.apply_async((job,), params, **options)
    return {"id": result.id, "created": result.created}


def enqueue(
    job: str, params: Mapping[str, Any], options: Mapping[str, Any], commit: bool
) -> dict[str, Any]:
    """In the caller's own transaction, which is committed or rolled back."""
    with psycopg.connect(settings.services().database_conninfo, connect_timeout=5) as connection:
        result = trigger_run.enqueue(connection, job, params, **options)
        if not commit:
            connection.rollback()
    return {"id": result.id, "created": result.created, "committed": commit}


def chain(job: str, steps: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A stored chain of one job; the ids of its steps, the first first."""
    result = canvas.chain(trigger_run.si(job, **step) for step in steps).apply_async()
    ids = []
    while result is not None:
        ids.insert(0, result.id)
        result = result.parent
    return {"ids": ids}


def get(run: str, timeout: float) -> dict[str, Any]:
    """What the result's ``get`` returns, or the name of what it raises."""
    try:
        return {"told": trigger_run.AsyncResult(run).get(timeout=timeout)}
    except (RunFailed, TaskRevokedError, TimeoutError) as error:
        return {"told": type(error).__name__}


def cancel(run: str) -> dict[str, Any]:
    answer = cancel_run(PORTS, run, actor="scenario")
    return {"id": str(answer.run_id), "status": answer.status, "changed": answer.changed}


def retry(run: str) -> dict[str, Any]:
    return {"id": str(retry_run(PORTS, run, actor="scenario").run_id)}


def edit(job: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    with catalog.editing() as session:
        changed = jobs.edit(session, CONNECTORS, job, changes, actor="scenario")
    return {"changed": changed is not None}


def switch(job: str, name: Any, value: bool) -> dict[str, Any]:
    with catalog.editing() as session:
        changed = jobs.set_switch(session, job, name, value, actor="scenario")
    return {"changed": changed is not None}


def datasource(name: str, enabled: bool) -> dict[str, Any]:
    with catalog.editing() as session:
        changed = datasources.set_enabled(session, name, enabled, actor="scenario")
    return {"changed": changed is not None}


def schedule(name: str, enabled: bool) -> dict[str, Any]:
    with catalog.editing() as session:
        changed = jobschedules.set_enabled(session, name, enabled, actor="scenario")
    return {"changed": changed is not None}


DOES: Mapping[str, Callable[..., dict[str, Any]]] = {
    does.__name__: does
    for does in (trigger, enqueue, chain, get, cancel, retry, edit, switch, datasource, schedule)
}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = DOES[asked.pop("do")](**asked)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
