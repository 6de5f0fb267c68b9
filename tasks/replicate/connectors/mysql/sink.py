"""Writing MySQL: InnoDB transactions, fenced, and loaded through LOAD DATA where it is allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Column,
    Counts,
    Fit,
    Guard,
    Kind,
    Load,
    Relation,
    Sink,
    SinkError,
    TableName,
)
from tasks.replicate.connectors.mysql import (
    catalog,
    fence,
    loading,
    preflight,
    staging,
    types,
    values,
)
from tasks.replicate.connectors.mysql.publishing import Publication, target
from tasks.replicate.connectors.mysql.session import Session, identifier
from tasks.replicate.fits import fit, refusal
from tasks.replicate.names import join_name

# Locks the table's definition until the transaction ends, and no row; a mere SELECT's lock would
# have to grow with the first change, behind whoever waits to alter the table and for us.
_HOLD = "select 1 from {table} limit 0 for update"
_PATIENCE = "set session lock_wait_timeout = 2"
_ALONE = "lock tables {table} write"
_ANY = "select 1 from {table} limit 1"
_DROP = "drop table {table}"
_CREATE = "create table if not exists {table} ({definitions}) engine = InnoDB"
PAGE = 5000

# What only PostgreSQL's types hold.
_EXTREMES = {
    Kind.FLOAT: "finite",
    Kind.DECIMAL: "finite",
    Kind.DATE: "calendar",
    Kind.TIMESTAMP: "calendar",
    Kind.TIMESTAMPTZ: "calendar",
}
_OWN_FORM = frozenset({"geometry", "point", "linestring", "polygon", "geometrycollection"}) | {
    "multipoint",
    "multilinestring",
    "multipolygon",
}


class MySQLSink(Sink):
    """A connection that writes."""

    dialect = "mysql"

    def __init__(self, config: Mapping[str, Any], *, name: str = "") -> None:
        self._session = Session(config, SinkError, name=name, loads=True)
        self._loads = loading.allowed(self._session)
        self._announced: tuple[str, int] | None = None

    def stop(self) -> None:
        self._session.stop()

    def close(self) -> None:
        self._session.close()

    # What there is

    def describe(self, table: TableName) -> Relation | None:
        schema, name = self._place(table)
        found = catalog.describe(self._session, schema, name)
        if found is None and not catalog.exists(self._session, schema):
            raise SinkError(
                f"nothing was changed: the sink has no database {schema}, or its user may not see "
                "it, and the first part of a name is one here: write sink.table: "
                f"{join_name((self._session.database, name))} (of a tables pattern: "
                f"sink.table_schema: {self._session.database}), or create it",
                permanent=True,
            )
        return found

    def writes(self, relation: Relation) -> Any:
        place = (relation.detail["schema"], relation.detail["table"])
        (found,) = catalog.identities(self._session, [place])
        return found

    def _place(self, table: TableName) -> tuple[str, str]:
        try:
            return catalog.split(self._session, table)
        except ValueError as error:
            raise SinkError(f"sink: {error}", permanent=True) from None

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        base, own = sink.detail["base"], dialect == self.dialect
        same = own and source.type.name == sink.type.name
        if base in _OWN_FORM or base == "year":
            return Fit() if same else refusal(source.type, sink.type, "only its own kind fits")
        if base in ("float", "double") and "(" in sink.type.name and not same:
            return refusal(source.type, sink.type, "the column rounds what it is given")
        if base in ("enum", "set") and source.type.kind in (Kind.TEXT, Kind.OTHER):
            # Membership is looked at value by value when it is written.
            return Fit()
        found = fit(source.type, sink.type)
        extreme = _EXTREMES.get(sink.type.kind)
        whole = source.type.kind is Kind.INTEGER and not source.type.loose
        if found.refusal is None and extreme and not own and not whole:
            found = replace(found, guards=(*found.guards, Guard(extreme)))
        return found

    def refusals(self, load: Load) -> list[str]:
        return preflight.refusals(self._session, load)

    def create(
        self, table: TableName, columns: Sequence[Column], key: Sequence[str], dialect: str
    ) -> None:
        make = types.Creation(mariadb=self._session.mariadb, version=self._session.version)
        definitions = [
            f"{identifier(column.name)} {make.definition(column, dialect, key=column.name in key)}"
            for column in columns
        ]
        if key:
            definitions.append(f"primary key ({', '.join(identifier(part) for part in key)})")
        self._session.execute(
            _CREATE.format(
                table=identifier(*self._place(table)), definitions=", ".join(definitions)
            )
        )

    def uncreate(self, table: TableName) -> None:
        place = identifier(*self._place(table))
        with contextlib.suppress(SinkError):
            self._session.execute(_PATIENCE)
            self._session.execute(_ALONE.format(table=place))
            try:
                if not self._session.rows(_ANY.format(table=place)):
                    self._session.execute(_DROP.format(table=place))
            finally:
                self._session.execute("unlock tables")

    def altered(self, load: Load) -> bool:
        assert load.relation is not None
        self._session.execute(_HOLD.format(table=target(load)))
        now = self.describe(load.table)
        # Another engine has no transactions.
        kept = now is not None and now.detail["engine"] == load.relation.detail["engine"]
        return not kept or super().altered(load)

    # The fence

    def begin(self, load: Load) -> None:
        try:
            self._enter(load)
        except SinkError:
            if not self._session.lost:
                raise
            # Ended while it did nothing, perhaps by a newer attempt: the fence tells.
            self._session.reopen()
            self._announced = None
            self._enter(load)

    def _enter(self, load: Load) -> None:
        self._announce(load)
        self._session.begin()
        fence.enter(self._session, _schema(load), load)

    def _announce(self, load: Load) -> None:
        """Once for each attempt, outside of its transactions."""
        if self._announced != (load.scope, load.fence):
            fence.create(self._session, _schema(load))
            fence.announce(self._session, _schema(load), load)
            self._announced = (load.scope, load.fence)

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()

    def settle(self, load: Load) -> bool:
        self._session.reopen()
        self._announced = None
        return fence.settle(self._session, _schema(load), load)

    # The data

    def truncate(self, load: Load) -> None:
        Publication(self._session, load).empty()

    def stage(self, load: Load) -> None:
        self._announce(load)
        staging.make(self._session, load)

    def unstage(self, load: Load) -> str | None:
        with contextlib.suppress(SinkError):
            self._session.rollback()
            if staging.drop(self._session, load):
                return None
        return staging.name(load)

    def write(self, load: Load, batches: Iterable[Batch], *, staging: bool) -> int:
        place = _stage(load) if staging else target(load)
        store = loading.load if self._loads else loading.insert
        if not staging:
            return store(self._session, place, load.columns, batches)
        self._session.begin()
        try:
            written = store(self._session, place, load.columns, batches)
        except BaseException:
            self._session.rollback()
            raise
        self._session.commit()
        return written

    def publish(self, load: Load) -> Counts:
        return Publication(self._session, load).publish()

    def finish(self, load: Load, *, analyze: bool) -> list[str]:
        # AUTO_INCREMENT has moved on by itself.
        if analyze:
            Publication(self._session, load).analyze()
        return []

    # Verification

    def count(self, load: Load) -> int:
        return int(self._session.row(Publication(self._session, load).landed("count(*)"))[0])

    def scan(self, load: Load) -> Iterator[Batch]:
        columns = [plan.sink for plan in load.columns]
        conversions = values.conversions(columns)
        wanted = ", ".join(
            types.read_as(column).format(f"t.{identifier(column.name)}") for column in columns
        )
        statement = Publication(self._session, load).landed(wanted)
        for page in self._session.pages(statement, PAGE):
            yield Batch.of_rows(page, conversions)


def _schema(load: Load) -> str:
    assert load.relation is not None
    schema: str = load.relation.detail["schema"]
    return schema


def _stage(load: Load) -> str:
    return staging.name(load)
