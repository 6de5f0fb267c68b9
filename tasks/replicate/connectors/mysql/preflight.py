"""What would make a load fail or do harm at the sink, found before anything is touched."""

from __future__ import annotations

from tasks.replicate.connector import Load, SinkError
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.mysql import fence, staging
from tasks.replicate.connectors.mysql.catalog import FENCE
from tasks.replicate.connectors.mysql.publishing import target
from tasks.replicate.connectors.mysql.session import Session, identifier, literal
from tasks.replicate.names import join_name

_REFERENCES = """
select distinct concat(table_schema, '.', table_name) from information_schema.key_column_usage
where referenced_table_schema = {schema} and referenced_table_name = {name}
order by 1
"""
_TRIGGERS = """
select trigger_name, event_manipulation from information_schema.triggers
where event_object_schema = {schema} and event_object_table = {name} order by 1
"""
_SCHEMA = "select count(*) from information_schema.schemata where schema_name = {name}"
_FENCE_TRIES = (
    "insert into {fence} select * from {fence} where 1 = 0",
    "update {fence} set fence = fence where 1 = 0",
)
# Each asks for a right and changes no row; a condition that cannot hold is not even looked at.
_TRIES = {
    "select": "select 1 from {target} where 1 = 0",
    "insert": "insert into {target} ({columns}) select {columns} from {target} where 1 = 0",
    "update": "update {target} set {same} where 1 = 0",
    "delete": "delete from {target} where 1 = 0",
}
_CHANGES = {
    "": ("insert", "delete"),
    "delete": ("insert", "delete"),
    "diff": ("insert", "update", "delete"),
    "merge": ("insert", "update"),
}


def refusals(session: Session, load: Load) -> list[str]:
    """Every reason not to begin, each with the way out."""
    assert load.relation is not None
    detail = load.relation.detail
    table = join_name((detail["schema"], detail["table"]))
    if "VIEW" in detail["type"]:
        return [f"{table} is a view: write to a table"]
    if detail["engine"] != "InnoDB":
        return [
            f"{table} is kept by {detail['engine']}, which has no transactions, so that a failed "
            "load could not be taken back: alter it to engine=InnoDB"
        ]
    place = {"schema": literal(detail["schema"]), "name": literal(detail["table"])}
    changes = _CHANGES[load.how]
    found = _rights(session, load, table, changes)
    if load.how != "merge":
        references = [row[0] for row in session.rows(_REFERENCES.format(**place))]
        if references:
            found.append(
                f"{table} is referenced by foreign keys of {', '.join(references)}, which emptying "
                "it would break: use mode incremental, or drop those foreign keys"
            )
    for trigger, event in session.rows(_TRIGGERS.format(**place)):
        if event.lower() in changes:
            found.append(
                f"{table} has the trigger {trigger} on {event.lower()}, which could change what "
                "is stored: drop it, or write to a table without triggers"
            )
    return found + _key(load, table) + _schemas(session, load)


def _rights(session: Session, load: Load, table: str, changes: tuple[str, ...]) -> list[str]:
    names = [identifier(plan.sink.name) for plan in load.columns]
    parts = {
        "target": target(load),
        "columns": ", ".join(names),
        "same": ", ".join(f"{name} = {name}" for name in names),
    }
    found: list[str] = []
    for right in dict.fromkeys((*changes, "select")):
        try:
            session.execute(_TRIES[right].format(**parts))
        except SinkError as error:
            found.append(f"may not {right} on {table} ({error}): grant it, or name another sink")
    return found


def _schemas(session: Session, load: Load) -> list[str]:
    """The fence's table can be used, if it is there, and the staging's database is there.

    Whether both tables can be made shows when they are, which is before the target is touched.
    """
    assert load.relation is not None
    schema = load.relation.detail["schema"]
    found: list[str] = []
    try:
        if fence.exists(session, schema):
            for statement in _FENCE_TRIES:
                session.execute(statement.format(fence=fence.table(schema)))
    except SinkError as error:
        found.append(
            f"{schema}.{FENCE}, which keeps older attempts out, cannot be written ({error}): "
            f"grant select, insert, update on it"
        )
    if load.how:
        place = staging.schema(load)
        if not session.row(_SCHEMA.format(name=literal(place)))[0]:
            found.append(f"the staging schema {place} does not exist: create database {place}")
    return found


def _key(load: Load, table: str) -> list[str]:
    assert load.relation is not None
    unique = load.relation.detail["unique"]
    return keys.problems(load, table, lambda: any(set(parts) == set(load.key) for parts in unique))
