"""What would make a load fail or do harm at the sink, found before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from tasks.replicate.connector import Load
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.postgresql import catalog, fence, staging
from tasks.replicate.names import join_name

_RIGHTS = """
select pg_catalog.has_table_privilege(%(oid)s::oid, 'select'),
       pg_catalog.has_table_privilege(%(oid)s::oid, 'insert')
         or (select bool_and(pg_catalog.has_column_privilege(%(oid)s::oid, name, 'insert'))
             from unnest(%(columns)s::text[]) name),
       pg_catalog.has_table_privilege(%(oid)s::oid, 'update'),
       pg_catalog.has_table_privilege(%(oid)s::oid, 'delete'),
       pg_catalog.has_table_privilege(%(oid)s::oid, 'truncate'),
       pg_catalog.pg_has_role(current_user, c.relowner, 'usage'),
       pg_catalog.current_setting('transaction_read_only')::bool,
       pg_catalog.pg_is_in_recovery(),
       pg_catalog.row_security_active(%(oid)s::oid),
       pg_catalog.current_setting('session_replication_role') = 'replica'
from pg_catalog.pg_class c where c.oid = %(oid)s::oid
"""

_SCHEMA = """
select n.oid is not null,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'create'), false),
       pg_catalog.to_regclass(%(fence)s) is not null,
       case when pg_catalog.to_regclass(%(fence)s) is null then false
            else pg_catalog.has_table_privilege(pg_catalog.to_regclass(%(fence)s), 'select')
             and pg_catalog.has_table_privilege(pg_catalog.to_regclass(%(fence)s), 'insert')
             and pg_catalog.has_table_privilege(pg_catalog.to_regclass(%(fence)s), 'update') end
from (select %(schema)s::name as name) given
left join pg_catalog.pg_namespace n on n.nspname = given.name
"""

# The table and all its partitions, which may have foreign keys and triggers of their own. (Their
# rules and row security count only where a statement names them, which none here does.)
_TREE = """
with recursive tree (oid) as (
  select %(oid)s::oid
  union
  select i.inhrelid from pg_catalog.pg_inherits i join tree on i.inhparent = tree.oid
)
select array_agg(oid::int8) from tree
"""

_CHILDREN = """
select inhrelid::regclass::text from pg_catalog.pg_inherits where inhparent = %s::oid order by 1
"""

# A key of a partitioned table, or to one, has a row for each partition besides its own.
_REFERENCES = """
select distinct c.confrelid::regclass::text, c.conrelid::regclass::text, c.confrelid <> %(oid)s::oid
from pg_catalog.pg_constraint c
where c.contype = 'f' and c.conparentid = 0
  and c.confrelid = any(%(tree)s::oid[]) and c.conrelid <> all(%(tree)s::oid[])
order by 3, 1, 2
"""

# Bits of tgtype: 4 insert, 8 delete, 16 update, 32 truncate. A partition bears its parent's
# triggers under the same name.
_TRIGGERS = """
select t.tgname, (array_agg(t.tgrelid::regclass::text order by t.tgrelid))[1],
       not bool_or(t.tgrelid = %(oid)s::oid),
       bool_or((t.tgtype & 4) <> 0), bool_or((t.tgtype & 8) <> 0),
       bool_or((t.tgtype & 16) <> 0), bool_or((t.tgtype & 32) <> 0)
from pg_catalog.pg_trigger t
where t.tgrelid = any(%(tree)s::oid[]) and not t.tgisinternal and t.tgenabled in ('O', 'A')
group by 1
order by 1
"""
_RULES = """
select r.rulename from pg_catalog.pg_rewrite r
where r.ev_class = %s::oid and r.ev_type <> '1' and r.ev_enabled in ('O', 'A')
"""

_UNIQUE = """
select i.indexrelid::regclass::text
from pg_catalog.pg_index i
where i.indrelid = %s::oid and i.indisunique and i.indimmediate and i.indisvalid
  and i.indpred is null and i.indexprs is null
  and (select array_agg(a.attname::text order by a.attname::text)
       from unnest(i.indkey[0:i.indnkeyatts - 1]) k (attnum)
       join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum)
      = (select array_agg(name order by name) from unnest(%s::text[]) name)
"""

# The unique indexes with their columns, also those inside of expressions, and what is in the way of
# finding rows by them.
_INDEXES = """
select i.indexrelid::regclass::text, u.columns, not i.indimmediate, i.indpred is not null,
       i.indexprs is not null, not i.indisvalid, u.nullable
