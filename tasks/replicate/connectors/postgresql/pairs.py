"""How a PostgreSQL column reaches a PostgreSQL column: the planner's table for the byte lane.

Binary COPY only where both ends read the same bits: one base type, built in (or an enum of one
name), with the same modifiers, in versions that mean the same by it. Otherwise the source casts to
the sink's type where the cast keeps every value, or the sink parses the source's text, which gives
the right value or an error. A conversion that would lose something without an error (a rounded
number, a dropped time zone) is guarded in SQL: a value that does not survive becomes a text, or in
binary a form, that no such column accepts. It is always the sink that refuses: its error names the
column, and that of a cast at the source does not.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.replicate.connector import Column, Fit, Lane
from tasks.replicate.connectors.postgresql.catalog import interval_fields
from tasks.replicate.fits import refusal

ANY = frozenset({Lane.COPY_BINARY, Lane.COPY_TEXT, Lane.ROWS})
AS_TEXT = frozenset({Lane.COPY_TEXT, Lane.ROWS})
POISON = "*"
"""Stands in for a value that the sink could not hold; no number or time parses it."""
NO_FORM = f"pg_catalog.decode('{'00' * 64}', 'hex')"
"""Stands in for it in binary: a 0 of any number or time, and more bytes than belong to it."""
_GREATEST_INTERVAL = "178956970 years 7 mons 2147483647 days 2562047788:00:54.775807"
"""Of servers before 17. Later ones take it for infinity; the least they refuse by themselves."""

# Types whose text means something else, or nothing, in another database.
_NAMES_OF_OBJECTS = frozenset(
    {"regclass", "regproc", "regprocedure", "regoper", "regoperator", "regtype", "regconfig"}
    | {"regdictionary", "regnamespace", "regrole", "regcollation"}
)
_OF_ONE_DATABASE = _NAMES_OF_OBJECTS | {"money", "xml"}
_INTEGERS = {"int2": 16, "int4": 32, "int8": 64}
_CHARACTERS = frozenset({"text", "varchar", "bpchar", "name", "char"})
_CLOCKS = frozenset({"time", "timetz", "timestamp", "timestamptz", "interval"})
_SENDS = (
    {name: f"{name}send" for name in _INTEGERS}
    | {name: f"{name}_send" for name in _CLOCKS}
    | {"numeric": "numeric_send"}
)
"""Of each type the function that makes its binary form."""
# Text that these types parse is either their value or an error; dates and floats are left out,
# because PostgreSQL reads more into a text than is there (an order of day and month, rounding).
_PARSED = frozenset({"int2", "int4", "int8", "uuid", "bool", "json", "inet", "macaddr"})
# Functions and operators are named in full: a schema of the user's may have others of their names.
_EQUALS = "operator(pg_catalog.=)"
_NUMBER = "({0})::numeric"
_LENGTH = "pg_catalog.length(({0})::text)"
# Of less than an address, PostgreSQL guesses the net from its first number.
_WHOLE_NET = r"({0})::text operator(pg_catalog.~) '[/:]|[.].*[.].*[.]'"


def pair(source: Column, sink: Column) -> Fit:
    """The fit of one PostgreSQL column to another."""
    fit = _pair(source, sink)
    if fit.packed is not None and sink.type.name != sink.detail["base"]:
        # A domain would look at the stand-in's 0, and refuse that for a reason of its own.
        fit = replace(fit, lanes=fit.lanes & AS_TEXT, packed=None)
    apart = (source.detail["newer"] ^ sink.detail["newer"]) & _within(source) & _within(sink)
    return _apart(source, sink, fit, apart) if apart and fit.refusal is None else fit


def _apart(source: Column, sink: Column, fit: Fit, apart: frozenset[str]) -> Fit:
    """The fit where the servers differ in how they write and read types inside the columns'."""
    lanes = fit.lanes
    if "interval" in apart:
        lanes &= AS_TEXT
        if "interval" in sink.detail["newer"]:
            finite = f"strpos(({{0}})::text, '{_GREATEST_INTERVAL}') = 0"
            value = (fit.read_as or "{0}").replace("{}", "{0}")
            fit = replace(fit, read_as=_guard(finite, value=value), poisons=True)
    if "char" in apart and "char" in source.detail["newer"]:
        lanes -= AS_TEXT
    if not lanes:
        reason = 'the text of "char" is another before version 15'
        return refusal(source.type, sink.type, reason)
    return replace(fit, lanes=lanes)


