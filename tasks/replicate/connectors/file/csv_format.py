"""CSV files: every column is text, and between PostgreSQL and a file whole blocks travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tasks.replicate.columnwise import passes, takes_any_text
from tasks.replicate.connector import (
    Batch,
    Cell,
    Column,
    ColumnPlan,
    ColumnType,
    Fit,
    Guard,
    Kind,
    Lane,
    ReadRequest,
    Relation,
    Row,
    Side,
)
from tasks.replicate.connectors.file import csv_text
from tasks.replicate.connectors.file.csv_text import Dialect
from tasks.replicate.connectors.file.formats import (
    BadFile,
    BadValue,
    Format,
    StopCheck,
    TextEncoder,
    Writer,
    refuse_lacking,
    unwritable,
)
from tasks.replicate.guards import guarded

TEXT = ColumnType(Kind.TEXT, "csv text", loose=True)
_DELIMITERS = (",", ";", "\t", "|")
_NUMBERED = (
    "a file without a header has the columns column_1, column_2 and so on (the datasource's header)"
)


class CSV(Format):
    """Comma-separated values, in the dialect of the datasource."""

    suffixes = (".csv",)

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        lanes = (Lane.COPY_CSV, Lane.ROWS) if dialect.plain else (Lane.ROWS,)
        self.source_lanes = self.sink_lanes = lanes
        self.named = dialect.header

    def describe(self, paths: Sequence[Path]) -> Relation:
        headers = {path: csv_text.header(path, self._dialect) for path in paths}
        if not self.named:
            # Without a header an empty file is one of no rows.
            headers = {path: names for path, names in headers.items() if names}
            if not headers:
                return Relation((), named=False, blank=TEXT)
        first, names = next(iter(headers.items()))
        for path, others in headers.items():
            if others != names and sorted(others) != sorted(names):
                raise BadFile(f"{path}: its columns are not those of {first}")
        if not names:
            raise BadFile(f"{first}: is empty, so that its columns are not known")
        columns = tuple(Column(name, TEXT) for name in names)
        return Relation(columns, hint=self._hint(names), named=self.named)

    def _hint(self, names: Sequence[str]) -> str:
        """A word on the delimiter where the only column's name looks like many."""
        used = [mark for mark in _DELIMITERS if mark in names[0]] if len(names) == 1 else []
        if not used:
            return "" if self.named else _NUMBERED
        return (
            f"the file has one column; is its delimiter {used[0]!r}? (the datasource's delimiter)"
        )

    # Reading

    def read(
        self, paths: Sequence[Path], request: ReadRequest, lane: Lane, check: StopCheck
    ) -> Iterator[Batch]:
        for path in paths:
            names = csv_text.header(path, self._dialect)
            if not names:
                continue
            refuse_lacking(path, names, request.columns)
            wanted = [names.index(plan.source.name) for plan in request.columns]
            as_is = wanted == list(range(len(names)))
            guards = _Guards(request.columns, self._dialect)
            begun = False
            for number, (chunk, line, size) in enumerate(self._data(path)):
                check()
                try:
                    if lane is Lane.ROWS:
                        rows = self._rows(chunk, names, wanted, path)
                        yield from _pages(rows, size, request.fetch_size)
                        continue
                    if as_is:
                        batch = self._block(chunk, guards, path)
                    else:
                        batch = self._rewritten(chunk, names, wanted, request.columns, path)
                except csv_text.BadRecord as error:
                    at = self._line(path, number, check) + error.line
                    raise BadFile(f"{path}, line {at}: {error.what}") from None
                # What was read, whatever was made of it: by that the file comes to its end.
                batch.size = size
                if not begun:
                    batch.place, begun = (str(path), line), True
                yield batch

    def _line(self, path: Path, number: int, check: StopCheck) -> int:
        """The line of the file on which this chunk of its data begins."""
        at = 1
        for before, (chunk, line, _) in enumerate(islice(self._data(path), number + 1)):
            check()
            if before == 0:
                at = line
            if before < number:
                at += chunk.count(b"\n")
        return at

    def _data(self, path: Path) -> Iterator[tuple[bytes, int, int]]:
        """The records behind the header, the line on which the first of all stands, and their
        bytes in the file."""
        line, first = 1, self._dialect.header
        for chunk, size in csv_text.chunks(path, self._dialect):
            data = csv_text.without_first(chunk) if first else chunk
            if first:
                line += chunk.count(b"\n") - data.count(b"\n")
            first = False
            if data:
                yield data, line, size

    def _rows(
        self, chunk: bytes, names: Sequence[str], wanted: Sequence[int], path: Path
    ) -> list[tuple[Cell, ...]]:
        rows = csv_text.parse(chunk, len(names), self._dialect, path)
        if list(wanted) == list(range(len(names))):
            return rows
        return [tuple([row[position] for position in wanted]) for row in rows]

    def _block(self, chunk: bytes, guards: _Guards, path: Path) -> Batch:
        """The bytes as they are, once they are known to be well formed and to pass the guards."""
        rows = guards.apply_by_column(chunk)
        if rows is None:
            rows = guards.apply(chunk, path)
            chunk = csv_text.without_ends(chunk)
        return Batch(chunk, rows, len(chunk))

    def _rewritten(
        self,
        chunk: bytes,
        names: Sequence[str],
        wanted: Sequence[int],
        columns: Sequence[ColumnPlan],
        path: Path,
    ) -> Batch:
        """The wanted columns in the plan's order."""
        rows = self._rows(chunk, names, wanted, path)
        (batch,) = guarded([Batch(rows, len(rows), 0)], columns)
        data = csv_text.written(batch.data, self._dialect).encode()  # type: ignore[arg-type]
        return Batch(data, len(rows), len(data))

    def count(self, paths: Sequence[Path], check: StopCheck) -> int:
        total = 0
        for path in paths:
            for chunk, _, _ in self._data(path):
                check()
                total += csv_text.count_records(chunk)
        return total

    # Writing

    def create(self, path: Path, relation: Relation) -> None:
        self.writer(path, relation, ()).close()

    def new_columns(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        names = [column.name for column in columns]
        if not self.named:
            names = csv_text.numbered(len(names))
        return tuple(Column(name, TEXT) for name in names)

    def writer(self, path: Path, relation: Relation, columns: Sequence[ColumnPlan]) -> Writer:
        names = [column.name for column in relation.columns]
        return _CSVWriter(path, self._dialect, names, columns)

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        """Text holds everything; that it was a number or a truth value is not kept."""
        lanes = {Lane.ROWS, Lane.COPY_CSV} if self._dialect.plain else {Lane.ROWS}
        # Of a column that may hold anything, everything is made text by the one rule for that.
        anything = source.type.loose and source.type.kind is Kind.TEXT
        return Fit(frozenset(lanes), guards=(Guard("text"),) if anything else ())


def _pages(rows: Sequence[Row], size: int, most: int) -> Iterator[Batch]:
    """Batches of at most ``most`` of the rows, each with its share of their ``size`` in bytes."""
    for start in range(0, len(rows), most):
        page = list(rows[start : start + most])
        yield Batch(page, len(page), size * len(page) // len(rows))


class _Guards:
    """The plan's guards, in the byte lane: only their columns are made into Python's text."""

    def __init__(self, columns: Sequence[ColumnPlan], dialect: Dialect) -> None:
        self._watched = [(i, plan) for i, plan in enumerate(columns) if _needed(plan)]
        self._dialect = dialect
        self._width = len(columns)

    def apply_by_column(self, chunk: bytes) -> int | None:
        """The number of records, if they are well formed; None where that is not known."""
        if b"\\.\n" in chunk:
            return None
        try:
            text = chunk.decode()
        except UnicodeDecodeError:
            return None
        wanted = [position for position, _ in self._watched] or [0]
        sides = csv_text.columns(text, self._width, self._dialect, wanted)
        if sides is None:
            return None
        self._check(sides[: len(self._watched)])
        return len(sides[0])

    def apply(self, chunk: bytes, path: Path) -> int:
        """The number of records. Raises BadRecord, or SourceError naming the column of a value
        that does not pass."""
        records = csv_text.parse_carefully(chunk, self._width, self._dialect, path)
        self._check([[record[i] for record in records] for i, _ in self._watched])
        return len(records)

    def _check(self, sides: Sequence[Sequence[Cell]]) -> None:
        for values, (_, plan) in zip(sides, self._watched, strict=True):
            side = Side(values)
            if not all(passes(side, guard) for guard in plan.guards):
                cells: list[Row] = [(cell,) for cell in values]
                for _batch in guarded([Batch(cells, len(cells), 0)], [plan]):
                    pass


def _needed(plan: ColumnPlan) -> bool:
    """Whether a text could fail the column's guards."""
    return not all(map(takes_any_text, plan.guards))


class _CSVWriter(Writer):
    def __init__(
        self,
        path: Path,
        dialect: Dialect,
        names: Sequence[str],
        columns: Sequence[ColumnPlan],
    ) -> None:
        self._dialect = dialect
        self._columns, self._names = columns, names
        planned = [plan.sink.name for plan in columns]
        self._order: list[int | None] | None = None
        if planned != list(names):
            self._order = [planned.index(n) if n in planned else None for n in names]
        self._path, self._rest = path, b""
        self._encoder = TextEncoder(dialect.encoding)
        header = self._encoded([tuple(names)], "its name") if dialect.header else b""
        self._file = path.open("wb", buffering=1 << 20)
        self._put(header)

    def write(self, batch: Batch) -> int:
        rows = batch.data
        if isinstance(rows, bytes):
            if self._order is None:
                self._put(rows)
                return batch.rows
            data = self._rest + rows
            end = csv_text.last_end(data)
            self._rest = data[end:]
            rows = csv_text.parse(data[:end], len(self._columns), self._dialect, self._path)
        if not rows:
            return 0
        if self._order is not None:
            order = self._order
            rows = [tuple([None if i is None else row[i] for i in order]) for row in rows]
        self._put(self._encoded(rows, "a text"))
        return len(rows)

    def _encoded(self, rows: Sequence[Row], what: str) -> bytes:
        try:
            return self._encoder.encode(csv_text.written(rows, self._dialect))
        except UnicodeError:
            encoding = self._dialect.encoding
            sides = zip(self._names, zip(*rows, strict=True), strict=True)
            lacking = ", ".join(name for name, side in sides if unwritable(side, encoding))
            raise BadValue(
                f"column {lacking}: {what} has a character that {encoding} cannot write"
            ) from None

    def _put(self, data: bytes) -> None:
        mark = csv_text.BOM
        if data.startswith(mark) and self._dialect.encoding == "utf-8" and not self._file.tell():
            # A file without a header whose first text begins so: readers take one mark away.
            data = mark + data
        self._file.write(data)

    def close(self) -> int:
        self._file.close()
        return 0
