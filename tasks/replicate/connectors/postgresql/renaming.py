"""``atomic: rename``: the staging table takes the target's place.

What LIKE does not carry over is made again: the state and name of identity sequences, names of
indexes and statistics, storage parameters, replica identity, the comment. Views, foreign keys,
triggers, grants and publications do not follow a rename; a target that has any of them is
refused, and told of ``delete``.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Counts, Load, SinkError, was_altered
from tasks.replicate.connectors.postgresql import staging
from tasks.replicate.connectors.postgresql.session import comma, identifier
from tasks.replicate.names import join_name

_LOSES = """
select what from (
  select 1, 'views' as what where exists (
    select from pg_catalog.pg_depend d
    where d.refobjid = %(oid)s::oid and d.refclassid = 'pg_catalog.pg_class'::regclass
      and d.classid = 'pg_catalog.pg_rewrite'::regclass and d.deptype = 'n')
  union all
  select 2, 'foreign keys' where exists (
    select from pg_catalog.pg_constraint
    where contype = 'f' and %(oid)s::oid in (conrelid, confrelid))
  union all
  select 3, 'triggers' where exists (
    select from pg_catalog.pg_trigger where tgrelid = %(oid)s::oid and not tgisinternal)
  union all
  select 4, 'grants' where exists (
    select from pg_catalog.pg_class where oid = %(oid)s::oid and relacl is not null
      and not (relacl @> pg_catalog.acldefault('r', relowner)
               and relacl <@ pg_catalog.acldefault('r', relowner)))
  union all
  select 5, 'column grants' where exists (
    select from pg_catalog.pg_attribute where attrelid = %(oid)s::oid and attacl is not null)
  union all
  select 6, 'publications' where exists (
    select from pg_catalog.pg_publication_rel where prrelid = %(oid)s::oid)
  union all
  select 7, 'row security' where exists (
    select from pg_catalog.pg_class where oid = %(oid)s::oid and relrowsecurity) or exists (
    select from pg_catalog.pg_policy where polrelid = %(oid)s::oid)
  union all
  select 8, 'inheritance' where exists (
    select from pg_catalog.pg_inherits where %(oid)s::oid in (inhrelid, inhparent))
  union all
  select 9, 'a serial sequence' where exists (
    select from pg_catalog.pg_depend d join pg_catalog.pg_class s on s.oid = d.objid
    where d.refobjid = %(oid)s::oid and d.classid = 'pg_catalog.pg_class'::regclass
      and d.refclassid = 'pg_catalog.pg_class'::regclass and d.deptype = 'a' and s.relkind = 'S')
  union all
  select 10, 'an owner other than this role' where exists (
    select from pg_catalog.pg_class
    where oid = %(oid)s::oid and pg_catalog.pg_get_userbyid(relowner) <> current_user)
  union all
  select 11, 'rules' where exists (
    select from pg_catalog.pg_rewrite where ev_class = %(oid)s::oid)
  union all
  select 12, 'statistics targets or options of columns' where exists (
    select from pg_catalog.pg_attribute
    where (attrelid = %(oid)s::oid or attrelid in (
        select indexrelid from pg_catalog.pg_index where indrelid = %(oid)s::oid))
      and attnum > 0 and not attisdropped
      and (attstattarget >= 0 or array_to_string(attoptions, ',') like '%%n_distinct%%'))
  union all
  select 13, 'grants or a comment on an identity sequence' where exists (
    select from pg_catalog.pg_depend d join pg_catalog.pg_class s on s.oid = d.objid
    where d.refobjid = %(oid)s::oid and d.classid = 'pg_catalog.pg_class'::regclass
      and d.refclassid = 'pg_catalog.pg_class'::regclass and d.deptype = 'i'
      and s.relkind = 'S'
      and (s.relacl is not null or pg_catalog.obj_description(s.oid, 'pg_class') is not null))
  union all
  select 14, 'a tablespace of its own' where exists (
    select from pg_catalog.pg_class where oid = %(oid)s::oid and reltablespace <> 0)
  union all
  select 15, 'an access method other than the default' where exists (
    select from pg_catalog.pg_class c join pg_catalog.pg_am m on m.oid = c.relam
    where c.oid = %(oid)s::oid
      and m.amname <> pg_catalog.current_setting('default_table_access_method'))
  union all
  select 16, 'a composite type that it is made of' where exists (
    select from pg_catalog.pg_class where oid = %(oid)s::oid and reloftype <> 0)
  union all
  select 17, 'security labels' where exists (
    select from pg_catalog.pg_seclabel
    where classoid = 'pg_catalog.pg_class'::regclass and objoid = %(oid)s::oid)
  union all
  select 18, 'fewer grants than default privileges give a new table' where exists (
    select from pg_catalog.pg_default_acl a join pg_catalog.pg_class c on c.oid = %(oid)s::oid
    where a.defaclobjtype = 'r' and a.defaclnamespace in (0, c.relnamespace)
      and c.relacl is null and pg_catalog.pg_get_userbyid(a.defaclrole) = current_user)
  union all
  -- Whatever else depends on the table, its row type or its identity sequences: a function whose
  -- body is SQL, a column of the row type, another table's policy.
  select 19, pg_catalog.pg_describe_object(d.classid, d.objid, 0)
  from pg_catalog.pg_depend d
  where d.deptype = 'n' and (
      d.refclassid = 'pg_catalog.pg_class'::regclass and (
        d.refobjid = %(oid)s::oid
          and d.classid <> all(array['pg_catalog.pg_rewrite', 'pg_catalog.pg_constraint',
            'pg_catalog.pg_trigger', 'pg_catalog.pg_publication_rel']::regclass[])
        or d.refobjid in (
          select s.objid from pg_catalog.pg_depend s
          where s.refobjid = %(oid)s::oid and s.refclassid = 'pg_catalog.pg_class'::regclass
            and s.classid = 'pg_catalog.pg_class'::regclass and s.deptype = 'i'))
      or d.refclassid = 'pg_catalog.pg_type'::regclass and d.refobjid in (
        select t.oid from pg_catalog.pg_type r, pg_catalog.pg_type t
        where r.typrelid = %(oid)s::oid and t.oid in (r.oid, r.typarray)))
    and not exists (
      select from pg_catalog.pg_policy p
      where d.classid = 'pg_catalog.pg_policy'::regclass and p.oid = d.objid
        and p.polrelid = %(oid)s::oid)
    -- Generated columns, which LIKE makes again. Only they refer to columns of their own table.
    and not (d.refobjsubid > 0 and exists (
      select from pg_catalog.pg_attrdef e
      where d.classid = 'pg_catalog.pg_attrdef'::regclass and e.oid = d.objid
        and e.adrelid = %(oid)s::oid))
  group by 2
) losses (rank, what)
order by rank
"""

# The catalog's rows about the target, by the transactions that wrote them. VACUUM and ANALYZE
# change such rows in place.
_FORM = """
select pg_catalog.md5(coalesce(string_agg(what, ' ' order by what), '')) from (
  select 'class ' || oid || ' ' || xmin from pg_catalog.pg_class
  where oid = %(oid)s::oid
    or oid in (select indexrelid from pg_catalog.pg_index where indrelid = %(oid)s::oid)
    or oid in (select objid from pg_catalog.pg_depend where refobjid = %(oid)s::oid
      and refclassid = 'pg_catalog.pg_class'::regclass
      and classid = 'pg_catalog.pg_class'::regclass and deptype = 'i')
  union all
  select 'column ' || attnum || ' ' || xmin from pg_catalog.pg_attribute
  where attrelid = %(oid)s::oid
  union all
  select 'default ' || oid || ' ' || xmin from pg_catalog.pg_attrdef where adrelid = %(oid)s::oid
  union all
  select 'constraint ' || oid || ' ' || xmin from pg_catalog.pg_constraint
  where %(oid)s::oid in (conrelid, confrelid)
  union all
  select 'index ' || indexrelid || ' ' || xmin from pg_catalog.pg_index
  where indrelid = %(oid)s::oid
  union all
  select 'trigger ' || oid || ' ' || xmin from pg_catalog.pg_trigger where tgrelid = %(oid)s::oid
  union all
  select 'policy ' || oid || ' ' || xmin from pg_catalog.pg_policy where polrelid = %(oid)s::oid
  union all
  select 'rule ' || oid || ' ' || xmin from pg_catalog.pg_rewrite where ev_class = %(oid)s::oid
  union all
  select 'statistics ' || oid || ' ' || xmin from pg_catalog.pg_statistic_ext
  where stxrelid = %(oid)s::oid
  union all
  select 'child ' || inhrelid || ' ' || xmin from pg_catalog.pg_inherits
  where %(oid)s::oid in (inhrelid, inhparent)
  union all
  select 'publication ' || oid || ' ' || xmin from pg_catalog.pg_publication_rel
  where prrelid = %(oid)s::oid
  union all
  select 'comment ' || objoid || ' ' || objsubid || ' ' || xmin from pg_catalog.pg_description
  where classoid = 'pg_catalog.pg_class'::regclass and (objoid = %(oid)s::oid
    or objoid in (select indexrelid from pg_catalog.pg_index where indrelid = %(oid)s::oid))
) parts (what)
"""

_INDEXES = """
select c.relname, i.indisreplident, i.indisclustered from pg_catalog.pg_index i
join pg_catalog.pg_class c on c.oid = i.indexrelid
where i.indrelid = pg_catalog.to_regclass(%s)
order by i.indexrelid
"""
# Taken as a document, because PostgreSQL 12 has no such column.
_STATISTICS = """
select n.nspname, s.stxname, (pg_catalog.to_jsonb(s) ->> 'stxstattarget')::int
from pg_catalog.pg_statistic_ext s
join pg_catalog.pg_namespace n on n.oid = s.stxnamespace
where s.stxrelid = pg_catalog.to_regclass(%s)
order by s.oid
"""
_SEQUENCES = """
select n.nspname, s.relname
from pg_catalog.pg_depend d
join pg_catalog.pg_class s on s.oid = d.objid and s.relkind = 'S'
join pg_catalog.pg_namespace n on n.oid = s.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
where d.classid = 'pg_catalog.pg_class'::regclass
  and d.refclassid = 'pg_catalog.pg_class'::regclass
  and d.refobjid = pg_catalog.to_regclass(%s) and d.deptype = 'i'
