"""``atomic: rename``: the staging table takes the target's place.

Views, foreign keys, triggers, grants and publications do not follow a rename; a target that has
any of them is refused, and told of ``delete``.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Counts, Load
from tasks.replicate.connectors.postgresql import staging
from tasks.replicate.connectors.postgresql.session import identifier
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
    select from pg_catalog.pg_class where oid = %(oid)s::oid and relacl is not null)
  union all
  select 5, 'column grants' where exists (
    select from pg_catalog.pg_attribute where attrelid = %(oid)s::oid and attacl is not null)
  union all
  select 6, 'publications' where exists (
    select from pg_catalog.pg_publication_rel where prrelid = %(oid)s::oid)
  union all
  select 7, 'row security' where exists (
    select from pg_catalog.pg_class where oid = %(oid)s::oid and relrowsecurity)
  union all
  select 8, 'inheritance' where exists (
    select from pg_catalog.pg_inherits where %(oid)s::oid in (inhrelid, inhparent))
  union all
  select 9, 'a serial sequence' where exists (
    select from pg_catalog.pg_depend
    where refobjid = %(oid)s::oid and classid = 'pg_catalog.pg_class'::regclass
      and refclassid = 'pg_catalog.pg_class'::regclass and deptype = 'a')
  union all
  select 10, 'an owner other than this role' where exists (
    select from pg_catalog.pg_class
    where oid = %(oid)s::oid and pg_catalog.pg_get_userbyid(relowner) <> current_user)
  union all
  select 11, 'rules' where exists (
    select from pg_catalog.pg_rewrite where ev_class = %(oid)s::oid)
) losses (rank, what)
order by rank
"""

_INDEXES = """
select c.relname from pg_catalog.pg_index i
join pg_catalog.pg_class c on c.oid = i.indexrelid
where i.indrelid = pg_catalog.to_regclass(%s)
order by i.indexrelid
"""

_DROP = sql.SQL("drop table {}")
_RENAME = sql.SQL("alter table {} rename to {}")
_RENAME_INDEX = sql.SQL("alter index {} rename to {}")
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


def swap(connection: psycopg.Connection[Any], load: Load) -> Counts:
    """Drop the target and rename the staging table and its indexes, inside the last transaction."""
    from tasks.replicate.connectors.postgresql import catalog

    assert load.relation is not None
    schema, table = load.relation.detail["schema"], load.relation.detail["table"]
    staged = staging.table_name(load)
    row = connection.execute(_COUNT.format(staging.name(load))).fetchone()
    # LIKE makes the indexes in the order of the old ones.
    old = [r[0] for r in connection.execute(_INDEXES, (catalog.quoted((schema, table)),))]
    new = [r[0] for r in connection.execute(_INDEXES, (catalog.quoted((schema, staged)),))]
    connection.execute(_DROP.format(identifier((schema, table))))
    connection.execute(_RENAME.format(staging.name(load), sql.Identifier(table)))
    for before, after in zip(new, old, strict=True):
        connection.execute(
            _RENAME_INDEX.format(identifier((schema, before)), sql.Identifier(after))
        )
    return Counts(inserted=row[0] if row else 0)
