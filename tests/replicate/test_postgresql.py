"""PostgreSQL passes the suite that every connector passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psycopg
import pytest
from conformance import Harness, Sample, SinkConformance, SourceConformance
from psycopg import conninfo, sql
from replication_kit import Database, url_of

from tasks.replicate.connector import Kind, Row, SinkError, SourceError
from tasks.replicate.connectors.postgresql import PostgreSQL, session
from tasks.replicate.names import join_name, split_name


class PostgreSQLHarness(Harness):
    """One fresh database."""

    connector = PostgreSQL()
    samples = (
        Sample("flag", "boolean", Kind.BOOLEAN, (True, False, None)),
        Sample("small", "smallint", Kind.INTEGER, (-32768, 32767, None)),
        Sample("big", "bigint", Kind.INTEGER, (-(2**63), 2**63 - 1, 0)),
        Sample("price", "numeric(12,2)", Kind.DECIMAL, ("-9999999999.99", None, "NaN")),
        Sample("huge", "numeric", Kind.DECIMAL, ("1" * 60 + ".5", "NaN", "0.000000000000000001")),
        Sample("real", "real", Kind.FLOAT, (1.5, float("nan"), None)),
        Sample("double", "double precision", Kind.FLOAT, (0.1, float("inf"), -5e-324)),
        Sample("words", "text", Kind.TEXT, ("", "tab\tnew\nline \\ é 🐘", None)),
        Sample("short", "varchar(5)", Kind.TEXT, ("12345", " 1 ", None)),
        Sample("data", "bytea", Kind.BYTES, (b"", bytes(range(256)), None)),
        Sample("day", "date", Kind.DATE, ("infinity", "0044-03-15 BC", "2026-11-01")),
        Sample("clock", "time", Kind.TIME, ("00:00:00", "24:00:00", "23:59:59.999999")),
        Sample("wall", "timestamp", Kind.TIMESTAMP, ("-infinity", "2026-11-01 01:02:03.5", None)),
        Sample(
            "at", "timestamptz", Kind.TIMESTAMPTZ, ("2026-11-01 01:02:03.5+00", "infinity", None)
        ),
        Sample("span", "interval", Kind.INTERVAL, ("1 year 2 days 00:00:00.001", "-1 days", None)),
        Sample("uid", "uuid", Kind.UUID, ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None, None)),
        Sample("doc", "json", Kind.JSON, ('{"b": [1, {"a": null}],  "a": "é"}', "null", None)),
        Sample("docb", "jsonb", Kind.JSON, ('{"a": 1.00}', "[]", None)),
        Sample("grid", "int[]", Kind.OTHER, ("{{1,2},{3,NULL}}", "{}", None)),
        Sample("words_of", "text[]", Kind.OTHER, ('{a,"b c",NULL}', None, None)),
        Sample("mood", "mood", Kind.OTHER, ("sad", "it's ok", None)),
        Sample("some", "int4range", Kind.OTHER, ("[1,5)", "empty", None)),
        Sample("bits", "bit varying", Kind.OTHER, ("10101", "", None)),
        Sample("net", "inet", Kind.OTHER, ("10.0.0.1/32", "::1/64", None)),
        Sample("zoned", "time with time zone", Kind.OTHER, ("23:59:59.5+05:30", None, None)),
    )

    def __init__(self, database: Database) -> None:
        self.database = database
        self.config = database.config
        database.execute(
            "do $$begin create type mood as enum ('sad', 'it''s ok'); "
            "exception when duplicate_object then null; end$$"
        )

    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        connection = self.database.connection
        parts: list[sql.Composable] = [
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(native))
            for name, native in columns.items()
        ]
        if key:
            names = sql.SQL(", ").join(map(sql.Identifier, key))
            parts.append(sql.SQL("primary key ({})").format(names))
        identifier = sql.Identifier(table)
        connection.execute(
            sql.SQL("create table {} ({})").format(identifier, sql.SQL(", ").join(parts))
        )
        with (
            connection.cursor() as cursor,
            cursor.copy(sql.SQL("copy {} from stdin").format(identifier)) as copy,
        ):
            for row in rows:
                copy.write_row(row)
        return join_name((table,))

    def rows(self, table: str) -> list[Row]:
        connection = self.database.connection
        identifier = sql.Identifier(*split_name(table))
        connection.execute("set timezone = 'UTC'")
        kinds = {s.name: s.kind for s in self.samples}
        cursor = connection.execute(sql.SQL("select * from {} limit 0").format(identifier))
        assert cursor.description is not None
        plain = (Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT, Kind.TEXT, Kind.BYTES, None)
        columns = [
            sql.Identifier(c.name)
            if kinds.get(c.name) in plain
            else sql.SQL("{}::text").format(sql.Identifier(c.name))
            for c in cursor.description
        ]
        statement = sql.SQL("select {} from {} order by 1").format(
            sql.SQL(", ").join(columns), identifier
        )
        return connection.execute(statement).fetchall()

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.database.execute("create view blocked as select 1 as id from pg_sleep(60)")
        yield


@pytest.fixture
def postgresql(source: Database) -> PostgreSQLHarness:
    return PostgreSQLHarness(source)


class TestSource(SourceConformance):
    @pytest.fixture
    def harness(self, postgresql: PostgreSQLHarness) -> Harness:
        return postgresql


class TestSink(SinkConformance):
    @pytest.fixture
    def harness(self, postgresql: PostgreSQLHarness) -> Harness:
        return postgresql


def test_a_version_that_is_not_tested_is_told(
    source: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "untested" not in PostgreSQL().test(source.config)
    monkeypatch.setattr("tasks.replicate.connectors.postgresql.TESTED", range(90, 91))
    told = PostgreSQL().test(source.config)
    assert told.startswith(f"PostgreSQL {source.version // 10000}")
    assert told.endswith(", untested: it is tested with 12 to 18, also from one to another")


def test_a_login_that_can_never_work_is_permanent(source: Database) -> None:
    whole = source.config["url"]
    for wrong in ({"user": "nobody_knows_them"}, {"dbname": "nobody_made_it"}):
        url = url_of(conninfo.make_conninfo(whole, **wrong))
        with pytest.raises(SourceError) as caught:
            PostgreSQL().test({"url": url})
        assert caught.value.permanent, str(caught.value)


@pytest.mark.parametrize(
    ("text", "permanent"),
    [
        ('connection failed: FATAL:  password authentication failed for user "a"', True),
        ('FATAL:  no pg_hba.conf entry for host "::1"\nFATAL:  role "a" does not exist', True),
        ("connection to server failed: fe_sendauth: no password supplied", True),
        ('FATAL:  role "a" does not exist\n- host b: connection timeout expired', False),
        ("connection failed: FATAL:  sorry, too many clients already", False),
        ("connection failed: FATAL:  the database system is starting up", False),
        ('FATAL:  LDAP authentication failed for user "a"', False),
        ("the connection is closed", False),
    ],
)
def test_a_refused_connection_is_judged_by_its_text(text: str, permanent: bool) -> None:
    with pytest.raises(SinkError) as caught, session.errors(SinkError, {}):
        raise psycopg.OperationalError(text)
    assert caught.value.permanent is permanent
