"""Fresh databases, and runs of replication jobs without a worker around them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from support import databases

from dispatch.context import BoundDatasource, Outcome, RunContext
from tasks.replicate import modes

# What some tests need and the oldest servers lack. A server that lacks it refuses the statement.
NEWER = {
    "xid8": 130000,
    "drop expression": 130000,
    "begin atomic": 140000,
    "multirange": 140000,
    "numeric(5,-2)": 150000,
}


@dataclass
class Database:
    """A fresh database: its URL as a datasource's configuration, and a session to look at it."""

    url: str
    connection: psycopg.Connection[Any]

    @property
    def config(self) -> dict[str, str]:
        return {"url": self.url}

    @property
    def version(self) -> int:
        """The server's, such as 160014."""
        return self.connection.info.server_version

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        try:
            cursor = self.connection.execute(statement, parameters or None)  # type: ignore[arg-type]
        except psycopg.Error:
            for what, version in NEWER.items():
                if what in statement and self.version < version:
                    pytest.skip(f"{what} came with PostgreSQL {version // 10000}")
            raise
        return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *parameters: Any) -> Any:
        return self.execute(statement, *parameters)[0][0]


def url_of(database: str) -> str:
    """libpq conninfo as a URL, as users write it."""
    parts = conninfo.conninfo_to_dict(database)
    query = "&".join(
        f"{key}={value}"
        for key, value in parts.items()
        if key not in ("host", "port", "dbname", "user")
    )
    host = str(parts.get("host", "127.0.0.1"))
    if host.startswith("/"):
        return (
            f"postgresql:///{parts['dbname']}?host={host}&port={parts.get('port', 5432)}"
            f"&user={parts.get('user', 'postgres')}&{query}".rstrip("&")
        )
    return (
        f"postgresql://{parts.get('user', 'postgres')}@{host}:{parts.get('port', 5432)}"
        f"/{parts['dbname']}?{query}".rstrip("?")
    )


@contextmanager
def fresh_database(server: str, encoding: str | None = None) -> Iterator[Database]:
    """A database with a unique name, dropped at the end; in the locale C with an encoding."""
    name = f"cc_rep_{uuid.uuid4().hex[:20]}"
    with psycopg.connect(server, autocommit=True) as admin:
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if encoding is not None:
            old = admin.info.server_version < 130000
            locale = "lc_collate 'C' lc_ctype 'C'" if old else "locale 'C'"
            statement += sql.SQL(f" template template0 {locale} encoding {{}}").format(
                sql.Literal(encoding)
            )
        admin.execute(statement)
        database = conninfo.make_conninfo(server, dbname=name)
        # Tests change tables between statements: nothing is prepared.
        connection = psycopg.connect(database, autocommit=True, prepare_threshold=None)
        try:
            user = connection.info.user
            yield Database(url_of(conninfo.make_conninfo(database, user=user)), connection)
        finally:
            connection.close()
            databases.drop(admin, name)


@dataclass
class Job:
    """A job between two datasources, and the state that its runs would leave in Postgres."""

    source: Mapping[str, Any]
    sink: Mapping[str, Any]
    definition: dict[str, Any]
    connectors: tuple[str, str] = ("postgresql", "postgresql")
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    watermark: str | None = None
    fence: int = 0

    def context(self) -> RunContext:
        """The next attempt's context."""
        self.fence += 1
        run_id = uuid.uuid4()
        return RunContext(
            id=run_id,
            root_run_id=run_id,
            job="job",
            job_id=self.id,
            attempt=1,
            fence=self.fence,
            definition=self.definition,
            params={},
            source=BoundDatasource(uuid.uuid4(), "source", self.connectors[0], self.source),
            sink=BoundDatasource(uuid.uuid4(), "sink", self.connectors[1], self.sink),
            watermark=self.watermark,
        )

    def run(self) -> Outcome:
        """Run to the end and keep the watermark, as a successful finish does."""
        outcome = modes.run(self.context())
        if outcome.watermark is not None:
            self.watermark = outcome.watermark
        return outcome


def definition(
    source: dict[str, Any], sink: dict[str, Any], mode: str, **more: Any
) -> dict[str, Any]:
    return {
        "source": {"datasource": "source", **source},
        "sink": {"datasource": "sink", **sink},
        "mode": mode,
        **more,
    }
