"""Arrow's types and the interface's, and cells to and from Arrow's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.replicate.connector import Column, ColumnType, Kind
from tasks.replicate.connectors.file.formats import BadValue

KIND = b"claimcheck.kind"
"""Of a field's metadata: the kind of a column that Parquet keeps as text."""

_TEXT_KINDS = {kind.value: kind for kind in (Kind.UUID, Kind.JSON, Kind.INTERVAL, Kind.OTHER)}
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
MOST_DIGITS = 76


# Types


def column_of(field: pa.Field) -> Column:
    """The column that a field of a file is."""
    return Column(field.name, _type_of(field.type, field.metadata or {}), field.nullable)


def _type_of(kind: pa.DataType, metadata: dict[bytes, bytes]) -> ColumnType:
    shown = str(kind)
    if pa.types.is_dictionary(kind):
        return _type_of(kind.value_type, metadata)
    if pa.types.is_boolean(kind):
        return ColumnType(Kind.BOOLEAN, shown)
    if pa.types.is_integer(kind):
        unsigned = pa.types.is_unsigned_integer(kind)
        return ColumnType(Kind.INTEGER, shown, bits=kind.bit_width, unsigned=unsigned)
    if pa.types.is_floating(kind):
        return ColumnType(Kind.FLOAT, shown, bits=max(32, kind.bit_width))
    if pa.types.is_decimal(kind):
        return ColumnType(Kind.DECIMAL, shown, precision=kind.precision, scale=kind.scale)
    if pa.types.is_date(kind):
        return ColumnType(Kind.DATE, shown)
    if pa.types.is_time(kind):
        return ColumnType(Kind.TIME, shown, precision=_DIGITS[kind.unit])
    if pa.types.is_timestamp(kind):
        zoned = Kind.TIMESTAMPTZ if kind.tz else Kind.TIMESTAMP
        return ColumnType(zoned, shown, precision=_DIGITS[kind.unit])
    if pa.types.is_fixed_size_binary(kind):
        return ColumnType(Kind.BYTES, shown, length=kind.byte_width)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return ColumnType(Kind.BYTES, shown)
    if _is_text(kind):
        named = _TEXT_KINDS.get(metadata.get(KIND, b"").decode(), Kind.TEXT)
        return ColumnType(named, "string" if named is Kind.TEXT else named.value)
    if pa.types.is_null(kind):
        return ColumnType(Kind.TEXT, shown)
    if pa.types.is_nested(kind):
        return ColumnType(Kind.JSON, shown)
    return ColumnType(Kind.OTHER, shown)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def field_of(column: Column) -> pa.Field:
    """The field that keeps a column's values."""
    kind = column.type
    plain = {
        Kind.BOOLEAN: pa.bool_(),
        Kind.FLOAT: pa.float32() if kind.bits == 32 else pa.float64(),
        Kind.TEXT: pa.string(),
        Kind.BYTES: pa.binary(),
        Kind.DATE: pa.date32(),
        Kind.TIME: pa.time64("us"),
        Kind.TIMESTAMP: pa.timestamp("us"),
        Kind.TIMESTAMPTZ: pa.timestamp("us", tz="UTC"),
    }
    if kind.kind in plain:
        return pa.field(column.name, plain[kind.kind], column.nullable)
    if kind.kind is Kind.INTEGER and kind.bits is not None and kind.bits <= 64:
        bits = next(size for size in (8, 16, 32, 64) if size >= kind.bits)
        made = getattr(pa, f"{'u' if kind.unsigned else ''}int{bits}")()
        return pa.field(column.name, made, column.nullable)
    if kind.kind is Kind.DECIMAL and kind.precision is not None:
        scale = kind.scale or 0
        if kind.precision <= MOST_DIGITS and 0 <= scale <= kind.precision:
            wide = pa.decimal128 if kind.precision <= 38 else pa.decimal256
            return pa.field(column.name, wide(kind.precision, scale), column.nullable)
    # Digits without a bound, and what Parquet has no type for: as text, exactly.
    named = {KIND: kind.kind.value.encode()} if kind.kind.value in _TEXT_KINDS else None
    return pa.field(column.name, pa.string(), column.nullable, named)


def refusal_of(column: Column) -> str | None:
    """Why nothing is written to an existing file's column, or None."""
    kind = column.type
    if kind.kind in (Kind.JSON, Kind.OTHER) and kind.name != kind.kind.value:
        return f"{kind.name} is not written: make it text in a new file, or leave the column out"
    return None


def read_from_text(column: Column) -> bool:
    """Whether Arrow's reader of CSV makes the column's type as :func:`array_of` does."""
    return not column.type.name.startswith("halffloat")


def text_type(kind: pa.DataType) -> pa.DataType:
    """The type that texts are read as, before a cast that fails where a value would change."""
    if pa.types.is_dictionary(kind):
        return text_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_decimal(kind):
        return _wide_decimal(kind)
    return kind


def _wide_decimal(kind: pa.DataType) -> pa.DataType:
    """Arrow reads texts as decimals of 128 bits and more."""
    wide = pa.decimal128 if kind.precision <= 38 else pa.decimal256
    return wide(kind.precision, kind.scale)


