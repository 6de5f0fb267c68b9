"""Rows into a table: LOAD DATA LOCAL through a pipe, or INSERTs where the server forbids that.

With LOCAL the server goes on after a bad value: it stores a default, cuts, or leaves a row out,
and only counts warnings. So every warning, and every row that is missing, is an error here, and
the transaction is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.replicate.connector import Batch, ColumnPlan, Kind, Side, SinkError
from tasks.replicate.connectors import tabbed
from tasks.replicate.connectors.mysql import faults, values
from tasks.replicate.connectors.mysql.session import Session, identifier, literal

_LOAD = """
load data local infile {path} into table {table} character set utf8mb4
fields terminated by '\\t' escaped by '\\\\' lines terminated by '\\n'
({targets}){assignments}
"""
_ASSIGNED = "\nset {0}"
_INSERT = "insert into {table} ({columns}) values {rows}"
_WARNINGS = "show warnings limit 5"
_COUNT = "select @@warning_count"
_ALLOWED = "select @@local_infile"
_PACKET = "select @@max_allowed_packet"

PIPE_BYTES = 1 << 20
INSERT_BYTES = 1 << 20
INSERT_ROWS = 1000
OPEN_SECONDS = 30.0
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\0": "\\0"}


def allowed(session: Session) -> bool:
    """Whether the server takes LOAD DATA LOCAL."""
    return bool(session.row(_ALLOWED)[0])


def load(
    session: Session, table: str, columns: Sequence[ColumnPlan], batches: Iterable[Batch]
) -> int:
    """Store the batches by LOAD DATA and return the rows stored."""
    writer = values.Writer(columns)
    folder = Path(tempfile.mkdtemp(prefix="claimcheck-"))
    try:
        pipe = folder / "rows"
        os.mkfifo(pipe, 0o600)
        loader = _Loader(session, _statement(pipe, table, writer))
        sent = 0
        with loader.reading(pipe) as send:
            for batch in batches:
                # What goes into the pipe does not show that nobody reads it any more.
                session.check()
                if batch.rows:
                    send(_lines(writer, batch))
                    sent += batch.rows
        stored = loader.stored
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _complain(session, sent, stored)
    return stored


def insert(
    session: Session, table: str, columns: Sequence[ColumnPlan], batches: Iterable[Batch]
) -> int:
    """Store the batches by INSERTs of many rows and return the rows stored."""
    writer = values.Writer(columns)
    names = ", ".join(identifier(column.name) for column in writer.columns)
    # Half of the longest statement that the server takes, because the last row may go beyond.
    most = min(INSERT_BYTES, int(session.row(_PACKET)[0]) // 2)
    stored = 0
    for batch in batches:
        for rows in _statements(writer, batch, most) if batch.rows else ():
            found = session.execute(
                _INSERT.format(table=table, columns=names, rows=",\n".join(rows))
            )
            _complain(session, len(rows), found)
            stored += found
    return stored


def _complain(session: Session, sent: int, stored: int) -> None:
    """Every note counts: a rounded decimal and a space that was cut off are no more than notes."""
    if session.row(_COUNT)[0]:
        found = session.rows(_WARNINGS)
        messages = dict.fromkeys(faults.clean(code, text) for _, code, text in found)
        raise SinkError(
            f"sink: the server would change what it stores: {'; '.join(messages)}", permanent=True
        )
    if sent != stored:
        raise SinkError(f"sink: of {sent} rows the server stored {stored}")


# The text that LOAD DATA reads


def _statement(pipe: Path, table: str, writer: values.Writer) -> str:
    targets, assignments = [], []
    for number, column in enumerate(writer.columns):
        name, variable = identifier(column.name), f"@c{number}"
        if column.type.kind is Kind.BYTES:
            # Bytes are not text of any character set.
            assignments.append(f"{name} = unhex({variable})")
        elif column.detail["base"] == "bit":
            # Digits would be taken for the bits of their letters.
            assignments.append(f"{name} = cast({variable} as unsigned)")
        else:
            variable = name
        targets.append(variable)
    return _LOAD.format(
        path=literal(str(pipe)),
        table=table,
        targets=", ".join(targets),
        assignments=_ASSIGNED.format(", ".join(assignments)) if assignments else "",
    )


def _lines(writer: values.Writer, batch: Batch) -> bytes:
    fields = [tabbed.with_nulls(side, _written(side)) for side in writer.sides(batch)]
    try:
        return b"".join(tabbed.lines(fields, batch.rows))
    except UnicodeError:
        raise _not_unicode(writer, batch) from None


def _written(side: Side) -> Sequence[str]:
    """The values that are not NULL as LOAD DATA reads them."""
    if side.kinds == {bytes}:
        return [value.hex() for value in side.present]  # type: ignore[union-attr]
    return tabbed.escaped(side, _ESCAPES)


# The text of INSERTs


def _statements(writer: values.Writer, batch: Batch, most: int) -> Iterator[list[str]]:
    """Rows of a batch as SQL, in statements of about ``most`` bytes."""
    sides = []
    for column, side in zip(writer.columns, writer.sides(batch), strict=True):
        # A bit field takes text for the bits of its letters; all else is read from text.
        bits = column.detail["base"] == "bit"
        cells: Sequence[Any] = side.values
        sides.append([value if bits and value else literal(value) for value in cells])
    rows: list[str] = []
    size = 0
    for row_cells in zip(*sides, strict=True):
        row = f"({', '.join(row_cells)})"
        try:
            size += len(row.encode())
        except UnicodeError:
            raise _not_unicode(writer, batch) from None
        rows.append(row)
        if size >= most or len(rows) >= INSERT_ROWS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _not_unicode(writer: values.Writer, batch: Batch) -> SinkError:
    sides = zip(batch.sides, writer.columns, strict=True)
    lacking = ", ".join(column.name for side, column in sides if tabbed.not_unicode(side))
    return SinkError(f"column {lacking}: a text is not valid Unicode", permanent=True)


# The pipe


class _Loader:
    """LOAD DATA in a thread of its own, which reads what this one writes into the pipe.

    The rows come from a source that belongs to the calling thread, so it is the server's side
    that moves to another one.
    """

    def __init__(self, session: Session, statement: str) -> None:
        self._session = session
        self._failure: BaseException | None = None
        self.stored = 0
        self._thread = threading.Thread(
            target=self._run, args=(statement,), name="claimcheck-load", daemon=True
        )

    def _run(self, statement: str) -> None:
        try:
            self.stored = self._session.execute(statement)
        except BaseException as error:
            self._failure = error

    @contextlib.contextmanager
    def reading(self, pipe: Path) -> Iterator[_Send]:
        """While the block runs, what is sent goes to the server; at its end all is stored."""
        self._thread.start()
        try:
            end = self._opened(pipe)
            try:
                with contextlib.suppress(OSError, AttributeError):
                    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                yield _Send(end)
            finally:
                os.close(end)
        except BrokenPipeError:
            # The server ended the statement: its error says why.
            self._join()
            raise SinkError("sink: the server stopped reading rows") from None
        except BaseException:
            # What stopped us is not the server's fault; its thread ends with the pipe.
            self._thread.join(OPEN_SECONDS)
            raise
        self._join()

    def _opened(self, pipe: Path) -> int:
        """The pipe's writing end, once the server's side has opened the other."""
        deadline = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            else:
                os.set_blocking(end, True)
                return end
            if not self._thread.is_alive():
                self._join()
                raise SinkError("sink: LOAD DATA ended before it read a row")
            if time.monotonic() > deadline:
                raise SinkError("sink: the server does not begin to read rows")
            time.sleep(0.001)

    def _join(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure


class _Send:
    """Writes all of a text into the pipe, waiting while the server is slower."""

    def __init__(self, end: int) -> None:
        self._end = end

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._end, view) :]
