"""JSON lines: one object a line; numbers and documents keep the very text they were written in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Cell,
    Column,
    ColumnPlan,
    ColumnType,
    Fit,
    Kind,
    Lane,
    ReadRequest,
    Relation,
)
from tasks.replicate.connectors.file.formats import (
    BadFile,
    BadValue,
    Format,
    StopCheck,
    TextEncoder,
    Writer,
    unwritable,
)

ANY = ColumnType(Kind.TEXT, "json value", loose=True)
SAMPLE = 1000
"""Lines that tell the columns; a name that first comes later is an error when it does."""

_SPACE = re.compile(r"[ \t\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS: dict[str, Cell] = {"true": True, "false": False, "null": None}


def _no_number(word: str) -> Any:
    """Python would read NaN and Infinity, which are no JSON."""
    raise ValueError(word)


_DECODER = json.JSONDecoder(parse_constant=_no_number)
_HALF = re.compile("[\ud800-\udfff]")
_FRACTIONAL = frozenset(".eE")
_HALVED = (
    "has one half of a surrogate pair, such as \\ud800, which is no character; write both or none"
)
MOST_FIGURES = 1000
"""Of a whole number that Python makes an int of; a longer one stays text."""


class JSONLines(Format):
    """Newline-delimited JSON."""

    suffixes = (".jsonl", ".ndjson")

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def describe(self, paths: Sequence[Path]) -> Relation:
        names: dict[str, None] = {}
        for path in paths:
            for number, line in enumerate(self._lines(path)):
                if number == SAMPLE:
                    break
                names |= dict.fromkeys(_members(line, path, number))
        return Relation(
            tuple(Column(name, ANY) for name in names),
            detail={"names": list(names)},
            blank=None if names else ANY,
        )

    def _lines(self, path: Path) -> Iterator[str]:
        """Lines with something in them. Only LF ends a line, as JSON's own text may hold others."""
        try:
            with path.open(encoding=self._encoding, newline="\n") as file:
                for number, line in enumerate(file):
                    text = line.removeprefix("\ufeff") if number == 0 else line
                    if text.strip():
                        yield text.rstrip("\r\n")
        except UnicodeError:
            raise BadFile(f"{path}: is not all {self._encoding}") from None

    # Reading

    def read(
        self, paths: Sequence[Path], request: ReadRequest, lane: Lane, check: StopCheck
    ) -> Iterator[Batch]:
        known = frozenset(self.describe(paths).detail["names"]) if paths else frozenset()
        # A column that goes into JSON wants the document, not what it stands for.
        wanted = [(p.source.name, p.sink.type.kind is Kind.JSON) for p in request.columns]
        for path in paths:
            page: list[tuple[Cell, ...]] = []
            size = 0
            for number, line in enumerate(self._lines(path)):
                page.append(_row(line, wanted, known, path, number))
                size += self._size(line)
                if len(page) == request.fetch_size:
                    check()
                    yield Batch(page, len(page), size)
                    page, size = [], 0
            if page:
                yield Batch(page, len(page), size)

    def _size(self, line: str) -> int:
        """Its bytes in the file, about: it may have ended in CR LF."""
        if line.isascii():
            return len(line) + 1
        return len(line.encode(self._encoding, "replace")) + 1

    def count(self, paths: Sequence[Path], check: StopCheck) -> int:
        total = 0
        for path in paths:
            check()
            total += sum(1 for _ in self._lines(path))
        return total

    # Writing

    def create(self, path: Path, relation: Relation) -> None:
        path.write_bytes(b"")

    def new_columns(self, columns: Sequence[Column]) -> tuple[Column, ...]:
        return tuple(Column(column.name, ANY) for column in columns)

    def writer(self, path: Path, relation: Relation, columns: Sequence[ColumnPlan]) -> Writer:
        return _JSONWriter(path, self._encoding, [c.name for c in relation.columns], columns)

    def fit(self, source: Column, sink: Column, dialect: str) -> Fit:
        """Every kind has a form in JSON: a number, a truth value, a document, or else text."""
        return Fit()


