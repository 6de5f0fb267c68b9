"""The fidelity matrix: every type that is tried either arrives as it was or is refused by name.

``PYTHONPATH=tests python tests/replicate/fidelity.py`` tries it against the database of
CLAIMCHECK_TEST_DATABASE_URL and prints the page ``docs/fidelity.md``.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelity_cases import MADE_BEFORE, PAIRS, VALUES, Pair
from psycopg import sql
from replication_kit import Database, Job, definition, fresh_database

from dispatch.context import HandlerFailure

MODES: dict[str, dict[str, Any]] = {
    "complete": {},
    "complete-atomic": {},
    "incremental": {"watermark": "id"},
}
ANEW = "print it anew: PYTHONPATH=tests python tests/replicate/fidelity.py > docs/fidelity.md"
EXACT, REFUSED = "arrives unchanged", "refused"


@dataclass(frozen=True)
class Result:
    """What became of one pair of types."""

    source: str
    sink: str
    lane: str
    good: int
    refused: int
    reason: str = ""


class Wrong(AssertionError):
    """A value arrived changed, or a refusal did not name its column."""


def try_pair(source: Database, sink: Database, pair: Pair) -> Result:
    """Run the pair in every mode; raises Wrong."""
    _tables(source, sink, pair)
    lane = reason = ""
    if pair.good:
        for mode, more in MODES.items():
            _fill(source, sink, [*pair.good, None])
            lane = _run(source, sink, mode, more)
            _compare(source, sink, pair, mode)
    for value in pair.odd:
        for mode, more in MODES.items():
            _fill(source, sink, [value])
            try:
                _run(source, sink, mode, more)
            except HandlerFailure as refusal:
                reason = str(refusal)
                if "column value" not in reason:
                    raise Wrong(
                        f"{pair}: {value!r} is refused without its column: {reason}"
                    ) from None
                if len(value) > 3 and value in reason:
                    raise Wrong(f"{pair}: the refusal shows the value: {reason}") from None
                continue
            raise Wrong(f"{pair}: {value!r} in mode {mode} is not refused")
    return Result(pair.source, pair.sink, lane, len(pair.good), len(pair.odd), reason)


def _tables(source: Database, sink: Database, pair: Pair) -> None:
    for database, type_ in ((source, pair.source), (sink, pair.sink)):
        database.execute("drop table if exists t")
        database.connection.execute(
            sql.SQL("create table t (id int primary key, value {})").format(sql.SQL(type_))
        )


def _fill(source: Database, sink: Database, values: Sequence[str | None]) -> None:
    source.execute("truncate t")
    sink.execute("truncate t")
    for number, value in enumerate(values):
        source.connection.execute(
            sql.SQL("insert into t values ({}, {})").format(
                sql.Literal(number), sql.SQL("null") if value is None else _literal(value)
            )
        )


def _literal(value: str) -> sql.Composable:
    return sql.SQL("E'{}'").format(sql.SQL(value.replace("\\", "\\\\").replace("'", "\\'")))


def _run(source: Database, sink: Database, mode: str, more: dict[str, Any]) -> str:
    task = Job(
        source.config,
        sink.config,
        definition({"table": "t"}, {"table": "t"}, mode, verify="checksum", **more),
    )
    result = task.run().result
    assert isinstance(result, dict)
    return str(result["lane"])


def _compare(source: Database, sink: Database, pair: Pair, mode: str) -> None:
    """Both sides as text, the source's value cast to the sink's type by the source itself."""
    for database in (source, sink):
        database.execute("set timezone = 'UTC'")
    known = source.value("select to_regtype(%s) is not null", pair.sink)
    cast = sql.SQL("value::{}::text" if known else "value::text").format(sql.SQL(pair.sink))
    if "mood" in pair.source + pair.sink:
        cast = sql.SQL("value::text")
    statement = sql.SQL("select id, {} from t order by id")
    wanted = source.connection.execute(statement.format(cast)).fetchall()
    found = sink.connection.execute(statement.format(sql.SQL("value::text"))).fetchall()
    if wanted != found:
        raise Wrong(f"{pair.source} -> {pair.sink} in mode {mode}: {wanted} became {found}")


def pairs() -> Iterable[Pair]:
    """Every type onto itself, then onto others."""
    for name, values in VALUES.items():
        yield Pair(name, name, values)
    yield from PAIRS


def prepare(*databases: Database) -> None:
    """Make the types that the matrix needs."""
    for database in databases:
        database.execute(MADE_BEFORE)


HEAD = """# What arrives, and what is refused

A replicated value arrives as it was, or the run fails naming its column before or while it loads;
nothing in between. This page is printed by `tests/replicate/fidelity.py`, which runs each line in
all three modes, compares both sides as text and lets both databases compute checksums.

The *lane* says how the rows travel: `copy-binary` and `copy-text` hand PostgreSQL's own bytes on,
`rows` carries each value through Python. The page is for two servers of one version; from one side
of PostgreSQL 17 to the other, intervals go as text, and those that the sink has not are refused.

## PostgreSQL to PostgreSQL

| source | sink | lane | result |
|---|---|---|---|
"""


def line(result: Result) -> str:
    """One line of the table."""
    return f"| `{result.source}` | `{result.sink}` | {result.lane or '-'} | {_verdict(result)} |"


def page(results: Iterable[Result]) -> str:
    """The documentation page."""
    return HEAD + "\n".join(map(line, results)) + "\n"


def _verdict(result: Result) -> str:
    if not result.refused:
        return f"{EXACT} ({result.good} values and NULL)"
    if not result.good:
        reason, _, way = result.reason.partition("unchanged: ")[2].partition("; ")
        reason = reason if way else ""
        return f"{REFUSED} before anything is touched" + (f": {reason}" if reason else "")
    return f"{EXACT} ({result.good} values and NULL); {REFUSED} where it would not"


ACROSS = """
## Between engines

Each type of one engine, with NULL and values at its edges, into a table or file that the job
itself makes in the other (`create: true`), in every mode that both have. The cell is the type that
it makes there, in which all values arrive unchanged; † marks those where some of the values have
no place (a NaN in MySQL, 24:00:00 in Parquet) and are refused, naming the column. What Parquet has
no type for is refused as well; as text it goes there by a `query` with a cast.
"""


def across(server: str, folder: Path) -> Iterable[str]:
    """The lines of the second part of the page."""
    import engines
    import fidelity_across

    with engines.Engines(server, folder) as made:
        for source in engines.NAMES:
            yield f"\n### From {source}\n"
            yield "| type | " + " | ".join(engines.NAMES) + " |"
            yield "|---" * (len(engines.NAMES) + 1) + "|"
            for sample in made.source(source).samples:
                results = [
                    fidelity_across.try_sample(made.source(source), made.sink(sink), sample)
                    for sink in engines.NAMES
                ]
                yield fidelity_across.line(sample.native, results)


def main() -> None:
    import fidelity_declared

    server = os.environ["CLAIMCHECK_TEST_DATABASE_URL"]
    logging.disable(logging.WARNING)
    with fresh_database(server) as source, fresh_database(server) as sink:
        prepare(source, sink)
        print(page(try_pair(source, sink, pair) for pair in pairs()), end="")
        print(fidelity_declared.section(source, sink), end="")
    print(ACROSS.rstrip())
    with tempfile.TemporaryDirectory() as folder:
        for text in across(server, Path(folder)):
            print(text)


if __name__ == "__main__":
    main()
