"""Reading PostgreSQL: one snapshot, raw COPY or a server-side cursor, in shares where asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import (
    Batch,
    Bound,
    Column,
    ColumnPlan,
    Kind,
    Lane,
    Part,
    ReadRequest,
    Relation,
    Row,
    Source,
    SourceError,
    TableName,
    was_altered,
)
from tasks.replicate.connectors.postgresql import catalog, checksums, session, watermarks
from tasks.replicate.connectors.postgresql.copying import copy_out
from tasks.replicate.connectors.postgresql.session import errors, identifier
from tasks.replicate.names import join_name

CHUNK = 100
"""Rows that libpq hands out at once in the row lane."""
BATCH_BYTES = 4 * 1024 * 1024

_TABLES = """
select n.nspname, c.relname
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
  and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
  and c.relname <> 'claimcheck_fence' and c.relname !~ '^cc_stage_[0-9a-f]{32}_'
"""

# Whether a relation that this transaction holds a lock on got another file after its snapshot: by
# TRUNCATE or a rewrite, after which an older snapshot sees it empty, or because it is newer than
# the snapshot. The catalog's row is as the snapshot sees it, the function tells what is now.
_REPLACED = """
select exists (
  select from pg_catalog.pg_locks l left join pg_catalog.pg_class c on c.oid = l.relation
  where l.pid = pg_catalog.pg_backend_pid() and l.locktype = 'relation'
    and l.relation::int8 >= 16384 and l.database = (
      select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
    and (c.oid is null
         or c.relkind in ('r', 'm') and c.relfilenode <> pg_catalog.pg_relation_filenode(c.oid)))
"""
_LOCKED = """
select l.relation::int8 from pg_catalog.pg_locks l
where l.pid = pg_catalog.pg_backend_pid() and l.locktype = 'relation'
  and l.relation::int8 >= 16384
order by 1
"""
SNAPSHOTS = 20
"""Snapshots that are taken before giving up on tables that are truncated all the time."""
PART_LOCK_SECONDS = 5

# Kinds whose cells psycopg hands out as they are; every other column is read as its text,
# because Python's dates hold neither BC nor infinity.
_AS_IS = frozenset({Kind.BOOLEAN, Kind.INTEGER, Kind.FLOAT, Kind.TEXT, Kind.BYTES})
_NATIVE = frozenset(
    {"bool", "int2", "int4", "int8", "oid", "float4", "float8", "text", "varchar", "bytea"}
)
# COPY writes these otherwise than a cast to text: with the padding, which char(n) takes back for a
# text's own spaces, without the length of an address's net, or without a document's declaration.
# Other engines get one form, whatever the lane.
_SHOWN_OTHERWISE = frozenset({"bpchar", "inet", "xml"})


class PostgreSQLSource(Source):
    """A connection that reads one snapshot."""

    dialect = "postgresql"
    lanes = (Lane.COPY_BINARY, Lane.COPY_TEXT, Lane.COPY_CSV, Lane.ROWS)

    def __init__(self, config: Mapping[str, Any], *, name: str = "") -> None:
        self._config = config
        with errors(SourceError, config):
            self._connection = session.connect(config, name=name)
        self._in_snapshot = False
        self._described: tuple[ReadRequest, catalog.Shape] | None = None

    def stop(self) -> None:
        session.interrupt(self._connection)

    def close(self) -> None:
        session.close(self._connection)

    # What there is

    def describe(self, request: ReadRequest) -> Relation:
        with errors(SourceError, self._config):
            found = None if request.query is not None else self._find(request)
            # Before the description: what is altered from here on is noticed at the snapshot.
            shape = catalog.shape(self._connection, rows_of(request))
            if found is None:
                relation = catalog.describe_query(self._connection, _inner(request))
            else:
                relation = catalog.describe_table(self._connection, found)
            rows = self._estimate(request, relation)
        self._described = (request, shape)
        return Relation(relation.columns, relation.key, rows, relation.detail)

    def _find(self, request: ReadRequest) -> dict[str, Any]:
        assert request.table is not None
        found = catalog.find(self._connection, request.table)
        if found is None:
            raise SourceError(
                f"source table {join_name(request.table)} does not exist, or its schema is not "
                "visible to this role (names are literal: case and spaces count)",
                permanent=True,
            )
        if found["relkind"] not in "rpvmf":
            raise SourceError(f"source {join_name(request.table)} is no table", permanent=True)
        return found

    def _estimate(self, request: ReadRequest, relation: Relation) -> int | None:
        """The planner's guess of the rows; also the check of the right to read them."""
        columns = sql.SQL(", ").join(sql.Identifier(c.name) for c in relation.columns)
        plan = catalog.explain(
            self._connection,
            sql.SQL("select {} {}").format(columns or sql.SQL("1"), rows_of(request)),
        )
        return int(plan["Plan Rows"])

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        with errors(SourceError, self._config):
            names = [request.table] if request.table is not None else []
            plan = catalog.explain(
                self._connection, sql.SQL("select * {}").format(rows_of(request))
            )
            return catalog.identities(self._connection, [*names, *catalog.scanned(plan)])

    def tables(self) -> list[TableName]:
        with errors(SourceError, self._config):
            return [(row[0], row[1]) for row in self._connection.execute(_TABLES)]

    # One state of the data

    def bound(self, request: ReadRequest, column: Column, lag: float | None) -> Bound:
        with errors(SourceError, self._config):
            return watermarks.bound(self._connection, rows_of(request), column, lag, request.since)

    def snapshot(self) -> None:
        """One state of what was described, locked so that nobody takes it away until the end.

        A snapshot does not hold against TRUNCATE, a lock does; but a statement takes its
        snapshot before it locks its tables. So both are taken, and taken again where a table
        was emptied in between. Planning locks all that the read will, with the rights for it; it
        follows the catalog as it is now, and not as the snapshot has it. So what is planned before
        and after the snapshot must be the same: a view or a partition that was changed in between
        would be read by its new definition from the old rows. What was altered since it was
        described is refused: its bytes would be taken for another type's.
        """
        with errors(SourceError, self._config):
            for attempt in range(1, SNAPSHOTS + 1):
                self._connection.execute("begin read only")
                expected = self._planned()
                self._connection.execute("rollback")
                self._connection.execute("begin isolation level repeatable read read only")
                # The snapshot is taken by the first statement, not by BEGIN.
                self._connection.execute("select 1")
                found = self._planned()
                # Plans of a function that is immutable by its word only may differ each time.
                same = found == expected or (attempt == SNAPSHOTS and found[0] == expected[0])
                if same and not self._replaced():
                    self._refuse_changes()
                    self._in_snapshot = True
                    return
                self._connection.execute("rollback")
        raise SourceError(
            "the source's tables are truncated or rewritten too often to be read in one state"
        )

    def _planned(self) -> tuple[list[Any], Any]:
        """The relations that the read needs, locked until the transaction ends, and its plan."""
        if self._described is None:
            return [], None
        source = rows_of(self._described[0])
        plan = catalog.explain(self._connection, sql.SQL("select * {}").format(source))
        return self._connection.execute(_LOCKED).fetchall(), catalog.outline(plan)

    def _replaced(self) -> bool:
        if self._described is None:
            return False
        row = self._connection.execute(_REPLACED).fetchone()
        return bool(row and row[0])

    def _refuse_changes(self) -> None:
        if self._described is None:
            return
        request, shape = self._described
        if catalog.shape(self._connection, rows_of(request)) != shape:
            raise SourceError(f"nothing was changed: source: {was_altered(request.table)}")

    def split(self, request: ReadRequest, parts: int) -> list[Part]:
        from tasks.replicate.connectors.postgresql import splitting

        with errors(SourceError, self._config):
            return splitting.split(self._connection, request, parts)

    def join(self, request: ReadRequest, part: Part) -> None:
        exported = part.bounds.get("snapshot")
        with errors(SourceError, self._config):
            self._connection.execute("begin isolation level repeatable read read only")
            if exported:
                self._connection.execute(
                    sql.SQL("set transaction snapshot {}").format(sql.Literal(exported))
                )
            # The leader holds the tables: who waits for a lock here stands behind one who waits
            # for the leader (to truncate or alter a table), and would do so for ever.
            self._connection.execute(
                sql.SQL("set local lock_timeout = {}").format(sql.Literal(f"{PART_LOCK_SECONDS}s"))
            )
            # Planning locks what the read will.
            catalog.explain(self._connection, sql.SQL("select * {}").format(rows_of(request)))
        self._in_snapshot = True

    # The rows

    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        if lane is Lane.ROWS:
            return self._rows(request, part)
        return self._bytes(request, part, lane)

    def _bytes(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        formats = {
            Lane.COPY_BINARY: sql.SQL("copy ({}) to stdout (format binary)"),
            Lane.COPY_TEXT: sql.SQL("copy ({}) to stdout"),
            Lane.COPY_CSV: sql.SQL("copy ({}) to stdout (format csv)"),
        }
        statement = formats[lane].format(_select(request, part, lane))
        with errors(SourceError, self._config):
            for block, rows in copy_out(self._connection, statement):
                yield Batch(block, rows, len(block))

    def _rows(self, request: ReadRequest, part: Part) -> Iterator[Batch]:
        statement = _select(request, part, Lane.ROWS)
        with errors(SourceError, self._config):
            if not self._in_snapshot:
                self.snapshot()
            with self._connection.cursor() as cursor:
                # The server goes on while rows are handled here, as with a COPY.
                size = CHUNK if psycopg.pq.version() >= 170000 else 1
                rows = cursor.stream(statement, binary=True, size=size)
                finished = False
                try:
                    yield from _batches(rows, request.fetch_size)
                    finished = True
                finally:
                    if not finished:
                        # psycopg would wait for a server that may be frozen.
                        session.interrupt(self._connection)
                        session.close(self._connection)

    def count(self, request: ReadRequest) -> int:
        with errors(SourceError, self._config):
            statement = sql.SQL("select count(*) {}").format(rows_of(request))
            row = self._connection.execute(statement).fetchone()
            assert row is not None
            return int(row[0])

    def checksum(self, request: ReadRequest) -> Any:
        columns = [checksums.source_column(plan) for plan in request.columns]
        with errors(SourceError, self._config):
            return checksums.compute(self._connection, columns, rows_of(request))


def _batches(rows: Iterator[Row], most: int) -> Iterator[Batch]:
    """Batches of at most ``most`` rows and about BATCH_BYTES, guessed from a row of each chunk."""
    while True:
        batch: list[Row] = []
        size = 0
        while len(batch) < most and size < BATCH_BYTES:
            chunk = list(islice(rows, min(CHUNK, most - len(batch))))
            if not chunk:
                break
            batch += chunk
            size += len(chunk) * max(_size(chunk[0]), _size(chunk[-1]))
        if not batch:
            return
        yield Batch(batch, len(batch), size)


def _size(row: Row) -> int:
    return sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in row)


def _inner(request: ReadRequest) -> sql.Composable:
    """The user's query, without a closing semicolon, as SQL."""
    assert request.query is not None
    return session.raw(request.query.strip().rstrip(";"))


def rows_of(request: ReadRequest, part: Part | None = None) -> sql.Composed:
    """FROM and WHERE of a request and, where given, of one share of it."""
    if request.query is not None:
        source: sql.Composable = sql.SQL("(\n{}\n) claimcheck_query").format(_inner(request))
    else:
        assert request.table is not None
        source = identifier(request.table[-2:])
    conditions: list[sql.Composable] = []
    if request.where is not None:
        # On lines of its own, so that a comment at its end stays one.
        conditions.append(sql.SQL("(\n{}\n)").format(session.raw(request.where)))
    if request.watermark is not None and request.since is not None:
        conditions.append(
            sql.SQL("({0} >= {1} or {0} is null)").format(
                sql.Identifier(request.watermark), sql.Literal(request.since)
            )
        )
    if part is not None and "condition" in part.bounds:
        conditions.append(session.raw(part.bounds["condition"]))
    where = sql.SQL(" where {}").format(sql.SQL(" and ").join(conditions)) if conditions else None
    return sql.SQL("from {}{}").format(source, where or sql.SQL(""))


def _select(request: ReadRequest, part: Part, lane: Lane) -> sql.Composed:
    columns = [_expression(plan, lane) for plan in request.columns]
    return sql.SQL("select {} {}").format(sql.SQL(", ").join(columns), rows_of(request, part))


def _expression(plan: ColumnPlan, lane: Lane) -> sql.Composable:
    template = (plan.packed if lane is Lane.COPY_BINARY else None) or plan.read_as
    if template is not None:
        column = session.raw(template).format(sql.Identifier(plan.source.name))
        return sql.SQL("({})::text").format(column) if lane is Lane.ROWS else column
    shown_otherwise = lane is Lane.COPY_CSV and plan.source.detail["typname"] in _SHOWN_OTHERWISE
    if lane is Lane.ROWS or shown_otherwise:
        return cells(plan.source)
    return sql.Identifier(plan.source.name)


def cells(column: Column) -> sql.Composable:
    """The column as an expression that psycopg hands out as a cell of the interface."""
    detail, name = column.detail, sql.Identifier(column.name)
    if column.type.kind not in _AS_IS or detail["typname"] not in _NATIVE:
        return sql.SQL("({})::text").format(name)
    if column.type.name != detail["base"]:
        # A domain, which psycopg does not know.
        return sql.SQL("({})::{}").format(name, session.raw(detail["base"]))
    return name
