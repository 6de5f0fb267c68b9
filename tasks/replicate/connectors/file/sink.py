"""Writing files: beside the target first, and then in its place at one stroke."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Column,
    ColumnPlan,
    CommitUnknown,
    Counts,
    Fit,
    Lane,
    Load,
    ReadRequest,
    Relation,
    Sink,
    SinkError,
    TableName,
)
from tasks.replicate.connectors.file.fence import LOCK, RECORD, Fence
from tasks.replicate.connectors.file.formats import BadFile, BadValue, cell_of_text
from tasks.replicate.connectors.file.places import NoTable, Place, State, identity, state, trouble

# Staging, and what a commit will put in the target's place: by job, fence and run.
_MADE = ".claimcheck_create."
MADE_SECONDS = 3600.0
"""From this age on a file that was to be made is of a process that was killed: it takes moments."""
_HIDDEN = re.compile(r"\.claimcheck_(?:stage|new)\.([0-9A-Za-z]+)\.(\d+)\.[0-9A-Za-z]+\.")
PAGE = 5000
UNCREATE_SECONDS = 1.0
"""How long the folder's lock is waited for, to take back a file that was made."""


class FileSink(Sink):
    """One folder's files. A target is only ever replaced as a whole."""

    dialect = "file"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._place = Place(config)
        self.lanes = self._place.format.sink_lanes  # type: ignore[misc]
        self._stopped = False
        self._load: Load | None = None
        self._new: Path | None = None
        """What commit puts in the target's place."""
        self._created: dict[Path, Relation] = {}
        self._made: dict[Path, State] = {}
        self._blank: set[Path] = set()
        """Files that were there, without a row that tells their columns."""

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        self.rollback()

    def _check(self) -> None:
        if self._stopped:
            raise SinkError("sink: stopped")

    @contextlib.contextmanager
    def _errors(self, table: TableName) -> Iterator[Path]:
        """The table's file; what goes wrong with it is raised as SinkError."""
        path = self._place.path
        try:
            path = self._place.target(table)
            yield path
        except (BadFile, BadValue, NoTable) as error:
            raise SinkError(f"sink: {error}", permanent=True) from None
        except OSError as error:
            raise SinkError(f"sink: {trouble(error, path)}") from None

    # What there is

    def describe(self, table: TableName) -> Relation | None:
        with self._errors(table) as path:
            if path in self._created:
                return self._created[path]
            if (unsuitable := _no_file(path)) is not None:
                # Before it is opened: a pipe would wait for its other end.
                raise BadFile(unsuitable)
            if not path.exists():
                return None
            try:
                found = self._place.format.describe([path])
            except BadFile:
                if path.stat().st_size == 0:
                    # Of a format in which no file is empty: as good as none.
                    return None
                raise
            if found.blank is not None:
                self._blank.add(path)
            return self._relation(path, found)

    def _relation(self, path: Path, found: Relation) -> Relation:
        detail = {**(found.detail or {}), "identity": identity(path)}
        found = replace(found, detail=detail)
        return found if self._place.format.binds else _loose(found)

    def writes(self, relation: Relation) -> Any:
        return relation.detail["identity"]

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        return self._place.format.fit(source, sink, dialect)

    def refusals(self, load: Load) -> list[str]:
        try:
            path = self._place.target(load.table)
        except NoTable as error:
            return [str(error)]
        if (unsuitable := _no_file(path)) is not None:
            return [unsuitable]
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return [
                f"{path.parent} must be writable for this worker (a new file is written beside the "
                "old one): change its permissions"
            ]
        return [
            f"{other} belongs to another account's jobs and must be writable for this worker: "
            "let one account write the folder, or change its permissions"
            for other in (path.with_name(LOCK), path.with_name(RECORD))
            if other.exists() and not os.access(other, os.R_OK | os.W_OK)
        ]

    def create(
        self, table: TableName, columns: Sequence[Column], key: Sequence[str], dialect: str
    ) -> None:
        with self._errors(table) as path:
            format_ = self._place.format
            made = Relation(format_.new_columns(columns), named=format_.named)
            if path in self._blank:
                self._created[path] = self._relation(path, made)
                return
            beside = path.with_name(f"{_MADE}{os.getpid()}.{id(self):x}.{path.name}")
            try:
                format_.create(beside, made)
                with Fence(path).locked(self._check):
                    if _holds_something(path):
                        # Another job has made it meanwhile, and it may have rows by now.
                        return
                    beside.replace(path)
                    self._made[path] = state(path)
            finally:
                beside.unlink(missing_ok=True)
            self._created[path] = self._relation(path, made)

    def uncreate(self, table: TableName) -> None:
        with contextlib.suppress(OSError, NoTable, SinkError):
            path = self._place.target(table)
            self._created.pop(path, None)
            made = self._made.pop(path, None)
            if made is None:
                return
            with Fence(path).locked(lambda: None, UNCREATE_SECONDS):
                # Who has written it meanwhile has put another file in its place.
                if state(path) == made:
                    path.unlink()

    def altered(self, load: Load) -> bool:
        """Never: a file is replaced as a whole, in the form that was planned."""
        return False

    # The fence

    def begin(self, load: Load) -> None:
        with self._errors(load.table) as path:
            Fence(path).begin(load, self._check)
            self._load = load

    def commit(self) -> None:
        load, new = self._load, self._new
        assert load is not None
        with self._errors(load.table) as path, Fence(path).commit(load, new, self._check):
            if new is not None:
                _keep_mode(path, new)
                try:
                    new.replace(path)
                    _sync_folder(path.parent)
                except OSError as error:
                    raise CommitUnknown(f"sink: {trouble(error, path)}") from None
        self._new = self._load = None

    def rollback(self) -> None:
        # Staging is unstage's to remove.
        if self._new is not None and not self._new.name.startswith(".claimcheck_stage."):
            with contextlib.suppress(OSError):
                self._new.unlink()
        self._new = self._load = None

    def settle(self, load: Load) -> bool:
        with self._errors(load.table) as path:
            settled = Fence(path).settled(load, self._check)
            if settled:
                _sync_folder(path.parent)
        self.rollback()
        return settled

    # The data

    def truncate(self, load: Load) -> None:
        assert load.relation is not None
        with self._errors(load.table):
            self._sweep(load)
            self._new = self._hidden(load, "new")
            self._place.format.create(self._new, load.relation)

    def stage(self, load: Load) -> None:
        with self._errors(load.table):
            self._sweep(load)

    def _sweep(self, load: Load) -> None:
        """Remove what older attempts of this job left behind when they were killed."""
        for other in self._place.target(load.table).parent.iterdir():
            found = _HIDDEN.match(other.name)
            older = found and found[1] == _plain(load.scope) and int(found[2]) < load.fence
            if older or (other.name.startswith(_MADE) and _age(other) > MADE_SECONDS):
                other.unlink(missing_ok=True)

    def unstage(self, load: Load) -> None:
        with contextlib.suppress(OSError, NoTable):
            self._hidden(load, "stage").unlink(missing_ok=True)

    def _hidden(self, load: Load, what: str) -> Path:
        """A hidden file beside the target, named by job, fence and run, so that it can be swept."""
        path = self._place.target(load.table)
        name = f"{_plain(load.scope)}.{load.fence}.{_plain(load.run_id)}"
        return path.with_name(f".claimcheck_{what}.{name}.{path.name}")

    def write(self, load: Load, batches: Iterable[Batch], *, staging: bool) -> int:
        with self._errors(load.table):
            path = self._hidden(load, "stage" if staging else "new")
            if not staging:
                self._new = path
        assert load.relation is not None
        with self._errors(load.table):
            writer = self._place.format.writer(path, load.relation, load.columns)
        written = 0
        try:
            # Errors of the batches themselves are not ours to tell.
            for batch in batches:
                self._check()
                with self._errors(load.table):
                    written += writer.write(batch)
        except BaseException:
            with contextlib.suppress(Exception):
                writer.close()
            raise
        with self._errors(load.table):
            written += writer.close()
            _sync(path)
        return written

    def publish(self, load: Load) -> Counts:
        with self._errors(load.table):
            self._new = self._hidden(load, "stage")
            return Counts(inserted=self._place.format.count([self._new], self._check))

    # Verification

    def _arrived(self, load: Load) -> Path:
        return self._new or self._place.target(load.table)

    def count(self, load: Load) -> int:
        with self._errors(load.table):
            return self._place.format.count([self._arrived(load)], self._check)

    def scan(self, load: Load) -> Iterator[Batch]:
        """The rows as they are in the file; text is taken back to what was written as text."""
        # The source's kind tells what a text in the file stands for.
        columns = tuple(
            ColumnPlan(plan.sink, replace(plan.sink, type=plan.source.type))
            for plan in load.columns
        )
        request = ReadRequest(table=load.table, columns=columns, fetch_size=PAGE)
        types = [plan.source.type for plan in load.columns]
        with self._errors(load.table):
            paths = [self._arrived(load)]
            for batch in self._place.format.read(paths, request, Lane.ROWS, self._check):
                assert isinstance(batch.data, list)
                rows = [tuple(map(cell_of_text, row, types)) for row in batch.data]
                yield Batch(rows, batch.rows, batch.size)


def _no_file(path: Path) -> str | None:
    """Why a folder, a pipe, a socket or a device is no target, or None."""
    if path.exists() and not path.is_file():
        return f"{path} is no file: name another table"
    return None


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _loose(relation: Relation) -> Relation:
    """A text file binds no value to a type."""
    return replace(
        relation,
        columns=tuple(
            replace(column, type=replace(column.type, loose=True)) for column in relation.columns
        ),
    )


def _plain(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "", text)[:32] or "0"


def _keep_mode(old: Path, new: Path) -> None:
    """The permissions of the file that is replaced; a first file has those of any new one."""
    with contextlib.suppress(FileNotFoundError):
        new.chmod(stat.S_IMODE(old.stat().st_mode))


def _age(path: Path) -> float:
    """Seconds since it was written, by the clock of this machine; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync_folder(path: Path) -> None:
    try:
        _sync(path)
    except OSError as error:
        # Some network file systems do not sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync(path: Path) -> None:
    """What was written is on the disk before anything rests on it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
