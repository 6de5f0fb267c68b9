"""What a server, or its init_connect, sets for everybody changes no value and leaves none out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conformance import batches
from mysql_kit import DRIVERS, SAMPLES, MySQLHarness, a_database, load_of
from replication_kit import Job, definition

from tasks.replicate.connector import Row, SinkError, SourceError
from tasks.replicate.connectors.mysql import MySQL, drivers, loading, session, sqlmodes

SETTINGS = [
    "sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT'",
    "sql_mode = ''",
    "character_set_filesystem = utf16",
    "time_zone = '-07:00'",
    "sql_notes = 0",
    "note_verbosity = ''",
    "max_error_count = 0",
    "lc_messages = 'de_DE'",
    "check_constraint_checks = 0",
    "completion_type = 1",
    "autocommit = 0",
    "sql_safe_updates = 1",
    "sql_big_selects = 0, max_join_size = 1",
    "sql_auto_is_null = 1",
    "max_sort_length = 64",
    "tx_isolation = 'READ-UNCOMMITTED'",
    "max_statement_time = 0.001",
    "idle_transaction_timeout = 1",
]
BAD: list[tuple[str, Any, str]] = [
    ("decimal(6,2)", "1.256", "column v: Data truncated"),
    ("varchar(3)", "abc ", "column v: Data truncated"),
    ("json", "{no document", "json_valid|CONSTRAINT|Syntax error"),
]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def set_otherwise(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """As if the server had it so: the setting comes before all that a session does."""
    original = drivers.connect

    def connect(*arguments: Any, **more: Any) -> Any:
        connection = original(*arguments, **more)
        with connection.cursor() as cursor:
            cursor.execute(f"set session {setting}")
        return connection

    monkeypatch.setattr(drivers, "connect", connect)


def filled(harness: MySQLHarness) -> list[Row]:
    columns = {"id": "int"} | {sample.name: sample.native for sample in SAMPLES}
    cells = zip(*(sample.cells for sample in SAMPLES), strict=True)
    rows = [(i, *row) for i, row in enumerate(cells)]
    harness.make("t", columns, rows, key=["id"])
    return rows


def a_job(harness: MySQLHarness, reads: dict[str, Any], mode: str = "complete", **more: Any) -> Job:
    made = definition(reads, {"table": "u"}, mode, **more)
    return Job(harness.config, harness.config, made, connectors=("mysql", "mysql"))


def load_of_new(harness: MySQLHarness, native: str) -> Any:
    table = re.sub(r"\W", "", native)
    harness.make(table, {"v": native})
    return load_of(harness, table)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_of_the_server_changes_a_value(monkeypatch, driver, setting):
    with a_database(driver) as harness:
        rows = filled(harness)
        loads = [(load_of_new(harness, native), cell, says) for native, cell, says in BAD]
        set_otherwise(monkeypatch, setting)
        a_job(harness, {"table": "t"}, create=True).run()
        assert harness.rows("u") == rows
        a_job(harness, {"table": "t"}, "complete-atomic", atomic="diff", verify="checksum").run()
        assert harness.rows("u") == rows
        for load, cell, says in loads:
            with MySQL().sink(harness.config) as sink:
                sink.begin(load)
                with pytest.raises(SinkError, match=says):
                    sink.write(load, batches([(cell,)]), staging=False)
                sink.rollback()


def test_nothing_is_set_to_the_default_which_is_the_servers_own():
    assert "default" not in session._SETTINGS.lower()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select group_concat(seq) as c from (select 1 as one, seq from {}) k group by one", None),
        ("with recursive c as (select 1 as n union all select n + 1 from c where n < 1500)"
         " select n as c from c", "max_recursive_iterations"),
        ("select repeat('x', @@max_allowed_packet + 1) as c", "max_allowed_packet"),
    ],
)  # fmt: skip
def test_a_result_that_the_server_cuts_is_refused(monkeypatch, driver, query, says):
    set_otherwise(monkeypatch, "group_concat_max_len = 16")
    with a_database(driver) as harness:
        harness.make("n", {"seq": "int"}, [(i,) for i in range(500)])
        harness.make("u", {"c": "longtext"})
        job = a_job(harness, {"query": query.format("n")}, "complete-atomic")
        if says is None:
            job.run()
            assert len(harness.rows("u")[0][0]) == 10 + 2 * 90 + 3 * 400 + 499
            return
        with pytest.raises(SourceError, match=f"left out a part of the result: .*{says}") as caught:
            job.run()
        assert caught.value.permanent
        assert harness.rows("u") == []


@pytest.mark.parametrize(
    ("mode", "where", "says"),
    [
        ("ANSI_QUOTES", 'id > 0 and "status" = 1', "is a name under this server's ANSI_QUOTES"),
        ("PIPES_AS_CONCAT", "id || 'x' = '1x'", "joins texts under"),
        ("NO_BACKSLASH_ESCAPES", r"id <> 'a\b'", "write char"),
    ],
)
def test_sql_that_the_servers_mode_reads_otherwise_is_refused(monkeypatch, mode, where, says):
    set_otherwise(monkeypatch, f"sql_mode = '{mode}'")
    with a_database() as harness:
        harness.make("t", {"id": "int"}, [(1,)], key=["id"])
        harness.make("u", {"id": "int"}, key=["id"])
        with pytest.raises(SourceError, match=f"nothing was changed: source.where: .*{says}") as it:
            a_job(harness, {"table": "t", "where": where}).run()
        assert it.value.permanent
        other = "id <> 'say \"no\"' /* || */ and id <> '||' and id <> '' -- \"\\"
        a_job(harness, {"table": "t", "where": other}).run()
        assert harness.rows("u") == [(1,)]


def test_what_both_modes_read_alike_is_no_clash():
    every = frozenset({"ANSI_QUOTES", "PIPES_AS_CONCAT", "NO_BACKSLASH_ESCAPES"})
    assert len(list(sqlmodes.clashes("\"a\" || '\\'", every))) == 3
    assert list(sqlmodes.clashes("\"a\" || '\\'", frozenset())) == []
    assert list(sqlmodes.clashes('`a"` | \'b"||\' -- " \\ ||', every)) == []


@pytest.mark.parametrize("native", ["varbinary(1500)", "varchar(1500) character set latin1"])
def test_the_newest_of_rows_with_one_long_key_stays(native):
    keys = ["k" * 1100 + str(n * 7 % 40) for n in range(40)]
    rows = [(key, w, w) for w in range(6) for key in keys]
    with a_database() as harness:
        columns = {"k": native, "w": "int", "v": "int"}
        harness.make("t", columns, rows[3::2] + rows[::2] + rows[1:3])
        harness.make("u", columns, [(key, -1, -1) for key in keys], key=["k"])
        job = a_job(harness, {"table": "t"}, "incremental", watermark="w", lag=0)
        outcome = job.run()
        assert outcome.counters["updated"] == 40
        assert {row[1:] for row in harness.rows("u")} == {(5, 5)}


def test_inserts_are_no_longer_than_the_servers_packets(monkeypatch):
    monkeypatch.setattr(loading, "allowed", lambda session: False)
    original = session.Session.row

    def row(self: Any, statement: str) -> Any:
        return (20_000,) if "max_allowed_packet" in statement else original(self, statement)

    monkeypatch.setattr(session.Session, "row", row)
    lengths: list[int] = []
    execute = session.Session.execute

    def measured(self: Any, statement: str) -> int:
        lengths.append(len(statement) if statement.startswith("insert into `cc_test") else 0)
        return execute(self, statement)

    monkeypatch.setattr(session.Session, "execute", measured)
    with a_database() as harness:
        rows: list[Row] = [(i, "x" * 5000) for i in range(50)]
        harness.make("t", {"id": "int", "v": "text"}, rows, key=["id"])
        harness.make("u", {"id": "int", "v": "text"}, key=["id"])
        a_job(harness, {"table": "t"}).run()
        assert harness.rows("u") == rows
    assert 5000 < max(lengths) < 20_000
