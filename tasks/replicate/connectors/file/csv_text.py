"""CSV as text: records, fields and NULLs, by the rules of PostgreSQL's COPY.

NULL is an unquoted text (nothing, by default), and a quoted one never is. A quote opens a field
at its very beginning only; what Python's and PostgreSQL's readers would each make something else
of is refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.replicate.connector import Row
from tasks.replicate.connectors.file.formats import BLOCK, BadFile

BOM = codecs.BOM_UTF8
_MALFORMED = (
    "a record is malformed (a quote inside an unquoted field, text behind a closing quote, or a "
    "carriage return outside of quotes)"
)
LONGEST = 256 * 1024 * 1024
"""Bytes of one record. A quote that is not closed makes one of all that follows it."""
_END = "\\."
"""On a line of its own PostgreSQL takes it for the end of the data."""


class BadRecord(BadFile):
    """A record is malformed. ``line`` is that of what was read together, from 0."""

    def __init__(self, path: Path, line: int, what: str) -> None:
        super().__init__(f"{path}, line {line + 1}: {what}")
        self.line, self.what = line, what


@dataclass(frozen=True)
class Dialect:
    """How a file writes its fields."""

    delimiter: str = ","
    null: str = ""
    header: bool = True
    encoding: str = "utf-8"

    @property
    def plain(self) -> bool:
        """Whether the bytes are what COPY writes and reads by default."""
        return (self.delimiter, self.null, self.encoding) == (",", "", "utf-8")

    @cached_property
    def bare_integers(self) -> bool:
        """Whether no integer can be taken for NULL or for two fields."""
        return not set("-0123456789") & set(self.delimiter + self.null)

    @cached_property
    def field(self) -> re.Pattern[str]:
        """A field and what ends it; possessive, so that a bad file costs no more than another."""
        end = re.escape(self.delimiter)
        return re.compile(rf'(?:"((?:[^"]++|"")*+)"|([^"{end}\r\n]*+))({end}|\n)')


def blocks(path: Path, dialect: Dialect) -> Iterator[bytes]:
    """The file in UTF-8, a block at a time. Raises BadFile for what is not of its encoding."""
    with path.open("rb") as file:
        if dialect.encoding == "utf-8":
            first = file.read(BLOCK).removeprefix(BOM)
            while first:
                yield first
                first = file.read(BLOCK)
            return
        decoder = codecs.getincrementaldecoder(dialect.encoding)()
        try:
            while data := file.read(BLOCK):
                yield decoder.decode(data).encode()
            yield decoder.decode(b"", final=True).encode()
        except UnicodeError:
            raise BadFile(f"{path}: is not all {dialect.encoding}") from None


def chunks(path: Path, dialect: Dialect) -> Iterator[tuple[bytes, int]]:
    """Whole records, each ended by one line feed, and their bytes in the file; the header is among
    them.

    The first line tells whether lines end in CR LF; then every line does.
    """
    crlf: bool | None = None
    for chunk in _whole_records(path, dialect):
        if crlf is None:
            crlf = _first_line(chunk).endswith(b"\r\n")
        size = len(chunk)
        if dialect.encoding != "utf-8":
            size = len(chunk.decode().encode(dialect.encoding, "replace"))
        yield _line_feeds(chunk) if crlf else chunk, size


def _whole_records(path: Path, dialect: Dialect) -> Iterator[bytes]:
    held: list[bytes] = []
    size = passed = 0
    inside = False
    for block in blocks(path, dialect):
        end, inside = _cut(block, inside=inside)
        if end:
            yield b"".join([*held, block[:end]])
            passed += size + end
            held, size = [], 0
        held.append(block[end:])
        size += len(block) - end
        if size > LONGEST:
            raise _unclosed(path, dialect, passed, f"is longer than {LONGEST >> 20} MB")
    if inside:
        raise _unclosed(path, dialect, passed, "ends inside a quoted field")
    if size:
        yield b"".join([*held, b"\n"])


def _unclosed(path: Path, dialect: Dialect, passed: int, how: str) -> BadFile:
    """What to say of the record behind so many bytes, in UTF-8, that takes all that follows it."""
    line = 1
    for block in blocks(path, dialect):
        line += block.count(b"\n", 0, passed)
        passed -= len(block)
        if passed <= 0:
            break
    return BadFile(f"{path}, line {line}: a record {how}; is a quote not closed, or one too many?")


def last_end(data: bytes) -> int:
    """Behind the last line feed that stands outside of quotes, or 0."""
    return _cut(data, inside=False)[0]


def _cut(data: bytes, *, inside: bool) -> tuple[int, bool]:
    """Behind the last line feed that stands outside of quotes, or 0; and whether the data ends
    inside of them, where ``inside`` tells how it begins."""
    inside ^= bool(data.count(b'"') % 2)
    end, outside = len(data), not inside
    while True:
        quote = data.rfind(b'"', 0, end)
        if outside and (feed := data.rfind(b"\n", quote + 1, end)) >= 0:
            return feed + 1, inside
        if quote < 0:
            return 0, inside
        end, outside = quote, not outside


def _first_line(chunk: bytes) -> bytes:
    position = chunk.find(b"\n")
    quotes = chunk.count(b'"', 0, position)
    while quotes % 2 and position >= 0:
        before, position = position, chunk.find(b"\n", position + 1)
        quotes += chunk.count(b'"', before, position)
    return chunk[: position + 1]


def _line_feeds(chunk: bytes) -> bytes:
    """CR LF outside of quotes as LF; inside it is the field's own."""
    if b'"' not in chunk:
        return chunk.replace(b"\r\n", b"\n")
    parts = chunk.split(b'"')
    # What stands outside of quotes is every other part.
    parts[::2] = [part.replace(b"\r\n", b"\n") for part in parts[::2]]
    return b'"'.join(parts)


