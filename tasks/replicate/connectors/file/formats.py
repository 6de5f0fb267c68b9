"""What every file format does, and the choice among them by a datasource's configuration."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tasks.replicate.canonical import float_of
from tasks.replicate.connector import (
    Batch,
    Cell,
    Column,
    ColumnPlan,
    ColumnType,
    Fit,
    Kind,
    Lane,
    Problem,
    ReadRequest,
    Relation,
)

NAMES = ("csv", "jsonl", "parquet")
BLOCK = 256 * 1024
"""Bytes of a text file that are looked at together: few enough that what a socket holds keeps the
sink busy meanwhile."""

StopCheck = Callable[[], None]
"""Raises where the run was asked to stop."""


class BadFile(ValueError):
    """A file does not hold what its format asks for; the message names the place, not the data."""


class BadValue(ValueError):
    """A value cannot be stored in a column; the message names the column."""


_PROBE = 'Az09 ,;|\t"\\{}[]:+-~%_\r\n'
"""What a text file is made of besides its values: every encoding must keep it, also twice."""


class TextEncoder:
    """Text as the bytes of one file, a piece at a time: only the first bears a byte order mark."""

    def __init__(self, encoding: str) -> None:
        self._encoder = codecs.getincrementalencoder(encoding)()
        # UTF-8 has a form of its own for every character.
        exact = encoding in ("utf-8", "utf-8-sig")
        self._decoder = None if exact else codecs.getincrementaldecoder(encoding)()

    def encode(self, text: str) -> bytes:
        """Whole records. Raises UnicodeError for what would not be read back as it is."""
        data = self._encoder.encode(text)
        if self._decoder is not None and self._decoder.decode(data) != text:
            raise UnicodeError("another character would be read back")
        return data


def unwritable(cells: Sequence[Cell], encoding: str) -> bool:
    """Whether one of the cells is a text that the encoding does not keep."""
    try:
        for cell in cells:
            if isinstance(cell, str):
                TextEncoder(encoding).encode(cell + "\n")
    except UnicodeError:
        return True
    return False


def refuse_lacking(path: Path, names: Sequence[str], columns: Sequence[ColumnPlan]) -> None:
    """Raise BadFile where a file lacks planned columns: it is another than the one described."""
    lacking = [plan.source.name for plan in columns if plan.source.name not in names]
    if lacking:
        raise BadFile(f"{path}: has no column {', '.join(lacking)}")


class Writer(ABC):
    """Writes one file, from its beginning to its end."""

    @abstractmethod
    def write(self, batch: Batch) -> int:
        """Store a batch of the load's lane and return its rows. Raises BadValue."""

    @abstractmethod
    def close(self) -> int:
        """Finish the file; returns rows that only then were stored."""


