"""The fence in the file: no transaction of an older attempt commits after a newer one's (R-F5)."""

from __future__ import annotations

from tasks.replicate.connector import Fenced, Load, SinkError
from tasks.replicate.connectors import turns
from tasks.replicate.connectors.sqlite.session import Session

# Made inside the transaction that needs it first: SQLite takes definitions back as well.
_CREATE = """
create table if not exists main.claimcheck_fence (
  scope text not null,
  step integer not null,
  fence integer not null,
  run_id text not null,
  primary key (scope, step)
) without rowid
"""
_READ = "select fence from main.claimcheck_fence where scope = ? and step = ?"
_RECORD = """
insert into main.claimcheck_fence (scope, step, fence, run_id) values (?, ?, ?, ?)
on conflict (scope, step) do update set fence = excluded.fence, run_id = excluded.run_id
"""
_WHOSE = "select run_id from main.claimcheck_fence where scope = ? and step = 0"
_EXISTS = """
select count(*) from main.sqlite_master where type = 'table' and name = 'claimcheck_fence'
"""


def enter(session: Session, load: Load) -> None:
    """Inside a transaction that holds the file's write lock: pass the fence, and take the turn.

    SQLite has one writer at a time, so the lock of a row is the lock of the file. Raises Fenced,
    or SinkError where another job has begun to write the target meanwhile.
    """
    session.execute(_CREATE)
    row = session.execute(_READ, (load.scope, 0)).fetchone()
    if row is None and load.step:
        raise SinkError("the fence record of this job has vanished from claimcheck_fence")
    if row is not None and row[0] > load.fence:
        raise Fenced(load.fence, row[0])
    session.execute(_RECORD, (load.scope, load.step, load.fence, load.run_id))
    turn = turns.scope(load)
    if load.step:
        row = session.execute(_WHOSE, (turn,)).fetchone()
        turns.check(load, row[0] if row else None)
    else:
        session.execute(_RECORD, (turn, 0, turns.NO_FENCE, load.run_id))


def settle(session: Session, load: Load) -> bool:
    """Whether the transaction of ``load.step`` committed; inside a transaction of its own."""
    if not session.execute(_EXISTS).fetchone()[0]:
        return False
    row = session.execute(_READ, (load.scope, load.step)).fetchone()
    return row is not None and row[0] == load.fence
