"""Where in a source's files stands what PostgreSQL could not read: COPY counts its own lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psycopg

from tasks.replicate.connector import Batch, SinkError, SourceError
from tasks.replicate.connectors.postgresql.session import describe_error, other_value

_LINE = re.compile(r"^COPY .*?, line (\d+)", re.MULTILINE)
# What is not a row of the table's columns in the file's encoding, whatever the columns are.
_MALFORMED = frozenset({"22P04", "22021"})


class Places:
    """The files whose bytes went into one COPY, each with the line of the COPY that it began at."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, str, int]] = []
        self._lines = 0

    def noted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches. What is in no file costs nothing, else a count of line feeds."""
        for batch in batches:
            if batch.place is not None:
                assert isinstance(batch.data, bytes)
                if not self._begun:
                    self._lines = -_uncounted(batch.data)
                self._begun.append((self._lines, *batch.place))
            if self._begun:
                assert isinstance(batch.data, bytes)
                self._lines += batch.data.count(b"\n")
            yield batch

    def explained(self, error: psycopg.DataError, config: Mapping[str, Any]) -> Exception:
        """The error of COPY with the file and line; a malformed record is the source's fault."""
        if not self._begun:
            return error
        found = _LINE.search(error.diag.context or "")
        where = self._where(int(found[1]) if found else None)
        message = describe_error(error, config)
        if error.sqlstate in _MALFORMED:
            return SourceError(f"source: {where}: {message}", permanent=True)
        return SinkError(f"sink: {where}: {message}{other_value(error)}", permanent=True)

    def _where(self, line: int | None) -> str:
        if line is None:
            return " or ".join(dict.fromkeys(name for _, name, _ in self._begun[-2:]))
        behind = bisect_left(self._begun, (line,)) - 1
        begun, name, first = self._begun[max(behind, 0)]
        return f"{name}, line {line - begun + first - 1}"


def _uncounted(data: bytes) -> int:
    """Line ends that COPY does not count: those within the first record, before it has seen one
    outside of quotes. (It counts carriage returns there.)"""
    end = data.find(b"\n")
    while data.count(b'"', 0, end) % 2:
        end = data.find(b"\n", end + 1)
    return data.count(b"\n", 0, end) - data.count(b"\r", 0, end)
