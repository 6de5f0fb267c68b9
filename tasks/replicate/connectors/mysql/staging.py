"""The staging table of a run: beside the target, named by the run, swept when orphaned."""

from __future__ import annotations

import contextlib
import re

from tasks.replicate.connector import Load, SinkError
from tasks.replicate.connectors.mysql import fence, types
from tasks.replicate.connectors.mysql.catalog import STAGE
from tasks.replicate.connectors.mysql.session import Session, identifier, literal

# Numbered by arrival, which tells the newest of two rows with one key and one watermark.
_CREATE = """
create table {stage} ({number} bigint unsigned not null auto_increment primary key, {columns}{key})
engine = InnoDB comment = {comment}
"""
_DROP = "drop table if exists {stage}"
_STAGES = """
select table_name, table_comment, create_time <= now() - interval {seconds} second
from information_schema.tables
where table_schema = {schema} and table_name like 'claimcheck\\\\_stage\\\\_%'
"""
_PATIENCE = "set session lock_wait_timeout = {seconds}"
_COMMENT = re.compile(r"claimcheck scope=(\S+) fence=(\d+)")


ORPHANED_SECONDS = 86_400
"""How long another job's staging is left alone, though no session of its attempt is seen: its
connection may have broken while it loads, or stand at another node of a cluster."""


def schema(load: Load) -> str:
    assert load.relation is not None
    return load.staging_schema or load.relation.detail["schema"]


def name(load: Load) -> str:
    """The quoted name of this run's staging table."""
    return identifier(schema(load), STAGE + re.sub(r"[^0-9A-Za-z]", "", load.run_id)[:32])


def number(load: Load) -> str:
    """The column that numbers the staged rows; named so that no column of the load is."""
    taken = {plan.sink.name.lower() for plan in load.columns}
    found = "claimcheck_number"
    while found in taken:
        found += "_"
    return identifier(found)


def make(session: Session, load: Load) -> None:
    """An empty table of the load's columns as the target has them, but free of its constraints."""
    sweep(session, load)
    session.execute(_DROP.format(stage=name(load)))
    columns = ", ".join(
        f"{identifier(plan.sink.name)} {types.declared(plan.sink)} null default null"
        for plan in load.columns
    )
    key = ""
    if load.key and load.how in ("merge", "diff"):
        key = f", key ({', '.join(identifier(part) for part in load.key)})"
    comment = f"claimcheck scope={load.scope} fence={load.fence}"
    session.execute(
        _CREATE.format(
            stage=name(load),
            number=number(load),
            columns=columns,
            key=key,
            comment=literal(comment),
        )
    )


def drop(session: Session, load: Load) -> bool:
    """Drop this run's table, and tell whether it could be: a later run sweeps what is held."""
    return _try(session, _DROP.format(stage=name(load)))


def sweep(session: Session, load: Load) -> None:
    """Drop what older attempts of this job left behind, and what jobs did that run no more."""
    place = schema(load)
    stages = _STAGES.format(schema=literal(place), seconds=ORPHANED_SECONDS)
    for table, comment, old in session.rows(stages):
        found = _COMMENT.match(comment)
        if not found:
            continue
        scope, number = found[1], int(found[2])
        drop = _DROP.format(stage=identifier(place, table))
        if scope == load.scope:
            if number < load.fence:
                _try(session, drop)
        elif old and not fence.held(session, scope, number):
            _try(session, drop)


def _try(session: Session, statement: str) -> bool:
    """Run what another user's rights or somebody's open transaction may forbid; whether it was."""
    session.execute(_PATIENCE.format(seconds=1))
    done = False
    with contextlib.suppress(SinkError):
        session.execute(statement)
        done = True
    session.execute(_PATIENCE.format(seconds="default"))
    return done
