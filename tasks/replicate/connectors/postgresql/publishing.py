"""Bringing staged rows to the target, in the one transaction that readers see."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Counts, Load
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.postgresql import catalog, staging
from tasks.replicate.connectors.postgresql.session import comma, identifier, patience

_TRUNCATE = sql.SQL("truncate table {}")
_DELETE = sql.SQL("delete from {}")

_INSERT = sql.SQL("""
insert into {target} ({columns}) overriding system value
select {columns} from {staging}
""")

_NULL_KEYS = sql.SQL("select count(*) from {staging} where {nulls}")
# Key columns whose equality does not see every difference; citext tells its type.
_BLIND = """
select a.attname from pg_catalog.pg_attribute a
join pg_catalog.pg_collation c on c.oid = a.attcollation
where a.attrelid = %s::oid and a.attname = any(%s) and not c.collisdeterministic
"""
# Keys that such a column takes for one are two keys of the source: they must not become one row.
_ALIKE = sql.SQL("""
select count(*) from (
  select from {staging} s group by {key} having count(distinct row({staged})) > 1
) claimcheck_alike
""")
_ALIKE_STORED = sql.SQL("""
select count(*) from {staging} s join {target} t on {same_key} where row({staged}) <> row({stored})
""")

_DOUBLES = sql.SQL("""
select count(*) from (
  select from {staging} s group by {key} having count(*) > 1
) claimcheck_doubles
""")

# Of several staged rows with one key the newest counts. A row that is equal to the last bit is
# left alone: safe watermarks read rows again. The comparison is of images (*<>), because values
# that compare equal may differ (1.0 and 1.00, text without regard to case).
_MERGE = sql.SQL("""
with newest as materialized (
  select distinct on ({key}) {columns} from {staging} order by {order}
), written as (
  insert into {target} as t ({columns}) overriding system value
  select {columns} from newest
  on conflict ({key}) do {action}
  returning {is_new} as is_new
)
select (select count(*) from newest),
       (select count(*) from written where is_new),
       (select count(*) from written where not is_new)
""")
_UPDATE = sql.SQL(
    "update set {changes} where row({old})::record operator(pg_catalog.*<>) row({new})::record"
)

# Partitioned tables do not hand out xmax; there the rows that exist are counted first.
_EXISTING = sql.SQL("""
select count(*) from (select distinct {key} from {staging}) s
where exists (select from {target} t where {same_key})
""")

_DELETE_GONE = sql.SQL("""
delete from {target} t where not exists (select from {staging} s where {same_key})
""")

# The rows that a run is answerable for: all, or in mode incremental those whose key is staged.
_ALL = sql.SQL("from {target}")
_STAGED = sql.SQL("from {target} t where exists (select from {staging} s where {same_key})")


def target(load: Load) -> sql.Identifier:
    assert load.relation is not None
    return identifier((load.relation.detail["schema"], load.relation.detail["table"]))


def truncate(load: Load) -> sql.Composed:
    return _TRUNCATE.format(target(load))


def _names(load: Load) -> sql.Composed:
    return comma([sql.Identifier(plan.sink.name) for plan in load.columns])


def _same_key(load: Load) -> sql.Composed:
    return sql.SQL(" and ").join(
        sql.SQL("s.{0} = t.{0}").format(sql.Identifier(name)) for name in load.key
    )


def landed(load: Load) -> sql.Composed:
    """FROM and WHERE of the rows that this run is answerable for."""
    if load.mode != "incremental":
        return _ALL.format(target=target(load))
    return _STAGED.format(target=target(load), staging=staging.name(load), same_key=_same_key(load))


def publish(connection: psycopg.Connection[Any], load: Load) -> Counts:
    """As ``load.how`` says; see :meth:`tasks.replicate.connector.Sink.publish`."""
    match load.how:
        case "merge":
            _single(connection, load)
            return _merge(connection, load)
        case "diff":
            _single(connection, load)
            deleted = connection.execute(
                _DELETE_GONE.format(
                    target=target(load), staging=staging.name(load), same_key=_same_key(load)
                )
            ).rowcount
            counts = _merge(connection, load)
            return Counts(counts.inserted, counts.updated, counts.unchanged, deleted)
    deleted = 0
    if load.how == "truncate":
        connection.execute(_TRUNCATE.format(target(load)))
    else:
        deleted = connection.execute(_DELETE.format(target(load))).rowcount
    inserted = connection.execute(
        _INSERT.format(target=target(load), columns=_names(load), staging=staging.name(load))
    ).rowcount
    return Counts(inserted=inserted, deleted=deleted)


def _single(connection: psycopg.Connection[Any], load: Load) -> None:
    """No staged key is NULL, none only looks like another, and in ``diff`` none stands twice."""
    stage = staging.name(load)
    nulls = [sql.SQL("{} is null").format(sql.Identifier(name)) for name in load.key]
    if _count(connection, _NULL_KEYS.format(staging=stage, nulls=sql.SQL(" or ").join(nulls))):
        raise keys.null(load)
    assert load.relation is not None
    found = connection.execute(_BLIND, (load.relation.detail["oid"], list(load.key)))
    blind = {row[0] for row in found}
    blind |= {plan.sink.name for plan in load.columns if plan.sink.detail["typname"] == "citext"}
    exact = [name for name in load.key if name in blind]
    key = comma([sql.Identifier("s", name) for name in load.key])
    if exact:
        parts = {
            "staging": stage,
            "target": target(load),
            "key": key,
            "same_key": _same_key(load),
            "staged": _exact("s", exact),
            "stored": _exact("t", exact),
        }
        count = _count(connection, _ALIKE.format(**parts))
        count = count or _count(connection, _ALIKE_STORED.format(**parts))
        if count:
            raise keys.alike(load, count, "give the key column a deterministic collation")
    if load.how == "diff" and (
        count := _count(connection, _DOUBLES.format(staging=stage, key=key))
    ):
        raise keys.doubled(load, count)


def _exact(table: str, names: list[str]) -> sql.Composed:
    cast = sql.SQL('{}::text collate "C"')
    return comma([cast.format(sql.Identifier(table, name)) for name in names])


def _count(connection: psycopg.Connection[Any], statement: sql.Composed) -> int:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return int(row[0])


def _merge(connection: psycopg.Connection[Any], load: Load) -> Counts:
    assert load.relation is not None
    key = comma([sql.Identifier(name) for name in load.key])
    rest = [plan.sink.name for plan in load.columns if plan.sink.name not in load.key]
    order: list[sql.Composable] = [sql.Identifier(name) for name in load.key]
    if load.watermark is not None:
        order.append(sql.SQL("{} desc nulls last").format(sql.Identifier(load.watermark)))
    action: sql.Composable = sql.SQL("nothing")
    if rest:
        action = _UPDATE.format(
            changes=comma([sql.SQL("{0} = excluded.{0}").format(sql.Identifier(n)) for n in rest]),
            old=comma([sql.SQL("t.{}").format(sql.Identifier(n)) for n in rest]),
            new=comma([sql.SQL("excluded.{}").format(sql.Identifier(n)) for n in rest]),
        )
    heap = load.relation.detail["relkind"] == "r"
    existing = 0
    if not heap:
        row = connection.execute(
            _EXISTING.format(
                key=key, staging=staging.name(load), target=target(load), same_key=_same_key(load)
            )
        ).fetchone()
        existing = row[0] if row else 0
    row = connection.execute(
        _MERGE.format(
            key=key,
            columns=_names(load),
            staging=staging.name(load),
            order=comma(order),
            target=target(load),
            action=action,
            is_new=sql.SQL("t.xmax = 0") if heap else sql.SQL("true"),
        )
    ).fetchone()
    assert row is not None
    staged, inserted, updated = row
    if not heap:
        inserted, updated = staged - existing, inserted - (staged - existing)
    return Counts(inserted, updated, unchanged=staged - inserted - updated)


# The sequence of a loaded identity or serial column goes on above its greatest value, and
# never back.
_SEQUENCES = """
select a.attname, pg_catalog.pg_get_serial_sequence(%s, a.attname) as sequence
from pg_catalog.pg_attribute a
where a.attrelid = pg_catalog.to_regclass(%s) and a.attname = any(%s)
  and pg_catalog.pg_get_serial_sequence(%s, a.attname) is not null
