"""Arrow's columns as the rows of PostgreSQL's COPY in binary, made by whole columns.

Each field of a row is its length in four bytes and its content. Both are made for all rows of a
batch at once, and Arrow's kernel that joins texts element by element then writes the stream. Only
types whose bits are the same on both sides, or whose conversion is exact, are offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.replicate.connector import Batch, Column, ColumnPlan, Kind, Row
from tasks.replicate.connectors.file import arrow_types
from tasks.replicate.connectors.file.formats import BadFile
from tasks.replicate.guards import guarded

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_EPOCH_DAYS = 10957
"""From 1970 to 2000, where PostgreSQL counts from."""
_DAY = 86_400_000_000
_EPOCH_MICROSECONDS = _EPOCH_DAYS * _DAY
_FIRST_DAY = -2_451_545
"""From 2000: PostgreSQL's first date and day of a timestamp, in the year 4714 BC."""
_DATES_END = 2_145_031_949
_MOMENTS_END = 106_751_983
"""Likewise the days behind its last date and its last timestamp, in the years 5874897 and 294276.
The lowest and the highest number mean infinity, and are beyond these."""
_MOST_DIGITS = 18
"""Of a decimal that a 64-bit integer holds whatever its digits are."""

_UUID = r"\A(?:[0-9A-Fa-f]{4}-?){7}[0-9A-Fa-f]{4}\z"

_TEXTS = frozenset({"text", "varchar", "json"})
BINARY = "copy_binary"
"""Of a column's detail: PostgreSQL's types whose binary form this source can write for it."""


def marked(column: Column, field: pa.Field) -> Column:
    """The column, with the types that it can be written as."""
    names = types_of(field.type, column)
    return replace(column, detail={BINARY: names}) if names else column


def types_of(kind: pa.DataType, column: Column) -> tuple[str, ...]:
    """PostgreSQL's types (by pg_type.typname) that hold the column bit for bit."""
    if pa.types.is_boolean(kind):
        return ("bool",)
    if pa.types.is_signed_integer(kind):
        return tuple(f"int{size}" for size in (2, 4, 8) if size * 8 >= kind.bit_width)
    if pa.types.is_unsigned_integer(kind) and kind.bit_width < 64:
        return tuple(f"int{size}" for size in (4, 8) if size * 8 > kind.bit_width)
    if pa.types.is_float32(kind):
        return ("float4", "float8")
    if pa.types.is_float64(kind):
        return ("float8",)
    if pa.types.is_decimal128(kind) and kind.precision <= _MOST_DIGITS and kind.scale >= 0:
        return ("numeric",)
    if pa.types.is_date32(kind):
        return ("date",)
    if pa.types.is_timestamp(kind) and kind.unit in ("s", "ms", "us"):
        return ("timestamptz",) if kind.tz else ("timestamp",)
    if pa.types.is_time64(kind) and kind.unit == "us":
        return ("time",)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return ("bytea",)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        named = {Kind.UUID: ("uuid",), Kind.JSON: ("json", "jsonb")}
        return named.get(column.type.kind, ("text", "varchar", "json", "jsonb", "uuid"))
    return ()


class Encoder:
    """Writes batches for the sink's columns of a plan."""

    def __init__(self, columns: Sequence[ColumnPlan]) -> None:
        self._columns = columns
        self._encoders = [_ENCODERS[plan.sink.detail["typname"]] for plan in columns]
        self._count = len(columns).to_bytes(2, "big")

    def encode(self, record: pa.RecordBatch) -> bytes:
        """The rows of a batch in the form of COPY."""
        rows = record.num_rows
        if not rows:
            return b""
        parts: list[pa.Array] = [_repeated(self._count, rows)]
        for column, encoder, plan in zip(
            record.columns, self._encoders, self._columns, strict=True
        ):
            if plan.guards:
                _guard(column, plan)
            try:
                parts += encoder(column)
            except pa.ArrowException:
                raise BadFile(
                    f"column {plan.source.name}: a value is no {plan.sink.type.name}"
                ) from None
        joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
        return _content(joined)


def _guard(column: pa.Array, plan: ColumnPlan) -> None:
    """Apply the plan's guards to the column's cells, but for a length that one look tells."""
    if [guard.name for guard in plan.guards] == ["text"]:
        (room,) = (guard.argument for guard in plan.guards)
        if room is None or (pc.max(pc.utf8_length(column)).as_py() or 0) <= room:
            return
    rows: list[Row] = [(cell,) for cell in arrow_types.cells(column, plan.source.name)]
    for _ in guarded([Batch(rows, len(rows), 0)], [plan]):
        pass


def _content(array: pa.Array) -> bytes:
    """All values of an array, one behind the other."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)
    first, last = bounds[array.offset], bounds[array.offset + len(array)]
    return bytes(memoryview(data)[first:last])


def _repeated(value: bytes, times: int) -> pa.Array:
    return _fixed(np.tile(np.frombuffer(value, np.uint8), (times, 1)))


def _fixed(matrix: Any) -> pa.Array:
    """An array of as many binary values as the matrix of bytes has rows."""
    rows, width = matrix.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(matrix))]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)


def _with_length(content: Any, array: pa.Array) -> list[pa.Array]:
    """Fields of one width: the length, the content, and nothing but -1 where it is NULL."""
    rows, width = content.shape
    prefix = np.frombuffer(width.to_bytes(4, "big"), np.uint8)
    fields = _fixed(np.hstack([np.tile(prefix, (rows, 1)), content]))
    if not array.null_count:
        return [fields]
    return [pc.if_else(array.is_valid(), fields, pa.scalar(_NULL, pa.large_binary()))]


def _big_endian(values: Any, dtype: str) -> Any:
    """Numbers as rows of bytes."""
    ordered = np.ascontiguousarray(values.astype(dtype))
    return ordered.view(np.uint8).reshape(len(values), ordered.dtype.itemsize)


def _numbers(array: pa.Array, kind: pa.DataType) -> Any:
    """The array's numbers, with 0 where it is NULL."""
    whole = array.cast(kind)
    return pc.fill_null(whole, 0).to_numpy(zero_copy_only=False)


