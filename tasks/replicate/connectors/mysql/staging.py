"""The staging table of a run: beside the target, named by the run, swept when orphaned."""

from __future__ import annotations

import re

from tasks.replicate.connector import Load
from tasks.replicate.connectors.mysql import types
from tasks.replicate.connectors.mysql.catalog import STAGE
from tasks.replicate.connectors.mysql.session import Session, identifier, literal

# Numbered by arrival, which tells the newest of two rows with one key and one watermark.
_CREATE = """
create table {stage} ({number} bigint unsigned not null auto_increment primary key, {columns}{key})
engine = InnoDB comment = {comment}
"""
_DROP = "drop table if exists {stage}"
_ORPHANS = """
select table_name, table_comment from information_schema.tables
where table_schema = {schema} and table_name like 'claimcheck\\\\_stage\\\\_%'
"""
_COMMENT = re.compile(r"claimcheck scope=(\S+) fence=(\d+)")


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


def drop(session: Session, load: Load) -> None:
    session.execute(_DROP.format(stage=name(load)))


def sweep(session: Session, load: Load) -> None:
    """Drop what older attempts of this job left behind."""
    place = schema(load)
    for table, comment in session.rows(_ORPHANS.format(schema=literal(place))):
        found = _COMMENT.match(comment)
        if found and found[1] == load.scope and int(found[2]) < load.fence:
            session.execute(_DROP.format(stage=identifier(place, table)))
