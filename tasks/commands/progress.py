"""How far a run has come, as commands tell it: percent, rows, bytes and phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from dispatch.lifecycle import JobRunStatus


def percent(run: Mapping[str, Any]) -> int | None:
    """Whole percent of all rows; None where their number is not known.

    100 is only of a run that succeeded: all rows may be read before they are in place, and an
    estimate of them may be too low.
    """
    if run["status"] == JobRunStatus.SUCCEEDED:
        return 100
    progress = run["progress"] or {}
    done, total = progress.get("done") or 0, progress.get("total")
    return min(99, 100 * done // total) if total else None


def told(
    run: Mapping[str, Any], *, rows: str = " rows", gap: str = ", ", with_phase: bool = True
) -> str:
    """``24 %, 12,000 / ~50,000 rows, 3.4 MB, reading``; ``~`` says that it is an estimate.

    What is not known is left out. Without ``with_phase`` the phase stands in the place of the
    bytes, where it tells why rows and percent stand still.
    """
    progress = run["progress"] or {}
    done, total = progress.get("done"), progress.get("total")
    phase = progress.get("phase")
    share = percent(run)
    if share == 100:
        total = phase = None
        if run["rows_processed"] is not None:
            done = run["rows_processed"]
    parts = [] if share is None else [f"{share} %"]
    if total:
        about = "~" if progress.get("total_is_estimate") else ""
        parts.append(f"{done or 0:,} / {about}{total:,}{rows}")
    elif done or (share == 100 and done is not None):
        parts.append(f"{done:,}{rows}")
    standing = phase is not None and phase != "reading"
    if progress.get("bytes") and (with_phase or not standing):
        parts.append(decimal(progress["bytes"]))
    if phase and (with_phase or standing or not parts):
        parts.append(phase)
    return gap.join(parts)