def _integer(kind: pa.DataType, dtype: str) -> Callable[[pa.Array], list[pa.Array]]:
    def encode(array: pa.Array) -> list[pa.Array]:
        return _with_length(_big_endian(_numbers(array, kind), dtype), array)

    return encode


def _boolean(array: pa.Array) -> list[pa.Array]:
    values = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return _with_length(values.astype(np.uint8).reshape(-1, 1), array)


def _since_2000(numbers: Any, epoch: int, first: int, end: int) -> Any:
    """Numbers from 1970 as numbers from 2000, all of them from ``first`` to before ``end``."""
    # Compared before the subtraction, which would wrap around.
    if len(numbers) and (numbers.min() < first + epoch or numbers.max() >= end + epoch):
        raise pa.ArrowInvalid("beyond PostgreSQL's calendar")
    return numbers - epoch


def _date(array: pa.Array) -> list[pa.Array]:
    days = _numbers(array.cast(pa.int32()), pa.int64())
    counted = _since_2000(days, _EPOCH_DAYS, _FIRST_DAY, _DATES_END)
    return _with_length(_big_endian(counted, ">i4"), array)


def _moment(array: pa.Array) -> list[pa.Array]:
    # A cast from seconds or milliseconds is exact, or fails where it would overflow.
    whole = _numbers(array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()), pa.int64())
    counted = _since_2000(whole, _EPOCH_MICROSECONDS, _FIRST_DAY * _DAY, _MOMENTS_END * _DAY)
    return _with_length(_big_endian(counted, ">i8"), array)


def _time(array: pa.Array) -> list[pa.Array]:
    return _with_length(_big_endian(_numbers(array.cast(pa.int64()), pa.int64()), ">i8"), array)


def _uuid(array: pa.Array) -> list[pa.Array]:
    """Text of 32 hexadecimal digits, with or without hyphens where the server allows them."""
    filled = pc.fill_null(array.cast(pa.large_string()), "0" * 32)
    if not pc.all(pc.match_substring_regex(filled, _UUID)).as_py():
        raise pa.ArrowInvalid("a text is no UUID")
    digits = "".join(pc.replace_substring(filled, "-", "").to_pylist())
    matrix = np.frombuffer(bytes.fromhex(digits), np.uint8).reshape(len(array), 16)
    return _with_length(matrix, array)


def _octets(before: bytes = b"") -> Callable[[pa.Array], list[pa.Array]]:
    """Values of many lengths: the length as one array, the content as another."""

    def encode(array: pa.Array) -> list[pa.Array]:
        content = array.cast(pa.large_binary())
        lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False)
        head = _big_endian(lengths + len(before), ">i4")
        if before:
            mark = np.tile(np.frombuffer(before, np.uint8), (len(array), 1))
            head = np.hstack([head, mark])
        prefix = _fixed(head)
        if not array.null_count:
            return [prefix, content]
        null = pa.scalar(_NULL, pa.large_binary())
        return [
            pc.if_else(array.is_valid(), prefix, null),
            pc.fill_null(content, pa.scalar(b"", pa.large_binary())),
        ]

    return encode


def _numeric(array: pa.Array) -> list[pa.Array]:
    """Groups of four digits, of which the server drops leading and trailing zeros."""
    scale = array.type.scale
    pad = -scale % 4
    unscaled = _unscaled(array)
    magnitude = np.abs(unscaled).astype(np.uint64)
    behind = (scale + pad) // 4
    groups = []
    # The last group holds the digits before the padding.
    if pad:
        unit = np.uint64(10 ** (4 - pad))
        groups.append((magnitude % unit) * np.uint64(10**pad))
        magnitude = magnitude // unit
    count = behind + -(-(_MOST_DIGITS - scale) // 4) if scale < _MOST_DIGITS else behind
    while len(groups) < count:
        groups.append(magnitude % np.uint64(10000))
        magnitude = magnitude // np.uint64(10000)
    words = np.empty((len(array), 4 + count), ">i2")
    words[:, 0] = count
    words[:, 1] = count - behind - 1
    words[:, 2] = np.where(unscaled < 0, 0x4000, 0)
    words[:, 3] = scale
    for place, group in enumerate(reversed(groups), start=4):
        words[:, place] = group
    return _with_length(words.view(np.uint8).reshape(len(array), -1), array)


def _unscaled(array: pa.Array) -> Any:
    """The decimals' digits as 64-bit integers: the lower half of Arrow's 128 bits."""
    filled = pc.fill_null(array, pa.scalar(0, array.type))
    words = np.frombuffer(filled.buffers()[1], np.int64)
    start = filled.offset * 2
    return words[start : start + 2 * len(filled) : 2]


_ENCODERS: dict[str, Callable[[pa.Array], list[pa.Array]]] = {
    "bool": _boolean,
    "int2": _integer(pa.int16(), ">i2"),
    "int4": _integer(pa.int32(), ">i4"),
    "int8": _integer(pa.int64(), ">i8"),
    "float4": _integer(pa.float32(), ">f4"),
    "float8": _integer(pa.float64(), ">f8"),
    "numeric": _numeric,
    "date": _date,
    "timestamp": _moment,
    "timestamptz": _moment,
    "time": _time,
    "uuid": _uuid,
    "text": _octets(),
    "varchar": _octets(),
    "json": _octets(),
    "jsonb": _octets(b"\x01"),
    "bytea": _octets(),
}
