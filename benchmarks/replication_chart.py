"""The chart of the replication benchmark: rates beside the practical limit, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIMIT = "psql binary"
OURS, OTHERS, LINE = "#2a6f97", "#a9b4bd", "#222222"


def draw(figures: dict[str, dict[str, Any]], path: Path) -> Path | None:
    """Draw ``path`` (SVG) if matplotlib is there; bars are ratios to one psql into another."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    limit = figures[LIMIT]["rows_per_second"]
    names = sorted(figures, key=lambda name: figures[name]["rows_per_second"])
    ratios = [figures[name]["rows_per_second"] / limit for name in names]
    others = {LIMIT, "SQLAlchemy", "dlt"} | {name for name in names if "by hand" in name}
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(names) + 1.4), layout="constrained")
    bars = axes.barh(names, ratios, color=[OTHERS if name in others else OURS for name in names])
    labels = [
        f"{ratio:.2f}   {figures[name]['rows_per_second'] / 1000:,.0f}k rows/s,"
        f" {figures[name]['peak_mb']} MB"
        for name, ratio in zip(names, ratios, strict=True)
    ]
    # On white, so that the line of the limit does not run through a label.
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, labels, padding=4, fontsize=8, bbox=behind)
    axes.axvline(1.0, color=LINE, linewidth=0.6, linestyle=":", zorder=0)
    axes.set_xlim(0, max(ratios) * 1.45)
    axes.set_xlabel("rate as a ratio to one psql into another, in binary (blue: Claimcheck)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)
    return path
