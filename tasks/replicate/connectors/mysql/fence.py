"""The fence at the sink: no transaction of an older attempt commits after a newer one's (R-F5).

A frozen worker's session holds its locks until someone ends it. So each sink session holds a named
lock that tells the job and its fence number; a newer attempt finds the sessions of the one before
by it, and ends them: that the newer one runs is the proof that the older has lost its lease.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tasks.replicate.connector import Fenced, Load, SinkError
from tasks.replicate.connectors import turns
from tasks.replicate.connectors.mysql.catalog import FENCE
from tasks.replicate.connectors.mysql.session import Session, identifier, literal
from tasks.replicate.names import session_name

_CREATE = """
create table if not exists {fence} (
  scope varchar(64) character set ascii collate ascii_bin not null,
  step int not null,
  fence bigint not null,
  run_id varchar(64) character set ascii collate ascii_bin not null,
  primary key (scope, step)
) engine = InnoDB
"""
_EXISTS = """
select count(*) from information_schema.tables
where table_schema = {schema} and table_name = {name}
"""
# Takes the row's lock, whether it is there or not, and keeps the higher number.
_RECORD = """
insert into {fence} (scope, step, fence, run_id) values ({scope}, {step}, {mine}, {run})
on duplicate key update
  run_id = if(fence <= {mine}, {run}, run_id), fence = greatest(fence, {mine})
"""
_SHARE = "select fence from {fence} where scope = {scope} and step = 0 lock in share mode"
# The target's own row: whose turn it is.
_TURN = """
insert into {fence} (scope, step, fence, run_id) values ({turn}, 0, {none}, {run})
on duplicate key update run_id = {run}
"""
_WHOSE = "select run_id from {fence} where scope = {turn} and step = 0 lock in share mode"
_LOCK = "select fence from {fence} where scope = {scope} and step = {step} for update"
_PATIENCE = "set session innodb_lock_wait_timeout = {seconds}"
SETTLE_SECONDS = 30
MOST_PATIENCE = 100_000_000

# The number of the attempt that opened sessions last; kept beside the steps, and never locked long.
_SESSIONS = -1
_LAST = "select fence from {fence} where scope = {scope} and step = {step}"
_HOLDERS = "select {locks}"
_TAKE = "select get_lock({lock}, 0)"
_END = "kill {id}"
MOST_SESSIONS = 65


def table(schema: str) -> str:
    return identifier(schema, FENCE)


def exists(session: Session, schema: str) -> bool:
    place = _EXISTS.format(schema=literal(schema), name=literal(FENCE))
    return bool(session.row(place)[0])


def create(session: Session, schema: str) -> None:
    """Make the fence table where it is missing; outside a transaction, which it would commit."""
    if not exists(session, schema):
        session.execute(_CREATE.format(fence=table(schema)))


def announce(session: Session, schema: str, load: Load) -> None:
    """Outside a transaction: end the sessions of older attempts, and hold this one's named lock."""
    place = {"fence": table(schema), "scope": literal(load.scope), "step": _SESSIONS}
    found = session.rows(_LAST.format(**place))
    if found and found[0][0] < load.fence:
        _end(session, load.scope, found[0][0])
    session.execute(_RECORD.format(**place, mine=load.fence, run=literal(load.run_id)))
    for number in range(MOST_SESSIONS):
        if session.row(_TAKE.format(lock=_lock(load.scope, load.fence, number)))[0]:
            return


def held(session: Session, scope: str, fence: int) -> bool:
    """Whether a session of that attempt is there."""
    return any(holder is not None for holder in _holders(session, scope, fence))


def _holders(session: Session, scope: str, fence: int) -> tuple[Any, ...]:
    """The numbers of the sessions that hold an attempt's named locks, None for each free one."""
    locks = ", ".join(
        f"is_used_lock({_lock(scope, fence, number)})" for number in range(MOST_SESSIONS)
    )
    return session.row(_HOLDERS.format(locks=locks))


def _lock(scope: str, fence: int, number: int) -> str:
    """A named lock of one session; at most 64 characters."""
    return literal(f"{session_name(scope, fence)}/{number}")


def _end(session: Session, scope: str, fence: int) -> None:
    for holder in _holders(session, scope, fence):
        if holder is not None and holder != session.id:
            # Not ours to end, or gone already: then its locks are waited for.
            with contextlib.suppress(SinkError):
                session.execute(_END.format(id=holder))


def enter(session: Session, schema: str, load: Load) -> None:
    """Inside a transaction that has just begun: pass the fence, and wait for the target's turn.

    Raises Fenced, or SinkError where another job has begun to write the target meanwhile.
    """
    place = {"fence": table(schema), "scope": literal(load.scope), "step": load.step}
    if load.step:
        found = session.rows(_SHARE.format(**place))
        if not found:
            raise SinkError(f"the fence record of this job has vanished from {schema}.{FENCE}")
        if found[0][0] > load.fence:
            raise Fenced(load.fence, found[0][0])
    session.execute(_RECORD.format(**place, mine=load.fence, run=literal(load.run_id)))
    ((found_fence,),) = session.rows(_LOCK.format(**place))
    if found_fence > load.fence:
        raise Fenced(load.fence, found_fence)
    turn = {
        "fence": table(schema),
        "turn": literal(turns.scope(load)),
        "none": turns.NO_FENCE,
        "run": literal(load.run_id),
    }
    if load.step:
        rows = session.rows(_WHOSE.format(**turn))
        turns.check(load, str(rows[0][0]) if rows else None)
    else:
        # As long as the other's load takes; a stop breaks it.
        session.execute(_PATIENCE.format(seconds=MOST_PATIENCE))
        session.execute(_TURN.format(**turn))
        session.execute(_PATIENCE.format(seconds="default"))


def settle(session: Session, schema: str, load: Load) -> bool:
    """Whether the transaction of ``load.step`` committed; waits until a lost one has ended."""
    place = {"fence": table(schema), "scope": literal(load.scope)}
    session.execute(_PATIENCE.format(seconds=SETTLE_SECONDS))
    session.begin()
    try:
        session.rows(_LOCK.format(**place, step=0))
        found = session.rows(_LOCK.format(**place, step=load.step))
    finally:
        session.rollback()
    return bool(found) and found[0][0] == load.fence
