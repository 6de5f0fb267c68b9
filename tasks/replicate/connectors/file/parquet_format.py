"""Parquet files, by pyarrow; to and from PostgreSQL whole columns are converted at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tasks.replicate.connector import (
    Batch,
    Column,
    ColumnPlan,
    Fit,
    Guard,
    Kind,
    Lane,
    ReadRequest,
    Relation,
)
from tasks.replicate.connectors.file import arrow_types, copy_binary, csv_text
from tasks.replicate.connectors.file.formats import (
    BadFile,
    BadValue,
    Format,
    StopCheck,
    Writer,
    refuse_lacking,
)
from tasks.replicate.fits import fit

GROUP_ROWS = 128 * 1024
"""Rows of a row group; it is held in memory while it is filled."""
GROUP_BYTES = 64 * 1024 * 1024
SCHEMA = "schema"
"""Of a relation's detail: the schema of the file that there is."""
BINARY_ROWS = 16 * 1024
CSV_BYTES = 4 * 1024 * 1024

_EXTREMES = {
    Kind.DATE: "calendar",
    Kind.TIMESTAMP: "calendar",
    Kind.TIMESTAMPTZ: "calendar",
    Kind.TIME: "clock",
    Kind.DECIMAL: "finite",
}
# Kinds whose text in COPY's CSV Arrow reads as the value, or refuses.
_READ_FROM_CSV = frozenset(
    {Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL, Kind.TEXT, Kind.DATE}
    | {Kind.TIMESTAMP, Kind.TIMESTAMPTZ, Kind.UUID, Kind.JSON, Kind.INTERVAL, Kind.OTHER}
)


