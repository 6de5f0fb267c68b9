"""One harness of each engine as source and one as sink, for the matrix between engines."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from conformance import Harness
from files_kit import FolderHarness
from mysql_kit import a_database
from replication_kit import fresh_database
from sqlite_kit import SQLiteHarness
from test_postgresql import PostgreSQLHarness

FILES = ("csv", "jsonl", "parquet")
NAMES = ("postgresql", "mysql", "sqlite", *FILES)


class Engines:
    """Made when they are first asked for; what an engine needs and is not here is a skip."""

    def __init__(self, server: str, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._stack = ExitStack()
        self._made: dict[str, Harness] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def source(self, name: str) -> Harness:
        return self._one(name, "source")

    def sink(self, name: str) -> Harness:
        return self._one(name, "sink")

    def _one(self, name: str, side: str) -> Harness:
        key = f"{name}-{side}"
        if key not in self._made:
            self._made[key] = self._make(name, key)
        return self._made[key]

    def _make(self, name: str, key: str) -> Harness:
        if name == "postgresql":
            return PostgreSQLHarness(self._stack.enter_context(fresh_database(self._server)))
        if name == "mysql":
            return self._stack.enter_context(a_database())
        if name == "sqlite":
            return SQLiteHarness(self._folder / f"{key}.db")
        if name in FILES:
            folder = self._folder / key
            folder.mkdir()
            return FolderHarness(folder, name)
        pytest.fail(f"no engine is called {name}")
