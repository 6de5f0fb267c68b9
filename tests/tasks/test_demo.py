"""`celery -A tasks demo`: the first thing that a new user runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from db import embedded

SERVERS = ("DATABASE_URL", "DATABASE_DIRECT_URL", "REDIS_URL", "CLAIMCHECK_KEYRING_FILE")


@pytest.mark.timeout(300)
def test_it_replicates_real_data_twice_and_leaves_no_server() -> None:
    folder = Path(tempfile.mkdtemp(prefix="cc-demo-"))
    folder.chmod(0o711)  # as root the servers run as another account, which must pass through
    home = folder / "home"
    environment = {name: value for name, value in os.environ.items() if name not in SERVERS}
    environment["CLAIMCHECK_HOME"] = str(home)
    try:
        for _ in range(2):
            ended = subprocess.run(
                [sys.executable, "-m", "celery", "-A", "tasks", "demo", "--json"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=140,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            shown = json.loads(ended.stdout)
            assert shown["same"]
            assert [
                (run["job"], run["status"], run["rows_processed"]) for run in shown["runs"]
            ] == [
                ("flights", "SUCCEEDED", 336_776),
                ("late-departures", "SUCCEEDED", 26_581),
            ]
            assert not embedded.status(home).running
    finally:
        embedded.remove(home)
        shutil.rmtree(folder, ignore_errors=True)
