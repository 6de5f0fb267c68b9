"""Plain Celery on the same Redis, as most teams run it: no durability, results ignored."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks.noop import note_start

app = Celery("plain", broker=os.environ["REDIS_URL"])
app.conf.update(
    task_default_queue="plain",
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
)


@app.task(name="plain.noop")
def noop() -> None:
    note_start()
