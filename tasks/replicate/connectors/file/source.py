"""Reading files that must not change meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Lane,
    Part,
    ReadRequest,
    Relation,
    Source,
    SourceError,
    TableName,
)
from tasks.replicate.connectors.file.formats import BadFile, BadValue
from tasks.replicate.connectors.file.places import NoTable, Place, State, identity, state, trouble


class FileSource(Source):
    """The files of one table, as they are when they are described.

    Nothing keeps a file as it is: one that is changed, replaced or removed from then on is an
    error, and one that joins a pattern is left for the next run.
    """

    dialect = "file"
    reads_ahead = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._place = Place(config)
        self.lanes = self._place.format.source_lanes  # type: ignore[misc]
        self.guarded_lanes = frozenset(self.lanes) - {Lane.ROWS}
        self._stopped = False
        self._states: dict[TableName, dict[Path, State]] = {}

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True

    def _check(self) -> None:
        if self._stopped:
            raise SourceError("source: stopped")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BadFile, BadValue, NoTable) as error:
            raise SourceError(f"source: {error}", permanent=True) from None
        except OSError as error:
            raise SourceError(f"source: {trouble(error, self._place.path)}") from None

    def _files(self, request: ReadRequest) -> Sequence[Path]:
        if request.table is None or request.where is not None:
            raise SourceError("source: files have no query and no where", permanent=True)
        if request.table not in self._states:
            found = self._place.find(request.table)
            self._states[request.table] = {path: state(path) for path in found}
        return list(self._states[request.table])

    # What there is

    def describe(self, request: ReadRequest) -> Relation:
        with self._errors():
            relation = self._place.format.describe(self._files(request))
        assert request.table is not None
        size = sum(size for _, size, _ in self._states[request.table].values())
        return replace(relation, size=size)

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        with self._errors():
            return frozenset(map(identity, self._files(request)))

    def tables(self) -> list[TableName]:
        with self._errors():
            return self._place.tables()

    def snapshot(self) -> None:
        """The files must still be as they were described, before anything is done to the sink."""
        with self._errors():
            self._unchanged()

    # The rows

    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        with self._errors(), self._watched():
            paths = self._files(request)
            yield from self._place.format.read(paths, request, lane, self._check)

    def count(self, request: ReadRequest) -> int:
        with self._errors(), self._watched():
            return self._place.format.count(self._files(request), self._check)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raises SourceError naming a file that is another by now, before and after its rows."""
        self._unchanged()
        try:
            yield
        except Exception:
            # Whatever a changed file was taken for: that it was changed is why.
            self._unchanged()
            raise
        self._unchanged()

    def _unchanged(self) -> None:
        for states in self._states.values():
            for path, described in states.items():
                try:
                    what = "" if state(path) == described else "changed"
                except FileNotFoundError:
                    what = "removed"
                if what:
                    raise SourceError(f"source: {path} was {what} while the run was at work")