from pg_catalog.pg_index i
cross join lateral (
  select coalesce(array_agg(a.attname::text), '{}') as columns,
         coalesce(array_agg(a.attname::text) filter (where not a.attnotnull), '{}') as nullable
  from pg_catalog.pg_attribute a
  where a.attrelid = i.indrelid and (
    a.attnum = any(i.indkey[0:i.indnkeyatts - 1]) or i.indexprs is not null and exists (
      select from pg_catalog.pg_depend d
      where d.classid = 'pg_catalog.pg_class'::regclass and d.objid = i.indexrelid
        and d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjid = i.indrelid
        and d.refobjsubid = a.attnum))
) u
where i.indrelid = %s::oid and i.indisunique
order by i.indisprimary desc, i.indexrelid
"""

# ON CONFLICT heeds every unique index on the key's columns, also one that compares otherwise than
# the column does.
_BLIND_INDEX = """
select i.indexrelid::regclass::text, c.collname
from pg_catalog.pg_index i
cross join lateral unnest(
  i.indkey[0:i.indnkeyatts - 1], i.indcollation[0:i.indnkeyatts - 1]) k (attnum, collated)
join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
join pg_catalog.pg_collation c on c.oid = k.collated
where i.indrelid = %s::oid and i.indisunique and i.indnkeyatts = cardinality(%s::text[])
  and a.attname = any(%s) and c.oid <> a.attcollation and not c.collisdeterministic