def without_first(chunk: bytes) -> bytes:
    """The chunk without its first record."""
    return chunk[len(_first_line(chunk)) :]


def count_records(chunk: bytes) -> int:
    """Line feeds outside of quotes."""
    if b'"' not in chunk:
        return chunk.count(b"\n")
    return sum(part.count(b"\n") for part in chunk.split(b'"')[::2])


def without_ends(chunk: bytes) -> bytes:
    """The same records, with what PostgreSQL would take for the end of the data in quotes."""
    if b"\\.\n" not in chunk:
        return chunk
    parts = chunk.split(b'"')
    parts[::2] = [re.sub(rb"(?m)^\\\.$", b'"\\\\."', part) for part in parts[::2]]
    return b'"'.join(parts)


def header(path: Path, dialect: Dialect) -> list[str]:
    """The names in the first record, or names by number where the file has no header."""
    for chunk, _ in chunks(path, dialect):
        fields = parse_carefully(_first_line(chunk), None, dialect, path)[0]
        if not dialect.header:
            return numbered(len(fields))
        names = ["" if name is None else str(name) for name in fields]
        if "" in names:
            raise BadFile(f"{path}: column {names.index('') + 1} has no name in the header")
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise BadFile(f"{path}: the header names {', '.join(doubled)} twice")
        return names
    return []


def numbered(count: int) -> list[str]:
    """What the columns of a file without a header are called."""
    return [f"column_{number}" for number in range(1, count + 1)]


def parse(chunk: bytes, width: int, dialect: Dialect, path: Path) -> list[Row]:
    """The records of a chunk as rows of text and None. Raises BadRecord."""
    sides = columns(_decoded(chunk, path), width, dialect, range(width))
    if sides is not None:
        return list(zip(*sides, strict=True))
    return parse_carefully(chunk, width, dialect, path)


def parse_carefully(chunk: bytes, width: int | None, dialect: Dialect, path: Path) -> list[Row]:
    """As ``parse``, field by field; it alone tells what is malformed. Without a width each record
    may have its own."""
    rows = _match(_decoded(chunk, path), dialect, path)
    for number, row in enumerate(rows if width is not None else ()):
        if len(row) != width:
            before = sum(1 + sum(str(cell).count("\n") for cell in r) for r in rows[:number])
            has = f"a record has {len(row)} fields, and the file {width} columns"
            raise BadRecord(path, before, has)
    return rows


def _decoded(chunk: bytes, path: Path) -> str:
    try:
        return chunk.decode()
    except UnicodeDecodeError as error:
        line = chunk.count(b"\n", 0, error.start)
        raise BadRecord(path, line, "is not all UTF-8; name the file's encoding") from None


_MARKS = "\x1f\x1e\x1d\x1c\x02\x01"
"""Of these, one that the text does not have stands for a field in quotes, and two for two quotes
in one: to replace them by as many characters costs half as much."""
_MOST = 8 * BLOCK
"""Characters that are read by column: what is longer is a long record, which would stand in memory
half a dozen times."""


def columns(
    text: str, width: int, dialect: Dialect, wanted: Sequence[int]
) -> list[Sequence[str | None]] | None:
    """These columns of whole records that have ``width`` fields each.

    None where a few calls that loop in C do not tell what the text says, or that it is malformed.
    """
    used = dialect.delimiter + dialect.null
    free = (mark for mark in _MARKS if mark not in text and mark not in used)
    marks = "".join(islice(free, 3))
    if len(text) > _MOST or len(marks) < 3:
        return None
    found = _without_quotes(text, marks)
    if found is None:
        return None
    bare, quoted = found
    delimiter, null = dialect.delimiter, dialect.null
    parted = bare.replace("\n", f"\n{delimiter}")
    fields = parted.split(delimiter)
    # Each line feed stands at a field's end. Where the last fields of records have all of them,
    # and each one, no record has another width.
    ends = "".join(fields[width - 1 :: width]).split("\n")
    records = len(ends) - 1
    if len(fields) != records * width + 1 or fields[-1] or len(parted) - len(bare) != records:
        return None
    ends.pop()
    sides: list[Sequence[str | None]] = [fields[i:-1:width] for i in range(width - 1)]
    sides.append(ends)
    for position in wanted:
        if null in sides[position]:
            sides[position] = [None if field == null else field for field in sides[position]]
    if '"' in text and not _fill(sides, bare, quoted, marks):
        return None
    return [sides[position] for position in wanted]


