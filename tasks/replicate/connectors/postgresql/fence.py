"""The fence at the sink: no transaction of an older attempt commits after a newer one's (R-F5)."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import errors as states
from psycopg import sql

from tasks.replicate.connector import Fenced, Load, SinkError
from tasks.replicate.connectors import turns
from tasks.replicate.connectors.postgresql import catalog
from tasks.replicate.connectors.postgresql.session import identifier
from tasks.replicate.names import session_name

TABLE = "claimcheck_fence"

_CREATE = sql.SQL("""
create table if not exists {fence} (
  scope text not null,
  step int not null,
  fence bigint not null,
  run_id text not null,
  changed_at timestamptz not null default clock_timestamp(),
  primary key (scope, step)
)
""")

# Step 0: recorded unless a higher number stands there already.
_RECORD = sql.SQL("""
insert into {fence} as f (scope, step, fence, run_id) values ({scope}, {step}, {number}, {run})
on conflict (scope, step) do update
  set fence = excluded.fence, run_id = excluded.run_id, changed_at = clock_timestamp()
  where f.fence <= excluded.fence
returning fence
""")

_SHARE = sql.SQL("select fence from {fence} where scope = {scope} and step = 0 for share")
_READ = sql.SQL("select fence from {fence} where scope = {scope} and step = {step}")

# The target's own row: whose turn it is.
_TURN = sql.SQL("""
insert into {fence} (scope, step, fence, run_id) values ({turn}, 0, {none}, {run})
on conflict (scope, step) do update
  set run_id = excluded.run_id, changed_at = clock_timestamp()
""")
_WHOSE = sql.SQL("select run_id from {fence} where scope = {turn} and step = 0 for share")

# To settle: waits for a lost transaction that has inserted this row and not yet ended, then for
# one that has updated it. Rolled back afterwards.
_PROBE = sql.SQL("""
insert into {fence} (scope, step, fence, run_id) values ({scope}, {step}, -1, '')
on conflict (scope, step) do nothing
""")
_LOCK = sql.SQL("select fence from {fence} where scope = {scope} and step = {step} for update")
SETTLE_SECONDS = 30

# A frozen worker's sessions hold their locks until someone ends them. That a newer attempt runs
# is the proof that the older one has lost its lease; its name tells scope and fence number.
_END_OLDER = """
select pg_catalog.pg_terminate_backend(pid)
from pg_catalog.pg_stat_activity
where datname = pg_catalog.current_database() and pid <> pg_catalog.pg_backend_pid()
  and usename = current_user
  and application_name ~ %s
  and substring(application_name from '\\d+$')::numeric < %s
"""


def table(schema: str) -> sql.Identifier:
    """The fence table stands beside the target."""
    return identifier((schema, TABLE))


def create(connection: psycopg.Connection[Any], schema: str) -> None:
    """Make the fence table where it is missing; in autocommit."""
    if connection.execute(
        "select to_regclass(%s)", (catalog.quoted((schema, TABLE)),)
    ).fetchone() != (None,):
        return
    try:
        connection.execute(_CREATE.format(fence=table(schema)))
    except (states.UniqueViolation, states.DuplicateTable):
        # Another run made it at the same moment.
        return


def end_older(connection: psycopg.Connection[Any], load: Load) -> None:
    """End the sessions of older attempts in this database, as far as they are this role's."""
    any_attempt = f"^{session_name(load.scope, load.fence).rpartition('/')[0]}/[0-9]+$"
    connection.execute(_END_OLDER, (any_attempt, load.fence))


def _bind(statement: sql.SQL, schema: str, load: Load) -> sql.Composed:
    """The statement with literals, not parameters: a name may hold a per cent sign."""
    return statement.format(
        fence=table(schema),
        scope=sql.Literal(load.scope),
        step=sql.Literal(load.step),
        number=sql.Literal(load.fence),
        run=sql.Literal(load.run_id),
        turn=sql.Literal(turns.scope(load)),
        none=sql.Literal(turns.NO_FENCE),
    )


def enter(connection: psycopg.Connection[Any], schema: str, load: Load) -> None:
    """Inside a transaction that has just begun: pass the fence, and wait for the target's turn.

    Raises Fenced, or SinkError where another job has begun to write the target meanwhile.
    """
    if load.step:
        row = connection.execute(_bind(_SHARE, schema, load)).fetchone()
        if row is None:
            raise SinkError(f"the fence record of this job has vanished from {schema}.{TABLE}")
        if row[0] > load.fence:
            raise Fenced(load.fence, row[0])
    if connection.execute(_bind(_RECORD, schema, load)).fetchone() is None:
        found = connection.execute(_bind(_READ, schema, load)).fetchone()
        raise Fenced(load.fence, found[0] if found else load.fence)
    if load.step:
        row = connection.execute(_bind(_WHOSE, schema, load)).fetchone()
        turns.check(load, row[0] if row else None)
    else:
        connection.execute(_bind(_TURN, schema, load))


def settle(connection: psycopg.Connection[Any], schema: str, load: Load) -> bool:
    """Whether the transaction of ``load.step`` committed; waits until it has ended."""
    with connection.transaction(force_rollback=True):
        connection.execute("select set_config('lock_timeout', %s, true)", (f"{SETTLE_SECONDS}s",))
        connection.execute(_bind(_PROBE, schema, load))
        row = connection.execute(_bind(_LOCK, schema, load)).fetchone()
    return row is not None and row[0] == load.fence
