"""What a command changed, in words and as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dispatch.catalog.changes import SECRET, Change, Difference
from tasks.commands.console import Output


def tell(out: Output, change: Change | None, done: str) -> None:
    """Say that one change was ``done`` and what follows from it, or that there was none to make."""
    out.say(done if change is not None else "nothing to change")
    if change is not None and change.note:
        out.say(change.note)
    if out.as_json:
        out.document({"changed": change is not None, "change": change and change.as_json()})


def lines(changes: Iterable[Change]) -> Iterable[tuple[str, str, str]]:
    """Sign, name and what changes, a line for each change."""
    signs: Mapping[str, str] = {"add": "+", "edit": "~", "remove": "-"}
    for change in changes:
        parts = []
        if change.action == "edit":
            parts = [str(found) for found in change.differences]
        elif change.action == "add":
            parts = _added({found.key: found.after for found in change.differences})
        if change.note:
            parts.append(f"({change.note})")
        yield signs[change.action], f"{change.kind} {change.name}", ", ".join(parts)


def _added(keys: dict[str, Any]) -> list[str]:
    """What is new in few words: ``complete, shop public.orders -> warehouse public.orders``."""
    parts = [str(keys.pop(key)) for key in ("connector", "mode", "cron") if keys.get(key)]
    ends = []
    for side in ("source", "sink"):
        datasource = keys.pop(f"{side}.datasource", None)
        place = keys.pop(f"{side}.table", None) or ("a query" if f"{side}.query" in keys else "")
        keys.pop(f"{side}.query", None)
        if datasource:
            ends.append(f"{datasource} {place}".strip())
    if ends:
        parts.append(" -> ".join(ends))
    # A secret's stars say nothing about it.
    rest = {key: value for key, value in keys.items() if value not in (None, SECRET)}
    return [*parts, *(str(Difference(key, None, value)).replace("none -> ", "", 1)
                      for key, value in rest.items())]  # fmt: skip
