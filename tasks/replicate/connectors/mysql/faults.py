"""The server's errors and warnings, without the values that they quote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dispatch.redaction import redact, secrets_of

# Errors whose quotes hold names (of columns, tables, keys, users) or the user's own SQL.
_NAMES = frozenset(
    {1040, 1044, 1045, 1046, 1048, 1049, 1050, 1051, 1054, 1060, 1061, 1064, 1067, 1071, 1072}
    | {1075, 1091, 1101, 1103, 1110, 1118, 1136, 1142, 1143, 1146, 1147, 1193, 1205, 1213, 1227}
    | {1228, 1231, 1263, 1264, 1265, 1273, 1286, 1290, 1298, 1305, 1317, 1364, 1370, 1406, 1419}
    | {1451, 1452, 1471, 1792, 1906, 1969, 3024, 3819, 3948, 4025}
)
_DUPLICATE = re.compile(r"Duplicate entry '.*' for key '([^']*)'$", re.DOTALL)
# The apostrophe of "Can't create table" begins no value.
_QUOTE = r"(?!(?<=n)'t\b)'"
_QUOTED = re.compile(rf"{_QUOTE}(?:[^'\\]|\\.|'')*'", re.DOTALL)
_OPEN = re.compile(rf"{_QUOTE}.*$", re.DOTALL)
# MariaDB writes `db`.`table`.`column`, MySQL 'column'.
_COLUMN = re.compile(
    r"(.*) for column (?:`(?:[^`]|``)*`\.`(?:[^`]|``)*`\.`((?:[^`]|``)*)`|'([^']*)')(?: at row|$)",
    re.DOTALL,
)

# Locks, limits and lost connections: another attempt may not meet them again.
_PASSING = frozenset(
    {1040, 1053, 1080, 1158, 1159, 1160, 1161, 1205, 1213, 1317, 1927, 1969, 3024, 3058, 3572, 4031}
)
LOST = frozenset({0, 2000, 2002, 2003, 2006, 2013, 2014, 2026, 2055, 1053, 1927, 4031})


def number(error: BaseException) -> int:
    """The server's or client's error number; 0 where the driver gives none."""
    first = error.args[0] if error.args else 0
    return first if isinstance(first, int) else 0


def permanent(code: int) -> bool:
    """Whether another attempt would only meet it again."""
    return (1000 <= code < 2000 and code not in _PASSING) or (code >= 3000 and code not in _PASSING)


def lost(error: BaseException) -> bool:
    """Whether the connection broke, so that nothing is known of the statement."""
    return number(error) in LOST


def describe(error: BaseException, config: Mapping[str, Any]) -> str:
    """One line on an error of the driver."""
    code = number(error)
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    return redact(f"{clean(code, text)} (error {code})", secrets_of(config))


def clean(code: int, text: str) -> str:
    """A message with its values left out and the name of its column kept."""
    found = _DUPLICATE.match(text)
    if found:
        return f"duplicate key in index {found[1]}"
    column = _COLUMN.match(text)
    if column:
        # What stands before is "Incorrect integer value: 'the value'".
        name = column[3] if column[2] is None else column[2].replace("``", "`")
        return f"column {name}: {column[1].partition(': ' + chr(39))[0]}"
    if code in _NAMES:
        return text
    return _OPEN.sub("(a value)", _QUOTED.sub("(a value)", text))