class Parquet(Format):
    """Apache Parquet."""

    suffixes = (".parquet", ".pq")
    source_lanes = (Lane.COPY_BINARY, Lane.ROWS)
    sink_lanes = (Lane.COPY_CSV, Lane.ROWS)
    binds = True

    def describe(self, paths: Sequence[Path]) -> Relation:
        first: pa.Schema | None = None
        rows = 0
        for path in paths:
            with _opened(path) as file:
                schema = file.schema_arrow
                rows += file.metadata.num_rows
            if first is None:
                first = schema
            elif not schema.equals(first):
                raise BadFile(f"{path}: its columns are not those of {paths[0]}")
        assert first is not None
        doubled = sorted({name for name in first.names if first.names.count(name) > 1})
        if doubled:
            raise BadFile(f"{paths[0]}: has the column {', '.join(doubled)} twice")
        columns = [arrow_types.column_of(field) for field in first]
        return Relation(
            tuple(copy_binary.marked(c, f) for c, f in zip(columns, first, strict=True)),
            rows=rows,
            detail={SCHEMA: first},
        )

    # Reading

    def read(
        self, paths: Sequence[Path], request: ReadRequest, lane: Lane, check: StopCheck
    ) -> Iterator[Batch]:
        names = [plan.source.name for plan in request.columns]
        size = BINARY_ROWS if lane is Lane.COPY_BINARY else request.fetch_size
        encoder = copy_binary.Encoder(request.columns) if lane is Lane.COPY_BINARY else None
        if encoder is not None:
            yield Batch(copy_binary.HEADER, 0, len(copy_binary.HEADER))
        for path in paths:
            with _opened(path) as file:
                refuse_lacking(path, file.schema_arrow.names, request.columns)
                for record in file.iter_batches(batch_size=size, columns=names, use_threads=False):
                    check()
                    # The file's order of columns is not the request's.
                    record = record.select(names)
                    if encoder is None:
                        yield _page(record, names)
                    else:
                        data = encoder.encode(record)
                        yield Batch(data, record.num_rows, len(data))
        if encoder is not None:
            yield Batch(copy_binary.TRAILER, 0, len(copy_binary.TRAILER))

    def count(self, paths: Sequence[Path], check: StopCheck) -> int:
        total = 0
        for path in paths:
            check()
            with _opened(path) as file:
                total += file.metadata.num_rows
        return total

    # Writing

    def create(self, path: Path, relation: Relation) -> None:
        schema = _schema(relation)
        with pq.ParquetWriter(path, schema) as writer:
            writer.write_table(schema.empty_table())

    def new_columns(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        return tuple(arrow_types.column_of(arrow_types.field_of(column)) for column in columns)

    def writer(self, path: Path, relation: Relation, columns: Sequence[ColumnPlan]) -> Writer:
        return _ParquetWriter(path, _schema(relation), columns)

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        unwritten = arrow_types.refusal_of(sink)
        if unwritten is not None:
            return Fit(refusal=unwritten)
        found = fit(source.type, sink.type)
        if found.refusal is not None and source.type.kind is sink.type.kind is Kind.OTHER:
            return Fit(refusal=_untyped(source, dialect))
        if found.refusal is not None:
            return found
        guards = list(found.guards)
        extreme = _EXTREMES.get(sink.type.kind)
        same = dialect == "file" or (source.type.kind is Kind.INTEGER and not source.type.loose)
        if extreme is not None and not same:
            guards.append(Guard(extreme))
        if guards and dialect == "postgresql":
            # Arrow reads the text of a number or a time as that value, or refuses it.
            guards = [guard for guard in guards if guard.name not in _READ_ALIKE]
        alike = source.type.kind is sink.type.kind and arrow_types.read_from_text(sink)
        csv = source.type.kind in _READ_FROM_CSV and alike
        lanes = {Lane.ROWS, Lane.COPY_CSV} if csv else {Lane.ROWS}
        return Fit(frozenset(lanes), guards=tuple(guards))


_READ_ALIKE = frozenset({"calendar", "finite", "scale", "integer", "fraction"})


_AS_TEXT = {"postgresql": "text", "mysql": "char"}


def _untyped(source: Column, dialect: str) -> str:
    """What is to be done with a column that Parquet has no type for, and no kind tells of."""
    text = _AS_TEXT.get(dialect)
    way = (
        "convert it at the source"
        if text is None
        else (f"write its text, by a query with cast({source.name} as {text}) as {source.name}")
    )
    return f"{source.type.name} has no type of its own in a Parquet file; {way}"


def _schema(relation: Relation) -> pa.Schema:
    """The existing file's, with its metadata; or a new one that keeps the columns' values."""
    found = relation.detail.get(SCHEMA)
    if found is None:
        found = pa.schema([arrow_types.field_of(column) for column in relation.columns])
    return found


def _opened(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException:
        raise BadFile(f"{path}: is no Parquet file") from None
    except OSError as error:
        error.filename = str(path)
        raise


def _page(record: pa.RecordBatch, names: Sequence[str]) -> Batch:
    try:
        sides = [
            arrow_types.cells(column, name)
            for column, name in zip(record.columns, names, strict=True)
        ]
    except BadValue as error:
        raise BadFile(str(error)) from None
    return Batch.of_columns(sides, record.num_rows, record.nbytes)


class _ParquetWriter(Writer):
    def __init__(self, path: Path, schema: pa.Schema, columns: Sequence[ColumnPlan]) -> None:
        self._schema = schema
        self._names = [plan.sink.name for plan in columns]
        # Half the time and half the size of pyarrow's own choice, for tables as they are.
        self._file = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)
        self._tables: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._numbered: dict[str, tuple[set[Any], int]] = {
            field.name: (set(), arrow_types.room(field.type))
            for field in schema
            if pa.types.is_dictionary(field.type) and field.type.index_type.bit_width <= 16
        }
        self._rest: list[bytes] = []
        self._rest_size = 0
        self._options = pacsv.ConvertOptions(
            column_types={
                name: arrow_types.text_type(schema.field(name).type) for name in self._names
            },
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            true_values=["t"],
            false_values=["f"],
        )

    def write(self, batch: Batch) -> int:
        if isinstance(batch.data, bytes):
            self._rest.append(batch.data)
            self._rest_size += len(batch.data)
            return self._take_csv(last=False) if self._rest_size >= CSV_BYTES else 0
        if not batch.rows:
            return 0
        sides = [side.values for side in batch.sides]
        made = arrow_types.arrays(self._schema, self._names, sides)
        self._add(pa.RecordBatch.from_arrays(made, schema=self._schema))
        return batch.rows

    def _take_csv(self, *, last: bool) -> int:
        """Whole records of what has come, read column by column by Arrow."""
        data = b"".join(self._rest)
        end = len(data) if last else csv_text.last_end(data)
        self._rest, self._rest_size = [data[end:]], len(data) - end
        if not end:
            return 0
        try:
            table = pacsv.read_csv(
                pa.BufferReader(data[:end]),
                read_options=pacsv.ReadOptions(
                    column_names=self._names, use_threads=False, block_size=max(end, 1)
                ),
                parse_options=pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                convert_options=self._options,
            )
        except pa.ArrowException as error:
            raise BadValue(self._explain(str(error))) from None
        for record in table.to_batches():
            columns = dict(zip(self._names, record.columns, strict=True))
            made = [
                self._stored(columns[field.name], field)
                if field.name in columns
                else pa.nulls(record.num_rows, field.type)
                for field in self._schema
            ]
            self._add(pa.RecordBatch.from_arrays(made, schema=self._schema))
        return int(table.num_rows)

    def _stored(self, array: pa.Array, field: pa.Field) -> pa.Array:
        if array.null_count and not field.nullable:
            raise BadValue(f"column {field.name}: a value is NULL, which the file does not allow")
        try:
            return arrow_types.as_stored(array, field.type)
        except pa.ArrowException:
            raise BadValue(self._not_stored(field.name)) from None

    def _explain(self, message: str) -> str:
        """Which column, without the value that Arrow quotes."""
        number = message.partition("In CSV column #")[2].partition(":")[0]
        if number.isdigit():
            return self._not_stored(self._names[int(number)])
        return "a record cannot be read"

    def _not_stored(self, name: str) -> str:
        return (
            f"column {name}: a value cannot be stored as {self._schema.field(name).type} "
            "unchanged; change the sink column, or convert it at the source, such as in a query"
        )

    def _number(self, record: pa.RecordBatch) -> None:
        """Refuse more different values than a file's dictionary has numbers: the file, or one of
        its row groups, could be written and never be read."""
        for name, (seen, most) in self._numbered.items():
            seen.update(record.column(name).dictionary.to_pylist())
            if len(seen) > most:
                kind = self._schema.field(name).type
                raise BadValue(
                    f"column {name}: holds more different values than {kind} has room for"
                )

    def _add(self, record: pa.RecordBatch) -> None:
        self._number(record)
        self._tables.append(record)
        self._rows += record.num_rows
        self._bytes += record.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._tables:
            self._file.write_table(pa.Table.from_batches(self._tables))
        self._tables, self._rows, self._bytes = [], 0, 0

    def close(self) -> int:
        try:
            late = self._take_csv(last=True) if self._rest_size else 0
            self._flush()
        finally:
            self._file.close()
        return late
