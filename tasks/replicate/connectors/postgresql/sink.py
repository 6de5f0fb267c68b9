"""Writing PostgreSQL: COPY into the target or into staging, then one fenced transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import (
    Batch,
    Column,
    CommitUnknown,
    Counts,
    Fit,
    Lane,
    Load,
    Relation,
    Sink,
    SinkError,
    TableName,
)
from tasks.replicate.connectors.postgresql import (
    catalog,
    checksums,
    copytext,
    creation,
    fence,
    pairs,
    preflight,
    publishing,
    renaming,
    session,
    staging,
    texts,
)
from tasks.replicate.connectors.postgresql.copying import copy_in
from tasks.replicate.connectors.postgresql.places import Places
from tasks.replicate.connectors.postgresql.session import errors
from tasks.replicate.fits import fit, refusal
from tasks.replicate.names import join_name
from tasks.replicate.opening import Opening


class PostgreSQLSink(Sink):
    """A connection that writes one target."""

    dialect = "postgresql"
    lanes = (Lane.COPY_BINARY, Lane.COPY_TEXT, Lane.COPY_CSV, Lane.ROWS)

    def __init__(self, config: Mapping[str, Any], *, name: str = "") -> None:
        self._config = config
        self._name = name
        with errors(SinkError, config):
            self._connection = session.connect(config, name=name)
        self._stopped = False
        self._opening: Opening[psycopg.Connection[Any]] | None = None
        self._form: str | None = None
        """The target's form as it was staged for a rename."""

    def stop(self) -> None:
        self._stopped = True
        if self._opening is not None:
            self._opening.leave()
        session.interrupt(self._connection)

    def close(self) -> None:
        session.close(self._connection)

    def _check(self) -> None:
        if self._stopped:
            raise SinkError("sink: stopped")

    # Before anything changes

    def describe(self, table: TableName) -> Relation | None:
        with errors(SinkError, self._config):
            found = catalog.find(self._connection, table)
            if found is None:
                return None
            if found["relkind"] not in "rp":
                raise SinkError(
                    f"sink {join_name(table)} is no ordinary or partitioned table; name one",
                    permanent=True,
                )
            return catalog.describe_table(self._connection, found)

    def writes(self, relation: Relation) -> Any:
        name = (relation.detail["schema"], relation.detail["table"])
        with errors(SinkError, self._config):
            return catalog.identity(self._connection, name)

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        if dialect == self.dialect:
            return pairs.pair(source, sink)
        found = fit(source.type, sink.type)
        if found.refusal:
            return found
        guards = texts.guards(source.type, sink, found.guards)
        if isinstance(guards, str):
            return refusal(source.type, sink.type, guards)
        lanes = {Lane.ROWS, Lane.COPY_CSV}
        if sink.detail["typname"] in source.detail.get("copy_binary", ()):
            # The source writes exactly this type's binary form for the column.
            lanes.add(Lane.COPY_BINARY)
        return Fit(frozenset(lanes), guards=guards)

    def refusals(self, load: Load) -> list[str]:
        with errors(SinkError, self._config):
            return preflight.refusals(self._connection, load)

    def create(
        self, table: TableName, columns: Sequence[Column], key: Sequence[str], dialect: str
    ) -> None:
        with errors(SinkError, self._config):
            creation.create(self._connection, table, columns, key, dialect)

    def uncreate(self, table: TableName) -> None:
        with contextlib.suppress(psycopg.Error):
            creation.take_back(self._connection, table)

    def altered(self, load: Load) -> bool:
        with errors(SinkError, self._config):
            # What another session had not yet committed would stay beside the new content.
            alone = load.how in ("delete", "diff")
            catalog.hold(self._connection, load.table, alone=alone)
        return super().altered(load)

    # The fence

    def begin(self, load: Load) -> None:
        schema = _schema(load)
        with errors(SinkError, self._config):
            if load.step == 0:
                fence.create(self._connection, schema)
                fence.end_older(self._connection, load)
            self._connection.execute("begin")
            fence.enter(self._connection, schema, load)

    def commit(self) -> None:
        try:
            self._connection.execute("commit")
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            # A server that answers has decided; a broken connection tells nothing.
            if not self._connection.closed and error.sqlstate is not None:
                with errors(SinkError, self._config):
                    raise
            raise CommitUnknown("sink: the connection broke while it committed") from None
        except psycopg.Error:
            with errors(SinkError, self._config):
                raise

    def rollback(self) -> None:
        with contextlib.suppress(psycopg.Error):
            if not self._connection.closed:
                self._connection.execute("rollback")

    def settle(self, load: Load) -> bool:
        with errors(SinkError, self._config):
            self._reconnect()
            return fence.settle(self._connection, _schema(load), load)

    def _reconnect(self) -> None:
        """Leave this connection and open another, unless a stop comes first (SinkError)."""
        session.close(self._connection)
        self._opening = Opening(lambda: session.connect(self._config, name=self._name))
        connection = None if self._stopped else self._opening.wait()
        if connection is not None:
            self._connection = connection
        # Only a stop that comes after this look finds the new connection.
        self._check()

    # The data

    def truncate(self, load: Load) -> None:
        with errors(SinkError, self._config):
            self._connection.execute(publishing.truncate(load))

    def stage(self, load: Load) -> None:
        with errors(SinkError, self._config):
            fence.end_older(self._connection, load)
            if load.how == "rename":
                self._form = renaming.form(self._connection, load)
            staging.make(self._connection, load)

    def unstage(self, load: Load) -> str | None:
        with contextlib.suppress(psycopg.Error):
            if not self._connection.closed and staging.drop(self._connection, load):
                return None
        return join_name((staging.schema(load), staging.table_name(load)))

    def write(self, load: Load, batches: Iterable[Batch], *, staging: bool) -> int:
        target = _staging_name(load) if staging else _target(load)
        columns = session.comma([sql.Identifier(plan.sink.name) for plan in load.columns])
        formats = {
            Lane.COPY_BINARY: sql.SQL("copy {} ({}) from stdin (format binary)"),
            Lane.COPY_CSV: sql.SQL("copy {} ({}) from stdin (format csv)"),
        }
        text = sql.SQL("copy {} ({}) from stdin")
        statement = formats.get(load.lane, text).format(target, columns)
        places = Places()
        try:
            with errors(SinkError, self._config):
                try:
                    blocks = self._blocks(load, places.noted(batches))
                    return copy_in(self._connection, statement, blocks)
                except psycopg.DataError as error:
                    raise places.explained(error, self._config) from None
        except SinkError as error:
            raise _explained(error, load) from None

    def _blocks(self, load: Load, batches: Iterable[Batch]) -> Iterator[bytes]:
        for batch in batches:
            # Few bytes are kept here, and do not show that the server is gone.
            self._check()
            if isinstance(batch.data, bytes):
                yield batch.data
            else:
                yield from copytext.blocks(batch, load.columns)

    def publish(self, load: Load) -> Counts:
        with errors(SinkError, self._config):
            if load.how == "rename":
                return renaming.swap(self._connection, load, self._form)
            return publishing.publish(self._connection, load)

    def finish(self, load: Load, *, analyze: bool) -> list[str]:
        with errors(SinkError, self._config):
            return publishing.finish(self._connection, load, analyze=analyze)

    # Verification

    def count(self, load: Load) -> int:
        with errors(SinkError, self._config):
            statement = sql.SQL("select count(*) {}").format(publishing.landed(load))
            row = self._connection.execute(statement).fetchone()
            assert row is not None
            return int(row[0])

    def scan(self, load: Load) -> Iterator[Batch]:
        from tasks.replicate.connectors.postgresql.source import cells

        columns = session.comma([cells(plan.sink) for plan in load.columns])
        statement = sql.SQL("select {} {}").format(columns, publishing.landed(load))
        with errors(SinkError, self._config):
            yield from _pages(self._connection, statement)

    def shown(self, load: Load, batches: Iterable[Batch]) -> Iterable[Batch]:
        for batch in batches:
            with errors(SinkError, self._config):
                rows = texts.shown(self._connection, load.columns, batch.data)  # type: ignore[arg-type]
            yield Batch(rows, batch.rows, batch.size)

    def checksum(self, load: Load) -> Any:
        columns = [sql.Identifier(plan.sink.name) for plan in load.columns]
        with errors(SinkError, self._config):
            return checksums.compute(self._connection, columns, publishing.landed(load))


