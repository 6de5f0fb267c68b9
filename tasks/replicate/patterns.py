"""``tables``: one job over many tables, each a child job with a watermark and fence of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dispatch.context import ChildJob, HandlerFailure, Outcome, RunContext, RunStopped
from tasks.replicate.connector import Connector
from tasks.replicate.ends import opened
from tasks.replicate.names import join_name, matching, session_name, split_name
from tasks.replicate.spec import ReplicationSpec

_SCHEMAS = {
    False: "and a name without a schema matches in all of them",
    True: "and tables have no schema or database before their name here",
}
MOST_NAMED = 5
"""How many tables or jobs one message names."""


def run(context: RunContext, spec: ReplicationSpec, connector: Connector) -> Outcome:
    """List the tables, have a child job stored and a run enqueued for each, and end.

    Children run on their own: one that fails stops no other, and this run does not wait.
    """
    assert context.source is not None
    assert spec.tables is not None
    config = context.source.config
    name = session_name(str(context.job_id), context.fence)
    with opened(context, lambda: connector.source(config, name=name)) as source:
        tables = source.tables()
    found = matching(tables, spec.tables)
    if not found:
        raise HandlerFailure(
            f"no table of the source matches {', '.join(spec.tables)}; patterns are literal: "
            f"case counts, {_SCHEMAS[bool(tables) and all(len(table) == 1 for table in tables)]}",
            code="source_error",
            permanent=True,
        )
    _refuse_collisions(spec, found, context.sink.connector if context.sink else "")
    general = {
        key: value
        for key, value in context.definition.items()
        if key not in ReplicationSpec.model_fields
    }
    children = [
        ChildJob(
            name=f"{context.job}/{join_name(table)}", definition=general | spec.for_table(table)
        )
        for table in found
    ]
    context.check_cancelled()
    spawned = context.spawn(children)
    with suppress(RunStopped):  # all is done, so no stop counts any more
        context.progress(0, phase="spawned")
    warnings = []
    if spawned.active:
        warnings.append(
            f"no run was started of {_named(spawned.active)}: each has an active run already "
            "(overlap: skip), which is not counted or waited for here; see it with "
            "celery -A tasks run list --active --job NAME"
        )
    if spawned.gone:
        warnings.append(
            f"no table of the source is there for {_named(spawned.gone)}: dropped, or not matched "
            "any more; remove the job with celery -A tasks job rm NAME, or keep it with "
            "job disable NAME"
        )
    result: dict[str, Any] = {"tables": [join_name(table) for table in found]}
    for warning in warnings:
        context.log.warning("%s", warning)
    if warnings:
        result["warnings"] = warnings
    return Outcome(result=result, rows_processed=0)


def _named(jobs: Sequence[str]) -> str:
    more = f" and {len(jobs) - MOST_NAMED} more" if len(jobs) > MOST_NAMED else ""
    return ", ".join(jobs[:MOST_NAMED]) + more


def _refuse_collisions(
    spec: ReplicationSpec, tables: list[tuple[str, ...]], sink_connector: str
) -> None:
    """Two children that write one sink table would each undo the other's load."""
    writers: dict[str, list[str]] = {}
    for table in tables:
        target = str(spec.for_table(table)["sink"]["table"])
        if sink_connector == "file":
            # A file's name has the parts in one, whatever was quoted.
            target = ".".join(split_name(target))
        writers.setdefault(target, []).append(join_name(table))
    doubled = [
        f"{' and '.join(sources)} would both be written to {target}"
        if len(sources) == 2
        else f"{', '.join(sources)} would all be written to {target}"
        for target, sources in writers.items()
        if len(sources) > 1
    ]
    if doubled:
        more = f"; and {len(doubled) - MOST_NAMED} more" if len(doubled) > MOST_NAMED else ""
        raise HandlerFailure(
            f"nothing was started: {'; '.join(doubled[:MOST_NAMED])}{more}. Exclude all but "
            'one (tables: ["...", "!SCHEMA.TABLE"]), or write a job for each schema with a '
            "table_schema of its own",
            permanent=True,
        )
