"""Reading files that must not change meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
from tasks.replicate.connectors.file.places import NoTable, Place, identity, state


class FileSource(Source):
    """The files of one table, as they are at the snapshot.

    Nothing keeps a file as it is; a change while it is read is an error.
    """

    dialect = "file"
    reads_ahead = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._place = Place(config)
        self.lanes = self._place.format.source_lanes  # type: ignore[misc]
        self.guarded_lanes = frozenset(self.lanes) - {Lane.ROWS}
        self._stopped = False
        self._states: dict[Path, tuple[int, int, int]] = {}

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
            raise SourceError(f"source: {error.filename}: {error.strerror}") from None

    def _files(self, request: ReadRequest) -> Sequence[Path]:
        if request.table is None or request.where is not None:
            raise SourceError("source: files have no query and no where", permanent=True)
        found = self._place.find(request.table)
        for path in found:
            self._states.setdefault(path, state(path))
        return found

    # What there is

    def describe(self, request: ReadRequest) -> Relation:
        with self._errors():
            return self._place.format.describe(self._files(request))

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        with self._errors():
            return frozenset(map(identity, self._files(request)))

    def tables(self) -> list[TableName]:
        with self._errors():
            return self._place.tables()

    def snapshot(self) -> None:
        """The files are taken as they were when they were described."""

    # The rows

    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        with self._errors():
            paths = self._files(request)
            yield from self._place.format.read(paths, request, lane, self._check)
            self._unchanged(paths)

    def count(self, request: ReadRequest) -> int:
        with self._errors():
            paths = self._files(request)
            found = self._place.format.count(paths, self._check)
            self._unchanged(paths)
        return found

    def _unchanged(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if state(path) != self._states[path]:
                raise SourceError(f"source: {path} was changed while it was read")
