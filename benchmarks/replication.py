"""Replication beside the practical limit (one psql into another) and beside other ways, in one run.

Each way moves the same table of ten columns and runs in a process of its own, one after another,
round by round, so that a noisy machine treats all alike; the figures are medians, and only their
ratios mean much. psql and its nearest match run three times a round; SQLAlchemy and dlt (where it
is installed) move a tenth of the rows.
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
CLOSE = ("psql binary", "PG -> PG, identical")
"""Nearly as fast as each other, and so run three times a round."""

TARGETS: dict[str, tuple[str, float, int]] = {
    "PG -> PG, identical": ("psql binary", 0.95, 64),
    "PG -> PG, casts": ("psql binary", 0.65, 64),
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
        taken: dict[str, list[dict[str, float]]] = {}
        for number in range(rounds):
            for name in _with_close(places.paths(first=number == 0)):
                taken.setdefault(name, []).append(_once(name, places))
                print(f"round {number + 1} {name}: {taken[name][-1]}", flush=True)
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


def _with_close(names: list[str]) -> list[str]:
    """The paths of a round, with the close ones also in its middle and at its end."""
    middle = len(names) // 2
    return [*names[:middle], *CLOSE, *names[middle:], *CLOSE]


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
    seconds = statistics.median(one["seconds"] for one in found)
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
