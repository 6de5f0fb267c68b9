"""SQLite files as source and sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.replicate.connector import Capabilities, Connector, Problem, SourceError


class SQLite(Connector):
    """A SQLite 3 database file on this machine."""

    name = "sqlite"
    capabilities = Capabilities(
        title="SQLite",
        source_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        sink_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        atomic=("delete", "diff"),
        queries=True,
        watermark="lag",
        transactional=True,
        create=True,
        analyze=True,
        patterns=True,
        cancel="interrupt",
        tested="3.40",
        settings={"url": "sqlite:///relative/path.db or sqlite:////absolute/path.db"},
    )

    def check_config(self, config: Mapping[str, Any]) -> list[Problem]:
        from tasks.replicate.connectors import urls
        from tasks.replicate.connectors.sqlite import session

        found = [
            Problem(key, "is no setting of sqlite; it has url")
            for key in config
            if key not in self.capabilities.settings
        ]
        try:
            session.location(config)
        except urls.UnusableURL as error:
            found.append(error.problem)
        return found

    def test(self, config: Mapping[str, Any]) -> str:
        from tasks.replicate.connectors.sqlite import session

        with session.Session(config, SourceError, writable=False) as opened:
            version, _ = opened.execute(
                "select sqlite_version(), count(*) from main.sqlite_master"
            ).fetchone()
        return f"SQLite {version}"

    def source(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.sqlite.source import SQLiteSource

        return SQLiteSource(config)

    def sink(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.sqlite.sink import SQLiteSink

        return SQLiteSink(config)
