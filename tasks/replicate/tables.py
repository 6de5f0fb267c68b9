"""The tables of a run as its ends have them, before a row moves."""

from __future__ import annotations

from dataclasses import replace

from tasks.replicate import planner
from tasks.replicate.connector import (
    Column,
    ColumnType,
    ReadRequest,
    Relation,
    Sink,
    Source,
    SourceError,
)
from tasks.replicate.names import join_name, split_name
from tasks.replicate.spec import ReplicationSpec


def request(spec: ReplicationSpec, watermark: str | None) -> ReadRequest:
    """What the job reads; the stored watermark counts in mode ``incremental`` alone."""
    reads = spec.source
    return ReadRequest(
        table=None if reads.table is None else split_name(reads.table),
        query=reads.query,
        where=reads.where,
        watermark=spec.watermark,
        since=watermark if spec.mode == "incremental" else None,
        fetch_size=spec.fetch_size,
    )


def described(spec: ReplicationSpec, source: Source, sink: Sink, request: ReadRequest) -> Relation:
    """What the source has; an error of the user's own SQL names the key that it stands in."""
    try:
        found = source.describe(request)
    except SourceError as error:
        if not error.permanent or (request.where is None and request.query is None):
            raise
        key = "source.query"
        if request.where is not None:
            # It is the table's fault, if it fails without the condition too.
            source.describe(replace(request, where=None))
            key = "source.where"
        message = str(error).removeprefix("source: ")
        raise SourceError(f"nothing was changed: {key}: {message}", permanent=True) from None
    if found.blank is None:
        return found
    return replace(found, columns=_assumed(spec, source, sink, found.blank))


def _assumed(
    spec: ReplicationSpec, source: Source, sink: Sink, blank: ColumnType
) -> tuple[Column, ...]:
    """Columns for a source of no rows that knows none: those that the job names, or the sink's.

    No value comes, so that what would not fit in the sink stops nothing.
    """
    chosen = spec.source.columns
    if chosen is not None:
        return tuple(Column(name, blank) for name in chosen)
    table = split_name(spec.sink.table or "")
    theirs = sink.describe(table)
    if theirs is None or theirs.blank is not None:
        raise SourceError(
            "nothing was changed: the source holds no row, so that its columns are not known, "
            f"and {join_name(table)} has none either: name them in source.columns",
            permanent=True,
        )
    to = spec.sink.columns
    if isinstance(to, tuple):
        return tuple(Column(name, blank) for name in to)
    back = {name: origin for origin, name in (to or {}).items()}
    columns = [(Column(back.get(c.name, c.name), blank), c) for c in theirs.columns]
    return tuple(
        column
        for column, target in columns
        if not target.generated and sink.fit(column, target, source.dialect).refusal is None
    )


def new_columns(spec: ReplicationSpec, ours: Relation) -> list[Column]:
    """The columns of a sink's table that is made for the source's."""
    columns = planner.chosen(spec, ours)
    return [
        replace(column, name=planner.sink_name(spec, i, column.name))
        for i, column in enumerate(columns)
    ]


def new_key(spec: ReplicationSpec, ours: Relation) -> list[str]:
    """The key of such a table: the job's, or the source's where all its columns come along."""
    if spec.sink.key is not None:
        return list(spec.sink.key)
    names = [column.name for column in planner.chosen(spec, ours)]
    if not ours.key or not set(ours.key) <= set(names):
        return []
    return [planner.sink_name(spec, names.index(name), name) for name in ours.key]