class Format(ABC):
    """One format; it knows files and columns, nothing of tables and transactions."""

    suffixes: ClassVar[tuple[str, ...]]
    source_lanes: tuple[Lane, ...] = (Lane.ROWS,)
    sink_lanes: tuple[Lane, ...] = (Lane.ROWS,)
    named: bool = True
    """Whether a file of it names its columns."""
    binds: ClassVar[bool] = False
    """Whether a file of it binds the values of a column to a type."""

    @abstractmethod
    def describe(self, paths: Sequence[Path]) -> Relation:
        """The columns that all of the files have. Raises BadFile.

        Where only a row could tell them and there is none, the relation is blank.
        """

    @abstractmethod
    def read(
        self, paths: Sequence[Path], request: ReadRequest, lane: Lane, check: StopCheck
    ) -> Iterator[Batch]:
        """The rows of the files, one after the other. Raises BadFile."""

    @abstractmethod
    def count(self, paths: Sequence[Path], check: StopCheck) -> int:
        """How many rows the files hold."""

    @abstractmethod
    def create(self, path: Path, relation: Relation) -> None:
        """Write a file of no rows."""

    @abstractmethod
    def writer(self, path: Path, relation: Relation, columns: Sequence[ColumnPlan]) -> Writer:
        """Begin a file of all the relation's columns; those that are not planned stay NULL."""

    @abstractmethod
    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        """Whether and how values of a source column are stored in this format unchanged."""

    def new_columns(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        """What the columns of another end become in a file of this format."""
        return tuple(columns)


def of(config: Mapping[str, Any]) -> Format:
    """The format that the configuration asks for; it has been checked."""
    name = config["format"]
    if name == "csv":
        from tasks.replicate.connectors.file.csv_format import CSV
        from tasks.replicate.connectors.file.csv_text import Dialect

        return CSV(
            Dialect(
                delimiter=config.get("delimiter", ","),
                null=config.get("null", ""),
                header=config.get("header", True),
                encoding=codecs.lookup(config.get("encoding", "utf-8")).name,
            )
        )
    if name == "jsonl":
        from tasks.replicate.connectors.file.jsonl_format import JSONLines

        return JSONLines(codecs.lookup(config.get("encoding", "utf-8")).name)
    from tasks.replicate.connectors.file.parquet_format import Parquet

    return Parquet()


def option_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Mistakes in the options of a format."""
    found = []
    for key, formats in (
        ("delimiter", ("csv",)),
        ("null", ("csv",)),
        ("header", ("csv",)),
        ("encoding", ("csv", "jsonl")),
    ):
        if key in config and config.get("format") in NAMES and config["format"] not in formats:
            found.append(Problem(key, f"is only for {' and '.join(formats)}"))
    delimiter = config.get("delimiter", ",")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        message = "must be one character, and no quote and no line end"
        found.append(Problem("delimiter", message))
    null = config.get("null", "")
    if not isinstance(null, str) or any(char in null for char in '"\r\n\0'):
        found.append(Problem("null", "must be a text without quotes and line ends"))
    elif isinstance(delimiter, str) and delimiter and delimiter in null:
        message = "must not have the delimiter in it, which would end the field"
        found.append(Problem("null", message))
    if not isinstance(config.get("header", True), bool):
        found.append(Problem("header", "must be true or false"))
    encoding = str(config.get("encoding", "utf-8"))
    problem = _encoding_problem(encoding)
    if problem is not None:
        found.append(Problem("encoding", problem))
    else:
        found += [
            Problem(key, f"has a character that {encoding} does not keep")
            for key, text in (("delimiter", delimiter), ("null", null))
            if unwritable([text], encoding)
        ]
    return found


def _encoding_problem(encoding: str) -> str | None:
    """Why no text file can be read and written in it, by the piece."""
    try:
        name = codecs.lookup(encoding).name
        if name.startswith(("utf-16", "utf-32")):
            return "UTF-16 and UTF-32 are not read; convert the file to utf-8"
        # Python also has codecs of bytes and of names of hosts.
        "".encode(encoding)
        encoder = TextEncoder(name)
        data = encoder.encode(_PROBE) + encoder.encode(_PROBE)
        if codecs.getincrementaldecoder(name)().decode(data, True) != _PROBE * 2:
            return f"{encoding} does not keep a text file's signs; write utf-8"
    except UnicodeError:
        return f"{encoding} does not keep a text file's signs; write utf-8"
    except LookupError:
        return "is not known as one of texts; write utf-8, latin-1, cp1252 or another of Python's"
    return None


def cell_of_text(text: Cell, type_: ColumnType) -> Cell:
    """The cell that a text stands for, where a column of that type was written as text."""
    if not isinstance(text, str):
        return text
    kind = type_.kind
    try:
        if kind is Kind.INTEGER:
            return int(text)
        if kind is Kind.FLOAT:
            return float_of(text, type_.bits)
        if kind is Kind.BYTES and text.startswith("\\x"):
            return bytes.fromhex(text[2:])
    except ValueError:
        # A source that binds no value to a type had another one there.
        return text
    if kind is Kind.BOOLEAN and text in ("t", "f", "true", "false"):
        return text[0] == "t"
    return text
