"""Types of one name that are built differently inside are told apart, at any depth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from replication_kit import Database, Job

from dispatch.context import HandlerFailure

AMOUNT = ("create domain amount as numeric(10,4)", "create domain amount as numeric(10,2)")
MOMENT = (
    "create type inner_one as (at timestamp(6)); create type outer_one as (x inner_one)",
    "create type inner_one as (at timestamp(0)); create type outer_one as (x inner_one)",
)
DIFFERENT = {
    "an array of a domain": (*AMOUNT, "amount[]", "{1.2345}"),
    "a composite with a domain": (
        *(f"{domain}; create type pair as (a int, b amount)" for domain in AMOUNT),
        "pair",
        "(1,1.2345)",
    ),
    "a composite within a composite": (*MOMENT, "outer_one", '("(""2026-01-01 00:00:00.7"")")'),
    "an array of a composite within a composite": (
        *MOMENT,
        "outer_one[]",
        '{"(\\"(2026-01-01)\\")"}',
    ),
    "an array of a domain over interval": (
        "create domain span as interval",
        "create domain span as interval(0)",
        "span[]",
        "{1.7 s}",
    ),
    "a range over another time": (
        "create type span as range (subtype = timestamp)",
        "create type span as range (subtype = timestamptz)",
        "span",
        "[2026-01-01 00:00,2026-01-02 00:00)",
    ),
    "a range over a shorter float": (
        "create type span as range (subtype = float8)",
        "create type span as range (subtype = float4)",
        "span",
        "[0.1,0.2)",
    ),
    "a range over a domain": (
        *(f"{domain}; create type span as range (subtype = amount)" for domain in AMOUNT),
        "span",
        "[1.2345,2)",
    ),
    "a multirange": (
        "create type span as range (subtype = timestamp, multirange_type_name = spans)",
        "create type span as range (subtype = timestamptz, multirange_type_name = spans)",
        "spans",
        "{[2026-01-01 00:00,2026-01-02 00:00)}",
    ),
    "a domain over an array of a domain": (
        *(f"{domain}; create domain amounts as amount[]" for domain in AMOUNT),
        "amounts",
        "{1.2345}",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_type_built_otherwise_inside_is_refused(
    source: Database, sink: Database, job: Callable[..., Job], case: str
) -> None:
    ours, theirs, type_, value = DIFFERENT[case]
    for database, made in ((source, ours), (sink, theirs)):
        database.execute(f"{made}; create table t (id int primary key, x {type_})")
    source.execute("insert into t values (1, %s)", value)
    for mode in ("complete", "complete-atomic"):
        with pytest.raises(HandlerFailure, match=r"column x: .*built otherwise"):
            job(mode).run()
    assert sink.value("select count(*) from t") == 0


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_type_built_alike_arrives(
    source: Database, sink: Database, job: Callable[..., Job], case: str
) -> None:
    ours, _, type_, value = DIFFERENT[case]
    for database in (source, sink):
        database.execute(f"{ours}; create table t (id int primary key, x {type_})")
    source.execute("insert into t values (1, %s)", value)
    job("complete", verify="checksum").run()
    statement = "select x::text from t"
    assert sink.value(statement) == source.value(statement)