order by a.attname
"""
_TRAITS = """
select c.relreplident::text, pg_catalog.obj_description(c.oid, 'pg_class')
from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass(%s)
"""

_STORAGE = """
select c.relpersistence = 'u', coalesce(c.reloptions, '{}') || coalesce(
  (select array_agg('toast.' || name) from pg_catalog.pg_class t, unnest(t.reloptions) name
   where t.oid = c.reltoastrelid), '{}')
from pg_catalog.pg_class c where c.oid = %s::oid
"""
# To take the target's place it must be like it in all that LIKE carries over, and in storage.
_MAKE = sql.SQL("create {unlogged} table {staging} (like {target} including all)")
_SET = sql.SQL("alter table {} set ({})")

_LOCK = sql.SQL("lock table {} in access exclusive mode")
_DROP = sql.SQL("drop table {}")
_RENAME = sql.SQL("alter table {} rename to {}")
_RENAME_INDEX = sql.SQL("alter index {} rename to {}")
_RENAME_SEQUENCE = sql.SQL("alter sequence {} rename to {}")
_GO_ON = sql.SQL("select pg_catalog.setval({new}::regclass, last_value, is_called) from {old}")
_RENAME_STATISTICS = sql.SQL("alter statistics {} rename to {}")
_MOVE_STATISTICS = sql.SQL("alter statistics {} set schema {}")
_AIM_STATISTICS = sql.SQL("alter statistics {} set statistics {}")
_REPLICA_IDENTITY = sql.SQL("alter table {} replica identity {}")
_CLUSTER = sql.SQL("alter table {} cluster on {}")
_COMMENT = sql.SQL("comment on table {} is {}")
_COUNT = sql.SQL("select count(*) from {}")


def refusals(connection: psycopg.Connection[Any], load: Load) -> list[str]:
    """What a rename would lose, and why the table cannot be renamed at all."""
    assert load.relation is not None
    detail = load.relation.detail
    table = join_name((detail["schema"], detail["table"]))
    if detail["relkind"] != "r":
        return [f"{table} is partitioned and cannot be replaced by a rename: use atomic: delete"]
    lost = [row[0] for row in connection.execute(_LOSES, {"oid": detail["oid"]})]
    if not lost:
        return []
    return [f"{table} has {', '.join(lost)}, which a rename would lose: use atomic: delete"]


def make(connection: psycopg.Connection[Any], load: Load) -> None:
    """The staging table, with the target's columns, constraints, indexes and storage."""
    assert load.relation is not None
    detail = load.relation.detail
    row = connection.execute(_STORAGE, (detail["oid"],)).fetchone()
    assert row is not None
    unlogged, options = row
    connection.execute(
        _MAKE.format(
            unlogged=sql.SQL("unlogged" if unlogged else ""),
            staging=staging.name(load),
            target=identifier((detail["schema"], detail["table"])),
        )
    )
    if options:
        pairs = [option.partition("=") for option in options]
        connection.execute(
            _SET.format(
                staging.name(load),
                comma(
                    [
                        sql.SQL("{} = {}").format(identifier(key.split(".")), sql.Literal(value))
                        for key, _, value in pairs
                    ]
                ),
            )
        )