"""

_CHANGES = {
    "complete": ("insert", "truncate"),
    "delete": ("insert", "delete"),
    "truncate": ("insert", "truncate"),
    "diff": ("insert", "update", "delete"),
    "merge": ("insert", "update"),
    "rename": (),
}


def refusals(connection: psycopg.Connection[Any], load: Load) -> list[str]:
    """Every reason not to begin, each with the way out."""
    assert load.relation is not None
    oid, schema = load.relation.detail["oid"], load.relation.detail["schema"]
    table = join_name((schema, load.relation.detail["table"]))
    found: list[str] = []
    changes = _CHANGES[load.how or "complete"]
    found += _rights(connection, load, table, changes)
    found += _schemas(connection, load, schema)
    found += _key(connection, load, table)
    if load.relation.detail["relkind"] == "r":
        children = [row[0] for row in connection.execute(_CHILDREN, (oid,))]
        if children:
            found.append(
                f"the tables {', '.join(children)} inherit from {table}, so that their rows count "
                "as its own and would be changed with them: write to a table that none inherits "
                f"from, or cut them off (alter table {children[0]} no inherit {table})"
            )
    row = connection.execute(_TREE, {"oid": oid}).fetchone()
    place = {"oid": oid, "tree": row[0] if row else [oid]}
    if load.how != "merge":
        references: dict[str, list[str]] = {}
        for to, other, part in connection.execute(_REFERENCES, place):
            named = f"the partition {to} of {table}" if part else table
            references.setdefault(named, []).append(other)
        for named, others in references.items():
            found.append(
                f"{named} is referenced by foreign keys of {', '.join(others)}, which emptying "
                "or replacing it would break: use mode incremental, or drop those foreign keys"
            )
    for trigger, on, part, *fires in connection.execute(_TRIGGERS, place):
        events = dict(zip(("insert", "delete", "update", "truncate"), fires, strict=True))
        hit = [event for event in changes if events[event]]
        if hit:
            named = f"the partition {on} of {table}" if part else table
            found.append(
                f"{named} has the trigger {trigger} on {' and '.join(hit)}, which could change "
                "what is stored: disable it, or let it fire for replicas only (ENABLE REPLICA)"
            )
    for (rule,) in connection.execute(_RULES, (oid,)):
        found.append(f"{table} has the rule {rule}, which could change what is stored: drop it")
    if load.how == "rename":
        from tasks.replicate.connectors.postgresql import renaming

        found += renaming.refusals(connection, load)
    return found


def _rights(
    connection: psycopg.Connection[Any], load: Load, table: str, changes: tuple[str, ...]
) -> list[str]:
    assert load.relation is not None
    columns = [plan.sink.name for plan in load.columns]
    row = connection.execute(
        _RIGHTS, {"oid": load.relation.detail["oid"], "columns": columns}
    ).fetchone()
    assert row is not None
    select, insert, update, delete, truncate, owner, read_only, standby, secured, replica = row
    if read_only or standby:
        return ["the sink is read-only (a standby, or default_transaction_read_only): name another"]
    held = {"insert": insert, "update": update, "delete": delete, "truncate": truncate}
    wanted = [right for right in changes if not held[right]]
    if not select and (load.how or load.verified):
        wanted.append("select")
    found = []
    if wanted:
        role = connection.info.user
        found.append(
            f"role {role} may not {', '.join(wanted)} on {table}: "
            f"grant {', '.join(wanted)} on {table} to {role}"
        )
    if secured:
        found.append(
            f"the row security of {table} holds for role {connection.info.user}, which must see "
            f"and write every row: alter role {connection.info.user} bypassrls, or name another"
        )
    if replica:
        # The role may not set it back by itself, unless it is a superuser or was granted to.
        role = connection.info.user
        found.append(
            f"session_replication_role is replica for role {role}: no foreign key is checked, and "
            f"triggers for replicas change what is stored: alter role {role} in database "
            f"{connection.info.dbname} set session_replication_role = origin"
        )
    if load.how == "rename" and not owner:
        found.append(f"only the owner of {table} can rename it: use atomic: delete")
    return found


def _schemas(connection: psycopg.Connection[Any], load: Load, schema: str) -> list[str]:
    role = connection.info.user
    name = join_name((schema, fence.TABLE))
    quoted = catalog.quoted((schema, fence.TABLE))
    row = connection.execute(_SCHEMA, {"schema": schema, "fence": quoted}).fetchone()
    assert row is not None
    _, create, exists, usable = row
    found = []
    if not exists and not create:
        found.append(
            f"role {role} may not create {name}, which keeps older attempts out: "
            f"grant create on schema {schema} to {role}, or create the table for it"
        )
    if exists and not usable:
        found.append(f"grant select, insert, update on {name} to {role}: the fence needs them")
    if load.how:
        where = staging.schema(load)
        row = connection.execute(_SCHEMA, {"schema": where, "fence": quoted}).fetchone()
        assert row is not None
        if not row[0]:
            found.append(f"the staging schema {where} does not exist: create schema {where}")
        elif not row[1]:
            found.append(
                f"role {role} may not create a staging table in {where}: "
                f"grant create on schema {where} to {role}, or name another staging_schema"
            )
    return found


def _key(connection: psycopg.Connection[Any], load: Load, table: str) -> list[str]:
    assert load.relation is not None
    oid = load.relation.detail["oid"]

    def is_unique() -> bool:
        return connection.execute(_UNIQUE, (oid, list(load.key))).fetchone() is not None

    def passed_over() -> list[str]:
        return _passed_over(connection, oid, load.key)

    if found := keys.problems(load, table, is_unique, passed_over):
        return found
    if load.how not in ("merge", "diff"):
        return []
    row = connection.execute(_BLIND_INDEX, (oid, list(load.key), list(load.key))).fetchone()
    if row is not None:
        return [
            f"the unique index {row[0]} of {table} has the collation {row[1]}, which takes "
            "different keys for one: drop it, or give it the column's collation"
        ]
    always = [
        plan.sink.name
        for plan in load.columns
        if plan.sink.detail.get("identity") == "a" and plan.sink.name not in load.key
    ]
    if always:
        return [
            f"column {', '.join(always)} of {table} is GENERATED ALWAYS AS IDENTITY and cannot be "
            "updated: leave it out, or make it GENERATED BY DEFAULT"
        ]
    return []


def _passed_over(connection: psycopg.Connection[Any], oid: int, key: Sequence[str]) -> list[str]:
    """Why each unique index on the key (on any columns, where there is none) cannot serve."""
    found = []
    for index, columns, deferrable, partial, expression, invalid, nullable in connection.execute(
        _INDEXES, (oid,)
    ):
        if key and set(columns) != set(key):
            continue
        if deferrable:
            found.append(
                f"{index} is deferrable, and ON CONFLICT needs one that is checked at once"
            )
        elif partial:
            found.append(f"{index} covers a part of the rows only")
        elif expression:
            found.append(f"{index} is on an expression")
        elif invalid:
            found.append(f"{index} is invalid: reindex it")
        elif not key and nullable:
            found.append(f"{index} allows NULL in {', '.join(nullable)}")
    return found
