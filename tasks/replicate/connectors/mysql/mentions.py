"""The tables that a statement reads, found in its text, through views as deep as they lie.

EXPLAIN would not do: it tells aliases, and leaves out what the optimizer has read beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.replicate.connectors.mysql.session import Session, literal

Place = tuple[str, str]
"""Database and table."""

TOKEN = re.compile(
    r"""
    (?P<nothing> \s+ | \#[^\n]* | --(?=\s|$)[^\n]* | /\*(?!M?!).*?\*/ | /\*M?!\d* | \*/
               | '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" )
  | (?P<quoted> `(?:[^`]|``)*` )
  | (?P<word> [0-9A-Za-z_$\u0080-\uffff]+ )
  | (?P<mark> . )
    """,
    re.VERBOSE | re.DOTALL,
)
# After these stands a table, and after a comma another.
_BEGIN = frozenset({"from", "join", "straight_join", "table", "oj"})
_END = frozenset({"select", "where", "group", "having", "order", "limit", "window"}) | frozenset(
    {"union", "except", "intersect"}
)
_VIEW = """
select view_definition from information_schema.views
where table_schema = {schema} and table_name = {name}
"""


def tables(session: Session, statement: str) -> frozenset[Place]:
    """What a statement reads; of a view whose definition this user may not see, only its name.

    Names that only look like tables (an alias, a function) may be among them.
    """
    found: set[Place] = set()
    waiting = set(named(statement, session.database))
    while waiting:
        place = waiting.pop()
        found.add(place)
        schema, name = place
        for (definition,) in session.rows(_VIEW.format(schema=literal(schema), name=literal(name))):
            waiting |= set(named(definition or "", schema)) - found
    return frozenset(found)


def named(statement: str, database: str) -> Iterator[Place]:
    """The names that stand where a table does; in ``database`` where they name none."""
    tokens = [
        (match.lastgroup, match[0])
        for match in TOKEN.finditer(statement)
        if match.lastgroup != "nothing"
    ]
    lists = [False]  # for each open parenthesis: whether a comma is followed by a table
    expected = False
    position = 0
    while position < len(tokens):
        kind, text = tokens[position]
        word = text.lower() if kind == "word" and not _dotted(tokens, position) else ""
        position += 1
        if word in _BEGIN:
            lists[-1] = expected = True
        elif word in _END:
            lists[-1] = expected = False
        elif text == "(":
            lists.append(expected)
        elif text == ")":
            expected = False
            lists[-1:] = [] if len(lists) > 1 else [False]
        elif text == ",":
            expected = lists[-1]
        elif expected and kind != "mark":
            expected = False
            if tokens[position : position + 1] == [("mark", ".")] and position + 1 < len(tokens):
                yield _bare(text), _bare(tokens[position + 1][1])
                position += 2
            else:
                yield database, _bare(text)


def _dotted(tokens: list[tuple[str | None, str]], position: int) -> bool:
    """Behind a point every word is a name."""
    return position > 0 and tokens[position - 1] == ("mark", ".")


def _bare(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name
