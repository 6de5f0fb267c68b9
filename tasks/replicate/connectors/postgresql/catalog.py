"""What PostgreSQL's catalog says about tables, queries and their types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Column, ColumnType, Kind, Relation, TableName

# The relation behind a literal, possibly qualified name; NULL where there is none.
_FIND = """
select c.oid::int8, c.relkind::text, n.nspname, c.relname, c.reltuples::float8,
       pg_catalog.pg_get_userbyid(c.relowner)
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = pg_catalog.to_regclass(%s)
"""

_ATTRIBUTES = """
select a.attname, a.atttypid::int8, a.atttypmod, a.attnotnull, a.atthasdef,
       a.attgenerated <> '', a.attidentity::text,
       case when a.attgenerated <> '' then pg_catalog.pg_get_expr(d.adbin, d.adrelid) end
from pg_catalog.pg_attribute a
left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %s::oid and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""

# A unique key that is always checked and covers every row: the primary key, or the first other
# index of that kind whose columns are all NOT NULL.
_KEY = """
select array_agg(a.attname order by k.position)
from pg_catalog.pg_index i
cross join lateral unnest(i.indkey[0:i.indnkeyatts - 1]) with ordinality k (attnum, position)
join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = %s::oid and i.indisunique and i.indimmediate and i.indisvalid
  and i.indpred is null and i.indexprs is null
group by i.indexrelid, i.indisprimary
having bool_and(a.attnotnull)
order by i.indisprimary desc, i.indexrelid
limit 1
"""

# Each type resolved through its domains to the base type that decides its representation.
# ``inside`` are that type and all that its values are made of: elements, attributes, the bounds of
# ranges, the types behind domains. The signature tells apart, at any depth, types that bear one
# name in two databases but are built differently; the leaves are those that parse text themselves.
_TYPES = """
with recursive given as (
  select position, typid, typmod
  from unnest(%s::oid[], %s::int4[]) with ordinality g (typid, typmod, position)
), step as (
  select position, typid, typmod, 0 as depth from given
  union all
  select s.position, t.typbasetype, t.typtypmod, s.depth + 1
  from step s join pg_catalog.pg_type t on t.oid = s.typid
  where t.typtype = 'd'
), base as (
  select distinct on (position) position, typid, typmod from step order by position, depth desc
), inside as (
  select position, typid, typmod from base
  union
  select i.position, n.typid, n.typmod
  from inside i
  join pg_catalog.pg_type t on t.oid = i.typid
  cross join lateral (
    -- An array's modifier is that of its elements.
    select t.typelem, i.typmod where t.typcategory = 'A' and t.typelem <> 0
    union all
    select t.typbasetype, t.typtypmod where t.typtype = 'd'
    union all
    select a.atttypid, a.atttypmod from pg_catalog.pg_attribute a
    where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
    union all
    select r.rngsubtype, -1 from pg_catalog.pg_range r
    where t.typtype = 'r' and r.rngtypid = t.oid
    union all
    select r.rngtypid, -1 from pg_catalog.pg_range r
    -- As JSON, because servers before 14 have no such column.
    where t.typtype = 'm' and (pg_catalog.to_jsonb(r) ->> 'rngmultitypid')::oid = t.oid
  ) n (typid, typmod)
), built as (
  select i.position, pg_catalog.format_type(i.typid, null) as name,
         case t.typtype
           when 'd' then pg_catalog.format_type(t.typbasetype, t.typtypmod)
           when 'c' then (
             select string_agg(format('%%I %%s', a.attname,
                      pg_catalog.format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum)
             from pg_catalog.pg_attribute a
             where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped)
           else (
             select format('%%s %%s', pg_catalog.format_type(r.rngsubtype, null),
                      r.rngcanonical::oid::regproc)
             from pg_catalog.pg_range r where r.rngtypid = t.oid)
         end as form
  from inside i join pg_catalog.pg_type t on t.oid = i.typid
  where t.typtype in ('c', 'd', 'r')
)
select pg_catalog.format_type(g.typid, g.typmod) as name,
       pg_catalog.format_type(b.typid, b.typmod) as base,
       t.typname, b.typmod, t.typtype::text,
       t.typsend <> 0 as sendable,
       t.oid < 16384 as builtin,
       coalesce(e.oid < 16384, true) as element_builtin,
       e.typname as element,
       (select string_agg(distinct format('%%s = (%%s)', u.name, u.form) collate "C", '; ')
        from built u where u.position = g.position) as signature,
       array(select distinct array[l.typname::text, i.typmod::text]
             from inside i join pg_catalog.pg_type l on l.oid = i.typid
             where i.position = g.position and l.typtype not in ('c', 'd', 'r', 'm')
               and not (l.typcategory = 'A' and l.typelem <> 0)) as leaves
from given g
join base b using (position)
join pg_catalog.pg_type t on t.oid = b.typid
left join pg_catalog.pg_type e
  on e.oid = t.typelem and t.typcategory = 'A' and t.typelem <> 0
order by g.position
"""

