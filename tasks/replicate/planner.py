"""How each column travels: pairs of columns, the lane, and every reason to refuse."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.replicate.connector import (
    Column,
    ColumnPlan,
    Kind,
    Lane,
    Relation,
    Sink,
    SinkError,
    Source,
    SourceError,
)
from tasks.replicate.names import join_name, split_name
from tasks.replicate.spec import ReplicationSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """The columns in order, and the lane in which all of them arrive unchanged."""

    columns: tuple[ColumnPlan, ...]
    lane: Lane
    computed: tuple[ColumnPlan, ...] = ()
    """Columns that both ends compute, each for itself."""
    warnings: tuple[str, ...] = ()
    """What the run's result tells about columns that are computed."""


def refuse(problems: list[str]) -> None:
    """Raise the reasons not to begin, if there are any, as one permanent error."""
    if problems:
        raise SinkError("nothing was changed: " + "; ".join(problems), permanent=True)


def chosen(spec: ReplicationSpec, relation: Relation) -> list[Column]:
    """The source's columns that the job names, or all of them."""
    names = spec.source.columns
    if names is None:
        return list(relation.columns)
    missing = [name for name in names if relation.column(name) is None]
    if missing:
        have = ", ".join(column.name for column in relation.columns)
        hint = f"; {relation.hint}" if relation.hint else ""
        raise SourceError(
            f"nothing was changed: the source has no column {', '.join(missing)} (it has "
            f"{have}){hint}",
            permanent=True,
        )
    return [column for name in names if (column := relation.column(name)) is not None]


def check_names(spec: ReplicationSpec, mine: list[Column]) -> None:
    """Refuse columns that cannot be paired by name, whatever the sink's table is like."""
    if not mine:
        raise SourceError("nothing was changed: the source has no column", permanent=True)
    if isinstance(spec.sink.columns, tuple) and len(spec.sink.columns) != len(mine):
        refuse([f"sink.columns lists {len(spec.sink.columns)} names for {len(mine)} columns"])
    if isinstance(spec.sink.columns, dict):
        unknown = sorted(set(spec.sink.columns) - {column.name for column in mine})
        if unknown:
            refuse([f"sink.columns maps {', '.join(unknown)}, which the source does not have"])
    doubled = sorted({c.name for c in mine if [m.name for m in mine].count(c.name) > 1})
    if doubled:
        refuse([f"the query names {', '.join(doubled)} twice; give each column a name of its own"])


def _missing(spec: ReplicationSpec, name: str, table: str) -> str:
    filled = ""
    if spec.mode == "incremental":
        # Its rows from before are below the watermark, and would stay NULL without a word.
        filled = " (and let the job read everything again, to fill it: job edit --reset-watermark)"
    return (
        f"column {name} is missing in the sink's table {table}: add it there{filled}, or leave it "
        "out by source.columns"
    )


def _by(spec: ReplicationSpec) -> str:
    """How the job leaves a column out."""
    return "by source.columns" if spec.source.query is None else "of the query"


def sink_name(spec: ReplicationSpec, position: int, name: str) -> str:
    """The name under which a source column stands in the sink."""
    mapping = spec.sink.columns
    if isinstance(mapping, dict):
        return mapping.get(name, name)
    return name if mapping is None else mapping[position]


def _paired(
    spec: ReplicationSpec, position: int, name: str, mine: list[Column], theirs: Relation
) -> Column | None:
    """The sink's column for a source column: by its name, or by its order where it has none."""
    if theirs.named or spec.sink.columns is not None:
        return theirs.column(name)
    if len(theirs.columns) != len(mine):
        refuse(
            [
                f"the sink has {len(theirs.columns)} columns without names, and the source "
                f"{len(mine)}: choose as many by source.columns, or name the sink's by sink.columns"
            ]
        )
    return theirs.columns[position]


