"""What MySQL's types are to the interface, and which of them hold a foreign column's values."""

from __future__ import annotations

import re
from typing import Any

from tasks.replicate.connector import Column, ColumnType, Kind, SinkError

_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "integer": 32, "bigint": 64}
_OCTETS = {"tinyblob": 255, "blob": 65535, "mediumblob": 2**24 - 1, "longblob": None}
_TEXTS = frozenset({"tinytext", "text", "mediumtext", "longtext"})
_TIMES = {"time": Kind.TIME, "datetime": Kind.TIMESTAMP, "timestamp": Kind.TIMESTAMPTZ}
_MEMBER = re.compile(r"'((?:[^']|'')*)'")
# Characters of four bytes at most, in an index of at most 3072 bytes.
KEY_CHARACTERS = 191
WIDEST_VARCHAR = 4000


def type_of(
    base: str,
    shown: str,
    *,
    length: int | None = None,
    precision: int | None = None,
    scale: int | None = None,
    digits: int | None = None,
    json: bool = False,
) -> ColumnType:
    """The type of a column. ``base`` is the bare name, ``shown`` the whole declaration."""
    unsigned = "unsigned" in shown
    if json or base == "json":
        return ColumnType(Kind.JSON, "json")
    if base in _BITS:
        return ColumnType(Kind.INTEGER, shown, bits=_BITS[base], unsigned=unsigned)
    if base == "bit":
        return ColumnType(Kind.INTEGER, shown, bits=precision or 1, unsigned=True)
    if base == "year":
        return ColumnType(Kind.INTEGER, shown, bits=16, unsigned=True)
    if base == "decimal":
        return ColumnType(Kind.DECIMAL, shown, precision=precision, scale=scale or 0)
    if base in ("float", "double"):
        return ColumnType(Kind.FLOAT, shown, bits=32 if base == "float" else 64)
    if base in _TIMES:
        return ColumnType(_TIMES[base], shown, precision=digits or 0)
    if base == "date":
        return ColumnType(Kind.DATE, shown)
    if base in ("char", "varchar"):
        return ColumnType(Kind.TEXT, shown, length=length)
    if base in _TEXTS:
        return ColumnType(Kind.TEXT, shown)
    if base in ("binary", "varbinary"):
        return ColumnType(Kind.BYTES, shown, length=length)
    if base in _OCTETS:
        return ColumnType(Kind.BYTES, shown, length=_OCTETS[base])
    if base == "uuid":
        return ColumnType(Kind.UUID, shown)
    if base in ("enum", "set", "inet4", "inet6"):
        return ColumnType(Kind.OTHER, shown)
    # Geometries, and what later versions bring: their bytes, exactly.
    return ColumnType(Kind.BYTES, shown)


def members(shown: str) -> tuple[str, ...]:
    """The members of an enum's or a set's declaration."""
    return tuple(part.replace("''", "'") for part in _MEMBER.findall(shown))


def read_as(column: Column) -> str:
    """A template for the column's cell: the text protocol prints a FLOAT with six digits, and one
    that was declared with (M,D) rounded; a bit field comes as raw bytes."""
    base = column.detail["base"]
    if base == "float" or (base == "double" and "(" in column.type.name):
        return "{} * 1e0"
    return "{} + 0" if base == "bit" else "{}"


class Creation:
    """MySQL's types for columns of another end, on one server."""

    def __init__(self, *, mariadb: bool, version: tuple[int, ...]) -> None:
        self._mariadb = mariadb
        self._uuid = mariadb and version >= (10, 7)
        # Equal is what has the same letters, trailing spaces included.
        modern = version >= (8, 0, 17)
        exact = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin" if modern else "utf8mb4_bin"
        self._characters = f"character set utf8mb4 collate {exact}"

    def definition(self, column: Column, dialect: str, *, key: bool) -> str:
        """The type and whether NULL is allowed. Raises SinkError where nothing holds the values."""
        null = "null" if column.nullable and not key else "not null"
        if dialect == "mysql":
            name = "json" if column.type.kind is Kind.JSON else declared(column)
        else:
            name = self._type(column.type, column.name, key=key)
        # Without an explicit default an old server invents one for a timestamp.
        empty = " default null" if null == "null" else ""
        return f"{name} {null}{empty}"

    def _type(self, kind: ColumnType, name: str, *, key: bool) -> str:
        digits = 6 if kind.precision is None else min(kind.precision, 6)
        plain = {
            Kind.BOOLEAN: "tinyint(1)",
            Kind.FLOAT: "float" if kind.bits == 32 else "double",
            Kind.DATE: "date",
            Kind.TIME: f"time({digits})",
            Kind.TIMESTAMP: f"datetime({digits})",
            Kind.TIMESTAMPTZ: f"timestamp({digits})",
            # The native type of MySQL rewrites documents (numbers, order and doubles of keys).
            Kind.JSON: "json" if self._mariadb else f"longtext {self._characters}",
            Kind.UUID: "uuid" if self._uuid else "char(36) character set ascii",
            Kind.INTERVAL: f"varchar(255) {self._characters}",
        }
        if kind.kind in plain:
            return plain[kind.kind]
        if kind.kind is Kind.INTEGER:
            return _integer(kind)
        if kind.kind is Kind.DECIMAL:
            return _decimal(kind, name)
        if kind.kind is Kind.BYTES:
            if key or (kind.length and kind.length <= WIDEST_VARCHAR):
                return f"varbinary({kind.length or 4 * KEY_CHARACTERS})"
            return "longblob"
        if key or (kind.length and kind.length <= WIDEST_VARCHAR):
            return f"varchar({kind.length or KEY_CHARACTERS}) {self._characters}"
        return f"longtext {self._characters}"


def declared(column: Column) -> str:
    """The full declaration of a column of this dialect, its character set included."""
    characters: str = column.detail.get("characters", "")
    name = "longtext" if column.type.kind is Kind.JSON and characters else column.type.name
    return f"{name} {characters}".rstrip()


def _integer(kind: ColumnType) -> str:
    if kind.bits is None or kind.bits > 64:
        return "decimal(65,0)"
    names = {8: "tinyint", 16: "smallint", 24: "mediumint", 32: "int", 64: "bigint"}
    bits = min(size for size in names if size >= kind.bits)
    return names[bits] + (" unsigned" if kind.unsigned else "")


def _decimal(kind: ColumnType, name: str) -> str:
    if kind.precision is None:
        return "decimal(65,30)"
    scale = kind.scale or 0
    if kind.precision > 65 or not 0 <= scale <= 30:
        raise SinkError(
            f"column {name}: {kind.name} has more digits than MySQL's decimal(65,30) holds; "
            "create the table yourself, or convert the column in a query",
            permanent=True,
        )
    return f"decimal({kind.precision},{scale})"


def detail_of(base: str, shown: str, characters: str = "", **more: Any) -> dict[str, Any]:
    """What only ends of this dialect need to know of a column."""
    return {"base": base, "shown": shown, "characters": characters, **more}
