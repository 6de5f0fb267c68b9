"""How PostgreSQL reads the text of other engines: which of its types make more, or less, of it.

Most of its types take a text for their value or refuse it. Some change it without an error: they
round, cut, or fill in a time zone. A column of such a type is guarded; where such values stand
inside of others (an array, a range, a composite), each is looked at, or the pair is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Column, ColumnPlan, ColumnType, Guard, Kind, Row
from tasks.replicate.connectors.postgresql import catalog
from tasks.replicate.connectors.postgresql.session import comma, raw

_TIMES = frozenset({"time", "timetz", "timestamp", "timestamptz"})
_CUTS = "PostgreSQL cuts such text without an error"


def guards(source: ColumnType, sink: Column, found: Iterable[Guard]) -> tuple[Guard, ...] | str:
    """The guards that a column of another engine needs, or why it is refused.

    ``found`` are those of any engine; what PostgreSQL refuses by itself is left out of them.
    """
    typname, typmod = sink.detail["typname"], sink.detail["typmod"]
    if sink.detail["typtype"] in ("c", "r", "m") or sink.detail["element"] is not None:
        return _within(sink.detail["leaves"])
    if source.kind is Kind.INTERVAL and not source.loose and typmod < 0:
        return ()
    if typname in ("interval", "money", "name", "char", "timetz", "cidr"):
        return _rule(typname, typmod)
    kept = _kept(source, sink, found)
    if typname == "bpchar":
        return (*kept, Guard("unpadded"))
    return (*kept, Guard("distinct-keys")) if typname == "jsonb" else kept


def _kept(source: ColumnType, sink: Column, found: Iterable[Guard]) -> tuple[Guard, ...]:
    text = source.kind is Kind.TEXT
    checked = {"integer", "boolean"} if source.kind is not Kind.FLOAT else set()
    if sink.detail["typname"] == "oid":
        # It takes -1 for the greatest.
        checked.discard("integer")
    if source.loose or text:
        checked |= {"scale"} if sink.type.precision is None else set()
        checked |= {"text"} if sink.type.length is None and not source.loose else set()
    if text and not source.loose:
        checked.add("real")
    return tuple(
        Guard("nearest", guard.argument) if guard.name == "real" and source.loose else guard
        for guard in found
        if guard.name not in checked
    )


def _within(leaves: Iterable[tuple[str, int]]) -> tuple[Guard, ...] | str:
    """Of a type that holds values of others: each value is looked at, where all are of one type."""
    found: list[tuple[Guard, ...]] = []
    for typname, typmod in leaves:
        rule = _rule(typname, typmod, within=True)
        if isinstance(rule, str):
            return rule
        found.append(rule)
    if not any(found):
        return ()
    if len(found) > 1:
        return "it holds times or rounded numbers beside other values"
    (looks,) = found
    # One look at a value takes all arguments.
    first = next((guard.argument for guard in looks if guard.argument is not None), None)
    second = next((guard.second for guard in looks if guard.second is not None), None)
    return (Guard(f"each-{looks[0].name}", first, second),)


def _rule(typname: str, typmod: int, *, within: bool = False) -> tuple[Guard, ...] | str:
    """What a text needs so that this type takes it as it is; a text is why none could."""
    type_ = catalog.neutral(typname, typname, typmod)
    match typname:
        case "money":
            return "money depends on the server's locale"
        case "name" | "char":
            return _CUTS
        case "bpchar" | "varchar" if within and type_.length is not None:
            return _CUTS
        case "jsonb" if within:
            return "jsonb drops doubled keys"
        case "cidr":
            return (Guard("net"),)
        case "oid":
            return (Guard("integer", 32, 1),)
        case "numeric" if type_.precision is not None:
            return (Guard("scale", type_.precision, type_.scale),)
        case "interval":
            if catalog.interval_fields(typmod) != catalog.ALL_FIELDS:
                return "an interval of some fields drops the others"
            return (Guard("interval", type_.precision),)
        case "date":
            return (Guard("date"),)
    if typname in _TIMES:
        digits = typmod if typmod >= 0 else 6
        return (Guard(typname), Guard("fraction", digits))
    return ()


# Of these a text has many forms, and only PostgreSQL knows which one it shows. (What json is
# given, it keeps.)
_MANY_FORMS = frozenset({Kind.INTERVAL, Kind.JSON, Kind.OTHER})


def shown(
    connection: psycopg.Connection[Any], columns: Sequence[ColumnPlan], rows: Sequence[Row]
) -> list[Row]:
    """The rows, with each text for such a column as the column would show it."""
    places = [
        i
        for i, plan in enumerate(columns)
        if plan.sink.type.kind in _MANY_FORMS and plan.sink.detail["typname"] != "json"
    ]
    if not places or not rows:
        return list(rows)
    names = [sql.Identifier(f"c{i}") for i in places]
    casts = [
        sql.SQL("{}::{}::text").format(name, raw(columns[i].sink.detail["base"]))
        for i, name in zip(places, names, strict=True)
    ]
    statement = sql.SQL(
        "select {} from unnest({}) with ordinality given ({}, place) order by place"
    ).format(comma(casts), comma([sql.SQL("%s::text[]")] * len(places)), comma(names))
    sides = [list(map(itemgetter(i), rows)) for i in places]
    found = list(zip(*connection.execute(statement, sides), strict=True))
    whole = list(zip(*rows, strict=True))
    for i, side in zip(places, found, strict=True):
        whole[i] = side
    return list(zip(*whole, strict=True))
