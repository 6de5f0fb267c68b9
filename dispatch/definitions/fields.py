"""Typed values out of a mapping that a person wrote; whatever is wrong is reported, not raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dispatch.definitions.documents import Path, Report
from dispatch.durations import InvalidDuration, parse_duration

_NAME = re.compile(r"\w[\w.-]{0,99}")


def check_name(name: str, kind: str, path: Path, report: Report) -> None:
    """Names of jobs, datasources, queues and keys: letters, digits, ``.``, ``_`` and ``-``."""
    if _NAME.fullmatch(name):
        return
    if "/" in name and kind == "job":
        report.add(path, "a name with / belongs to the child jobs of a pattern job; choose another")
        return
    report.add(
        path,
        f"a {kind}'s name takes letters, digits, '.', '_' and '-', starts with a letter, digit "
        "or '_', and has at most 100 characters",
    )


class Fields:
    """Reads typed values of one mapping; a wrong one is reported and its default used."""

    def __init__(self, raw: Mapping[str, Any], path: Path, report: Report) -> None:
        self.raw = raw
        self.path = path
        self.report = report

    def refuse_unknown(self, kind: str, known: Collection[str]) -> None:
        for key in self.raw:
            if key not in known:
                self.report.unknown_key((*self.path, key), kind, known)

    def text(self, key: str, default: str | None = None) -> str | None:
        value: str | None = self._typed(
            key, default, "must be text", lambda found: isinstance(found, str)
        )
        return value

    def name(self, key: str, default: str, kind: str) -> str:
        value = self.text(key, default)
        if value is None:
            self.report.add((*self.path, key), f"names no {kind}")
            return default
        check_name(value, kind, (*self.path, key), self.report)
        return value

    def boolean(self, key: str, default: bool | None) -> bool | None:
        value: bool | None = self._typed(
            key, default, "must be true or false", lambda found: isinstance(found, bool)
        )
        return value

    def integer(self, key: str, default: int, lowest: int, highest: int) -> int:
        def fits(value: Any) -> bool:
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole and lowest <= value <= highest

        found = self._typed(key, default, f"must be a whole number, {lowest} to {highest}", fits)
        return default if found is None else int(found)

    def duration(self, key: str, default: float | None, *, positive: bool = False) -> float | None:
        if key not in self.raw:
            return default
        value = self.raw[key]
        if value is None and default is None:
            return None
        try:
            seconds = parse_duration(value, what="").total_seconds()
        except InvalidDuration as error:
            self.report.add((*self.path, key), str(error).strip())
            return default
        if positive and seconds == 0:
            self.report.add((*self.path, key), "must be more than 0; leave it out for none")
        return seconds

    def mapping(self, key: str, example: str = "") -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(
            key,
            None,
            f"must hold keys{example and '; '}{example}",
            lambda found: isinstance(found, dict),
        )
        return value

    def _typed(self, key: str, default: Any, message: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.raw or (self.raw[key] is None and default is None):
            return default
        value = self.raw[key]
        if fits(value):
            return value
        self.report.add((*self.path, key), message)
        return default
