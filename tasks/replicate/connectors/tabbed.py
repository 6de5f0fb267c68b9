"""Rows as lines of text with tabs between the fields, which PostgreSQL's COPY and MySQL's LOAD DATA
read: a column at a time, by calls that loop in C."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tasks.replicate.batch import BETWEEN, Side

_NULL = "\\N"


def escaped(side: Side, escapes: Mapping[str, str]) -> Sequence[str]:
    """Texts that are not NULL, with ``escapes`` for these characters; mostly there are none.

    The backslash is the first of them, so that none escapes another.
    """
    texts: Sequence[str] = side.present  # type: ignore[assignment]
    if not any(character in side.joined for character in escapes):
        return texts
    found = _replaced(side.joined, escapes).split(BETWEEN)
    return found if len(found) == len(texts) else [_replaced(text, escapes) for text in texts]


def _replaced(text: str, escapes: Mapping[str, str]) -> str:
    for character, escape in escapes.items():
        text = text.replace(character, escape)
    return text


def with_nulls(side: Side, written: Sequence[str]) -> Sequence[str]:
    """The fields of all values of the column; ``written`` are those that are not NULL."""
    if len(written) == len(side.values):
        return written
    present = iter(written)
    return [_NULL if value is None else next(present) for value in side.values]


def lines(fields: Sequence[Sequence[str]], step: int) -> Iterator[bytes]:
    """Columns of fields as lines, ``step`` at a time. Raises UnicodeEncodeError for what is no
    Unicode."""
    for start in range(0, len(fields[0]), step):
        some = [side[start : start + step] for side in fields]
        text = "\n".join(map("\t".join, zip(*some, strict=True)))
        yield f"{text}\n".encode()


def not_unicode(side: Side) -> bool:
    """Whether a text has half of a surrogate pair in it, which no encoding can write."""
    try:
        "".join(value for value in side.values if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return True
    return False
