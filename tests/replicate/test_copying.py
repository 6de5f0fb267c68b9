"""COPY as it is spoken to the server: whole, and with errors as soon as there are any."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql
from replication_kit import Database, Job

from tasks.replicate import modes
from tasks.replicate.connector import SinkError
from tasks.replicate.connectors.postgresql import copying, session

Make = Callable[..., Job]
INTO = sql.SQL("copy t from stdin")
OUT = sql.SQL("copy ({}) to stdout")


@pytest.fixture(name="connection")
def _connection(sink: Database) -> Iterator[psycopg.Connection[Any]]:
    sink.execute("create table t (id int primary key, note text)")
    with closing(session.connect(sink.config, name="cc/copying/1")) as connection:
        yield connection


class Slowly:
    """Many blocks of one row each; ``taken`` tells how many were asked for."""

    def __init__(self, first: bytes, count: int = 500) -> None:
        self.first, self.count, self.taken = first, count, 0

    def __iter__(self) -> Iterator[bytes]:
        yield self.first
        for number in range(1, self.count):
            self.taken = number
            time.sleep(0.01)
            yield b"%d\t\\N\n" % number


def _content(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return connection.execute("select count(*), sum(length(note)) from t").fetchall()


def test_blocks_of_all_sizes_arrive(connection: psycopg.Connection[Any]) -> None:
    large = "x" * (copying.BLOCK * 5 + 1)
    blocks = [b"", b"1\ta\n2\t", b"b\n", f"3\t{large}\n4\t{large}".encode(), b"\n"]
    assert copying.copy_in(connection, INTO, blocks) == 4
    assert _content(connection) == [(4, 2 + 2 * len(large))]
    assert copying.copy_in(connection, INTO, []) == 0


def test_a_refused_row_ends_the_copy_while_others_still_come(
    connection: psycopg.Connection[Any], sink: Database
) -> None:
    if sink.version < 140000:
        pytest.skip("an older server may tell of a setting, too, while it takes rows")
    # It looks at keys a thousand rows at a time.
    blocks = Slowly(b"7\ta\n" * 2000)
    with pytest.raises(psycopg.errors.UniqueViolation, match=r"\(id\)=\(7\)"):
        copying.copy_in(connection, INTO, blocks)
    assert blocks.taken < blocks.count / 2
    assert _content(connection) == [(0, None)]


def test_a_run_that_cannot_end_well_ends_soon(source: Database, sink: Database, job: Make) -> None:
    if sink.version < 140000:
        pytest.skip("an older server may tell of a setting, too, while it takes rows")
    sink.execute("create table t (id int check (id > 1), note text)")
    query = "select i as id, repeat('x', 100) as note from generate_series(1, 3000000) i"
    one = job("complete", reads={"table": None, "query": query})
    context = one.context()
    read: list[int] = []
    context.progress = lambda done, *_, **__: read.append(done)  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="check"):
        modes.run(context)
    assert max(read) < 1_500_000


def test_a_source_that_fails_leaves_nothing_and_a_session_of_use(
    connection: psycopg.Connection[Any],
) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"1\ta\n"
        raise SinkError("told by the blocks")

    with pytest.raises(SinkError, match="told by the blocks"):
        copying.copy_in(connection, INTO, blocks())
    assert _content(connection) == [(0, None)]


def test_a_notice_for_each_row_stops_nothing(
    connection: psycopg.Connection[Any], sink: Database
) -> None:
    # A long one comes in parts.
    sink.execute(
        "create function tell() returns trigger language plpgsql set client_min_messages = notice"
        " as $$ begin raise notice 'row % %', new.id, repeat('x', 100000); return new; end $$"
    )
    sink.execute("create trigger t before insert on t for each row execute function tell()")
    seen: list[Any] = []
    connection.add_notice_handler(seen.append)
    blocks = Slowly(b"0\ta\n", 50)
    assert copying.copy_in(connection, INTO, blocks) == 50
    assert len(seen) == 50


def test_a_killed_session_is_told_at_once(
    connection: psycopg.Connection[Any], sink: Database
) -> None:
    blocks = Slowly(b"0\ta\n")
    pid = connection.info.backend_pid

    def killing() -> Iterator[bytes]:
        for number, block in enumerate(blocks):
            if number == 3:
                sink.execute("select pg_terminate_backend(%s)", pid)
            yield block

    with pytest.raises(psycopg.errors.AdminShutdown):
        copying.copy_in(connection, INTO, killing())
    assert blocks.taken < blocks.count / 2


def test_a_copy_that_cannot_begin_leaves_a_session_of_use(
    connection: psycopg.Connection[Any],
) -> None:
    for wrong in ("copy t (none) from stdin", "copy none from stdin"):
        with pytest.raises(psycopg.ProgrammingError):
            copying.copy_in(connection, sql.SQL(wrong), [])
        assert _content(connection) == [(0, None)]
    with pytest.raises(psycopg.errors.DivisionByZero):
        list(copying.copy_out(connection, OUT.format(sql.SQL("select 1 / 0"))))
    assert _content(connection) == [(0, None)]


def test_a_killed_read_tells_why(source: Database) -> None:
    # One that is held up by a full socket says nothing more.
    query = (
        "select case when i > 150 then pg_sleep(60)::text else repeat('x', 1000) end"
        " from generate_series(1, 151) i"
    )
    with closing(session.connect(source.config, name="cc/copying/1")) as connection:
        blocks = copying.copy_out(connection, OUT.format(sql.SQL(query)))
        next(blocks)
        source.execute("select pg_terminate_backend(%s)", connection.info.backend_pid)
        with pytest.raises(psycopg.errors.AdminShutdown):
            list(blocks)


def test_the_rows_of_blocks_in_binary_add_up(source: Database) -> None:
    binary = sql.SQL("copy (select repeat('x', 1000) from generate_series(1, {})) to stdout binary")
    with closing(session.connect(source.config, name="cc/copying/1")) as connection:
        for rows in (0, 1, 96, 97, 98, 5000):
            blocks = list(copying.copy_out(connection, binary.format(sql.Literal(rows))))
            assert sum(found for _, found in blocks) == rows


@pytest.mark.parametrize("rows", [0, 1, 10_000])
@pytest.mark.parametrize("length", [1, 100, copying.BLOCK * 3])
def test_each_block_tells_its_rows(source: Database, rows: int, length: int) -> None:
    rows = min(rows, 20_000_000 // length)
    query = sql.SQL("select repeat('x', {}) from generate_series(1, {})").format(length, rows)
    with closing(session.connect(source.config, name="cc/copying/1")) as connection:
        blocks = list(copying.copy_out(connection, OUT.format(query)))
        connection.execute("select 1")
    assert [rows for _, rows in blocks] == [block.count(b"\n") for block, _ in blocks]
    assert sum(rows for _, rows in blocks) == rows
    assert all(len(block) >= copying.BLOCK for block, _ in blocks[:-1])


def test_a_read_that_fails_tells_the_error(source: Database) -> None:
    query = "select 1 / (5 - i) from generate_series(1, 10) i"
    with closing(session.connect(source.config, name="cc/copying/1")) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            list(copying.copy_out(connection, OUT.format(sql.SQL(query))))
        connection.execute("select 1")
