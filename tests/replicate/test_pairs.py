"""What goes from one PostgreSQL to another only where both mean the same by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replication_kit import Database

from tasks.replicate.connector import Column, Lane
from tasks.replicate.connectors.postgresql import catalog, pairs

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