def as_stored(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array of the :func:`text_type` as one of the type. Raises ArrowException."""
    if pa.types.is_dictionary(kind):
        array = as_stored(array, kind.value_type).dictionary_encode()
    return array if array.type == kind else array.cast(kind)


def room(kind: pa.DictionaryType) -> int:
    """How many different values a dictionary's numbers can tell apart."""
    index = kind.index_type
    signed = pa.types.is_signed_integer(index)
    return int(2 ** (index.bit_width - (1 if signed else 0)))


# Reading


def cells(array: pa.Array, name: str) -> list[Any]:
    """A column's cells."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return cells(array.dictionary_decode(), name)
    if pa.types.is_float16(kind):
        array = array.cast(pa.float32())
    elif pa.types.is_timestamp(kind):
        # The number is UTC's, whatever zone it would be shown in.
        return _calendar(array.cast(pa.timestamp(kind.unit)), name, "+00" if kind.tz else "")
    elif pa.types.is_date(kind):
        return _calendar(array.cast(pa.date32()), name)
    elif pa.types.is_time(kind) or pa.types.is_decimal(kind):
        return _plain_text(array)
    elif pa.types.is_nested(kind):
        return [None if value is None else _document(value, name) for value in array.to_pylist()]
    elif pa.types.is_duration(kind) or pa.types.is_interval(kind):
        raise BadValue(f"column {name}: {kind} is not read; convert the file's column")
    found: list[Any] = array.to_pylist()
    return found


def _plain_text(array: pa.Array) -> list[Any]:
    if pa.types.is_decimal(array.type):
        # The text of a cast may have an exponent; the interface's digits never do.
        return [None if v is None else format(v, "f") for v in array.to_pylist()]
    found: list[Any] = array.cast(pa.string()).to_pylist()
    return found


def _calendar(array: pa.Array, name: str, zone: str = "") -> list[Any]:
    """Dates or moments as text. Raises BadValue where the calendar of text does not reach."""
    shown = array.cast(pa.string())
    texts = shown.to_pylist()
    if pc.any(pc.match_substring_regex(shown, "^(?:-|0000|<)")).as_py():
        return [None if text is None else _with_era(text, name, zone) for text in texts]
    return [None if text is None else text + zone for text in texts] if zone else list(texts)


def _with_era(text: str, name: str, zone: str) -> str:
    """Arrow counts a year 0 and years below it, and has no text for what is far away."""
    if text.startswith("<"):
        raise BadValue(f"column {name}: a time is beyond the years that have a text")
    year, rest = int(text[: text.index("-", 1)]), text[text.index("-", 1) :]
    return f"{1 - year:04d}{rest}{zone} BC" if year <= 0 else text + zone


def _document(value: Any, name: str) -> str:
    import json

    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise BadValue(
            f"column {name}: holds nested values that JSON has no form for; convert the file"
        ) from None


# Writing


def arrays(
    schema: pa.Schema, names: Sequence[str], sides: Sequence[Sequence[Any]]
) -> list[pa.Array]:
    """Arrays for all fields of a file; those that are not written are NULL."""
    given = dict(zip(names, sides, strict=True))
    length = len(sides[0]) if sides else 0
    return [
        array_of(field, given[field.name]) if field.name in given else pa.nulls(length, field.type)
        for field in schema
    ]


def array_of(field: pa.Field, side: Sequence[Any]) -> pa.Array:
    """One column's cells as an array of the field's type. Raises BadValue naming the column."""
    kind = field.type
    try:
        plain = text_type(kind)
        convert = _CONVERT.get(plain.id)
        array = pa.array(side, plain) if convert is None else convert(side, plain)
        array = as_stored(array, kind)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError, ValueError):
        raise BadValue(
            f"column {field.name}: a value cannot be stored as {kind} unchanged"
        ) from None
    if array.null_count and not field.nullable:
        raise BadValue(f"column {field.name}: a value is NULL, which the file does not allow")
    return array


def _from_text(side: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(side, pa.string()).cast(kind)


def _from_times(side: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Arrow reads a time of day only as a part of a timestamp."""
    if any(value is not None and len(value.partition(".")[0]) != 8 for value in side):
        raise ValueError("no time of day")
    dated = [None if value is None else f"1970-01-01 {value}" for value in side]
    return _from_text(dated, pa.timestamp("ns" if kind.unit == "ns" else "us")).cast(kind)


def _from_moments(side: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind.tz is None:
        return _from_text(side, kind)
    if any(value is not None and not value.endswith("+00") for value in side):
        raise ValueError("no moment in UTC")
    bare = [None if value is None else value[:-3] for value in side]
    return _from_text(bare, pa.timestamp(kind.unit)).cast(kind)


def _from_floats(side: Sequence[Any], kind: pa.DataType) -> pa.Array:
    array = pa.array(side, pa.float64())
    if kind == pa.float64():
        return array
    narrow = array.cast(kind, safe=False)
    # A float that the narrow type does not hold exactly would be rounded.
    wide = narrow.cast(pa.float64())
    if any(a != b and a == a for a, b in zip(array.to_pylist(), wide.to_pylist(), strict=True)):
        raise ValueError("rounded")
    return narrow


_CONVERT: dict[int, Callable[[Sequence[Any], pa.DataType], pa.Array]] = {
    pa.date32().id: _from_text,
    pa.date64().id: _from_text,
    pa.time32("s").id: _from_times,
    pa.time64("us").id: _from_times,
    pa.timestamp("us").id: _from_moments,
    pa.decimal128(1).id: _from_text,
    pa.decimal256(1).id: _from_text,
    pa.float16().id: _from_floats,
    pa.float32().id: _from_floats,
    pa.float64().id: _from_floats,
}
