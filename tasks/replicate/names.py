"""Names: those of tables as users write them, and what a run's sessions are called.

Names of tables are literal, split at unquoted dots, and quoted as in SQL.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def session_name(scope: str, fence: int) -> str:
    """What the sessions of a job's attempt are called at either end, so that a newer attempt can
    find them; short enough for PostgreSQL's limit of 63 bytes.
    """
    return f"cc/{scope.replace('-', '')[:32]}/{fence}"


def split_name(text: str) -> tuple[str, ...]:
    """``public."My.Orders"`` -> ``("public", "My.Orders")``; nothing is ever case-folded.

    Raises ValueError, with the reason, for an empty part or an unclosed quote.
    """
    parts: list[str] = []
    part: list[str] = []
    quoted = closed = False
    position = 0
    while position < len(text):
        char = text[position]
        if quoted:
            if char == '"' and text[position + 1 : position + 2] == '"':
                part.append('"')
                position += 1
            elif char == '"':
                quoted, closed = False, True
            else:
                part.append(char)
        elif char == ".":
            parts.append("".join(part))
            part, closed = [], False
        elif closed:
            raise ValueError("there is text between a closing quote and the next dot")
        elif char == '"' and not part:
            quoted = True
        else:
            part.append(char)
        position += 1
    if quoted:
        raise ValueError("a double quote is not closed")
    parts.append("".join(part))
    if not all(parts):
        raise ValueError("a part of the name is empty")
    if any("\0" in part for part in parts):
        raise ValueError("a name cannot hold a NUL character")
    return tuple(parts)


def join_name(parts: Iterable[str]) -> str:
    """The text that :func:`split_name` reads as these parts, quoted only where it must be."""
    return ".".join(
        '"' + part.replace('"', '""') + '"' if "." in part or part.startswith('"') else part
        for part in parts
    )


def matching(names: Iterable[tuple[str, ...]], patterns: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that some pattern matches and no ``!pattern`` excludes, sorted.

    Patterns are those of file names (``*``, ``?``, ``[a-z]``), each on one part of the name,
    case-sensitive; one without a dot matches the last part in any schema.
    """
    wanted = [split_name(pattern) for pattern in patterns if not pattern.startswith("!")]
    unwanted = [split_name(pattern[1:]) for pattern in patterns if pattern.startswith("!")]

    def hits(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
        tail = name[-len(pattern) :]
        return len(tail) == len(pattern) and all(map(fnmatch.fnmatchcase, tail, pattern))

    return sorted(
        name
        for name in set(names)
        if any(hits(name, p) for p in wanted) and not any(hits(name, p) for p in unwanted)
    )
