"""``verify: checksum`` between PostgreSQL and files: equal data is equal, and other data is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fidelity
import psycopg
import pytest
from fidelity_cases import VALUES
from files_kit import FolderHarness
from psycopg import sql
from replication_kit import Database, Job, definition, fresh_database

from dispatch.context import HandlerFailure
from tasks.replicate import checksum
from tasks.replicate.canonical import canonical
from tasks.replicate.connector import Kind

# A type of a length or a rule of its own, beside those of the matrix.
TYPES = {**VALUES, "character(6)": ("abc", "", "123456"), "json ": ("[1, 2]",)}


@pytest.fixture(scope="module")
def database(database_server: str) -> Iterator[Database]:
    with fresh_database(database_server) as made:
        fidelity.prepare(made)
        yield made


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("type_", TYPES)
def test_every_type_is_found_equal_in_a_file_and_back(
    database: Database, tmp_path: Path, type_: str, kind: str
) -> None:
    folder = {"path": str(tmp_path), "format": kind}
    for table in ("t", "back"):
        database.execute(f"drop table if exists {table}")
        try:
            database.connection.execute(
                sql.SQL("create table {} (id int primary key, value {})").format(
                    sql.Identifier(table), sql.SQL(type_)
                )
            )
        except psycopg.errors.UndefinedObject:
            pytest.skip(f"{type_} is newer than this server")
    values = TYPES[type_]
    try:
        fidelity._fill(database, database, values)
    except psycopg.errors.FeatureNotSupported:
        pytest.skip(f"this server is built without {type_}")
    if not there_and_back(database, folder, values):
        # A value is refused: the others each by itself.
        for value in values:
            there_and_back(database, folder, (value,))


def there_and_back(database: Database, folder: dict[str, str], values: tuple[str, ...]) -> bool:
    """Whether the values went through; a refusal that names the column is no false alarm."""
    fidelity._fill(database, database, [*values, None])
    shape: dict[str, Any] = {"create": True, "verify": "checksum"}
    ends = (database.config, "postgresql"), (folder, "file")
    try:
        for (ours, one), (theirs, other), table in ((*ends, "t"), (*ends[::-1], "back")):
            work = definition({"table": "t"}, {"table": table}, "complete", **shape)
            Job(ours, theirs, work, (one, other)).run()
    except HandlerFailure as refusal:
        if "column value" not in str(refusal):
            raise
        return False
    return True


# Texts that PostgreSQL takes for their value, but shows otherwise.
SPELLINGS = {
    "real": ("0.1", "1e-45", "3.4028235e38", "16777217.0000001", "-0", " 1.50 ", "Infinity"),
    "double precision": ("0.1", "1E3", "+1.50"),
    "numeric": ("1e3", "007", "+1.50"),
    "integer": ("007", "+1"),
    "boolean": ("yes", "f", "1", "TRUE"),
    "bytea": ("\\xABcd", "\\x"),
    "date": ("2026-11-01", "02026-11-01", "infinity", "0044-03-15 BC"),
    "time": ("23:59", "23:59:59.500", "24:00"),
    "time with time zone": ("23:59:59Z", "23:59:59 +05:30"),
    "timestamp": ("2026-11-01", "2026-11-01T23:59", "2026-12-31 24:00:00", "2026-11-01 01:02:03.0"),
    "timestamptz": (
        "2026-11-01 23:59:59+05:30",
        "2026-11-01T00:00:00.50Z",
        "2026-12-31 20:00-0800",
        "0001-01-01 01:00:00+02",
        "infinity",
    ),
    "uuid": (
        "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
        "A0EEBC999C0B4EF8BB6D6BB9BD380A11",
        "a0ee-bc99-9c0b-4ef8-bb6d-6bb9-bd38-0a11",
    ),
    "interval": ("1 day 2 hours", "PT36H", "1.5 days", "2 weeks"),
    "json": ('{"b": 1,  "a": 2}',),
    "jsonb": ('{"b": 1,  "a": 2.50}', "[ 1 ]", '"\\u00e9"'),
    "inet": ("10.0.0.1/32", "::0001"),
    "cidr": ("10.0.0.0",),
    "macaddr": ("08002B010203",),
    "integer[]": ("{1, 2}", "{ 007 }"),
    "timestamptz[]": ('{"2026-11-01 23:59:59+05:30"}',),
    "int4range": ("[1,4]", "(0,5]"),
    "mood": ("sad",),
    "point": ("0.10, 2",),
    "tsvector": ("b a",),
    "pair": ('(1, "a b")',),
    "character(6)": ("abc",),
    "character varying(5)": ("abc", "a  "),
    "positive": ("007",),
}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("type_", SPELLINGS)
def test_a_text_that_postgresql_shows_otherwise_is_found_equal(
    database: Database, tmp_path: Path, type_: str, kind: str
) -> None:
    job = text_job(database, tmp_path, kind, type_, SPELLINGS[type_])
    assert job.run().rows_processed == len(SPELLINGS[type_])


def text_job(
    database: Database, folder: Path, kind: str, type_: str, values: tuple[str, ...]
) -> Job:
    """A job of texts into a column of a type of PostgreSQL."""
    FolderHarness(folder, kind).make("t", {"value": "text"}, [(value,) for value in values])
    database.execute("drop table if exists t")
    database.connection.execute(
        sql.SQL("create table t (value {})").format(sql.SQL(type_)),
    )
    return Job(
        {"path": str(folder), "format": kind},
        database.config,
        definition({"table": "t"}, {"table": "t"}, "complete", verify="checksum"),
        ("file", "postgresql"),
    )


OTHER = {
    "real": ("0.1", "0.10000001"),
    "uuid": ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12"),
    "timestamptz": ("2026-11-01 23:59:59+05:30", "2026-11-01 23:59:59+05:29"),
    "timestamp": ("2026-11-01", "2026-11-02"),
    "time": ("23:59", "23:58"),
    "interval": ("1 day 2 hours", "1 day 3 hours"),
    "jsonb": ('{"b": 1, "a": 2}', '{"b": 1, "a": 3}'),
    "character(6)": ("abc", "abd"),
    "integer[]": ("{1, 2}", "{1, 3}"),
}


@pytest.mark.parametrize("type_", OTHER)
def test_another_value_in_postgresql_is_noticed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str
) -> None:
    ours, theirs = OTHER[type_]
    found = checksum.of_both

    def after_a_change(source: Any, sink: Any, *more: Any) -> Any:
        sink._connection.execute("update t set value = %s", (theirs,))
        return found(source, sink, *more)

    monkeypatch.setattr(checksum, "of_both", after_a_change)
    with pytest.raises(HandlerFailure, match="checksum") as caught:
        text_job(database, tmp_path, "csv", type_, (ours,)).run()
    assert caught.value.code == "verify_failed"


@pytest.mark.parametrize(
    ("type_", "ours", "theirs"),
    [("real", "0.1", "0.10000001"), ("character(6)", "abc", "abd"), ("inet", "::1", "::2")],
)
def test_another_value_in_a_file_is_noticed(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    type_: str,
    ours: str,
    theirs: str,
) -> None:
    found = checksum.of_both

    def after_a_change(source: Any, sink: Any, *more: Any) -> Any:
        written = sink._new.read_text()
        assert ours in written
        sink._new.write_text(written.replace(ours, theirs))
        return found(source, sink, *more)

    monkeypatch.setattr(checksum, "of_both", after_a_change)
    database.execute("drop table if exists t")
    database.connection.execute(sql.SQL("create table t (value {})").format(sql.SQL(type_)))
    database.connection.execute("insert into t values (%s)", (ours,))
    with pytest.raises(HandlerFailure, match="checksum"):
        Job(
            database.config,
            {"path": str(tmp_path), "format": "csv"},
            definition({"table": "t"}, {"table": "t"}, "complete", create=True, verify="checksum"),
            ("postgresql", "file"),
        ).run()


def test_a_text_half_way_between_two_small_floats_is_the_one_that_its_digits_are_nearer_to() -> (
    None
):
    half = "1.000000059604644775390625"
    up = canonical(half + "0000000001", Kind.FLOAT, 32)
    down = canonical(half.replace("625", "6249999999999"), Kind.FLOAT, 32)
    assert (up, down) == ("1.0000001192092896", "1.0")
    assert canonical(half, Kind.FLOAT, 32) == "1.0"