_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "char"})
_KINDS = {
    "bool": Kind.BOOLEAN,
    "int2": Kind.INTEGER,
    "int4": Kind.INTEGER,
    "int8": Kind.INTEGER,
    "oid": Kind.INTEGER,
    "numeric": Kind.DECIMAL,
    "float4": Kind.FLOAT,
    "float8": Kind.FLOAT,
    "bytea": Kind.BYTES,
    "date": Kind.DATE,
    "time": Kind.TIME,
    "timestamp": Kind.TIMESTAMP,
    "timestamptz": Kind.TIMESTAMPTZ,
    "interval": Kind.INTERVAL,
    "uuid": Kind.UUID,
    "json": Kind.JSON,
    "jsonb": Kind.JSON,
} | dict.fromkeys(_TEXTS, Kind.TEXT)
ALL_FIELDS = 0x7FFF
# Types that a version wrote or read otherwise than those before it, under the same name: the bits
# (and the text) of the greatest interval are infinity since 17; a byte above 127 of "char" has the
# text \\377 since 15. Numbers got an infinity of their own, which older servers refuse.
_CHANGED = {"interval": 170000, "char": 150000}
_BITS = {"int2": 16, "int4": 32, "int8": 64, "oid": 32, "float4": 32, "float8": 64}


def quoted(name: TableName) -> str:
    """The name as SQL text, for ``to_regclass``."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name)


def find(connection: psycopg.Connection[Any], name: TableName) -> dict[str, Any] | None:
    """Oid, kind and full name of a relation, or None."""
    if len(name) > 2:
        # A third part can only be the database itself.
        if name[0] != connection.info.dbname or len(name) > 3:
            return None
        name = name[1:]
    row = connection.execute(_FIND, (quoted(name),)).fetchone()
    if row is None:
        return None
    keys = ("oid", "relkind", "schema", "table", "tuples", "owner")
    return dict(zip(keys, row, strict=True))


# A role that may only write some columns may not lock the table: for it nothing is held.
_MAY_LOCK = """
select pg_catalog.has_table_privilege(
  pg_catalog.to_regclass(%s), 'insert, update, delete, truncate')
