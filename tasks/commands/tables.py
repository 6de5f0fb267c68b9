"""Values, tables and facts as people read them, on a terminal of any width.

A run id is never broken: what matters less makes room for it. Times are in the reader's zone, and
say so: each with its offset, or a column's heading for all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from rich.table import Table
from rich.text import Text

_GAP = 2
_TIME = "%Y-%m-%d %H:%M:%S"


def plain(value: Any) -> Any:
    """A value of the database as JSON: times as ISO 8601 with offset."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID | date):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def shown(value: Any) -> str:
    """A value on one line: times in the reader's zone, to the second, with their offset."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().strftime(f"{_TIME} %z")
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=plain, ensure_ascii=False)
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], width: int, less: Sequence[str] = ()
) -> Table:
    """A table of at most ``width`` columns of text; ``less`` are the headings to drop, in order.

    A column without any value is dropped before those.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    times = {i for i in range(len(headings)) if any(isinstance(row[i], datetime) for row in rows)}
    ids = {i for i in range(len(headings)) if any(isinstance(row[i], UUID) for row in rows)}
    titles = [
        f"{heading} {datetime.now().astimezone():%z}" if i in times else heading
        for i, heading in enumerate(headings)
    ]
    widths = [
        max(len(title), *(row[i].cell_len for row in cells)) for i, title in enumerate(titles)
    ]
    kept = list(range(len(headings)))
    empty = [i for i in kept if not any(row[i].plain for row in cells)]
    for i in [*(i for i in empty if headings[i] in less), *map(list(headings).index, less)]:
        if sum(widths[k] for k in kept) + _GAP * (len(kept) - 1) <= width:
            break
        if i in kept:
            kept.remove(i)
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for i in kept:
        whole = i in ids or i in times
        found.add_column(
            titles[i], overflow="fold", no_wrap=whole, min_width=widths[i] if whole else None
        )
    for row in cells:
        found.add_row(*(row[i] for i in kept))
    return found


def facts(found: Mapping[str, Any]) -> Table:
    """Names and values below each other; None and empty ones are left out."""
    shape = Table(box=None, pad_edge=False, show_header=False, padding=(0, _GAP, 0, 0))
    shape.add_column(style="dim", no_wrap=True)
    shape.add_column(overflow="fold")
    for name, value in found.items():
        if isinstance(value, Text):
            shape.add_row(name, value)
        elif not _is_empty(value):
            shape.add_row(name, Text("\n".join(_lines(value))))
    return shape


def _lines(value: Any) -> Iterator[str]:
    """A value as indented lines, in the manner of YAML."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping) or (isinstance(inner, list | tuple) and not _flat(inner)):
                if not _is_empty(inner):
                    yield f"{key}:"
                    yield from (f"  {line}" for line in _lines(inner))
            elif inner is not None:
                yield f"{key}: {_one(inner)}"
    elif isinstance(value, list | tuple) and not _flat(value):
        for inner in value:
            first, *rest = list(_lines(inner)) or [""]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _one(value)


def _one(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value)
    return shown(value)


def _flat(value: Sequence[Any]) -> bool:
    return not any(isinstance(inner, Mapping | list | tuple) for inner in value)


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", {}, [], ())


def _cell(value: Any) -> Text:
    if isinstance(value, Text):
        return value
    if isinstance(value, datetime):
        # All by one offset, the one that the heading names.
        return Text(value.astimezone(datetime.now().astimezone().tzinfo).strftime(_TIME))
    return Text(shown(value))
