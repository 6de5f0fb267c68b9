"""The fidelity matrix between engines: each type of a source into a sink that the job creates.

The source's table is made by the engine's own means; the job makes the sink's. Afterwards both
are read through their connectors, whose reading the conformance suite compares with the engines'
own, and compared as values of the sink's kind. A value that cannot be stored must be refused
naming its column.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance import Harness, Sample, read_all, request_for
from replication_kit import Job, definition

from dispatch.context import HandlerFailure
from tasks.replicate.checksum import canonical
from tasks.replicate.connector import Cell, ColumnPlan, ColumnType, Kind, ReadRequest, Row, Source

MODES = ("complete", "complete-atomic", "incremental")


class Wrong(AssertionError):
    """A value arrived changed, or a refusal did not name its column."""


@dataclass(frozen=True)
class Across:
    """What became of one type on its way from one engine to another."""

    source: str
    native: str
    sink: str
    made: str
    """The sink's type, or the reason for which the column is refused."""
    arrived: int
    refused: int


def try_sample(source: Harness, sink: Harness, sample: Sample) -> Across:
    """All values of a sample at once in every mode that both have; raises Wrong."""
    cells = list(dict.fromkeys(sample.cells))
    good: list[Cell] = []
    made = ""
    try:
        made = _run(source, sink, sample, cells, "complete")
        good = cells
    except HandlerFailure as refusal:
        if "nothing was changed" not in str(refusal):
            # Some of them: look at each.
            made, good = _one_by_one(source, sink, sample, cells)
        elif "column value" not in str(refusal):
            raise Wrong(f"{sample.native}: refused without its column: {refusal}") from None
    for mode in MODES[1:]:
        if good and mode in _modes(source, sink):
            _run(source, sink, sample, good, mode)
    refused = len(cells) - len(good)
    arrived = sum(cell is not None for cell in good)
    return Across(source.connector.name, sample.native, sink.connector.name, made, arrived, refused)


def _one_by_one(
    source: Harness, sink: Harness, sample: Sample, cells: Sequence[Cell]
) -> tuple[str, list[Cell]]:
    """The sink's type, and the values that arrive; each other must be refused by its column."""
    made, good = "", []
    for cell in cells:
        try:
            made = _run(source, sink, sample, [cell], "complete")
            good.append(cell)
        except HandlerFailure as refusal:
            if "column value" not in str(refusal):
                raise Wrong(f"{sample.native}: refused without its column: {refusal}") from None
    return made, good


def _modes(source: Harness, sink: Harness) -> frozenset[str]:
    ours, theirs = source.connector.capabilities, sink.connector.capabilities
    return ours.source_modes & theirs.sink_modes


def _run(source: Harness, sink: Harness, sample: Sample, cells: Sequence[Cell], mode: str) -> str:
    """Run one job and compare; returns the sink's type."""
    rows: list[Row] = list(enumerate(cells))
    name = f"t{uuid.uuid4().hex[:10]}"
    columns = {"id": source.key_type, "value": sample.native}
    table = source.make(name, columns, rows, key=["id"])
    more = {"watermark": "id"} if mode == "incremental" else {}
    task = Job(
        source.config,
        sink.config,
        definition(
            {"table": table},
            {"table": table, "key": ["id"]},
            mode,
            create=True,
            verify="checksum",
            **more,
        ),
        connectors=(source.connector.name, sink.connector.name),
    )
    task.run()
    with (
        source.connector.source(source.config) as here,
        sink.connector.source(sink.config) as there,
    ):
        ours = request_for(here, table)
        theirs = _back(there, ours)
        here.snapshot()
        there.snapshot()
        wanted, found = read_all(here, ours), read_all(there, theirs)
    column = next(plan.source for plan in theirs.columns if plan.source.name == "value")
    origin = next(plan.source for plan in ours.columns if plan.source.name == "value")
    # What stands in a file as text is compared as what it was.
    type_ = origin.type if column.type.kind is Kind.TEXT else column.type
    one, two = (_content(content, type_) for content in (wanted, found))
    if one != two:
        raise Wrong(
            f"{sample.native} -> {sink.connector.name} {column.type.name} in mode {mode}:"
            f" {wanted} became {found}"
        )
    return column.type.name


def _back(there: Source, ours: ReadRequest) -> ReadRequest:
    """A request for the sink's columns, as a job back to where they came from would make it."""
    request = ReadRequest(table=ours.table)
    origins = {plan.source.name: plan.source for plan in ours.columns}
    columns = there.describe(request).columns
    return request.planned([ColumnPlan(column, origins[column.name]) for column in columns])


def _content(rows: Iterable[Row], type_: ColumnType) -> list[tuple[str, str]]:
    return sorted(
        (canonical(row[0], Kind.INTEGER), canonical(row[1], type_.kind, type_.bits)) for row in rows
    )


def cell(result: Across) -> str:
    """One cell of the page: the sink's type, marked where some of the values are refused."""
    if not result.made:
        return "refused"
    return f"`{result.made}`" + (" †" if result.refused else "")


def line(native: str, results: Iterable[Across]) -> str:
    """One line of the page: a type into every engine."""
    return " | ".join([f"| `{native}`", *map(cell, results)]) + " |"
