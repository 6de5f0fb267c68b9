"""COPY spoken straight to libpq, because two million messages are two million steps.

psycopg's reader passes each message through a generator and a wait; asking libpq for what it holds
already and waiting only when it holds nothing halves the cost. Its writer learns only at the end,
with all rows sent, that the first of them was refused; here the server's answer is looked for
before each block.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import pq, sql

BLOCK = 96 * 1024
"""Bytes gathered before they go on: a write for each message costs a fifth of the rate."""
_PIECE = 128 * 1024
"""Bytes that libpq is given at a time, at most: what a socket takes where it says that it does. Of
what it does not take, libpq keeps a copy."""
_ANSWERS_LAST = 140000
"""The first version that tells of changed settings only when the statement is over."""
_PART_MILLISECONDS = 100
"""What the rest of a message may take, once a part of it is there."""


def copy_out(
    connection: psycopg.Connection[Any], statement: sql.Composable
) -> Iterator[tuple[bytes, int]]:
    """Blocks of the statement's output, each with its number of rows.

    In binary the end may count as a row, which a last block without bytes takes back. The
    connection serves nothing else meanwhile; left early, it is of no more use.
    Raises psycopg's errors.
    """
    pgconn = connection.pgconn
    ready = _begun(connection, statement, pq.ExecStatus.COPY_OUT)
    take = pgconn.get_copy_data
    messages: list[Any] = []
    parts: list[bytes] = []
    size = rows = known = 0
    gone: psycopg.OperationalError | None = None
    length = 0
    while length >= 0:
        length, message = take(1)
        while length > 0:
            # The server sends each row as a message of its own; in binary a last one is no row.
            messages.append(message)
            length, message = take(1)
        if messages:
            parts.append(b"".join(messages))
            size += len(parts[-1])
            rows += len(messages)
            messages.clear()
        if size >= BLOCK and length == 0:
            yield b"".join(parts), rows
            known += rows
            parts.clear()
            size = rows = 0
        if length == 0:
            if gone is not None:
                raise gone
            ready.poll()
            # What came before the end is there still, and may be why it ended.
            gone = _taken_in(pgconn)
    total = _ended(pgconn, ready)
    yield b"".join(parts), (known + rows if total is None else total) - known


def copy_in(
    connection: psycopg.Connection[Any], statement: sql.Composable, blocks: Iterable[bytes]
) -> int:
    """Send the blocks, and return the number of rows that the statement wrote.

    Raises psycopg's errors, those of the server as soon as it gives them (or at the end, where
    libpq takes one in while a full socket makes it wait); and what ``blocks`` raise, after which
    the statement has failed.
    """
    pgconn = connection.pgconn
    ready = _begun(connection, statement, pq.ExecStatus.COPY_IN)
    ready.modify(pgconn.socket, select.POLLIN | select.POLLOUT)
    reason: bytes | None = None
    try:
        with _noticed(connection) as notices:
            for piece in _pieces(blocks):
                if _answered(pgconn, ready, notices):
                    reason = b"the server answered before all rows were sent"
                    break
                while not pgconn.put_copy_data(piece):
                    ready.poll()
                # The server looks at no row of a message before it has all of it.
                pgconn.flush()
    except BaseException:
        with suppress(psycopg.Error):
            _end(pgconn, ready, b"given up")
            _ended(pgconn, ready)
        raise
    try:
        _end(pgconn, ready, reason)
    except psycopg.OperationalError:
        # What the server said before it closed the connection is the better reason.
        if not pgconn.is_busy():
            _check(pgconn, pgconn.get_result(), pq.ExecStatus.COMMAND_OK)
        raise
    return _ended(pgconn, ready) or 0


def _pieces(blocks: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    for block in blocks:
        if len(block) <= _PIECE:
            yield block
            continue
        view = memoryview(block)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


@contextmanager
def _noticed(connection: psycopg.Connection[Any]) -> Iterator[list[Any]]:
    """A list that the server's notices are added to."""
    notices: list[Any] = []
    add = notices.append
    connection.add_notice_handler(add)
    try:
        yield notices
    finally:
        connection.remove_notice_handler(add)


