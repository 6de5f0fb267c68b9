"""What a result says of the machine it was measured on, and where it is written."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(name: str, command: str, figures: dict[str, Any]) -> Path:
    """Write `figures` with the machine and the versions; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "benchmark": name,
        "command": command,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {p: version(p) for p in ("celery", "kombu", "redis", "psycopg", "sqlalchemy")},
        **figures,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