"""
_SETVAL = sql.SQL("""
select pg_catalog.setval({sequence}, greatest(m.high, s.last_value), true)
from (select max({column})::int8 as high from {target}) m, {relation} s
where m.high is not null and (m.high > s.last_value or (m.high = s.last_value and not s.is_called))
""")
_ANALYZE = sql.SQL("analyze {}")
# The table or a partition of it that a crash of the server empties.
_UNLOGGED = """
with recursive tree (oid) as (
  select %s::oid
  union
  select i.inhrelid from pg_catalog.pg_inherits i join tree on i.inhparent = tree.oid
)
select c.oid::regclass::text from tree join pg_catalog.pg_class c on c.oid = tree.oid
where c.relpersistence = 'u' and c.relkind = 'r' order by 1
"""
FINISH_SECONDS = 30.0
"""How long each statement that follows the commit waits for a lock, such as a vacuum's."""


def finish(connection: psycopg.Connection[Any], load: Load, *, analyze: bool) -> list[str]:
    """Sequences and statistics; returns warnings."""
    assert load.relation is not None
    schema, table = load.relation.detail["schema"], load.relation.detail["table"]
    name = catalog.quoted((schema, table))
    names = [plan.sink.name for plan in load.columns]
    with patience(connection, FINISH_SECONDS):
        found = connection.execute(_SEQUENCES, (name, name, names, name)).fetchall()
        for column, sequence in found:
            connection.execute(
                _SETVAL.format(
                    sequence=sql.Literal(sequence),
                    column=sql.Identifier(column),
                    target=target(load),
                    relation=sql.SQL(sequence),
                )
            )
        if analyze:
            connection.execute(_ANALYZE.format(target(load)))
        if load.how != "merge":
            return []
        # After a crash the watermark stands, and the next run would bring the newest rows alone.
        unlogged = connection.execute(_UNLOGGED, (load.relation.detail["oid"],)).fetchall()
    return [
        f"{name} is unlogged: a crash of the sink's server empties it, and later runs bring only "
        "what is newer than the watermark. Let the job read everything again after one (job edit "
        f"--reset-watermark), or alter table {name} set logged"
        for (name,) in unlogged
    ]