def _answered(pgconn: Any, ready: select.poll, notices: list[Any]) -> bool:
    """Wait until the server takes more, or has answered: that it does only where it failed.

    libpq keeps an error to itself until the end of the COPY, so it is known by this alone:
    something came that was no notice.
    """
    while True:
        [(_, events)] = ready.poll()
        if events & ~(select.POLLIN | select.POLLOUT):
            return True
        if events & select.POLLIN:
            notices.clear()
            if not _only_notices(pgconn, notices):
                return True
        elif not pgconn.flush():
            return False


def _only_notices(pgconn: Any, notices: list[Any]) -> bool:
    """Whether what comes from the server is no answer; of a notice it may be a part at first."""
    more = select.poll()
    more.register(pgconn.socket, select.POLLIN)
    while not notices:
        if _taken_in(pgconn) is not None:
            # What it said before is told at the end.
            return False
        pgconn.is_busy()
        if pgconn.server_version < _ANSWERS_LAST:
            break
        if not notices and not more.poll(_PART_MILLISECONDS):
            return False
    return True


def _begun(
    connection: psycopg.Connection[Any], statement: sql.Composable, wanted: pq.ExecStatus
) -> select.poll:
    """Begin the COPY; what is given back waits for what the server sends."""
    pgconn = connection.pgconn
    ready = select.poll()
    ready.register(pgconn.socket, select.POLLIN)
    pgconn.send_query(statement.as_bytes(connection))
    while pgconn.flush():
        ready.poll(50)
    result = _result(pgconn, ready)
    if result is None or result.status != wanted:
        _emptied(pgconn, ready, result)
        _check(pgconn, result, wanted)
    return ready


def _end(pgconn: Any, ready: select.poll, error: bytes | None) -> None:
    """Tell the server that no more comes, and with an error that it shall forget what came."""
    while not pgconn.put_copy_end(error):
        ready.poll()
    while pgconn.flush():
        ready.poll()
    ready.modify(pgconn.socket, select.POLLIN)


def _ended(pgconn: Any, ready: select.poll) -> int | None:
    """The number of rows that the server tells at the end."""
    result = _result(pgconn, ready)
    _emptied(pgconn, ready, result)
    _check(pgconn, result, pq.ExecStatus.COMMAND_OK)
    found: int | None = result.command_tuples
    return found


def _emptied(pgconn: Any, ready: select.poll, result: Any) -> None:
    """Take in what follows a result, so that the session is of use again."""
    try:
        while _result(pgconn, ready) is not None:
            pass
    except psycopg.OperationalError:
        # The error was the server's last word: that is to be told, and not the silence after it.
        if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
            raise


def _result(pgconn: Any, ready: select.poll) -> Any:
    while pgconn.is_busy():
        ready.poll()
        gone = _taken_in(pgconn)
        if gone is not None and pgconn.is_busy():
            raise gone
    return pgconn.get_result()


def _taken_in(pgconn: Any) -> psycopg.OperationalError | None:
    """Take in what has come; the error where the server is gone."""
    try:
        pgconn.consume_input()
    except psycopg.OperationalError as error:
        return error
    return None


def _check(pgconn: Any, result: Any, wanted: pq.ExecStatus) -> None:
    if result is not None and result.status == wanted:
        return
    failed = result is not None and result.status == pq.ExecStatus.FATAL_ERROR
    if failed and result.error_field(pq.DiagnosticField.SQLSTATE):
        raise psycopg.errors.error_from_result(result, encoding="utf-8")
    message = pgconn.error_message.decode("utf-8", "replace")
    raise psycopg.OperationalError(message or "the connection broke while rows were moved")
