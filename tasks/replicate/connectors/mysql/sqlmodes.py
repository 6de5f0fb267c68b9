"""A user's SQL that means one thing under the server's SQL mode and another in a session here.

Every session has one mode, whatever the server's is, so that what is written into statements here
is read as it was meant. What a user tried in a client of the server's mode would silently be
another condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tasks.replicate.connectors.mysql.mentions import TOKEN

_QUOTES = "\"...\" is a name under this server's ANSI_QUOTES, and a text here: write `...` or '...'"
_PIPES = "|| joins texts under this server's PIPES_AS_CONCAT, and is OR here: write concat() or OR"
_BACKSLASH = (
    "a backslash in a text is itself under this server's NO_BACKSLASH_ESCAPES, and begins an "
    "escape here: write char(92)"
)


def clashes(statement: str, modes: frozenset[str]) -> Iterator[str]:
    """What the statement has that ``modes`` read otherwise, each with the way out."""
    found = (match[0] for match in TOKEN.finditer(statement))
    tokens = [token for token in found if not token.startswith(("#", "--", "/*"))]
    if "ANSI_QUOTES" in modes and any(token.startswith('"') for token in tokens):
        yield _QUOTES
    if "PIPES_AS_CONCAT" in modes and ("|", "|") in pairwise(tokens):
        yield _PIPES
    if "NO_BACKSLASH_ESCAPES" in modes and any("\\" in token for token in tokens):
        yield _BACKSLASH
