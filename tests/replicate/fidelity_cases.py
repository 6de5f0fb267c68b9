"""The values and the pairs of types that the fidelity matrix tries."""

from __future__ import annotations

from dataclasses import dataclass

MADE_BEFORE = """
create type mood as enum ('sad', 'ok', 'it''s "odd"');
create type other_mood as enum ('ok', 'happy');
create type pair as (a int, b text);
create type swapped as (b int, a int);
create domain positive as int check (value > 0);
create domain label as text;
create type pace as range (subtype = float8);
"""

VALUES: dict[str, tuple[str, ...]] = {
    "boolean": ("true", "false"),
    "smallint": ("-32768", "32767"),
    "integer": ("-2147483648", "2147483647", "0"),
    "bigint": ("-9223372036854775808", "9223372036854775807"),
    "numeric": ("1.0", "1.00", "NaN", "1" * 200 + ".5", "0." + "0" * 150 + "1", "-0.10"),
    "numeric(10,2)": ("12345678.90", "-0.01"),
    "real": ("0.1", "NaN", "Infinity", "-0", "1e-45", "3.4028235e38"),
    "double precision": ("0.1", "NaN", "-Infinity", "-0", "5e-324", "1.7976931348623157e308"),
    "text": ("", "\\N", "NULL", 'a\tb\nc\r\\d"e', "\x01\x7f", "🐘 é 中", " padded ", "x" * 100_000),
    "character varying(5)": ("", "12345", " 1 ", "🐘🐘🐘🐘🐘"),
    "character(5)": ("ab", "12345"),
    '"char"': ("a",),
    "name": ("a name",),
    "bytea": ("\\x", "\\x00ff5c0a09", "\\x" + "ab" * 50_000),
    "date": ("0044-03-15 BC", "infinity", "-infinity", "5874897-12-31", "2024-02-29"),
    "time without time zone": ("00:00:00", "24:00:00", "23:59:59.999999"),
    "time with time zone": ("23:59:59.999999+14", "00:00:00-12:30"),
    "timestamp without time zone": ("4713-01-01 00:00:00 BC", "infinity", "2026-11-01 01:02:03.4"),
    "timestamp(3) without time zone": ("2026-11-01 01:02:03.456",),
    "timestamp with time zone": (
        "4713-01-01 00:00:00+00 BC",
        "-infinity",
        "2026-03-29 02:30:00+02",
        "294276-12-31 23:59:59.999999+00",
    ),
    "interval": ("1 year -2 days 00:00:00.001", "-178000000 years", "24:00:00", "1 day"),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "json": ('{"b": 1,  "a": [null, {"c": "\\u00e9"}], "b": 2}', "1.0", '""', "null"),
    "jsonb": ('{"b": 1, "a": [null, {"c": "é"}]}', "1.00", "1" * 100, "null"),
    "xml": ("<a b='1'>é</a>", '<?xml version="1.0" encoding="UTF-8"?>\n<a/>'),
    "xml[]": ('{<a/>,"<?xml version=\\"1.0\\"?><b/>"}',),
    "money[]": ('{"-$1,234.56",NULL}',),
    "inet": ("::1/64", "192.168.0.1"),
    "cidr": ("10.0.0.0/8",),
    "macaddr": ("08:00:2b:01:02:03",),
    "point": ("(0.1,-0)",),
    "polygon": ("((0,0),(1,1),(1,0))",),
    "bit(3)": ("101",),
    "bit varying": ("", "10101"),
    "tsvector": ("'a':1A 'it''s':2",),
    "tsquery": ("'a' & !'b'",),
    "pg_lsn": ("16/B374D848",),
    "xid8": ("18446744073709551615",),
    "oid": ("4000000000",),
    "money": ("-$1,234.56",),
    "int4range": ("[1,5)", "empty", "(,)"),
    "tstzrange": ('["2026-01-01 00:00:00+00",infinity)',),
    "integer[]": ("{}", "{{1,2},{3,NULL}}", "[2:3]={1,2}"),
    "text[]": ('{"",NULL,"NULL","a,b","q\\"uote","back\\\\slash"}',),
    "timestamp with time zone[]": ('{"2026-01-01 00:00:00+00",infinity}',),
    "oid[]": ("{4000000000}",),
    "mood": ("sad", 'it\'s "odd"'),
    "mood[]": ('{sad,"it\'s \\"odd\\""}',),
    "pair": ('(1,"a,b")', "(,)"),
    "positive": ("1",),
    "label": ("", "x"),
    "pace": ("[0.1,0.5)",),
}
"""Of each type, values at its edges, as text that PostgreSQL reads; NULL is always added."""


@dataclass(frozen=True)
class Pair:
    """A source type onto another sink type. ``odd`` values must be refused, naming the column."""

    source: str
    sink: str
    good: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()


