"""PostgreSQL as source and sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.replicate.connector import Capabilities, Connector, Problem, SourceError

TESTED = range(12, 19)
"""The major versions that the tests of replication run against."""


class PostgreSQL(Connector):
    """PostgreSQL 12 and later."""

    name = "postgresql"
    capabilities = Capabilities(
        title="PostgreSQL",
        source_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        sink_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        atomic=("delete", "diff", "truncate", "rename"),
        queries=True,
        parallel_source=True,
        parallel_sink=True,
        watermark="safe",
        transactional=True,
        staging_schema=True,
        create=True,
        analyze=True,
        patterns=True,
        cancel="cancel request, then the socket is shut down",
        tested=f"{TESTED[0]} to {TESTED[-1]}, also from one to another",
        settings={
            "url": "postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
            "pooler": "session, where url is a pooler that keeps a session for each client",
        },
        secrets=frozenset({"url"}),
    )

    def check_config(self, config: Mapping[str, Any]) -> list[Problem]:
        from tasks.replicate.connectors import urls
        from tasks.replicate.connectors.postgresql import session

        found = [
            Problem(key, "is no setting of postgresql; it has url and pooler")
            for key in config
            if key not in self.capabilities.settings
        ]
        try:
            urls.check_userinfo(str(config.get("url") or ""))
            session.conninfo_of(config)
        except urls.UnusableURL as error:
            found.append(error.problem)
        if config.get("pooler", session.SESSION) != session.SESSION:
            message = f"may only be {session.SESSION}; without one leave it out"
            found.append(Problem("pooler", message))
        return found

    def test(self, config: Mapping[str, Any]) -> str:
        from tasks.replicate.connectors.postgresql import session

        with session.errors(SourceError, config):
            connection = session.connect(config, name="claimcheck")
            try:
                row = connection.execute("show server_version").fetchone()
                known = connection.info.server_version // 10000 in TESTED
            finally:
                session.close(connection)
        untested = "" if known else f", untested: it is tested with {self.capabilities.tested}"
        return f"PostgreSQL {row[0] if row else '?'}{untested}"

    def source(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

        return PostgreSQLSource(config, name=name)

    def sink(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink

        return PostgreSQLSink(config, name=name)