def _without_quotes(text: str, marks: str) -> tuple[str, list[str]] | None:
    """The text with the first mark for each field in quotes, and these fields; the other marks for
    two quotes that are outside of all, as in an empty field."""
    field_mark, doubled = marks[0], marks[1:]
    if '"' not in text:
        return (text, []) if "\r" not in text else None
    parts = text.replace('""', doubled).split('"')
    outside, quoted = parts[::2], parts[1::2]
    if len(outside) == len(quoted):
        return None
    bare = field_mark.join(outside)
    if "\r" in bare:
        return None
    # One character is looked for much faster than two.
    if doubled[0] in bare and f"{doubled}{field_mark}" in bare:
        # Three quotes: the first one opens the field, the others are one in it.
        for i, part in enumerate(outside[:-1]):
            if part.endswith(doubled):
                outside[i] = part.rstrip(doubled)
                quoted[i] = part[len(outside[i]) :] + quoted[i]
        bare = field_mark.join(outside)
    if not quoted:
        return bare, []
    # All at once, since none of them has the character between them.
    return bare, _with_quotes(field_mark.join(quoted), doubled).split(field_mark)


def _with_quotes(text: str, doubled: str) -> str:
    """The text with one quote for these two characters, which never stand apart."""
    if text.isascii():
        # Of such text the faster way.
        return text.translate({ord(doubled[0]): '"', ord(doubled[1]): None})
    return text.replace(doubled, '"')


def _fill(sides: list[Sequence[str | None]], bare: str, quoted: list[str], marks: str) -> bool:
    """Put the fields that were in quotes in their places; False where one is no whole field."""
    field_mark, doubled = marks[0], marks[1:]
    if doubled[0] in bare:
        # Fields of quotes alone, of which the first and the last one are around it.
        for position, side in enumerate(sides):
            marked = [field for field in side if field and doubled in field]
            if any(field.strip(doubled) for field in marked):
                return False
            if marked:
                sides[position] = [
                    '"' * (len(field) // 2 - 1) if field and field[0] == doubled[0] else field
                    for field in side
                ]
    counts = [side.count(field_mark) for side in sides]
    if sum(counts) != len(quoted):
        return False
    places = [position for position, count in enumerate(counts) if count]
    if all(counts[position] == len(sides[position]) for position in places):
        for number, position in enumerate(places):
            sides[position] = quoted[number :: len(places)]
        return True
    rest = iter(quoted)
    rows = [
        [next(rest) if field == field_mark else field for field in row]
        for row in zip(*(sides[position] for position in places), strict=True)
    ]
    for position, side in zip(places, zip(*rows, strict=True), strict=True):
        sides[position] = side
    return True


def _match(text: str, dialect: Dialect, path: Path) -> list[Row]:
    """Records of any kind, field by field."""
    rows: list[Row] = []
    row: list[str | None] = []
    position = 0
    null = dialect.null
    # Not finditer: it would look for a field behind the place where there is none.
    while found := dialect.field.match(text, position):
        quoted, bare, end = found.groups()
        position = found.end()
        if quoted is None:
            row.append(None if bare == null else bare)
        else:
            row.append(quoted.replace('""', '"'))
        if end == "\n":
            rows.append(tuple(row))
            row = []
    if position != len(text):
        raise BadRecord(path, text.count("\n", 0, position), _MALFORMED)
    return rows


# Writing


def written(rows: Sequence[Row], dialect: Dialect) -> str:
    """Rows of cells as the text of records."""
    sides: Iterable[Sequence[str]] = [_side(side, dialect) for side in zip(*rows, strict=True)]
    lines = map(dialect.delimiter.join, zip(*sides, strict=True))
    return "\n".join(lines) + "\n"


def _side(side: Sequence[Any], dialect: Dialect) -> Sequence[str]:
    kinds = set(map(type, side))
    if kinds == {int}:
        digits = list(map(str, side))
        return digits if dialect.bare_integers else _quoted(digits, dialect)
    if kinds == {str}:
        return _quoted(side, dialect)
    return [
        dialect.null if value is None else _quoted([_text(value)], dialect)[0] for value in side
    ]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, float):
        special = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
        return special.get(repr(value), repr(value))
    return str(value)


def _quoted(side: Sequence[str], dialect: Dialect) -> Sequence[str]:
    """Quotes around what needs them; mostly nothing does, which one look at all of it tells."""
    joined = "\n".join(side)
    special = (dialect.delimiter, '"', "\r", _END)
    if (
        joined.count("\n") == len(side) - 1
        and not any(char in joined for char in special)
        and "" not in side
        and dialect.null not in side
    ):
        return side
    return [
        '"' + value.replace('"', '""') + '"'
        if value == dialect.null
        or value in ("", _END)
        or any(char in value for char in (dialect.delimiter, '"', "\r", "\n"))
        else value
        for value in side
    ]
