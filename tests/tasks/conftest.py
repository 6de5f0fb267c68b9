"""A Celery app on a fresh database and a Redis of its own, for each test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import ExecStatus
from psycopg.rows import dict_row
from support import processes
from support.app import forget_connections
from support.processes import Redis, Running

from db import keyring


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis that the test may stop, hang and kill."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with processes.redis_of_its_own(folder) as found:
        yield found


@pytest.fixture
def environment(database: str, own_redis: Redis, tmp_path: Path) -> dict[str, str]:
    """The settings of every process of the test."""
    path = tmp_path / "keyring.json"
    keyring.init(path)
    return {
        "DATABASE_URL": database,
        "REDIS_URL": own_redis.url,
        "CLAIMCHECK_KEYRING_FILE": str(path),
        "CLAIMCHECK_HOME": str(tmp_path / "home"),
    }


@pytest.fixture
def celery_app(environment: dict[str, str], configure: Callable[..., Any]) -> Iterator[Any]:
    """The project's app in this process, on the test's servers."""
    configure(**environment)
    from tasks import app

    forget_connections()
    yield app
    app.conf.task_always_eager = False
    forget_connections()


@pytest.fixture
def trigger(celery_app: Any) -> Any:
    from tasks import trigger

    return trigger


@pytest.fixture
def rows(database: str) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``rows("select ... where id = %s", id)`` on the control database, committed at once."""
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as connection:

        def run(query: Any, *parameters: Any) -> list[dict[str, Any]]:
            cursor = connection.execute(query, parameters)
            found = cursor.pgresult
            tells = found is not None and found.status == ExecStatus.TUPLES_OK
            return cursor.fetchall() if tells else []

        yield run


@pytest.fixture
def job(rows: Callable[..., list[dict[str, Any]]]) -> Callable[..., None]:
    """``job("noop")`` makes a job of that handler's name; options are columns or the definition."""

    def make(name: str, handler: str | None = None, definition: Any = None, **columns: Any) -> None:
        columns |= {
            "name": name,
            "handler": handler or name,
            "definition": json.dumps(definition or {}),
        }
        names = ", ".join(columns)
        places = ", ".join(["%s"] * len(columns))
        rows(f"insert into job ({names}) values ({places})", *columns.values())  # noqa: S608

    return make


@pytest.fixture
def worker(
    environment: dict[str, str], tmp_path: Path
) -> Callable[..., AbstractContextManager[Running]]:
    """``with worker(pool="threads") as w:`` a real worker on the test's servers."""

    def start(**options: Any) -> AbstractContextManager[Running]:
        name = options.get("name", "w")
        return processes.worker(tmp_path / f"worker-{name}.log", **{**environment, **options})

    return start