"""
_HOLD = sql.SQL("lock table {} in row exclusive mode")
_HOLD_ALONE = sql.SQL("lock table {} in share row exclusive mode")


def hold(connection: psycopg.Connection[Any], name: TableName, *, alone: bool = False) -> None:
    """Until the transaction's end nobody alters the table, or gives it triggers; others may read
    it and, unless ``alone``, write it. Nothing happens where there is no such table.

    To be asked once, before the table is touched: two sessions that each make a lock stronger
    wait for each other.
    """
    row = connection.execute(_MAY_LOCK, (quoted(name[-2:]),)).fetchone()
    if row and row[0]:
        statement = _HOLD_ALONE if alone else _HOLD
        connection.execute(statement.format(sql.Identifier(*name[-2:])))


def describe_table(connection: psycopg.Connection[Any], found: dict[str, Any]) -> Relation:
    """Columns and key of a relation that :func:`find` found."""
    attributes = connection.execute(_ATTRIBUTES, (found["oid"],)).fetchall()
    types = describe_types(connection, [(a[1], a[2]) for a in attributes])
    key = connection.execute(_KEY, (found["oid"],)).fetchone()
    columns = tuple(
        Column(
            name=name,
            type=kind,
            nullable=not not_null,
            has_default=has_default or identity != "",
            generated=generated,
            expression=expression,
            identity=identity != "",
            detail=detail | {"identity": identity},
        )
        for (name, _, _, not_null, has_default, generated, identity, expression), (
            kind,
            detail,
        ) in zip(attributes, types, strict=True)
    )
    return Relation(columns, key=tuple(key[0]) if key else (), detail=found)


Shape = tuple[tuple[bytes | None, int, int], ...]
"""Names, type oids and modifiers of a result's columns, as the server has them this moment."""


def shape(connection: psycopg.Connection[Any], source: sql.Composable) -> Shape:
    """The shape of all columns of a FROM clause. It does not depend on the transaction's snapshot,
    as what is read from the catalog's tables does."""
    result = connection.execute(sql.SQL("select * {} limit 0").format(source)).pgresult
    assert result is not None
    return tuple((result.fname(i), result.ftype(i), result.fmod(i)) for i in range(result.nfields))


def explain(connection: psycopg.Connection[Any], query: sql.Composable) -> dict[str, Any]:
    """The topmost node of a query's plan; planning also checks names and rights."""
    row = connection.execute(sql.SQL("explain (verbose, format json) {}").format(query)).fetchone()
    assert row is not None
    plan = json.loads(row[0]) if isinstance(row[0], str) else row[0]
    top: dict[str, Any] = plan[0]["Plan"]
    return top


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan."""
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


_GUESSES = frozenset({"Startup Cost", "Total Cost", "Plan Rows", "Plan Width"})


def outline(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan without what follows the statistics alone."""
    kept = {key: value for key, value in plan.items() if key not in _GUESSES}
    return kept | {"Plans": [outline(inner) for inner in plan.get("Plans", ())]}


# A server's start, to the microsecond, tells it from any other, for every role.
_IDENTITY = """
select pg_catalog.pg_postmaster_start_time()::text, d.oid::int8,
       pg_catalog.to_regclass(%s)::oid::int8
from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
"""

# The tables, what they are partitions or children of, and their own partitions and children: to
# empty any of these is to empty what is read.
_KIN = """
with recursive given (oid) as (
  select distinct pg_catalog.to_regclass(name)::oid from unnest(%s::text[]) name
), up (oid) as (
  select oid from given
  union
  select i.inhparent from pg_catalog.pg_inherits i join up on i.inhrelid = up.oid
), down (oid) as (
  select oid from given
  union
  select i.inhrelid from pg_catalog.pg_inherits i join down on i.inhparent = down.oid
)
select pg_catalog.pg_postmaster_start_time()::text, d.oid::int8, kin.oid::int8
from (select oid from up union select oid from down) kin, pg_catalog.pg_database d
where d.datname = pg_catalog.current_database() and kin.oid is not null
"""


def identity(connection: psycopg.Connection[Any], name: TableName) -> tuple[Any, ...]:
    """A value that is equal only for one table of one database of one server."""
    row = connection.execute(_IDENTITY, (quoted(name),)).fetchone()
    assert row is not None
    return tuple(row)


def identities(
    connection: psycopg.Connection[Any], names: Sequence[TableName]
) -> frozenset[tuple[Any, ...]]:
    """The identities of tables, of their partitions and children, and of their parents."""
    return frozenset(connection.execute(_KIN, (list(map(quoted, names)),)).fetchall())


