"""MySQL and MariaDB as source and sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.replicate.connector import Capabilities, Connector, Problem, SourceError

TESTED = (10, 11)
"""The series of MariaDB that the tests of replication run against."""


class MySQL(Connector):
    """MySQL 8.0 and MariaDB 10.5, and later; through mysqlclient, or else PyMySQL."""

    name = "mysql"
    capabilities = Capabilities(
        title="MySQL, MariaDB",
        source_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        sink_modes=frozenset({"complete", "complete-atomic", "incremental"}),
        atomic=("delete", "diff"),
        queries=True,
        parallel_sink=True,
        watermark="lag",
        transactional=True,
        staging_schema=True,
        create=True,
        analyze=True,
        patterns=True,
        cancel="KILL QUERY, then the socket is shut down",
        tested=f"MariaDB {TESTED[0]}.{TESTED[1]}; MySQL is untested",
        extra="mysql",
        settings={"url": "mysql://USER:PASSWORD@HOST:PORT/DATABASE (?ssl=verify&ssl_ca=FILE)"},
    )

    def missing(self) -> str | None:
        from tasks.replicate.connectors.mysql import drivers

        return drivers.missing()

    def check_config(self, config: Mapping[str, Any]) -> list[Problem]:
        from tasks.replicate.connectors import urls
        from tasks.replicate.connectors.mysql import drivers

        found = [
            Problem(key, "is no setting of mysql; it has url")
            for key in config
            if key not in self.capabilities.settings
        ]
        try:
            urls.check_userinfo(str(config.get("url") or ""))
            drivers.parameters(config)
        except urls.UnusableURL as error:
            found.append(error.problem)
        return found

    def test(self, config: Mapping[str, Any]) -> str:
        from tasks.replicate.connectors.mysql.session import Session

        with Session(config, SourceError) as opened:
            product = f"{'MariaDB' if opened.mariadb else 'MySQL'} {opened.version_text}"
            known = opened.mariadb and opened.version[:2] == TESTED
        untested = f"untested: it is tested with MariaDB {TESTED[0]}.{TESTED[1]}"
        return product if known else f"{product}, {untested}"

    def source(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.mysql.source import MySQLSource

        return MySQLSource(config, name=name)

    def sink(self, config: Mapping[str, Any], *, name: str = "") -> Any:
        from tasks.replicate.connectors.mysql.sink import MySQLSink

        return MySQLSink(config, name=name)