def _pair(source: Column, sink: Column) -> Fit:
    ours, theirs = source.detail, sink.detail
    if ours["base"] == theirs["base"]:
        return _same(source, sink)
    one, two = ours["typname"], theirs["typname"]
    if "money" in _within(source) | _within(sink):
        return refusal(source.type, sink.type, "money depends on the server's locale")
    if two in _CHARACTERS:
        return _into_characters(source, sink)
    if one in _INTEGERS and two in _INTEGERS:
        if _INTEGERS[one] < _INTEGERS[two]:
            return Fit(ANY, read_as=_cast(sink))
        held = _in_range(f"({{0}})::{one}", two)
        return Fit(ANY, poisons=True, packed=_packed(held, two, f"({{0}})::{two}"))
    if two == "numeric":
        return _into_numeric(source, sink)
    if two in ("float4", "float8"):
        exact = {"float8": ("int2", "int4", "float4"), "float4": ("int2",)}[two]
        if one in exact:
            return Fit(ANY, read_as=_cast(sink))
    if one == two and one in _CLOCKS:
        return _shorter_clock(source, sink)
    if (one, two) == ("date", "timestamp"):
        # Dates go on for some millions of years.
        day = "({0})::date"
        held = (
            f"{day} operator(pg_catalog.<) date '294277-01-01' or {day} {_EQUALS} date 'infinity'"
        )
        return Fit(ANY, poisons=True, packed=_packed(held, two, f"{day}::{sink.detail['base']}"))
    if (one, two) == ("jsonb", "json"):
        # The bits of json are its text's.
        return Fit(ANY, read_as="({})::text")
    if (one, two) == ("json", "jsonb"):
        return refusal(source.type, sink.type, "jsonb drops doubled keys and the order of keys")
    if one == "numeric" and two in _INTEGERS:
        # A cast would round; what stays a fraction is no integer's text.
        value = f"pg_catalog.trunc({_NUMBER})"
        whole = f"{_NUMBER} {_EQUALS} {value}"
        packed = _packed(f"{whole} and {_in_range(_NUMBER, two)}", two, f"{value}::{two}")
        return _guarded(whole, packed, value)
    if theirs["typtype"] == "e" and (one in _CHARACTERS or ours["typtype"] == "e"):
        # The bits of a label are its text's.
        return Fit(ANY, read_as="({})::text")
    if one in _CHARACTERS and two == "cidr":
        return Fit(AS_TEXT, read_as=_guard(_WHOLE_NET), poisons=True)
    if one in _CHARACTERS and two in _PARSED:
        return Fit(ANY if two == "json" else AS_TEXT, read_as="({})::text")
    if one.startswith("_") and two.startswith("_"):
        elements = (ours["element"], theirs["element"])
        wider = _INTEGERS.get(elements[1], 0) > _INTEGERS.get(elements[0], 99)
        if wider or elements == ("varchar", "text"):
            return Fit(ANY, read_as=_cast(sink))
    return refusal(source.type, sink.type)


def _same(source: Column, sink: Column) -> Fit:
    ours, theirs = source.detail, sink.detail
    if ours["locale"] != theirs["locale"]:
        return refusal(source.type, sink.type, "the servers differ in lc_monetary")
    if ours["signature"] != theirs["signature"]:
        return refusal(source.type, sink.type, "the type of that name is built otherwise there")
    if _within(source) & _OF_ONE_DATABASE:
        return _of_one_database(source, sink)
    built_in = ours["builtin"] and theirs["builtin"] and ours["typtype"] == theirs["typtype"] != "c"
    enum = ours["typtype"] == theirs["typtype"] == "e"
    sendable = ours["sendable"] and theirs["sendable"]
    return Fit(ANY if sendable and (built_in or enum) else AS_TEXT)


def _of_one_database(source: Column, sink: Column) -> Fit:
    """Types whose text, or bits, a database makes for itself: the name of an object is short where
    its schema is in the search path, and a number where it is gone."""
    typname, element = source.detail["typname"], source.detail["element"]
    kind = element or typname
    if kind == "money":
        return Fit(frozenset({Lane.COPY_BINARY}))
    if kind == "xml":
        # Its output leaves the declaration out, in binary, too; a cast does not.
        return Fit(AS_TEXT, read_as="({})::text[]" if element else "({})::text")
    return refusal(source.type, sink.type, "it means something else in each database")


def _within(column: Column) -> frozenset[str]:
    """The types of the values in the column's, or its own."""
    return frozenset(leaf for leaf, _ in column.detail["leaves"])