def _ranked(
    spec: ReplicationSpec, sink: Sink, ours: Relation, theirs: Relation, columns: list[ColumnPlan]
) -> list[str]:
    """Why the sink could not tell the newest of several rows with one key.

    Nothing where the source's own key keeps the rows apart by the sink's; a sink without a key has
    a refusal of its own.
    """
    key = spec.sink.key or theirs.key
    # Several spellings of a number or the like are one of it.
    names = {
        column.source.name: column.sink.name
        for column in columns
        if column.source.type.kind is not Kind.TEXT or column.sink.type.kind is Kind.TEXT
    }
    if not key or (ours.key and all(names.get(name) in key for name in ours.key)):
        return []
    found = next((c for c in columns if c.source.name == spec.watermark), None)
    if found is not None and sink.orders(found.source, found.sink):
        return []
    several = f"the source may have several rows with one key ({', '.join(key)}), of which the"
    if found is None:
        return [
            f"{several} newest counts, and the watermark {spec.watermark}, which tells it, is "
            "generated at the sink: make it a plain column there"
        ]
    return [
        f"column {found.sink.name}: {several} newest counts, and {found.sink.type.name} does not "
        f"sort as {found.source.type.name} does: give the sink's column a type that does (a "
        "number for a number, a time for a time), or read a table whose own key is the sink's"
    ]


def _emptied(spec: ReplicationSpec, theirs: Relation, planned: set[str]) -> list[str]:
    """What to say of sink columns that a job that writes all rows anew leaves NULL, where nobody
    has chosen the columns: the source may have had them."""
    keeps_rows = spec.mode == "incremental" or spec.atomic == "diff"
    chosen_by_user = spec.source.columns is not None or spec.source.query is not None
    if keeps_rows or chosen_by_user or not theirs.named:
        return []
    return [
        f"column {column.name} of {join_name(split_name(spec.sink.table or ''))} is NULL in every "
        "row: the source has no such column (where that is meant, list source.columns)"
        for column in theirs.columns
        if column.name not in planned
        and column.nullable
        and not (column.has_default or column.generated)
    ]


def plan(
    spec: ReplicationSpec, source: Source, sink: Sink, ours: Relation, theirs: Relation
) -> Plan:
    """Pair the columns and choose the lane; raises SinkError with every problem, by column."""
    table = join_name(split_name(spec.sink.table or ""))
    problems: list[str] = []
    warnings: list[str] = []
    columns: list[ColumnPlan] = []
    computed: list[ColumnPlan] = []
    lanes, odd = set(source.lanes) & set(sink.lanes), ""
    mine = chosen(spec, ours)
    for position, column in enumerate(mine):
        name = sink_name(spec, position, column.name)
        target = _paired(spec, position, name, mine, theirs)
        if target is None:
            problems.append(_missing(spec, name, table))
            problems += filter(None, dict.fromkeys((ours.hint, theirs.hint)))
            continue
        if target.generated and not (column.generated and source.dialect == sink.dialect):
            problems.append(
                f"column {name} of {table} is generated: it has what the sink computes, whatever "
                f"the source's column holds; leave it out {_by(spec)}, or make it a plain column "
                "at the sink"
            )
            continue
        fit = sink.fit(column, target, source.dialect)
        if fit.refusal is not None:
            problems.append(f"column {name}: {fit.refusal}")
            continue
        pair = ColumnPlan(column, target, fit.read_as, fit.guards, fit.poisons, fit.packed)
        if target.generated:
            computed.append(pair)
            if column.expression is None or column.expression != target.expression:
                warnings.append(
                    f"column {name} of {table} is generated at both ends, by expressions that are "
                    "not known to be the same: it has what the sink computes (verify: checksum "
                    "compares it)"
                )
            continue
        guarded = {Lane.ROWS, *source.guarded_lanes}
        left = lanes & fit.lanes & (guarded if fit.guards else lanes)
        if lanes and not left:
            odd = name
        lanes = left
        columns.append(pair)
    written = {column.sink.name for column in columns}
    needed = [
        column.name
        for column in theirs.columns
        if column.name not in written
        and not (column.nullable or column.has_default or column.generated)
    ]
    planned = {sink_name(spec, i, column.name) for i, column in enumerate(mine)}
    for name in needed:
        if name not in planned:
            problems.append(
                f"column {name} of {table} is NOT NULL without a default and the source has no "
                "such column: give it a default, allow NULL, or add it to the source"
            )
    warnings += _emptied(spec, theirs, set(planned))
    if spec.mode == "incremental" and not problems and ours.column(spec.watermark or ""):
        problems += _ranked(spec, sink, ours, theirs, columns)
    if not columns and not problems:
        problems.append(f"no column of the source can be written to {table}")
    refuse(problems)
    if not lanes:
        refuse([f"no one way carries all columns of {table}; convert {odd} in a query"])
    lane = next(lane for lane in source.lanes if lane in lanes)
    return Plan(tuple(columns), lane, tuple(computed), tuple(warnings))
