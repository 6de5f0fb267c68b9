"""What a save would change, in words that hold no secret."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["add", "edit", "remove"]
SECRET = "***"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One key before and after; None where it is not set. A secret shows as ``***``."""

    key: str
    before: Any = None
    after: Any = None

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "from": self.before, "to": self.after}

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.before)} -> {_short(self.after)}"


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one datasource, job or schedule (``JOB/NAME``).

    ``note`` is a consequence that a reader should know before it happens.
    """

    action: Action
    kind: Literal["datasource", "job", "schedule"]
    name: str
    differences: tuple[Difference, ...] = ()
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "action": self.action,
            "kind": self.kind,
            "name": self.name,
            "changes": [difference.as_json() for difference in self.differences],
            "note": self.note,
        }


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], *, secret: frozenset[str] = frozenset()
) -> tuple[Difference, ...]:
    """The keys whose values differ, nested as ``retry.backoff``; those of ``secret`` hidden."""
    old, new = dict(_flat(before)), dict(_flat(after))
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        was, becomes = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was == becomes and type(was) is type(becomes):
            continue
        if key.partition(".")[0] in secret:
            was = was if was is _ABSENT else SECRET
            becomes = becomes if becomes is _ABSENT else SECRET
        found.append(
            Difference(
                key, None if was is _ABSENT else was, None if becomes is _ABSENT else becomes
            )
        )
    return tuple(found)


def audited(changes: Iterable[Difference]) -> dict[str, Any]:
    """The form in which an audit record keeps what changed: ``{key: [before, after]}``."""
    return {found.key: [found.before, found.after] for found in changes}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = "none" if value is None else value if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "..."


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
