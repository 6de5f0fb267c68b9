"""What each test of replication may have: two databases of its own, and a worker's process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from replication_kit import Database, Job, definition, fresh_database


@pytest.fixture
def new_database(database_server: str) -> Iterator[Callable[[], Database]]:
    """Makes fresh databases, dropped at the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(fresh_database(database_server))


@pytest.fixture
def source(new_database: Callable[[], Database]) -> Database:
    return new_database()


@pytest.fixture
def sink(sink_server: str) -> Iterator[Database]:
    with fresh_database(sink_server) as database:
        yield database


@pytest.fixture
def job(source: Database, sink: Database) -> Callable[..., Job]:
    """Makes a job between the two databases: ``job("complete", verify="count")``."""

    def make(mode: str, table: str | None = "public.t", to: str | None = None, **more: Any) -> Job:
        reads = more.pop("reads", {})
        writes = more.pop("writes", {})
        if table is not None:
            reads = {"table": table, **reads}
        writes = {"table": to or table or "public.t", **writes}
        return Job(source.config, sink.config, definition(reads, writes, mode, **more))

    return make


WORKER = """
import json, sys, uuid
sys.path[:0] = json.loads(sys.argv[1])
import replication_kit
from tasks.replicate import modes
job = replication_kit.Job(**json.loads(sys.stdin.readline()))
job.id = uuid.UUID(job.id)
modes.run(job.context())
"""


@pytest.fixture
def worker() -> Iterator[Callable[[Job], subprocess.Popen[bytes]]]:
    """Runs a job in a process that can be killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(job: Job) -> subprocess.Popen[bytes]:
        here = str(Path(__file__).parent)
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps([here, *sys.path])], stdin=subprocess.PIPE
        )
        started.append(process)
        assert process.stdin is not None
        task = {
            "source": dict(job.source),
            "sink": dict(job.sink),
            "definition": job.definition,
            "connectors": job.connectors,
            "id": str(job.id),
            "fence": job.fence,
        }
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
