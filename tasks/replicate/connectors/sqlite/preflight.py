"""What would make a load fail or do harm at a SQLite sink, found before anything is touched."""

from __future__ import annotations

import os
import re

from tasks.replicate.connector import Load
from tasks.replicate.connectors import keys
from tasks.replicate.connectors.sqlite.session import Session
from tasks.replicate.names import join_name

_REFERENCES = """
select distinct m.name
from main.sqlite_master m, pragma_foreign_key_list(m.name, 'main') f
where m.type = 'table' and f."table" = ? collate nocase and m.name <> ? collate nocase
order by 1
"""
_TRIGGERS = """
select name, sql from main.sqlite_master
where type = 'trigger' and tbl_name = ? collate nocase order by 1
"""
_EVENT = re.compile(
    r"""create\s+(?:temp\w*\s+)?trigger\s+(?:if\s+not\s+exists\s+)?
        (?:"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|'[^']*'|[^\s."`\['])+
        \s*(?:before|after|instead\s+of)?\s*(insert|update|delete)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_CHANGES = {
    "": ("insert", "delete"),
    "delete": ("insert", "delete"),
    "diff": ("insert", "update", "delete"),
    "merge": ("insert", "update"),
}


def refusals(session: Session, load: Load) -> list[str]:
    """Every reason not to begin, each with the way out."""
    assert load.relation is not None
    name, table = load.table[-1], join_name(load.table)
    detail = load.relation.detail
    if detail["type"] != "table" or detail["virtual"]:
        return [
            f"{table} is a {'virtual table' if detail['virtual'] else 'view'}: write to a table"
        ]
    found = _rights(session)
    changes = _CHANGES[load.how]
    if load.how != "merge":
        references = [row[0] for row in session.execute(_REFERENCES, (name, name))]
        if references:
            found.append(
                f"{table} is referenced by foreign keys of {', '.join(references)}, which emptying "
                "it would break: use mode incremental, or drop those foreign keys"
            )
    for trigger, definition in session.execute(_TRIGGERS, (name,)):
        event = _EVENT.match(definition.strip())
        # A definition that cannot be read is taken to fire.
        if event is None or event[1].lower() in changes:
            on = event[1].lower() if event else "some change"
            found.append(
                f"{table} has the trigger {trigger} on {on}, which could change what is stored: "
                "drop it, or write to a table without triggers"
            )
    return found + _key(load, table)


def _rights(session: Session) -> list[str]:
    path = session.path
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return []
    return [
        f"{path} and its folder must be writable for this worker (SQLite keeps its journal beside "
        "the file): change their permissions"
    ]


def _key(load: Load, table: str) -> list[str]:
    assert load.relation is not None
    unique = load.relation.detail["unique"]
    return keys.problems(
        load, table, lambda: any(parts.keys() == set(load.key) for parts in unique)
    )
