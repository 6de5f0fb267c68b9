"""The lower bound of the next incremental read: what every row that commits later lies above.

A column that is set from the transaction's time (``now()``) gets the time at which its
transaction began, and the row shows only when it commits. So a row may appear below the greatest
value already read. Every such row belongs to a transaction that was open when we looked, or to a
later one of a message that the server was at work on: what one message begins has the time at which
the message came. So no such row's time is below the oldest open ``xact_start`` or the oldest
``query_start`` of a session at work. That bound, taken before the read's snapshot, misses nothing.
Where it cannot be known, nothing is guessed: the job must say a lag.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Bound, Column, Kind, SourceError
from tasks.replicate.connectors import lags
from tasks.replicate.connectors.postgresql import catalog

# A backend takes its transaction's time a moment before it shows it.
MARGIN_SECONDS = 1

_KNOWN = """
select pg_catalog.pg_is_in_recovery() as standby,
       pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'usage') as sees_all,
       pg_catalog.current_setting('track_activities')::bool as tracked
"""

# Autovacuum writes no rows of a user's; every other session of this database may. A replication
# connection may, too, but the message that has it send the log is at work for ever. Who lets its
# activity be tracked only later is in a transaction without a beginning.
_OLDEST = """
select (least(min(xact_start),
              min(query_start) filter (where state <> 'idle'
                                       and backend_type is distinct from 'walsender'),
              clock_timestamp())
        - make_interval(secs => %s))::text as bound,
       min(usename) filter (where state = 'disabled' or state like 'idle in transaction%%'
                                  and xact_start is null) as hidden
from pg_catalog.pg_stat_activity
where pid <> pg_catalog.pg_backend_pid()
  and (datname = pg_catalog.current_database() or datname is null)
  and backend_type is distinct from 'autovacuum worker'
"""

# Asked after the sessions: what is prepared in between was open then, or is still prepared now.
_PREPARED = """
select exists (select from pg_catalog.pg_prepared_xacts
               where database = pg_catalog.current_database())
"""

# Rows that logical replication brings carry the times of another server's transactions; it may name
# what a table is a partition of. Those of a materialized view carry times from before its refresh.
_ELSEWHERE = """
with named (oid) as (
  select pg_catalog.to_regclass(name)::oid from unnest(%s::text[]) name
), read (oid) as (
  select oid from named
  union
  select above.relid from named, pg_catalog.pg_partition_ancestors(named.oid) above (relid)
)
select exists (select from pg_catalog.pg_subscription_rel join read on srrelid = read.oid),
       exists (select from pg_catalog.pg_class c join read using (oid) where c.relkind = 'm')
"""

# No row has no bound: ``least`` alone would pass the absent maximum by and take the present time.
# What is infinite is no time of a change.
_LAGGING_TIME = sql.SQL("""
select case when newest is not null
  then (least(newest, {now}) - make_interval(secs => {lag}))::{type}::text end
from (select max({column}) as newest from (select {column} {source}) times
      where {column} > '-infinity' and {column} < 'infinity') finite
""")
_LAGGING_NUMBER = sql.SQL("select (max({column})::numeric - {lag})::text {source}")
# PostgreSQL takes NaN for greater than every number, and nothing lies above it.
_LAGGING_DECIMAL = sql.SQL("""
select (max({column}) - {lag})::text
from (select {column} {source}) numbers where {column} < {end}
""")
_NO_BOUNDS = frozenset({"NaN", "Infinity"})
_NOT_BACKWARDS = sql.SQL("select greatest(%s::{type}, %s::{type})::text")
_SNAPSHOT_XMIN = """
select pg_catalog.pg_snapshot_xmin(now.snapshot)::text,
       %s::xid8 > pg_catalog.pg_snapshot_xmax(now.snapshot)
