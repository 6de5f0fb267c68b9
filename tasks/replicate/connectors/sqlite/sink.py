"""Writing SQLite: one transaction with the file's write lock, fenced in the file itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Column,
    Counts,
    Fit,
    Kind,
    Load,
    Relation,
    Sink,
    SinkError,
    TableName,
)
from tasks.replicate.connectors.sqlite import catalog, fence, preflight, values
from tasks.replicate.connectors.sqlite.publishing import STAGE, Publication
from tasks.replicate.connectors.sqlite.session import Session, identifier
from tasks.replicate.fits import fit

_CREATE = "create table if not exists {table} ({definitions})"
_ANY = "select 1 from {table} limit 1"
_DROP = "drop table {table}"
_INSERT = "insert or abort into {table} ({columns}) values ({places})"
_ANALYZE = "analyze {table}"
PAGE = 5000

# Declared types: what keeps every value of a kind, and still tells the kind. Two words, because
# SQLite looks for TEXT in the name to leave what looks like a number as it is.
_TYPES = {
    Kind.BOOLEAN: "BOOLEAN",
    Kind.FLOAT: "REAL",
    Kind.DECIMAL: "DECIMAL TEXT",
    Kind.TEXT: "TEXT",
    Kind.BYTES: "BLOB",
    Kind.DATE: "DATE",
    Kind.TIME: "TIME",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.TIMESTAMPTZ: "TIMESTAMPTZ",
    Kind.INTERVAL: "TEXT",
    Kind.UUID: "UUID",
    Kind.JSON: "JSON TEXT",
    Kind.OTHER: "TEXT",
}


class SQLiteSink(Sink):
    """A connection that writes; staging lies in its own temporary file."""

    dialect = "sqlite"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._session = Session(config, SinkError, writable=True)

    def stop(self) -> None:
        self._session.stop()

    def close(self) -> None:
        self._session.rollback()
        self._session.close()

    # What there is

    def describe(self, table: TableName) -> Relation | None:
        name = _bare(table)
        found = catalog.describe(self._session, name)
        if found is None and (near := catalog.near(self._session, name)) is not None:
            raise SinkError(
                f"nothing was changed: sink table {name} cannot be there or be made: SQLite takes "
                f"names of any case for one, and {near} is there already; write sink.table: {near} "
                "where that one is meant, else another name",
                permanent=True,
            )
        return found

    def writes(self, relation: Relation) -> Any:
        return catalog.identity(self._session, relation.detail["table"])

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        """Between SQLite files a value stays as it is where the affinity does."""
        if dialect == self.dialect and source.detail["affinity"] == sink.detail["affinity"]:
            return Fit()
        return fit(source.type, sink.type)

    def orders(self, source: Column, sink: Column) -> bool:
        """A number that is kept as text sorts as one."""
        digits = sink.type.kind is Kind.DECIMAL and sink.detail["affinity"] == "TEXT"
        return not digits and super().orders(source, sink)

    def refusals(self, load: Load) -> list[str]:
        return preflight.refusals(self._session, load)

    def create(
        self, table: TableName, columns: Sequence[Column], key: Sequence[str], dialect: str
    ) -> None:
        name = _bare(table)
        definitions = [
            f"{identifier(column.name)} {_type(column, dialect)}"
            + ("" if column.nullable else " not null")
            for column in columns
        ]
        if key:
            definitions.append(f"primary key ({', '.join(identifier(part) for part in key)})")
        self._session.make_file()
        self._session.execute(
            _CREATE.format(table=identifier("main", name), definitions=", ".join(definitions))
        )

    def uncreate(self, table: TableName) -> None:
        place = identifier("main", _bare(table))
        with contextlib.suppress(SinkError):
            self._session.execute("begin immediate")
            if self._session.execute(_ANY.format(table=place)).fetchone() is None:
                self._session.execute(_DROP.format(table=place))
            self._session.execute("commit")

    # The fence

    def begin(self, load: Load) -> None:
        self._session.execute("begin immediate")
        fence.enter(self._session, load)

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()

    def settle(self, load: Load) -> bool:
        self._session.reopen()
        # The lock is had when whatever was lost has ended.
        self._session.execute("begin immediate")
        try:
            return fence.settle(self._session, load)
        finally:
            self._session.rollback()

    # The data

    def truncate(self, load: Load) -> None:
        Publication(self._session, load).empty()

    def stage(self, load: Load) -> None:
        Publication(self._session, load).stage()

    def unstage(self, load: Load) -> None:
        with contextlib.suppress(SinkError):
            self._session.rollback()
            Publication(self._session, load).unstage()

    def write(self, load: Load, batches: Iterable[Batch], *, staging: bool) -> int:
        target = identifier("temp", STAGE) if staging else identifier("main", load.table[-1])
        statement = _INSERT.format(
            table=target,
            columns=", ".join(identifier(plan.sink.name) for plan in load.columns),
            places=", ".join("?" for _ in load.columns),
        )
        if staging:
            self._session.execute("begin")
        written = self._write(statement, values.Writer(load.columns), batches)
        if staging:
            self._session.commit()
        return written

    def _write(self, statement: str, writer: values.Writer, batches: Iterable[Batch]) -> int:
        written = 0
        for batch in batches:
            assert isinstance(batch.data, list)
            if not batch.data:
                continue
            rows = writer.rows(batch)
            try:
                self._session.insert(statement, rows)
            except UnicodeError as error:
                raise SinkError(writer.explain(rows, error), permanent=True) from None
            written += len(rows)
        return written

    def publish(self, load: Load) -> Counts:
        return Publication(self._session, load).publish()

    def finish(self, load: Load, *, analyze: bool) -> list[str]:
        if analyze:
            self._session.execute(_ANALYZE.format(table=identifier("main", load.table[-1])))
        return []

    # Verification

    def count(self, load: Load) -> int:
        statement = Publication(self._session, load).landed("count(*)")
        return int(self._session.execute(statement).fetchone()[0])

    def scan(self, load: Load) -> Iterator[Batch]:
        columns = [plan.sink for plan in load.columns]
        conversions = values.conversions(columns)
        wanted = ", ".join(f"t.{identifier(column.name)}" for column in columns)
        statement = Publication(self._session, load).landed(wanted)
        for page in self._session.pages(statement, (), PAGE):
            yield Batch.of_rows(page, conversions)


def _bare(table: TableName) -> str:
    try:
        return catalog.split(table)
    except ValueError as error:
        raise SinkError(f"sink: {error}", permanent=True) from None


def _type(column: Column, dialect: str) -> str:
    """SQLite's declared type for a column of some end."""
    kind = column.type
    if dialect == "sqlite":
        return "" if kind.name == "any" else kind.name
    if kind.kind is Kind.INTEGER:
        beyond = kind.bits is None or (kind.bits > 63 and kind.unsigned)
        return "DECIMAL TEXT" if beyond else "INTEGER"
    if kind.kind is Kind.DECIMAL and kind.precision is not None:
        return f"DECIMAL TEXT({kind.precision},{kind.scale or 0})"
    return _TYPES[kind.kind]
