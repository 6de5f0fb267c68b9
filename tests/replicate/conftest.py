"""Two databases of one's own for each test of replication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