def _schema(load: Load) -> str:
    assert load.relation is not None
    schema: str = load.relation.detail["schema"]
    return schema


def _target(load: Load) -> sql.Identifier:
    return publishing.target(load)


def _staging_name(load: Load) -> sql.Identifier:
    return staging.name(load)


def _pages(connection: psycopg.Connection[Any], statement: sql.Composed) -> Iterator[Batch]:
    with connection.transaction(), connection.cursor("claimcheck_scan", binary=True) as cursor:
        cursor.execute(statement)
        while rows := cursor.fetchmany(5000):
            yield Batch(rows, len(rows), 0)


# What is too long, or no text or binary form of the type, or beyond it.
_OF_POISONS = ("22001", "22003", "22007", "22008", "22P02", "22P03")


def _explained(error: SinkError, load: Load) -> SinkError:
    """An error about a value that was poisoned says what the guard is for."""
    message = str(error)
    poisoned = any(f"(SQLSTATE {state})" in message for state in _OF_POISONS)
    for plan in load.columns:
        if poisoned and plan.poisons and f"column {plan.sink.name}: " in message:
            return SinkError(
                f"column {plan.sink.name}: a value of {plan.source.name} "
                f"({plan.source.type.name}) does not fit {plan.sink.type.name} unchanged; change "
                "the sink column, or convert it at the source, such as in a query",
                permanent=True,
            )
    return error