def scanned(plan: dict[str, Any]) -> list[TableName]:
    """The tables that a plan reads."""
    return [
        (node["Schema"], node["Relation Name"])
        for node in nodes(plan)
        if "Schema" in node and "Relation Name" in node
    ]


def describe_query(connection: psycopg.Connection[Any], query: sql.Composable) -> Relation:
    """Columns of a query's result; the query is planned but not run."""
    cursor = connection.execute(
        sql.SQL("select * from (\n{}\n) claimcheck_query limit 0").format(query)
    )
    result = cursor.pgresult
    assert result is not None
    names = [(result.fname(i) or b"").decode() for i in range(result.nfields)]
    types = describe_types(
        connection, [(result.ftype(i), result.fmod(i)) for i in range(result.nfields)]
    )
    columns = tuple(
        Column(name=name, type=kind, detail=detail)
        for name, (kind, detail) in zip(names, types, strict=True)
    )
    return Relation(columns)


def describe_types(
    connection: psycopg.Connection[Any], types: Sequence[tuple[int, int]]
) -> list[tuple[ColumnType, dict[str, Any]]]:
    """Neutral types and PostgreSQL's own details for pairs of type oid and modifier."""
    if not types:
        return []
    rows = connection.execute(_TYPES, ([t[0] for t in types], [t[1] for t in types])).fetchall()
    money, version = None, connection.info.server_version
    described = []
    for (
        name,
        base,
        typname,
        typmod,
        typtype,
        sendable,
        builtin,
        inner,
        element,
        signature,
        leaves,
    ) in rows:
        holds_money = any(leaf == "money" for leaf, _ in leaves)
        if holds_money and money is None:
            setting = connection.execute("show lc_monetary").fetchone()
            money = setting[0] if setting else ""
        detail = {
            "base": base,
            "typname": typname,
            "typtype": typtype,
            "builtin": builtin and inner,
            "sendable": sendable,
            "element": element,
            "signature": signature,
            "leaves": tuple((leaf, int(modifier)) for leaf, modifier in leaves),
            "newer": newer(version, (leaf for leaf, _ in leaves)),
            "typmod": typmod,
            "locale": money if holds_money else None,
        }
        described.append((neutral(name, typname, typmod, typtype), detail))
    return described


def newer(version: int, leaves: Iterable[str]) -> frozenset[str]:
    """Those of the types that a server of this version writes and reads otherwise than older ones.

    ``version`` is as libpq tells it, such as 160014.
    """
    return frozenset(leaf for leaf in leaves if version >= _CHANGED.get(leaf, version + 1))


def interval_fields(typmod: int) -> int:
    """The fields that an interval's modifier leaves it, as bits."""
    return ALL_FIELDS if typmod < 0 else (typmod >> 16) & ALL_FIELDS


def neutral(name: str, typname: str, typmod: int, typtype: str = "b") -> ColumnType:
    """What a type of PostgreSQL is to the interface; ``name`` is how it is shown."""
    kind = _KINDS.get(typname, Kind.OTHER) if typtype == "b" else Kind.OTHER
    precision = scale = length = None
    if kind is Kind.DECIMAL and typmod >= 4:
        precision = ((typmod - 4) >> 16) & 0xFFFF
        scale = (((typmod - 4) & 0x7FF) ^ 1024) - 1024
    elif typname in ("varchar", "bpchar") and typmod >= 4:
        length = typmod - 4
    elif typname == "name":
        length = 63
    elif typname == "char":
        length = 1
    elif kind in (Kind.TIME, Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        precision = typmod if typmod >= 0 else 6
    elif kind is Kind.INTERVAL:
        precision = typmod & 0xFFFF if typmod >= 0 else 6
        precision = 6 if precision == 0xFFFF else precision
    return ColumnType(
        kind=kind,
        name=name,
        bits=_BITS.get(typname),
        unsigned=typname == "oid",
        precision=precision,
        scale=scale,
        length=length,
    )
