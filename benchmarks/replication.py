"""Replication beside the practical limit (one psql into another) and beside other ways, in one run.

Each way moves the same table of ten columns and runs in a process of its own, one after another,
round by round, so that a noisy machine treats all alike; the figures are medians, and only their
ratios mean much. What is near its target runs more often, in turns with what it is held against.
SQLAlchemy and dlt (where it is installed) move a tenth of the rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from benchmarks.replication_chart import draw
from benchmarks.replication_places import Places

ROWS, QUICK_ROWS, ROUNDS = 2_000_000, 20_000, 5
SLOW = ("SQLAlchemy", "dlt")
SLOW_SHARE = 10
Taken = dict[str, list[dict[str, float]]]
"""Of each path what its runs took."""
NEAR, MORE = 0.1, 10
"""What comes out so near to its target, on either side, runs so many times more."""

TARGETS: dict[str, tuple[str, float, int]] = {
    "PG -> PG, identical": ("psql binary", 0.95, 64),
    "PG -> PG, casts": ("psql binary", 0.65, 64),
    "PG -> PG, narrower": ("psql binary", 0.65, 64),
    "PG -> PG, text": ("psql binary", 0.65, 64),
    "PG -> PG, row lane": ("psql binary", 0.35, 128),
    "PG -> Parquet": ("psql binary", 0.50, 512),
    "Parquet -> PG": ("psql binary", 0.50, 512),
    "CSV -> PG": ("CSV -> PG, by hand", 0.90, 128),
    "SQLite -> PG": ("SQLite -> PG, by hand", 0.90, 128),
    "MariaDB -> PG": ("MariaDB -> PG, by hand", 0.90, 128),
}
"""Of each path: what it is held against, the least ratio, and the most memory in MB a process."""


def measure(*, quick: bool = False) -> None:
    """Run all ways in rounds, write benchmarks/results/replication.json and draw the chart."""
    rows, rounds = (QUICK_ROWS, 1) if quick else (ROWS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="cc-bench-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o711)
        places = stack.enter_context(Places(Path(folder), rows))
        taken: Taken = {}
        for number in range(rounds):
            for name in places.paths(first=number == 0):
                _take(taken, name, places, f"round {number + 1}")
        near = [] if quick else _near(taken)
        for number in range(MORE):
            for name in near:
                _take(taken, name, places, f"once more, {number + 1} of {MORE},")
        flat = None if quick else _flatness(places)
    figures = {name: _figure(name, found, rows) for name, found in taken.items()}
    for name, (against, least, most) in TARGETS.items():
        if name in figures and against in figures:
            ratio = figures[name]["rows_per_second"] / figures[against]["rows_per_second"]
            figures[name] |= {
                "against": against,
                "ratio": round(ratio, 3),
                "least_ratio": least,
                "most_mb": most,
                "met": ratio >= least and figures[name]["peak_mb"] <= most,
            }
    document: dict[str, Any] = {"rows": rows, "rounds": rounds, "paths": figures}
    if flat is not None:
        document["peak_mb_by_rows"] = flat
    path = write(
        "replication-quick" if quick else "replication",
        "python -m benchmarks replication" + (" --quick" if quick else ""),
        document,
    )
    chart = None if quick else draw(figures, Path(__file__).with_name("replication.svg"))
    print(f"wrote {path}" + (f" and {chart}" if chart else ""))


def _take(taken: Taken, name: str, places: Places, when: str) -> None:
    taken.setdefault(name, []).append(_once(name, places))
    print(f"{when} {name}: {taken[name][-1]}", flush=True)


def _near(taken: Taken) -> list[str]:
    """The paths that are near their targets, and those that they are held against."""
    found: dict[str, None] = {}
    for name, (against, least, _) in TARGETS.items():
        if name in taken and against in taken:
            ratio = _seconds(taken[against]) / _seconds(taken[name])
            if abs(ratio / least - 1) < NEAR:
                found |= {against: None, name: None}
    return list(found)


def _seconds(found: list[dict[str, float]]) -> float:
    return statistics.median(one["seconds"] for one in found)


def _once(name: str, places: Places) -> dict[str, float]:
    place = dict(places.place)
    places.settle()
    if name in SLOW:
        place["rows"] = max(1, place["rows"] // SLOW_SHARE)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replication_paths", name],
        input=json.dumps(place),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["rows"] = place["rows"]
    return found


def _figure(name: str, found: list[dict[str, float]], rows: int) -> dict[str, Any]:
    seconds = _seconds(found)
    moved = found[0]["rows"]
    return {
        "seconds": round(seconds, 3),
        "all_seconds": [round(one["seconds"], 3) for one in found],
        "rows": int(moved),
        "rows_per_second": round(moved / seconds),
        "peak_mb": int(max(one["peak_mb"] for one in found)),
    }


def _flatness(places: Places) -> dict[str, int]:
    """Peak memory of a run over the table, and over ten times as many rows."""
    found = {str(places.rows): int(_once("PG -> PG, identical", places)["peak_mb"])}
    places.grow(10)
    found[str(places.rows)] = int(_once("PG -> PG, identical", places)["peak_mb"])
    return found