def _cast(sink: Column) -> str:
    return f"({{}})::{sink.detail['base']}"


def _guard(test: str, poison: str = f"'{POISON}'", value: str = "{0}") -> str:
    """The column, or ``value``, as text where ``test`` holds (or it is NULL), else the poison."""
    return f"case when ({test}) is not false then ({value})::text else {poison} end"


def _guarded(test: str, packed: str, value: str = "{0}") -> Fit:
    return Fit(ANY, read_as=_guard(test, value=value), poisons=True, packed=packed)


def _packed(test: str, typname: str, value: str) -> str:
    """The binary form of ``value``, which is of that type, where ``test`` holds, else none.

    COPY hands on the bytes of a ``bytea`` as they are, so that an expression can make the form of
    a value, or something that is no form. A NULL stays one.
    """
    form = f"pg_catalog.{_SENDS[typname]}({value})"
    return f"case when ({test}) is not false then {form} else {NO_FORM} end"


def _longer(room: int) -> str:
    return f"pg_catalog.repeat('{POISON}', {room + 1})"


def _in_range(number: str, integer: str) -> str:
    end = 2 ** (_INTEGERS[integer] - 1)
    return f"{number} operator(pg_catalog.>=) ({-end}) and {number} operator(pg_catalog.<) ({end})"


def _into_characters(source: Column, sink: Column) -> Fit:
    """Text of anything; into a shorter column only what is no longer than it.

    A cast to varchar(n), and a column of it, cut trailing spaces off without an error.
    """
    ours, one, two = source.detail, source.detail["typname"], sink.detail["typname"]
    if one in _NAMES_OF_OBJECTS or ours["typtype"] == "c" or one == "bytea":
        return refusal(source.type, sink.type)
    if one != "xml" and "xml" in _within(source):
        return refusal(source.type, sink.type, "xml within others loses its declaration")
    wide, room = source.type.length, sink.type.length
    if two == "bpchar":
        if one == "bpchar":
            return Fit(ANY, read_as="({})::text")
        if room is None:
            return refusal(source.type, sink.type, "bpchar drops spaces at the end")
        long = _longer(room)
        test = (
            f"{_LENGTH} <= {room} and ({{0}})::text {_EQUALS} pg_catalog.rtrim(({{0}})::text, ' ')"
        )
        return Fit(ANY, read_as=_guard(test, long), poisons=True)
    if room is None and two in ("text", "varchar"):
        return Fit(ANY, read_as="({})::text")
    room = room or 1
    if one in _CHARACTERS and wide is not None and wide <= room and two == "varchar":
        return Fit(ANY, read_as="({})::text")
    if two == "varchar":
        return Fit(ANY, read_as=_guard(f"{_LENGTH} <= {room}", _longer(room)), poisons=True)
    return refusal(source.type, sink.type)


def _into_numeric(source: Column, sink: Column) -> Fit:
    one = source.detail["typname"]
    if one not in _INTEGERS and one != "numeric":
        return refusal(source.type, sink.type)
    precision, scale = sink.type.precision, sink.type.scale
    if precision is None or scale is None:
        return Fit(ANY, read_as="({})::numeric")
    # Too many digits before the point are the sink's error.
    if one in _INTEGERS and scale >= 0:
        return Fit(ANY, read_as=_NUMBER)
    wide, fine = source.type.precision, source.type.scale
    if wide is not None and fine is not None and fine <= scale:
        roomy = wide - fine <= precision - scale
        return Fit(ANY, read_as=_cast(sink) if roomy else _NUMBER)
    test = f"{_NUMBER} {_EQUALS} pg_catalog.round({_NUMBER}, {scale})"
    return _guarded(test, _packed(test, "numeric", _NUMBER))


def _shorter_clock(source: Column, sink: Column) -> Fit:
    finer = (source.type.precision or 0) > (sink.type.precision or 0)
    if source.type.precision is None or sink.type.precision is None:
        return refusal(source.type, sink.type)
    if source.detail["typname"] == "interval" and _fields(source) != _fields(sink):
        return refusal(source.type, sink.type, "the interval's fields differ")
    if not finer:
        return Fit(ANY, read_as=_cast(sink))
    shorter = f"({{0}})::{sink.detail['base']}"
    test = f"({{0}})::{source.detail['base']} {_EQUALS} {shorter}"
    return _guarded(test, _packed(test, source.detail["typname"], shorter))


def _fields(column: Column) -> int:
    return interval_fields(column.detail["typmod"])
