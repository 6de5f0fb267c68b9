"""What goes from one PostgreSQL to another only where both mean the same by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from replication_kit import Database, Job, definition, fresh_database

from tasks.replicate.connector import Column, Lane, SinkError
from tasks.replicate.connectors.postgresql import catalog, pairs, session

Make = Callable[..., Job]

MADE = """
create type price as (a int, m money);
create domain fee as money;
create type page as (x xml);
"""


def described(database: Database, declared: str) -> Column:
    database.execute("drop table if exists t")
    database.execute(f"create table t (x {declared})")
    found = catalog.find(database.connection, ("public", "t"))
    assert found is not None
    (column,) = catalog.describe_table(database.connection, found).columns
    return column


@pytest.mark.parametrize("declared", ["money", "money[]", "fee", "price", "price[]"])
def test_money_goes_only_where_its_bits_are_of_one_currency(sink: Database, declared: str) -> None:
    sink.execute(MADE)
    ours = described(sink, declared)
    other = replace(ours, detail={**ours.detail, "locale": "ja_JP.UTF-8"})
    assert "lc_monetary" in str(pairs.pair(ours, other).refusal)
    same = pairs.pair(ours, ours)
    assert same.refusal or same.lanes == {Lane.COPY_BINARY}
    assert pairs.pair(ours, described(sink, "text")).refusal


def test_what_would_lose_its_declaration_inside_of_others_is_refused(sink: Database) -> None:
    sink.execute(MADE)
    for declared, into in (("page", "page"), ("page[]", "page[]"), ("xml[]", "text")):
        ours = described(sink, declared)
        assert pairs.pair(ours, described(sink, into)).refusal


@pytest.mark.parametrize("declared", ["smallint", "positive"])
def test_a_domain_does_not_look_at_what_stands_in_for_a_value(
    sink: Database, declared: str
) -> None:
    sink.execute("create domain positive as smallint check (value > 0)")
    found = pairs.pair(described(sink, "bigint"), described(sink, declared))
    assert (Lane.COPY_BINARY in found.lanes) == (declared == "smallint")


@pytest.mark.parametrize("path", ["public, pg_catalog", "public"])
@pytest.mark.parametrize("declared", ["numeric", "amount"])
def test_a_guard_uses_no_function_of_the_users(
    source: Database, sink: Database, job: Make, declared: str, path: str
) -> None:
    source.execute("create domain amount as numeric")
    for argument in ("numeric", "amount"):
        source.execute(
            f"create function trunc({argument}) returns numeric immutable language sql"
            " as 'select $1::numeric'"
        )
    source.execute(f"create table t (x) as values (1.5::{declared})")
    name = source.value("select current_database()")
    source.execute(f"alter database {name} set search_path = {path}")
    sink.execute("create table t (x int)")
    with pytest.raises(SinkError, match=r"column x: a value of x .* does not fit"):
        job("complete").run()


def test_what_a_check_of_the_users_raises_is_told(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (x) as values (8::bigint)")
    sink.execute("create domain odd as int check (100 / (value - 8) > 0); create table t (x odd)")
    with pytest.raises(SinkError, match=r"column x: division by zero") as refused:
        job("complete").run()
    assert refused.value.permanent
    sink.execute(
        "create function never(int) returns bool language plpgsql as"
        " $$ begin raise exception 'no eight'; end $$"
    )
    sink.execute("drop domain odd cascade; create domain odd as int check (never(value))")
    sink.execute("alter table t add x odd")
    with pytest.raises(SinkError, match="no eight") as refused:
        job("complete").run()
    assert refused.value.permanent


def test_of_two_spellings_of_one_key_the_newest_stays(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id text primary key, note text, at timestamptz)")
    source.execute("insert into t values ('01', 'new', now()), ('1', 'old', 'yesterday')")
    sink.execute("create table t (id int primary key, note text, at timestamptz)")
    job("incremental", watermark="at").run()
    assert sink.execute("select id, note from t") == [(1, "new")]
    sink.execute("alter table t alter at type text")
    with pytest.raises(SinkError, match="several rows with one key"):
        job("incremental", watermark="at").run()


def test_a_character_without_an_equivalent_is_not_shown(database_server: str) -> None:
    with fresh_database(database_server) as one, fresh_database(database_server, "LATIN1") as two:
        one.execute("create table t (x) as values (chr(8364))")
        two.execute("create table t (x varchar(5))")
        reads = {"table": "public.t"}
        copied = Job(one.config, two.config, definition(reads, reads, "complete"))
        with pytest.raises(SinkError, match="column x: a character has no equivalent") as refused:
            copied.run()
    assert "0xe2" not in str(refused.value)


@pytest.mark.parametrize("into", ["letters", "bpchar", "text"])
def test_padding_is_no_part_of_what_is_compared(
    source: Database, sink: Database, job: Make, into: str
) -> None:
    source.execute("create table t (x) as values ('ab'::char(5))")
    sink.execute(f"create type letters as enum ('ab'); create table t (x {into})")
    job("complete", verify="checksum").run()
    assert sink.value("select x::text from t") == "ab"


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ('COPY t, line 1, column x: "secret"', 'invalid input syntax for type integer: "secret"'),
        ("COPY t, Zeile 1, Spalte x: »secret«", "ungültige Eingabesyntax: »secret«"),
        ("COPY t, ligne 1, colonne x : « secret »", "syntaxe en entrée invalide : « secret »"),
        ('COPY t, строка 1, столбец x: "secret"', "неверный синтаксис: „secret“"),
        ('COPY a, b 2, c d, line 3, column x: "secret"', 'invalid input: "secret"'),
    ],
)
def test_an_error_in_any_language_names_the_column_and_no_value(context: str, message: str) -> None:
    class Error(psycopg.DataError):
        diag: Any = SimpleNamespace(
            message_primary=message, sqlstate="22P02", context=context, column_name=None
        )

    said = session.describe_error(Error(), {})
    assert said.startswith("column x: ")
    assert "secret" not in said
