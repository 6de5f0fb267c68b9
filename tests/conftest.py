"""What every test may lean on: servers, fresh databases, and an environment of its own.

Servers that run already are used when they are given, by `CLAIMCHECK_TEST_DATABASE_URL` and
`CLAIMCHECK_TEST_REDIS_URL`; else the embedded ones are started for this session in a folder of
their own and stopped at its end. `DATABASE_URL` and `REDIS_URL` are not looked at: the shell may
have them set for production. Tests make databases with unique names on a given server and drop
them; they never touch another one. On a given broker they use queues with unique names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from psycopg import conninfo, sql
from support import databases

from db import embedded, migrations, settings

# Read before any test: the tests themselves must not see a developer's own settings.
GIVEN_DATABASE = os.environ.get("CLAIMCHECK_TEST_DATABASE_URL")
GIVEN_REDIS = os.environ.get("CLAIMCHECK_TEST_REDIS_URL")
GIVEN_SINK = os.environ.get("CLAIMCHECK_TEST_SINK_URL")

# What a thread of the app does behind the end of its test reaches no server, and starts none.
os.environ["DATABASE_URL"] = "postgresql://127.0.0.1:1/between-tests"
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"


# --- servers ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def embedded_home() -> Iterator[Path]:
    """A state folder for this session's embedded servers, removed with them at the end."""
    folder = Path(tempfile.mkdtemp(prefix="cc-test-"))
    folder.chmod(0o711)  # as root the servers run as another account, which must pass through
    home = folder / "home"
    try:
        yield home
    finally:
        if (home / "place.json").exists():
            embedded.remove(home)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def database_server(request: pytest.FixtureRequest) -> str:
    """libpq conninfo of a maintenance database, of a role that may create databases."""
    if GIVEN_DATABASE:
        return settings.parse_database_url("CLAIMCHECK_TEST_DATABASE_URL", GIVEN_DATABASE)
    home = request.getfixturevalue("embedded_home")
    return embedded.ensure(home, redis=False).database_conninfo


@pytest.fixture(scope="session")
def sink_server(request: pytest.FixtureRequest) -> str:
    """Where tests of replication write to: ``database_server``, unless another is given."""
    if GIVEN_SINK:
        return settings.parse_database_url("CLAIMCHECK_TEST_SINK_URL", GIVEN_SINK)
    server = request.getfixturevalue("database_server")
    assert isinstance(server, str)
    return server


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> str:
    """URL of a broker for tests that neither stop nor flush it."""
    if GIVEN_REDIS:
        return GIVEN_REDIS
    home = request.getfixturevalue("embedded_home")
    return embedded.ensure(home, database=False).redis_url


# --- databases --------------------------------------------------------------------------------


def create_database(server: str, *, template: str = "template1") -> str:
    """Create a database with a unique name on `server`; returns its libpq conninfo."""
    name = f"cc_test_{uuid.uuid4().hex[:20]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    return conninfo.make_conninfo(server, dbname=name)


def drop_database(server: str, database: str) -> None:
    """Drop what `create_database` made, also where a test left a connection open."""
    name = conninfo.conninfo_to_dict(database)["dbname"]
    assert isinstance(name, str)
    with psycopg.connect(server, autocommit=True) as connection:
        databases.drop(connection, name)


@pytest.fixture
def empty_database(database_server: str) -> Iterator[str]:
    """libpq conninfo of a fresh database without any table, dropped afterwards."""
    database = create_database(database_server)
    try:
        yield database
    finally:
        drop_database(database_server, database)


@pytest.fixture(scope="session")
def migrated_template(database_server: str) -> Iterator[str]:
    """Name of a database at the newest version, from which `database` makes its copies."""
    template = create_database(database_server)
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", connect_args=conninfo.conninfo_to_dict(template)
    )
    migrations.upgrade(engine)
    engine.dispose()
    name = conninfo.conninfo_to_dict(template)["dbname"]
    assert isinstance(name, str)
    try:
        yield name
    finally:
        drop_database(database_server, template)


@pytest.fixture
def database(database_server: str, migrated_template: str) -> Iterator[str]:
    """libpq conninfo of a fresh migrated control database, dropped afterwards."""
    made = create_database(database_server, template=migrated_template)
    try:
        yield made
    finally:
        drop_database(database_server, made)


# --- environment ------------------------------------------------------------------------------


def _is_ours(name: str) -> bool:
    return name in settings.VARIABLES or name.startswith("CLAIMCHECK_")


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the settings of the shell that started pytest, nor those of another test."""
    for name in list(os.environ):
        if _is_ours(name) or name == "KUBERNETES_SERVICE_HOST":
            monkeypatch.delenv(name)
    settings.reset()
    yield
    settings.reset()


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., settings.Settings]:
    """`configure(DATABASE_URL=..., CLAIMCHECK_LEASE_SECONDS=2)`: set, reload, return them."""

    def apply(**variables: object) -> settings.Settings:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        settings.reset()
        return settings.settings()

    return apply
