"""What ``merge`` and ``diff`` ask of the key by which they find rows, in every SQL sink."""

from __future__ import annotations

from collections.abc import Callable

from tasks.replicate.connector import Load, SinkError


def problems(
    load: Load,
    table: str,
    is_unique: Callable[[], bool],
    passed_over: Callable[[], list[str]] = list,
) -> list[str]:
    """Why the key cannot serve; ``is_unique`` tells whether an index of the sink keeps it so.

    ``passed_over`` names the indexes that seem to, each with the reason for which it does not.
    """
    if load.how not in ("merge", "diff"):
        return []
    if not load.key:
        return [
            f"{table} has no primary key and no unique key without NULLs, by which rows could be "
            f"found{_listed(passed_over())}: add one, or use "
            + ("complete" if load.how == "merge" else "atomic: delete")
        ]
    written = {plan.sink.name for plan in load.columns}
    missing = [name for name in load.key if name not in written]
    if missing:
        return [f"key column {', '.join(missing)} of {table} is not among the columns to write"]
    if not is_unique():
        names = ", ".join(load.key)
        return [
            f"{table} has no unique index on exactly ({names}){_listed(passed_over())}: create "
            "one, or change key"
        ]
    return []


def _listed(reasons: list[str]) -> str:
    return f" that can be used ({'; '.join(reasons)})" if reasons else ""


def _counted(count: int, verb: str) -> str:
    return f"1 key {verb}s" if count == 1 else f"{count} keys {verb}"


def null(load: Load) -> SinkError:
    """A staged row's key is NULL, by which nothing can be found."""
    return SinkError(f"key column {', '.join(load.key)}: a row's key is NULL", permanent=True)


def alike(load: Load, count: int, remedy: str) -> SinkError:
    """Keys of the source that the sink takes for one."""
    return SinkError(
        f"key column {', '.join(load.key)}: {_counted(count, 'differ')} from another only by what "
        "the column's collation does not see (case, accents, trailing spaces), so that two rows "
        f"would become one; {remedy}",
        permanent=True,
    )


def doubled(load: Load, count: int) -> SinkError:
    """Keys that several staged rows have, where all of the source's rows must be held."""
    return SinkError(
        f"key column {', '.join(load.key)}: {_counted(count, 'stand')} in several rows of the "
        "source, where the sink can hold one row for each key; choose one in a query, or another "
        "key",
        permanent=True,
    )
