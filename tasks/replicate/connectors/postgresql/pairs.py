"""How a PostgreSQL column reaches a PostgreSQL column: the planner's table for the byte lane.

Binary COPY only where both ends read the same bits: one base type, built in (or an enum of one
name), with the same modifiers, in versions that mean the same by it. Otherwise the source casts to
the sink's type where the cast keeps every value or fails, or the sink parses the source's text,
which gives the right value or an error. A conversion that would lose something without an error (a
rounded number, a dropped time zone) is guarded in SQL: a value that does not survive becomes a
text that no such column accepts.
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
_GREATEST_INTERVAL = "178956970 years 7 mons 2147483647 days 2562047788:00:54.775807"
"""Of servers before 17. Later ones take it for infinity; the least they refuse by themselves."""

# Types whose text means something else, or nothing, in another database.
_NAMES_OF_OBJECTS = frozenset(
    {"regclass", "regproc", "regprocedure", "regoper", "regoperator", "regtype", "regconfig"}
    | {"regdictionary", "regnamespace", "regrole", "regcollation"}
)
_INTEGERS = {"int2": 16, "int4": 32, "int8": 64}
_CHARACTERS = frozenset({"text", "varchar", "bpchar", "name", "char"})
_CLOCKS = frozenset({"time", "timetz", "timestamp", "timestamptz", "interval"})
# Text that these types parse is either their value or an error; dates and floats are left out,
# because PostgreSQL reads more into a text than is there (an order of day and month, rounding).
_PARSED = frozenset({"int2", "int4", "int8", "uuid", "bool", "json", "inet", "cidr", "macaddr"})


def pair(source: Column, sink: Column) -> Fit:
    """The fit of one PostgreSQL column to another."""
    fit = _pair(source, sink)
    within = [{leaf for leaf, _ in end.detail["leaves"]} for end in (source, sink)]
    apart = (source.detail["newer"] ^ sink.detail["newer"]) & within[0] & within[1]
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
    if one == "money" or two == "money":
        return refusal(source.type, sink.type, "money depends on the server's locale")
    if two in _CHARACTERS:
        return _into_characters(source, sink)
    if one in _INTEGERS and two in _INTEGERS:
        # Out of range is the sink's error, which names the column; a cast's would not.
        wider = _INTEGERS[one] < _INTEGERS[two]
        return Fit(ANY, read_as=_cast(sink)) if wider else Fit(AS_TEXT)
    if two == "numeric":
        return _into_numeric(source, sink)
    if two in ("float4", "float8"):
        exact = {"float8": ("int2", "int4", "float4"), "float4": ("int2",)}[two]
        if one in exact:
            return Fit(ANY, read_as=_cast(sink))
    if one == two and one in _CLOCKS:
        return _shorter_clock(source, sink)
    if (one, two) == ("date", "timestamp"):
        return Fit(ANY, read_as=_cast(sink))
    if (one, two) == ("jsonb", "json"):
        # The bits of json are its text's.
        return Fit(ANY, read_as="({})::text")
    if (one, two) == ("json", "jsonb"):
        return refusal(source.type, sink.type, "jsonb drops doubled keys and the order of keys")
    if one == "numeric" and two in _INTEGERS:
        # A cast would round; what stays a fraction is no integer's text.
        return _guarded("({0}) = trunc({0})", value="trunc({0})")
    if one in _CHARACTERS and (two in _PARSED or theirs["typtype"] == "e"):
        return Fit(AS_TEXT, read_as="({})::text")
    if ours["typtype"] == "e" and theirs["typtype"] == "e":
        return Fit(AS_TEXT, read_as="({})::text")
    if one.startswith("_") and two.startswith("_"):
        elements = (ours["element"], theirs["element"])
        wider = _INTEGERS.get(elements[1], 0) > _INTEGERS.get(elements[0], 99)
        if wider or elements == ("varchar", "text"):
            return Fit(ANY, read_as=_cast(sink))
    return refusal(source.type, sink.type)


def _same(source: Column, sink: Column) -> Fit:
    ours, theirs = source.detail, sink.detail
    if ours["typname"] == "money" and ours["locale"] != theirs["locale"]:
        return refusal(source.type, sink.type, "the servers differ in lc_monetary")
    if ours["signature"] != theirs["signature"]:
        return refusal(source.type, sink.type, "the type of that name is built otherwise there")
    if ours["typname"] == "money":
        return Fit(frozenset({Lane.COPY_BINARY}))
    built_in = ours["builtin"] and theirs["builtin"] and ours["typtype"] == theirs["typtype"] != "c"
    enum = ours["typtype"] == theirs["typtype"] == "e"
    if ours["typname"] in _NAMES_OF_OBJECTS or ours["element"] in _NAMES_OF_OBJECTS:
        return Fit(AS_TEXT)
    sendable = ours["sendable"] and theirs["sendable"] and ours["typname"] != "xml"
    return Fit(ANY if sendable and (built_in or enum) else AS_TEXT)


def _cast(sink: Column) -> str:
    return f"({{}})::{sink.detail['base']}"


def _guard(test: str, poison: str = f"'{POISON}'", value: str = "{0}") -> str:
    """The column, or ``value``, as text where ``test`` holds (or it is NULL), else the poison."""
    return f"case when ({test}) is not false then ({value})::text else {poison} end"


def _guarded(test: str, poison: str = f"'{POISON}'", value: str = "{0}") -> Fit:
    return Fit(AS_TEXT, read_as=_guard(test, poison, value), poisons=True)


def _into_characters(source: Column, sink: Column) -> Fit:
    """Text of anything; into a shorter column only what is no longer than it.

    A cast to varchar(n), and a column of it, cut trailing spaces off without an error.
    """
    ours, one, two = source.detail, source.detail["typname"], sink.detail["typname"]
    if one in _NAMES_OF_OBJECTS or ours["typtype"] == "c" or one == "bytea":
        return refusal(source.type, sink.type)
    wide, room = source.type.length, sink.type.length
    if two == "bpchar" and one == "bpchar":
        return Fit(ANY, read_as="({})::text")
    if two == "bpchar":
        long = f"repeat('{POISON}', {(room or 1) + 1})"
        test = f"length(({{0}})::text) <= {room or 1} and ({{0}})::text = rtrim(({{0}})::text, ' ')"
        return _guarded(test, long)
    if room is None and two in ("text", "varchar"):
        return Fit(ANY, read_as="({})::text")
    room = room or 1
    if one in _CHARACTERS and wide is not None and wide <= room and two == "varchar":
        return Fit(ANY, read_as="({})::text")
    if two == "varchar":
        long = f"repeat('{POISON}', {room + 1})"
        return _guarded(f"length(({{0}})::text) <= {room}", long)
    return refusal(source.type, sink.type)


def _into_numeric(source: Column, sink: Column) -> Fit:
    one = source.detail["typname"]
    if one not in _INTEGERS and one != "numeric":
        return refusal(source.type, sink.type)
    precision, scale = sink.type.precision, sink.type.scale
    if precision is None or scale is None:
        return Fit(ANY, read_as="({})::numeric")
    if one in _INTEGERS and scale >= 0:
        return Fit(AS_TEXT)
    wide, fine = source.type.precision, source.type.scale
    if wide is not None and fine is not None and fine <= scale:
        roomy = wide - fine <= precision - scale
        return Fit(ANY, read_as=_cast(sink)) if roomy else Fit(AS_TEXT)
    return _guarded(f"({{0}})::numeric = round(({{0}})::numeric, {scale})")


def _shorter_clock(source: Column, sink: Column) -> Fit:
    finer = (source.type.precision or 0) > (sink.type.precision or 0)
    if source.type.precision is None or sink.type.precision is None:
        return refusal(source.type, sink.type)
    if source.detail["typname"] == "interval" and _fields(source) != _fields(sink):
        return refusal(source.type, sink.type, "the interval's fields differ")
    if not finer:
        return Fit(ANY, read_as=_cast(sink))
    return _guarded(f"({{0}}) = ({{0}})::{sink.detail['base']}")


def _fields(column: Column) -> int:
    return interval_fields(column.detail["typmod"])
