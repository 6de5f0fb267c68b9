"""The fidelity matrix holds, and the page in docs/ is what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fidelity
import fidelity_declared
import psycopg
import pytest
from fidelity_cases import Pair
from replication_kit import Database, fresh_database

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"
RESULTS: list[fidelity.Result] = []


@pytest.fixture(scope="module")
def ends(database_server: str, sink_server: str) -> Iterator[tuple[Database, Database]]:
    with ExitStack() as stack:
        source = stack.enter_context(fresh_database(database_server))
        sink = stack.enter_context(fresh_database(sink_server))
        fidelity.prepare(source, sink)
        yield source, sink


@pytest.mark.parametrize("pair", list(fidelity.pairs()), ids=lambda p: f"{p.source} to {p.sink}")
def test_values_arrive_unchanged_or_are_refused_by_column(
    ends: tuple[Database, Database], pair: Pair
) -> None:
    try:
        RESULTS.append(fidelity.try_pair(*ends, pair))
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedObject):
        pytest.skip(f"a server has no {pair.source}")


def test_the_page_is_what_the_matrix_prints(ends: tuple[Database, Database]) -> None:
    if len({end.version // 10000 for end in ends}) > 1:
        pytest.skip("the page tells the lanes between servers of one version")
    if len(RESULTS) < len(list(fidelity.pairs())) - 1:
        pytest.skip("only a part of the matrix was tried")
    page = PAGE.read_text()
    missing = [line for line in map(fidelity.line, RESULTS) if line not in page]
    assert not missing, fidelity.ANEW


def test_columns_that_a_table_fills_arrive_or_are_refused(ends: tuple[Database, Database]) -> None:
    assert fidelity_declared.section(*ends) in PAGE.read_text(), fidelity.ANEW