from (select pg_catalog.pg_current_snapshot()) now (snapshot)
"""

_TIMES = {
    "timestamptz": sql.SQL("clock_timestamp()"),
    "timestamp": sql.SQL("clock_timestamp()::timestamp"),
    "date": sql.SQL("clock_timestamp()::date"),
}


def bound(
    connection: psycopg.Connection[Any],
    source: sql.Composable,
    column: Column,
    lag: float | None,
    since: str | None,
) -> Bound:
    """The bound for reads of ``source`` (FROM and WHERE) by ``column``; see :class:`Bound`.

    Never below ``since``, the present one.
    """
    if since in _NO_BOUNDS:
        raise SourceError(
            f"the stored watermark of {column.name} is {since}, above which no row lies: let "
            "the job read everything again (job edit --reset-watermark)",
            permanent=True,
        )
    found = _bound(connection, source, column, lag, since)
    if since is None or found.value is None:
        return found
    row = connection.execute(
        _NOT_BACKWARDS.format(type=sql.SQL(found.type)), (found.value, since)
    ).fetchone()
    return found if row is None else replace(found, value=row[0])


def _bound(
    connection: psycopg.Connection[Any],
    source: sql.Composable,
    column: Column,
    lag: float | None,
    since: str | None,
) -> Bound:
    typname = column.detail["typname"]
    if typname == "xid8":
        return _transaction(connection, source, column, since)
    if typname == "timestamptz" and lag is None:
        return _safe(connection, source, column)
    if typname in _TIMES:
        return _lagging_time(connection, source, column, lag)
    if column.type.kind in (Kind.INTEGER, Kind.DECIMAL):
        less = lags.units(lag)
        finite = column.type.kind is Kind.INTEGER
        # Before version 14 a numeric has no infinity.
        end = "Infinity" if connection.info.server_version >= 140000 else "NaN"
        statement = (_LAGGING_NUMBER if finite else _LAGGING_DECIMAL).format(
            column=sql.Identifier(column.name),
            lag=sql.Literal(less),
            end=sql.SQL("{}::numeric").format(sql.Literal(end)),
            source=source,
        )
        row = connection.execute(statement).fetchone()
        kind = "bigint" if column.type.kind is Kind.INTEGER else "numeric"
        return Bound(
            row[0] if row else None,
            kind,
            f"watermark {column.name} is a number: rows are read again from {less} below the "
            "highest one; a row that commits later than that is missed",
        )
    raise SourceError(
        f"watermark column {column.name} has the type {column.type.name}; use a timestamptz, "
        "timestamp, date, number or xid8 column",
        permanent=True,
    )


def _refuse_other_times(
    connection: psycopg.Connection[Any], source: sql.Composable, column: Column
) -> None:
    """Raises SourceError where rows appear at other moments than this server's commits."""
    plan = catalog.explain(connection, sql.SQL("select * {}").format(source))
    names = list(map(catalog.quoted, catalog.scanned(plan)))
    row = connection.execute(_ELSEWHERE, (names,)).fetchone()
    assert row is not None
    subscribed, refreshed = row
    if subscribed or any(node["Node Type"] == "Foreign Scan" for node in catalog.nodes(plan)):
        why = (
            "rows come from another server (a foreign table or a subscription), whose open "
            "transactions are not seen"
        )
        way = "set lag above the longest one"
    elif refreshed:
        why = "rows of a materialized view appear when it is refreshed, with older times"
        way = "set lag above the time from the begin of one refresh to the end of the next"
    else:
        return
    if column.detail["typname"] == "xid8":
        way = f"use a timestamptz column, and {way}"
    raise SourceError(f"watermark {column.name}: {why}: {way}", permanent=True)


def _transaction(
    connection: psycopg.Connection[Any], source: sql.Composable, column: Column, since: str | None
) -> Bound:
    _refuse_other_times(connection, source, column)
    row = connection.execute(_SNAPSHOT_XMIN, (since or "0",)).fetchone()
    assert row is not None
    xmin, ahead = row
    if ahead:
        raise SourceError(
            f"the stored watermark of {column.name} is {since}, and this server's transactions "
            "have not come that far, as after a move to a younger server: let the job read "
            "everything again (job edit --reset-watermark)",
            permanent=True,
        )
    return Bound(xmin, "xid8")


def _safe(connection: psycopg.Connection[Any], source: sql.Composable, column: Column) -> Bound:
    row = connection.execute(_KNOWN).fetchone()
    assert row is not None
    standby, sees_all, tracked = row
    if standby:
        raise SourceError(
            "the source is a standby, which does not show the primary's open transactions: read "
            "from the primary, or set lag above the longest transaction and replication delay",
            permanent=True,
        )
    if not sees_all or not tracked:
        way = "grant pg_read_all_stats to the source's role" if tracked else "set track_activities"
        raise SourceError(
            "the source does not show other users' open transactions, so that no safe bound of "
            f"watermark {column.name} is known: {way}, or set lag above the longest transaction",
            permanent=True,
        )
    _refuse_other_times(connection, source, column)
    return _oldest_open(connection, MARGIN_SECONDS)


def _oldest_open(connection: psycopg.Connection[Any], margin: float) -> Bound:
    """``margin`` seconds before what is open began; without a value where that is not known."""
    oldest = connection.execute(_OLDEST, (margin,)).fetchone()
    prepared = connection.execute(_PREPARED).fetchone()
    assert oldest is not None
    assert prepared is not None
    value, hidden = oldest
    if hidden is not None:
        return _held(
            f"role {hidden} hides its transactions in the source (track_activities is off)"
        )
    if prepared[0]:
        return _held("a prepared transaction is open in the source")
    return Bound(value, "timestamptz")


def _held(why: str) -> Bound:
    return Bound(None, "timestamptz", f"{why}: the watermark stays where it is")


def _lagging_time(
    connection: psycopg.Connection[Any], source: sql.Composable, column: Column, lag: float | None
) -> Bound:
    seconds = lags.seconds(column, lag)
    typname = column.detail["typname"]
    newest: sql.Composable = _TIMES[typname]
    missed = "whose transaction commits later than that"
    row = connection.execute(_KNOWN).fetchone()
    if typname == "timestamptz" and row is not None and not row[0] and row[1] and row[2]:
        # What is known of open transactions counts as well.
        oldest = _oldest_open(connection, 0)
        if oldest.value is None:
            return oldest
        newest = sql.SQL("{}::timestamptz").format(sql.Literal(oldest.value))
        missed = "whose time differs by more from its transaction's"
    statement = _LAGGING_TIME.format(
        column=sql.Identifier(column.name),
        now=newest,
        lag=sql.Literal(seconds),
        type=sql.SQL(typname),
        source=source,
    )
    row = connection.execute(statement).fetchone()
    return Bound(
        row[0] if row else None,
        typname,
        f"watermark {column.name} is read again with a lag of {seconds} s: a row {missed} is "
        "missed",
    )
