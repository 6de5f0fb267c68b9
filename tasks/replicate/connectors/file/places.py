"""Where a datasource's files lie: a file, a folder or a pattern, and a table's name in it."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.replicate.connector import TableName
from tasks.replicate.connectors.file import formats

_SPECIAL = "*?["

State = tuple[int, int, int]
"""Of a file: its number, its size in bytes, and when it was changed, in nanoseconds."""


class NoTable(LookupError):
    """The datasource has no table of that name; the message says which it has."""


class Place:
    """The configured path. A table is a file in the folder, the file, or the pattern's files."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.path = Path(config["path"]).expanduser()
        self.format = formats.of(config)
        self.is_pattern = any(char in str(self.path) for char in _SPECIAL)
        self.is_folder = not self.is_pattern and self.path.is_dir()
        self.folder = self.path if self.is_folder else self.path.parent
        self.is_absent = not self.is_pattern and not self.path.exists()

    def files(self) -> list[Path]:
        """Every file of the format, sorted; hidden ones left out."""
        if self.is_pattern:
            found = [Path(name) for name in glob.glob(str(self.path), recursive=True)]
        elif self.is_folder:
            found = [p for p in self.path.iterdir() if p.suffix in self.format.suffixes]
        else:
            found = [self.path]
        return sorted(p for p in found if p.is_file() and not p.name.startswith("."))

    def tables(self) -> list[TableName]:
        """Raises NoTable where the path does not exist."""
        if self.is_absent:
            raise NoTable(f"{self.path} does not exist")
        if self.is_folder:
            return [(path.stem,) for path in self.files()]
        return [(self.own_name(),)]

    def own_name(self) -> str:
        """The table of a single file or a pattern: what its name begins with."""
        name = self.path.name
        if self.is_pattern:
            cut = (
                min(name.find(char) for char in _SPECIAL if char in name)
                if any(char in name for char in _SPECIAL)
                else len(name)
            )
            return name[:cut].rstrip("-_. ") or self.path.parent.name
        return self.path.stem if self.path.suffix in self.format.suffixes else name

    def find(self, table: TableName) -> list[Path]:
        """The files of a table; raises NoTable where there is none."""
        name = ".".join(table)
        if self.is_absent:
            raise NoTable(f"{self.path} does not exist")
        if not self.is_folder:
            self._check_own(name)
            found = self.files()
            if not found:
                raise NoTable(f"{name}: no file matches {self.path}")
            return found
        path = self._in_folder(name)
        if not path.is_file():
            have = ", ".join(".".join(t) for t in self.tables()[:10]) or "none"
            raise NoTable(f"{path} does not exist (names are literal; the folder has {have})")
        return [path]

    def target(self, table: TableName) -> Path:
        """The file that a sink's table is, whether it exists or not; raises NoTable."""
        name = ".".join(table)
        if self.is_pattern:
            raise NoTable(f"{self.path} is a pattern, and only one file is written: name a folder")
        if not self.is_folder:
            self._check_own(name)
            return _real(self.path)
        return _real(self._in_folder(name))

    def _check_own(self, name: str) -> None:
        if name in (self.own_name(), self.path.name):
            return
        if self.is_absent:
            raise NoTable(
                f"{self.path} does not exist: make the folder, or call the table "
                f"{self.own_name()}, as the file that would be made there"
            )
        raise NoTable(f"{name} is no table of {self.path}; its table is {self.own_name()}")

    def _in_folder(self, name: str) -> Path:
        if not name or name.startswith(".") or "/" in name or os.sep in name or "\0" in name:
            raise NoTable(f"{name!r} is no name of a file in {self.path}")
        suffixed = any(name.endswith(suffix) for suffix in self.format.suffixes)
        if suffixed:
            return self.path / name
        candidates = [self.path / (name + suffix) for suffix in self.format.suffixes]
        return next((path for path in candidates if path.is_file()), candidates[0])


def _real(path: Path) -> Path:
    """The file behind a symbolic link: that is what is replaced."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:
        raise NoTable(f"{path} is a link that leads to itself") from None


def trouble(error: OSError, path: Path) -> str:
    """What to say of an error of the file system at work on ``path``.

    The error names a file where it was opened, not where it was written, nor where Arrow did it.
    """
    why = os.strerror(error.errno) if error.errno else str(error)
    return f"{error.filename or path}: {why}"


def state(path: Path) -> State:
    """What tells that a file was changed or replaced."""
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def identity(path: Path) -> tuple[int, int]:
    """What is equal only for one and the same file, by whatever links it is named."""
    found = path.stat()
    return (found.st_dev, found.st_ino)
