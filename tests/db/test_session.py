"""Connections with deadlines, and named statements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.proxy import before_database
from support.waiting import until

from db import embedded, session, statements
from db.link import POINT_PLANS, Link


@pytest.fixture
def database(empty_database: str, configure: Callable[..., Any]) -> Iterator[str]:
    configure(DATABASE_URL=empty_database, REDIS_URL="redis://127.0.0.1:1/0")
    session.dispose()
    yield empty_database
    session.dispose()


def setting(connection: psycopg.Connection[Any], name: str) -> str:
    found = connection.execute("select current_setting(%s)", [name]).fetchone()
    assert found is not None
    return str(found[0])


def end_session(other: psycopg.Connection[Any], pid: int) -> None:
    """Have the server close a session, and wait until it has."""
    query = "select 1 from pg_stat_activity where pid = %s"
    other.execute("select pg_terminate_backend(%s)", [pid])
    until("it to be gone", lambda: not other.execute(query, [pid]).fetchall())


def test_a_session_has_deadlines_on_the_servers_side(database: str) -> None:
    with session.connect("a test") as connection:
        assert setting(connection, "statement_timeout") == "30s"
        assert setting(connection, "lock_timeout") == "5s"
        assert setting(connection, "idle_in_transaction_session_timeout") == "1min"
        assert setting(connection, "default_transaction_isolation") == "read committed"
        assert setting(connection, "application_name") == "a test"
        assert connection.autocommit


def test_what_the_users_url_sets_wins(database: str, configure: Callable[..., Any]) -> None:
    given = conninfo.make_conninfo(
        database, options="-c statement_timeout=7s -c search_path=mine,public"
    )
    configure(DATABASE_URL=given)
    with session.connect() as connection:
        assert setting(connection, "statement_timeout") == "7s"
        assert setting(connection, "search_path") == "mine,public"
        assert setting(connection, "lock_timeout") == "5s"


def test_a_hung_server_is_given_up_by_the_clients_own_clock(
    database: str, configure: Callable[..., Any]
) -> None:
    with before_database(database) as (proxy, through):
        configure(DATABASE_URL=through)
        connection = session.connect(patience=0.5)
        connection.execute("select 1")
        proxy.hang()
        began = time.monotonic()
        with pytest.raises(session.DeadlineExceeded):
            connection.execute("select 1")
        assert time.monotonic() - began < 3
        assert connection.closed
        proxy.resume()


def test_a_transaction_on_a_hung_server_ends_too(
    database: str, configure: Callable[..., Any]
) -> None:
    with before_database(database) as (proxy, through):
        configure(DATABASE_URL=through)
        session.engine().connect().close()

        def ask() -> None:
            with session.transaction(patience=0.5) as connection:
                proxy.hang()
                connection.exec_driver_sql("select 1")

        began = time.monotonic()
        with pytest.raises(DBAPIError) as raised:
            ask()
        assert isinstance(raised.value.orig, session.DeadlineExceeded)
        assert time.monotonic() - began < 5
        proxy.resume()


def test_patience_is_put_back(database: str) -> None:
    with session.engine().connect() as connection:
        with session.patient(connection, 0.25):
            assert connection.connection.driver_connection.patience == 0.25  # type: ignore[union-attr]
        driver = connection.connection.driver_connection
        assert driver.patience == session.PATIENCE_SECONDS  # type: ignore[union-attr]


def test_a_statement_may_be_given_more_time_than_others(database: str) -> None:
    limit = "select current_setting('statement_timeout')"
    with session.transaction() as connection:
        driver = session.driver_connection(connection)
        before = connection.exec_driver_sql(limit).scalar_one()
        with session.unhurried(connection, 120):
            assert connection.exec_driver_sql(limit).scalar_one() == "2min"
            assert driver.patience == 125  # type: ignore[attr-defined]
        assert connection.exec_driver_sql(limit).scalar_one() == before
        assert driver.patience == session.PATIENCE_SECONDS  # type: ignore[attr-defined]


def test_a_pooled_connection_that_the_server_closed_is_replaced_unseen(database: str) -> None:
    def backend() -> int:
        with session.transaction() as connection:
            return int(connection.exec_driver_sql("select pg_backend_pid()").scalar_one())

    before = backend()
    with psycopg.connect(database, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s)", [before])
        until(
            "it to be gone",
            lambda: (
                not other.execute(
                    "select 1 from pg_stat_activity where pid = %s", [before]
                ).fetchall()
            ),
        )
    assert backend() != before


def test_a_lock_is_waited_for_as_long_as_asked(database: str) -> None:
    with psycopg.connect(database) as other:
        other.execute("create table t (a int)")
        other.commit()
        other.execute("lock table t")
        with pytest.raises(DBAPIError) as raised, session.transaction(lock_seconds=0.2) as mine:
            mine.exec_driver_sql("select * from t")
        assert isinstance(raised.value.orig, psycopg.errors.LockNotAvailable)


def test_a_fork_shares_no_connection(database: str) -> None:
    link = Link("a test")
    mine = statements.row(link.get(), "select pg_backend_pid() as pid")
    with session.transaction() as connection:
        pooled = statements.row(connection, "select pg_backend_pid() as pid")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with session.transaction() as connection:
                found = statements.row(connection, "select pg_backend_pid() as pid")
            other = link.row("select pg_backend_pid() as pid")
            os.write(writer, f"{found['pid']} {other['pid']}".encode())  # type: ignore[index]
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    found = os.read(reader, 100).decode().split()
    os.close(reader)
    assert len(found) == 2
    assert mine is not None
    assert pooled is not None
    assert str(pooled["pid"]) not in found
    assert str(mine["pid"]) not in found
    # The parent's are as they were.
    assert link.row("select pg_backend_pid() as pid") == mine
    with session.transaction() as connection:
        assert statements.row(connection, "select pg_backend_pid() as pid") == pooled
    link.close()


def test_a_link_keeps_the_planner_to_its_plans_and_opens_again(database: str) -> None:
    link = Link("a test")
    row = link.row("select current_setting('enable_seqscan') as off, pg_backend_pid() as pid")
    assert row is not None
    assert row["off"] == POINT_PLANS["enable_seqscan"]
    with psycopg.connect(database, autocommit=True) as other:
        end_session(other, row["pid"])
    again = link.row("select pg_backend_pid() as pid")
    assert again is not None
    assert again["pid"] != row["pid"]
    link.close()
    assert not link.is_open


def test_an_unreachable_server_is_an_error_soon(configure: Callable[..., Any]) -> None:
    configure(DATABASE_URL="postgresql://nobody:hidden@127.0.0.1:1/x", REDIS_URL="redis://x")
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError) as raised:
        session.connect()
    assert time.monotonic() - began < 10
    assert "hidden" not in str(raised.value)


def test_a_broken_embedded_valkey_leaves_a_given_database_alone__R_T4(
    database: str, configure: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other processes' connections, or the first one here, come while it is broken."""

    def broken(*_: Any, **__: Any) -> Any:
        raise embedded.EmbeddedError("the embedded valkey cannot be started")

    configure(DATABASE_URL=database, REDIS_URL=None, CLAIMCHECK_HOME=tmp_path / "home")
    for name in ("ensure", "revive", "keep"):
        monkeypatch.setattr(embedded, name, broken)
    for _ in range(2):
        with session.connect() as connection:
            assert setting(connection, "application_name") == "claimcheck"
        with session.transaction() as transaction:
            assert statements.rows(transaction, "select 1 as one") == [{"one": 1}]