PAIRS = (
    Pair("smallint", "integer", VALUES["smallint"]),
    Pair("integer", "bigint", VALUES["integer"]),
    Pair("bigint", "integer", ("42", "-2147483648"), ("2147483648",)),
    Pair("bigint", "smallint", VALUES["smallint"], ("32768", "-32769")),
    Pair("bigint", "positive", ("5", "2147483647"), ("-5", "2147483648")),
    Pair("bigint", "numeric", VALUES["bigint"]),
    Pair("bigint", "numeric(5,2)", ("999", "-1"), ("1000",)),
    Pair("integer", "double precision", VALUES["integer"]),
    Pair("bigint", "double precision", (), ("42",)),
    Pair("bigint", "timestamp with time zone", (), ("42",)),
    Pair("integer", "date", (), ("42",)),
    Pair("integer", "boolean", (), ("1",)),
    Pair("integer", "text", VALUES["integer"]),
    Pair("integer", "character varying(3)", ("123",), ("1234",)),
    Pair("integer", "positive", ("5",), ("-5",)),
    Pair("positive", "integer", ("5",)),
    Pair("integer[]", "bigint[]", VALUES["integer[]"]),
    Pair("numeric", "integer", ("7.00", "-3"), ("1.5", "NaN", "99999999999")),
    Pair("numeric", "bigint", VALUES["bigint"], ("9223372036854775808", "0.5", "NaN")),
    Pair("numeric", "numeric(10,2)", ("1.50", "-99999999.99", "NaN"), ("1.005", "100000000")),
    Pair("numeric(10,2)", "numeric(12,4)", VALUES["numeric(10,2)"]),
    Pair("numeric(10,2)", "numeric(8,4)", ("9999.99", "-0.50", "NaN"), ("10000.00",)),
    Pair("numeric(10,2)", "numeric", VALUES["numeric(10,2)"]),
    Pair("numeric", "double precision", (), ("0.1",)),
    Pair("real", "double precision", ("0.1", "NaN", "-Infinity")),
    Pair("double precision", "real", (), ("0.1",)),
    Pair("double precision", "numeric", (), ("0.1",)),
    Pair("double precision", "text", VALUES["double precision"]),
    Pair("boolean", "text", VALUES["boolean"]),
    Pair("boolean", "integer", (), ("true",)),
    Pair("text", "boolean", ("true", "f"), ("maybe",)),
    Pair("text", "integer", ("42",), ("x", "4.5", "99999999999")),
    Pair("text", "uuid", VALUES["uuid"], ("x",)),
    Pair("text", "cidr", ("10/8", "192.168.0.1", "::1"), ("192.168", "128", "10.0.0.1/8")),
    Pair("text", "character", ("a",), ("ab",)),
    Pair("text", "bpchar", (), ("ab",)),
    Pair("regclass", "regclass", (), ("pg_class",)),
    Pair("regtype[]", "regtype[]", (), ("{integer}",)),
    Pair("text", "date", (), ("01/02/03",)),
    Pair("text", "timestamp without time zone", (), ("2026-01-01 00:00:00+02",)),
    Pair("text", "double precision", (), ("0.1",)),
    Pair("text", "json", VALUES["json"], ("{",)),
    Pair("text", "jsonb", (), ("{}",)),
    Pair("text", "character varying(5)", ("12345", " 1 "), ("123456", "12345 ")),
    Pair("text", "character(5)", ("12345", "ab"), ("123456", "ab ")),
    Pair("text", "bytea", (), ("abc",)),
    Pair("character varying(5)", "text", VALUES["character varying(5)"]),
    Pair("character varying(5)", "character varying(9)", VALUES["character varying(5)"]),
    Pair("character(5)", "text", VALUES["character(5)"]),
    Pair("bytea", "text", (), ("\\x00",)),
    Pair("label", "text", VALUES["label"]),
    Pair(
        "date",
        "timestamp without time zone",
        ("infinity", "-infinity", "2024-02-29", "294276-12-31", "4713-01-01 BC"),
        ("294277-01-01", "5874897-12-31"),
    ),
    Pair("date", "timestamp with time zone", (), ("2024-02-29",)),
    Pair("timestamp without time zone", "date", (), ("2026-01-01 00:00:00",)),
    Pair(
        "timestamp with time zone", "timestamp without time zone", (), ("2026-01-01 00:00:00+00",)
    ),
    Pair("timestamp without time zone", "timestamp with time zone", (), ("2026-01-01 00:00:00",)),
    Pair(
        "timestamp without time zone",
        "timestamp(3) without time zone",
        ("2026-01-01 00:00:00.123", "infinity"),
        ("2026-01-01 00:00:00.1234",),
    ),
    Pair(
        "timestamp with time zone",
        "timestamp(0) with time zone",
        ("0044-03-15 00:00:00+00 BC", "-infinity"),
        ("9999-12-31 23:59:59.999999+00",),
    ),
    Pair("time without time zone", "time(0) without time zone", ("01:02:03",), ("01:02:03.5",)),
    Pair("time with time zone", "time(1) with time zone", (), ("24:00:00-05",)),
    Pair("interval", "interval(2)", ("1 mon -30 days 00:00:00.01",), ("-0.001 seconds",)),
    Pair("timestamp with time zone", "text", VALUES["timestamp with time zone"]),
    Pair("interval", "text", VALUES["interval"]),
    Pair("interval", "interval day to second", (), ("1 year",)),
    Pair("json", "jsonb", (), ('{"a": 1, "a": 2}',)),
    Pair("jsonb", "json", VALUES["jsonb"]),
    Pair("jsonb", "text", VALUES["jsonb"]),
    Pair("mood", "text", VALUES["mood"]),
    Pair("text", "mood", VALUES["mood"], ("happy",)),
    Pair("mood", "other_mood", ("ok",), ("sad",)),
    Pair("uuid", "text", VALUES["uuid"]),
    Pair("money", "numeric", (), ("$1.00",)),
    Pair("pair", "text", (), ("(1,a)",)),
)
