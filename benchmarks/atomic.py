"""The ways of complete-atomic beside each other, by how much of the table has changed.

Each run replaces the same table while a reader asks for one row after another. Told are the whole
run, the longest that the reader waited, and how much the table grew; medians of the rounds. The
ways take turns, so that a noisy machine treats all alike; only ratios within one run mean much.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.machine import write
from benchmarks.replication_paths import import_ours, ours
from benchmarks.replication_places import Places

ROWS, QUICK_ROWS, ROUNDS = 1_000_000, 20_000, 3
# How much of the table differs says nothing to the ways that replace all of it.
CASES = [(way, changed) for changed in (0, 10, 100) for way in ("delete", "diff")] + [
    ("truncate", 10),
    ("rename", 10),
]
"""Way, and percent of the rows that differ."""


def measure(*, quick: bool = False) -> None:
    """Run all cases in rounds and write benchmarks/results/atomic.json."""
    rows, rounds = (QUICK_ROWS, 1) if quick else (ROWS, ROUNDS)
    taken: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="cc-bench-") as folder:
        Path(folder).chmod(0o711)
        with Places(Path(folder), rows, others=False) as places:
            for number in range(rounds):
                for case in CASES:
                    taken[case].append(_once(places.place, *case))
                    print(f"round {number + 1} {case}: {taken[case][-1]}", flush=True)
    path = write(
        "atomic-quick" if quick else "atomic",
        "python -m benchmarks atomic" + (" --quick" if quick else ""),
        {
            "rows": rows,
            "rounds": rounds,
            "cases": [
                {"way": way, "percent_changed": changed, **_medians(found)}
                for (way, changed), found in taken.items()
            ],
        },
    )
    print(f"wrote {path}")


def _once(place: dict[str, Any], way: str, changed: int) -> dict[str, float]:
    _make_sink(place, changed)
    before = _bytes(place)
    reader = _Reader(place)
    # A process of its own, as in a worker: the reader must not wait for its interpreter.
    process = multiprocessing.get_context("spawn").Process(target=_replace, args=(place, way))
    with reader:
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{way} at {changed} % failed; its error stands above")
    seconds = float(Path(place["folder"], "seconds").read_text())
    return {
        "seconds": round(seconds, 3),
        "reader_waited_ms": round(reader.longest * 1000, 1),
        "growth": round(_bytes(place) / before, 2),
    }


def _replace(place: dict[str, Any], way: str) -> None:
    import_ours()
    began = time.perf_counter()
    ours(place, mode="complete-atomic", atomic=way)
    Path(place["folder"], "seconds").write_text(str(time.perf_counter() - began))


def _make_sink(place: dict[str, Any], changed: int) -> None:
    """The table as an earlier run left it, of which ``changed`` percent differ by now."""
    with psycopg.connect(place["sink"]["url"], autocommit=True) as connection:
        connection.execute("truncate t")
    ours(place)
    with psycopg.connect(place["sink"]["url"], autocommit=True) as connection:
        # Rewritten whole, so that no case starts with another's dead rows.
        connection.execute(
            "create table fresh (like t including all)",
        )
        connection.execute(
            "insert into fresh select id, uid, name, case when id %% 100 < %s"
            " then 'old' else note end, amount, at, flag, doc, n, d from t",
            [changed],
        )
        connection.execute("drop table t")
        connection.execute("alter table fresh rename to t")
        connection.execute("vacuum analyze t")
        connection.execute("checkpoint")


def _bytes(place: dict[str, Any]) -> int:
    with psycopg.connect(place["sink"]["url"], autocommit=True) as connection:
        row = connection.execute("select pg_total_relation_size('t')").fetchone()
    assert row is not None
    return int(row[0])


class _Reader:
    """Asks for one row after another until the block ends; ``longest`` is in seconds."""

    def __init__(self, place: dict[str, Any]) -> None:
        self._url, self._rows = place["sink"]["url"], place["rows"]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.longest = 0.0

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _read(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            number = 0
            while not self._done.wait(0.002):
                number = (number + 7919) % self._rows
                began = time.perf_counter()
                found = connection.execute("select d from t where id = %s", [number + 1]).fetchone()
                self.longest = max(self.longest, time.perf_counter() - began)
                assert found is not None, f"row {number + 1} was not there"


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}
