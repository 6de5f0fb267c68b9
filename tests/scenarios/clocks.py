"""Processes whose wall clock is wrong (R-L2)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def wrong(seconds: int, folder: Path) -> dict[str, str]:
    """The environment of such a process; empty where the machine has no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library = folder / "wrong_clock.so"
    if not library.exists():
        source = Path(__file__).with_name("wrong_clock.c")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True
        )
    return {"LD_PRELOAD": str(library), "WRONG_CLOCK_SECONDS": str(seconds)}
