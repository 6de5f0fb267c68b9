"""Values of every wrong kind under each key of a replication job, told in our own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from replication_kit import definition

from tasks.replicate.spec import ReplicationSpec, SinkSpec, SourceSpec, SpecError

WRONG = (
    None, True, -1, 0, 2.5, float("nan"), float("inf"), 1e30, 2**70, "9" * 5000, "", "text", "\0",
    "a..b", b"x", [], [1], [None], ["a", ["b"]], [{"a": "b"}], {}, {"a": 1},
    {"a": None}, {"a": "b"}, {1: 2},
)  # fmt: skip
# How the validation library speaks, which knows our classes and nothing of a definition file.
FOREIGN = re.compile(
    r"Spec|dictionar|instance|pars|interpret|input|pydantic|tuple|unable|valid |fractional|raw data"
    r"|keys should|boolean|integer",
    re.IGNORECASE,
)


def places() -> Iterator[tuple[str, ...]]:
    for key in ReplicationSpec.model_fields:
        yield (key,)
    for side, model in (("source", SourceSpec), ("sink", SinkSpec)):
        for key in model.model_fields:
            yield (side, key)


def mistakes(place: tuple[str, ...], value: Any) -> dict[str, str]:
    whole = definition({"table": "s"}, {"table": "t"}, "complete")
    inner = whole if len(place) == 1 else whole[place[0]]
    inner[place[-1]] = value
    try:
        ReplicationSpec.parse(whole)
    except SpecError as error:
        problems = error.problems
    else:
        return {}
    # Two for one key would speak of one mistake as of two.
    assert len({problem.key for problem in problems}) == len(problems), problems
    return {problem.key: problem.message for problem in problems}


@pytest.mark.parametrize("place", list(places()), ids=".".join)
def test_no_mistake_is_told_in_the_words_of_a_library(place: tuple[str, ...]) -> None:
    told = [text for value in WRONG for text in mistakes(place, value).values()]
    assert told
    assert [text for text in told if FOREIGN.search(text)] == []


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("source", "pg17", "must be a mapping, such as {datasource: NAME, table: SCHEMA.TABLE}"),
        ("sink", None, "must be a mapping, such as {datasource: NAME, table: SCHEMA.TABLE}"),
        ("create", "maybe", "must be true or false"),
        ("analyze", None, "must be true or false"),
        ("fetch_size", "abc", "must be a whole number"),
        ("parallelism", 2.5, "must be a whole number"),
        ("parallelism", 1e30, "must be a whole number"),
        ("bandwidth", [1], "must be bytes a second, such as 10MB"),
        ("bandwidth", "9" * 5000, "is more than any line carries"),
        ("bandwidth", 2.5, "must be a whole number"),
        ("lag", "soon", "'soon' is no duration"),
        ("lag", {}, "must be a duration, or a number"),
        ("mode", 3, "must be 'complete', 'complete-atomic' or 'incremental'"),
        ("watermark", 3, "must be text"),
        ("tables", 3, "must be a list, such as [public.*]"),
        ("source.datasource", 3, "must be text"),
        ("source.columns", 3, "must be a list, such as [NAME]"),
        ("source.columns", "id", "is one text; write a list, such as [id]"),
        ("sink.key", {"id": "id"}, "must be a list, such as [NAME]"),
        ("sink.columns", "id", "must be a list of the sink's names in order, or a mapping"),
        ("sink.columns", {"a": 1}, "must be a list of the sink's names in order, or a mapping"),
    ],
)
def test_a_mistake_names_the_way_out(place: str, value: Any, says: str) -> None:
    assert says in mistakes(tuple(place.split(".")), value)[place]
