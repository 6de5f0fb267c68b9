"""The fidelity matrix between engines holds, and the page in docs/ is what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engines
import fidelity
import fidelity_across
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"


@pytest.fixture(scope="module")
def made(
    database_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[engines.Engines]:
    with engines.Engines(database_server, tmp_path_factory.mktemp("engines")) as found:
        yield found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", engines.NAMES)
def test_values_arrive_unchanged_or_are_refused_by_column(
    made: engines.Engines, source: str
) -> None:
    ours = made.source(source)
    sinks = [made.sink(sink) for sink in engines.NAMES]
    page = PAGE.read_text()
    for sample in ours.samples:
        results = [fidelity_across.try_sample(ours, sink, sample) for sink in sinks]
        line = fidelity_across.line(sample.native, results)
        assert line in page, fidelity.ANEW