def form(connection: psycopg.Connection[Any], load: Load) -> str:
    """A value that changes with whatever is changed of the target but its rows."""
    assert load.relation is not None
    row = connection.execute(_FORM, {"oid": load.relation.detail["oid"]}).fetchone()
    assert row is not None
    return str(row[0])


def swap(connection: psycopg.Connection[Any], load: Load, as_staged: str | None) -> Counts:
    """Drop the target and give the staging table its names, inside the last transaction.

    ``as_staged`` is the target's form when the staging table was made like it; what was changed
    since would be lost, so that SinkError is raised then.
    """
    from tasks.replicate.connectors.postgresql import catalog

    assert load.relation is not None
    schema, table = load.relation.detail["schema"], load.relation.detail["table"]
    staged = staging.table_name(load)
    target = identifier((schema, table))
    row = connection.execute(_COUNT.format(staging.name(load))).fetchone()
    # Whoever writes locks the table before its sequence, and so do we.
    connection.execute(_LOCK.format(target))
    if form(connection, load) != as_staged:
        raise SinkError("sink: " + was_altered((schema, table)))
    ours, theirs = (catalog.quoted((schema, name)) for name in (table, staged))

    def both(query: str) -> list[tuple[Any, Any]]:
        # LIKE makes indexes and statistics in the order of the old ones.
        old, new = (connection.execute(query, (name,)).fetchall() for name in (ours, theirs))
        return list(zip(old, new, strict=True))

    indexes, statistics, sequences = both(_INDEXES), both(_STATISTICS), both(_SEQUENCES)
    traits = connection.execute(_TRAITS, (ours,)).fetchone()
    assert traits is not None
    for number, (old, new) in enumerate(sequences):
        # The new name also keeps others from taking a value until the old one is dropped.
        aside = f"{staged}_old_{number}"
        connection.execute(_RENAME_SEQUENCE.format(identifier(old), sql.Identifier(aside)))
        connection.execute(
            _GO_ON.format(new=sql.Literal(catalog.quoted(new)), old=identifier((old[0], aside)))
        )
    connection.execute(_DROP.format(target))
    connection.execute(_RENAME.format(staging.name(load), sql.Identifier(table)))
    for old, new in sequences:
        connection.execute(_RENAME_SEQUENCE.format(identifier(new), sql.Identifier(old[1])))
    for (name, *_), (made, *_) in indexes:
        connection.execute(_RENAME_INDEX.format(identifier((schema, made)), sql.Identifier(name)))
    _statistics(connection, statistics)
    identity, comment = traits
    kept = {"f": sql.SQL("full"), "n": sql.SQL("nothing")}.get(identity)
    if kept is not None:
        connection.execute(_REPLICA_IDENTITY.format(target, kept))
    for (name, is_identity, is_clustered), _ in indexes:
        if is_identity and identity == "i":
            using = sql.SQL("using index {}").format(sql.Identifier(name))
            connection.execute(_REPLICA_IDENTITY.format(target, using))
        if is_clustered:
            connection.execute(_CLUSTER.format(target, sql.Identifier(name)))
    if comment is not None:
        connection.execute(_COMMENT.format(target, sql.Literal(comment)))
    return Counts(inserted=row[0] if row else 0)


def _statistics(connection: psycopg.Connection[Any], pairs: list[tuple[Any, Any]]) -> None:
    for (schema, name, aim), (own, made, _) in pairs:
        if schema != own:
            connection.execute(
                _MOVE_STATISTICS.format(identifier((own, made)), sql.Identifier(schema))
            )
        connection.execute(
            _RENAME_STATISTICS.format(identifier((schema, made)), sql.Identifier(name))
        )
        if aim is not None and aim >= 0:
            connection.execute(_AIM_STATISTICS.format(identifier((schema, name)), sql.Literal(aim)))