def _members(line: str, path: Path, number: int) -> dict[str, tuple[int, int]]:
    """The object's names, and where each value stands in the line."""
    found: dict[str, tuple[int, int]] = {}
    try:
        position = _after(line, _SPACE.match(line, 0), "{")
        if line[position : position + 1] == "}":
            end = position + 1
        else:
            while True:
                if line[position : position + 1] != '"':
                    raise ValueError
                name, position = scanstring(line, position + 1, True)
                if not name.isascii() and _HALF.search(name):
                    raise BadFile(f"{path}: a name of object {number + 1} {_HALVED}")
                start = _after(line, _SPACE.match(line, position), ":")
                position = _value_end(line, start)
                if name in found:
                    raise BadFile(f"{path}: an object names {name} twice (object {number + 1})")
                found[name] = (start, position)
                position = _end(line, position)
                if line[position : position + 1] == "}":
                    end = position + 1
                    break
                position = _after(line, _SPACE.match(line, position), ",")
        if _end(line, end) != len(line):
            raise ValueError
    except (ValueError, StopIteration, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{path}: object {number + 1} is no JSON object on one line") from None
    return found


def _end(line: str, position: int) -> int:
    found = _SPACE.match(line, position)
    assert found is not None
    return found.end()


def _after(line: str, space: re.Match[str] | None, sign: str) -> int:
    """Behind the sign and the spaces around it."""
    assert space is not None
    if line[space.end() : space.end() + 1] != sign:
        raise ValueError
    return _end(line, space.end() + 1)


def _value_end(line: str, start: int) -> int:
    number = _NUMBER.match(line, start)
    if number is not None:
        return number.end()
    for word in _WORDS:
        if line.startswith(word, start):
            return start + len(word)
    if line[start : start + 1] not in ('"', "{", "["):
        raise ValueError
    _, end = _DECODER.raw_decode(line, start)
    return int(end)


def _row(
    line: str, wanted: Sequence[tuple[str, bool]], known: frozenset[str], path: Path, number: int
) -> tuple[Cell, ...]:
    members = _members(line, path, number)
    unknown = members.keys() - known
    if unknown:
        raise BadFile(
            f"{path}: object {number + 1} has the name {', '.join(sorted(unknown))}, which the "
            f"first {SAMPLE} objects do not have; add it to one of them, as null"
        )
    try:
        return tuple([_cell(line, members.get(name), document) for name, document in wanted])
    except BadValue as error:
        broken = next(n for n, doc in wanted if not doc and _is_halved(line, members.get(n)))
        raise BadFile(f"{path}: column {broken}: a text of object {number + 1} {error}") from None


def _is_halved(line: str, place: tuple[int, int] | None) -> bool:
    if place is None or line[place[0]] != '"':
        return False
    value, _ = scanstring(line, place[0] + 1, True)
    return _HALF.search(value) is not None


def _cell(line: str, place: tuple[int, int] | None, document: bool) -> Cell:
    """An absent member is NULL. A number with a fraction stays its text, so no digit is lost."""
    if place is None:
        return None
    text = line[place[0] : place[1]]
    if text in _WORDS:
        return text if document and text != "null" else _WORDS[text]
    if document or text[0] in "{[":
        return text
    if text[0] != '"':
        return text if set(text) & _FRACTIONAL or len(text) > MOST_FIGURES else int(text)
    value, _ = scanstring(line, place[0] + 1, True)
    if not value.isascii() and _HALF.search(value):
        raise BadValue(_HALVED)
    return str(value)


# Writing


class _JSONWriter(Writer):
    def __init__(
        self, path: Path, encoding: str, names: Sequence[str], columns: Sequence[ColumnPlan]
    ) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._encoding = encoding
        self._encoder = TextEncoder(encoding)
        self._names = names
        self._columns = columns
        self._forms = [_form(plan) for plan in columns]
        planned = [plan.sink.name for plan in columns]
        absent = [name for name in names if name not in planned]
        self._tail = "".join(f", {json.dumps(name, ensure_ascii=False)}: null" for name in absent)
        keys = [json.dumps(name, ensure_ascii=False) for name in planned]
        self._keys = [f"{', ' if i else ''}{key}: " for i, key in enumerate(keys)]

    def write(self, batch: Batch) -> int:
        rows = batch.data
        assert isinstance(rows, list)
        if not rows:
            return 0
        sides = []
        for plan, form, key, side in zip(
            self._columns, self._forms, self._keys, zip(*rows, strict=True), strict=True
        ):
            try:
                sides.append([key + ("null" if cell is None else form(cell)) for cell in side])
            except ValueError as error:
                raise BadValue(f"column {plan.sink.name}: a value {error}") from None
        text = "".join(f"{{{''.join(parts)}{self._tail}}}\n" for parts in zip(*sides, strict=True))
        try:
            self._file.write(self._encoder.encode(text))
        except UnicodeError:
            raise BadValue(self._explain(rows)) from None
        return len(rows)

    def _explain(self, rows: Sequence[tuple[Cell, ...]]) -> str:
        lacks = f"has a character that {self._encoding} cannot write"
        for name in self._names:
            if unwritable([name], self._encoding):
                return f"column {name}: its name {lacks}"
        for plan, side in zip(self._columns, zip(*rows, strict=True), strict=True):
            if unwritable(side, self._encoding):
                return f"column {plan.sink.name}: a text {lacks}"
        return f"{self._encoding} cannot write a value"  # pragma: no cover

    def close(self) -> int:
        self._file.close()
        return 0


def _form(plan: ColumnPlan) -> Any:
    """How a cell of the source's column is written."""
    if plan.source.type.kind is Kind.JSON:
        return _document
    return _value if plan.source.type.kind is not Kind.DECIMAL else _decimal


def _value(cell: Any) -> str:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, int):
        return str(cell)
    if isinstance(cell, float):
        # JSON has no word for these; as text they are read back as the same floats.
        special = {"inf": '"Infinity"', "-inf": '"-Infinity"', "nan": '"NaN"'}
        return special.get(repr(cell), repr(cell))
    if isinstance(cell, bytes):
        return f'"\\\\x{cell.hex()}"'
    return json.dumps(cell, ensure_ascii=False)


def _decimal(cell: Any) -> str:
    """All digits as a number, where the text is one by JSON's rules."""
    if isinstance(cell, str) and _NUMBER.fullmatch(cell):
        return cell
    return _value(cell)


def _document(cell: Any) -> str:
    """The document itself, on one line: in JSON a line feed only ever stands between values."""
    text = str(cell)
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON document") from None
    if text.strip() == "null":
        raise ValueError("is the document null, which a line of JSON cannot tell from NULL")
    return text.replace("\r", " ").replace("\n", " ")
