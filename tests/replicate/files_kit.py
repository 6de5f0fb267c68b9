"""Folders of files made and read by plain means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from conformance import (
    Harness,
    Sample,
    identity_plan,
)

from tasks.replicate.connector import (
    Kind,
    Lane,
    Load,
    Row,
)
from tasks.replicate.connectors.file import Files
from tasks.replicate.names import split_name

WORDS = ("", "007", 'say "hi", he\nsaid\r\n', None, "ünï \U0001f600", "NULL", " x ", "\\.", "\\N")
TEXT_SAMPLES = (Sample("words", "text", Kind.TEXT, WORDS),)
PARQUET_SAMPLES = (
    Sample("tiny", "int8", Kind.INTEGER, (127, -128, None)),
    Sample("big", "int64", Kind.INTEGER, (2**63 - 1, -(2**63), None)),
    Sample("huge", "uint64", Kind.INTEGER, (2**64 - 1, 0, None)),
    Sample("flag", "bool", Kind.BOOLEAN, (True, False, None)),
    Sample("single", "float32", Kind.FLOAT, (0.10000000149011612, float("inf"), None)),
    Sample("twice", "float64", Kind.FLOAT, (0.1, float("nan"), None)),
    Sample("price", "decimal128(12,2)", Kind.DECIMAL, ("-9999999999.99", "0.10", None)),
    Sample("exact", "decimal256(60,30)", Kind.DECIMAL, ("9" * 30 + "." + "1" * 30, None, None)),
    Sample("words", "string", Kind.TEXT, ("", "nul\0 \U0001f600", None)),
    Sample("octets", "binary", Kind.BYTES, (b"", bytes(range(256)), None)),
    Sample("day", "date32", Kind.DATE, ("0001-01-01", "9999-12-31", None)),
    Sample("clock", "time64[us]", Kind.TIME, ("23:59:59.123456", "00:00:00.000000", None)),
    Sample(
        "wall",
        "timestamp[us]",
        Kind.TIMESTAMP,
        ("2026-11-01 23:59:59.123456", "0001-01-01 00:00:00.000000", None),
    ),
    Sample(
        "moment",
        "timestamp[us,UTC]",
        Kind.TIMESTAMPTZ,
        ("9999-12-31 23:59:59.999999+00", "1969-12-31 23:59:59.500000+00", None),
    ),
    Sample("ident", "uuid", Kind.UUID, ("00000000-0000-0000-0000-000000000000", None, None)),
    Sample("doc", "json", Kind.JSON, ('{"a": 1.10}', "17", None)),
)

ARROW = {
    "int8": pa.int8(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "bool": pa.bool_(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "decimal128(12,2)": pa.decimal128(12, 2),
    "decimal256(60,30)": pa.decimal256(60, 30),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "time64[us]": pa.time64("us"),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[us,UTC]": pa.timestamp("us", tz="UTC"),
    "uuid": pa.string(),
    "json": pa.string(),
}
TEXTUAL = ("decimal", "date", "time")


class FolderHarness(Harness):
    """A folder of files of one format."""

    connector = Files()
    key_type = "int64"
    text_type = "string"
    awkward_names = (*Harness.awkward_names, "semi;colon -- #", "per 100%", "tab\tbed")

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.folder = folder
        self.kind = kind
        self.config: Mapping[str, Any] = {"path": str(folder), "format": kind, **options}
        self.samples = PARQUET_SAMPLES if kind == "parquet" else TEXT_SAMPLES
        self.key_type = "int64" if kind == "parquet" else "text"

    def path(self, table: str) -> Path:
        return self.folder / f"{split_name(table)[-1]}.{self.kind}"

    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        path = self.folder / f"{table}.{self.kind}"
        names = list(columns)
        if self.kind == "csv":
            path.write_text(written_csv([tuple(names), *rows]), newline="")
        elif self.kind == "jsonl":
            lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
            path.write_text("".join(line + "\n" for line in lines))
        else:
            fields = [
                pa.field(
                    n, ARROW[t], metadata={"claimcheck.kind": t} if t in ("uuid", "json") else {}
                )
                for n, t in columns.items()
            ]
            sides = list(zip(*rows, strict=True)) or [()] * len(fields)
            made = [array(side, field) for side, field in zip(sides, fields, strict=True)]
            pq.write_table(pa.Table.from_arrays(made, schema=pa.schema(fields)), path)
        return '"' + table.replace('"', '""') + '"'

    def rows(self, table: str) -> list[Row]:
        path = self.path(table)
        if self.kind == "csv":
            found = read_csv(path.read_bytes().decode())[1:]
            return [tuple(row) for row in found]
        if self.kind == "jsonl":
            return [tuple(json.loads(line).values()) for line in path.read_text().splitlines()]
        table_ = pq.read_table(path)
        sides = [
            cells(table_[name], table_.schema.field(name).type) for name in table_.schema.names
        ]
        return list(zip(*sides, strict=True))

    def hold(self) -> None:
        """No read of a file waits for another."""


def array(side: Sequence[Any], field: pa.Field) -> pa.Array:
    if str(field.type).startswith(TEXTUAL):
        bare = [v[:-3] if isinstance(v, str) and v.endswith("+00") else v for v in side]
        wall = pa.timestamp("us") if pa.types.is_timestamp(field.type) else field.type
        if pa.types.is_time(field.type):
            bare, wall = [v and f"1970-01-01 {v}" for v in bare], pa.timestamp("us")
        return pa.array(bare, pa.string()).cast(wall).cast(field.type)
    return pa.array(side, field.type)


def cells(column: Any, kind: pa.DataType) -> list[Any]:
    if pa.types.is_timestamp(kind):
        text = column.cast(pa.timestamp("us")).cast(pa.string()).to_pylist()
        return [v + "+00" if v and kind.tz else v for v in text]
    if str(kind).startswith(TEXTUAL):
        return column.cast(pa.string()).to_pylist()
    return column.to_pylist()


def written_csv(rows: Sequence[Row]) -> str:
    """CSV by the plainest rule: NULL is nothing, and every text is quoted."""
    return "".join(
        ",".join("" if cell is None else '"' + str(cell).replace('"', '""') + '"' for cell in row)
        + "\n"
        for row in rows
    )


def read_csv(text: str) -> list[list[str | None]]:
    """CSV letter by letter."""
    rows: list[list[str | None]] = []
    row: list[str | None] = []
    field, quoted, inside = "", False, False
    position = 0
    while position < len(text):
        char = text[position]
        if inside:
            if char == '"' and text[position + 1 : position + 2] == '"':
                field += '"'
                position += 1
            elif char == '"':
                inside = False
            else:
                field += char
        elif char == '"':
            inside = quoted = True
        elif char in ",\n":
            row.append(field if field or quoted else None)
            field, quoted = "", False
            if char == "\n":
                rows.append(row)
                row = []
        else:
            field += char
        position += 1
    return rows


def load_of(config: Mapping[str, Any], table: str, **changes: Any) -> Load:
    with Files().sink(config) as sink:
        relation = sink.describe((table,))
        assert relation is not None
        load = Load((table,), identity_plan(relation), "complete", Lane.ROWS, "r", "s", 1)
        return replace(load, relation=relation, **changes)


def write(config: Mapping[str, Any], load: Load, found: Any) -> int:
    with Files().sink(config) as sink:
        sink.begin(load)
        written: int = sink.write(load, found, staging=False)
        assert sink.count(load) == written
        sink.commit()
    return written