# Statements

GOOD = """-- name: one
-- What it is for (R-X0).
select 1 as one;

-- name: two
-- Another,
-- with ; and 'literals'.
select ';' as two
from (select 1) x;
"""


def test_statements_are_read_by_name() -> None:
    found = statements.parse(GOOD, "file")
    assert list(found) == ["one", "two"]
    assert found["two"] == "select ';' as two\nfrom (select 1) x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-- name: a\nselect 1;\n", "does not say what it is for"),
        ("-- name: a\n-- x\nselect 1\n", "is not one statement"),
        ("-- name: a\n-- x\nselect 1; select 2;\n", "is not one statement"),
        (GOOD + "-- name: one\n-- again\nselect 1;\n", "twice"),
    ],
)
def test_a_malformed_file_is_refused(text: str, why: str) -> None:
    with pytest.raises(statements.MalformedStatements, match=why):
        statements.parse(text, "file")


def test_what_two_statements_say_alike_stands_once() -> None:
    text = (
        "-- fragment: known\n-- Who counts.\n  where a\n\n"
        "-- name: one\n-- It.\nselect 1\n-- include: known\n  and b;\n"
        "-- name: two\n-- It.\nselect 2\n-- include: known\n;\n"
    )
    assert statements.parse(text, "file") == {
        "one": "select 1\n  where a\n  and b",
        "two": "select 2\n  where a\n",
    }
    alone = text.partition("\n\n")[2]
    with pytest.raises(statements.MalformedStatements, match="no fragment known stands before"):
        statements.parse(alone, "file")
    assert (
        statements.parse(alone, "file", {"known": "  where z\n"})["two"] == "select 2\n  where z\n"
    )
    nested = "-- fragment: more\n-- It.\n  -- include: known\n  or c\n\n-- name: one\n-- It.\n" + (
        "select 3\n-- include: more\n;\n"
    )
    found = statements.parse(text.partition("\n\n")[0] + "\n\n" + nested, "file")
    assert found == {"one": "select 3\n  where a\n  or c\n"}


@pytest.mark.parametrize("path", sorted(statements.FOLDER.glob("*.sql")), ids=lambda p: p.stem)
def test_every_file_of_ours_reads(path: Any) -> None:
    found = statements.load(path.stem)
    assert found or path.stem == "shared"
    for statement in found.values():
        # A comment inside would be searched for parameters too.
        assert "%" not in "".join(
            line.partition("--")[2] for line in statement.splitlines() if "--" in line
        )


def test_the_same_text_runs_everywhere(database: str) -> None:
    text = "select %(a)s::int as a, '100%%' as b"
    expected = [{"a": 5, "b": "100%"}]
    with session.connect() as connection:
        assert statements.rows(connection, text, {"a": 5}) == expected
        assert statements.rows(connection, "select '100%%' as b") == [{"b": "100%"}]
    with session.transaction() as transaction:
        assert statements.rows(transaction, text, {"a": 5}) == expected
        assert statements.rows(transaction, "select '100%%' as b") == [{"b": "100%"}]
        with Session(bind=transaction) as orm:
            assert statements.row(orm, text, {"a": 5}) == expected[0]
        assert statements.rows(transaction, "create table t (a int)") == []
