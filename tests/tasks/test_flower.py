"""Flower shows runs under their job's name, and no wake-up: over its HTTP API and in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import missing, processes
from support.processes import Running
from support.waiting import until


@dataclass
class Flower:
    """A running Flower."""

    running: Running
    url: str

    def ask(self, path: str, *, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.url + path, data=data, timeout=10) as answer:
            return json.loads(answer.read())

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def tasks(self) -> dict[str, dict[str, Any]]:
        return dict(self.ask("/api/tasks"))


@pytest.fixture
def flower(environment: dict[str, str], tmp_path: Path) -> Iterator[Flower]:
    port = processes.free_port()
    variables = environment | {"FLOWER_UNAUTHENTICATED_API": "true"}
    options = ["flower", "--address=127.0.0.1", f"--port={port}"]
    with processes.celery(tmp_path / "flower.log", *options, **variables) as running:
        found = Flower(running, f"http://127.0.0.1:{port}")

        def answers() -> bool:
            try:
                return bool(found.text("/healthcheck"))
            except (urllib.error.URLError, ConnectionError):
                return False

        until("Flower to answer", answers, 30)
        until("Flower to hear events", lambda: "Connected to" in running.output(), 30)
        yield found


def test_flower_shows_runs_under_their_job_s_name(
    worker: Any, trigger: Any, celery_app: Any, job: Any, flower: Flower, tmp_path: Path
) -> None:
    for name in ("noop", "wait", "fail"):
        job(name, definition={"retry": {"backoff": 0}}, max_attempts=2)
    with worker(name="seen") as running:
        done = trigger.delay("noop", password="not-to-be-seen", result={"rows": 3})
        held = trigger.delay("wait", at=str(tmp_path))
        failed = trigger.delay("fail", message="of no use")
        cancelled = trigger.apply_async(("noop",), {}, countdown=3600)
        done.get(timeout=20)
        until("the failure", lambda: failed.state == "FAILURE", 30)
        cancelled.revoke()
        expected = {done.id: "SUCCESS", held.id: "STARTED", failed.id: "RETRY",
                    cancelled.id: "REVOKED"}  # fmt: skip

        def seen() -> bool:
            tasks = flower.tasks()
            return all(tasks.get(i, {}).get("state") == state for i, state in expected.items())

        until("Flower to show every run", seen)
        tasks = flower.tasks()
        assert {task["name"] for task in tasks.values()} == {"noop", "wait", "fail"}
        assert "not-to-be-seen" not in json.dumps(tasks)
        host = tasks[done.id]["worker"]
        assert host.startswith("seen@")
        assert tasks[done.id]["runtime"] > 0
        assert tasks[held.id]["kwargs"] == "{'attempt': 1, 'queue': 'runs'}"
        [second] = [t for t in tasks.values() if t["parent_id"] == failed.id]
        assert (second["state"], second["root_id"]) == ("FAILURE", failed.id)
        assert second["exception"] == "handler_error: of no use"

        # The durable result, from Postgres.
        assert flower.ask(f"/api/task/result/{done.id}")["result"] == {"rows": 3}
        assert flower.ask(f"/api/task/result/{failed.id}")["state"] == "FAILURE"
        metrics = flower.text("/metrics")
        assert re.search(r'flower_events_total\{.*task="noop".*type="task-succeeded"', metrics)
        assert "tasks.trigger" not in metrics

        # Flower's revoke button is a cancel.
        flower.ask(f"/api/task/revoke/{held.id}?terminate=true", data=b"")
        until("the run to be cancelled", lambda: held.state == "REVOKED")
        until("Flower to show it", lambda: flower.tasks()[held.id]["state"] == "REVOKED")
        assert len(running.children()) == 2


def test_run_whose_worker_was_lost_does_not_stay_started(
    worker: Any, trigger: Any, job: Any, flower: Flower
) -> None:
    job("die")
    with worker():
        result = trigger.delay("die")
        result.get(timeout=30)
        until("its first attempt", lambda: flower.tasks()[result.id]["state"] == "RETRY")


def test_flower_survives_both_servers_going_away(
    worker: Any, trigger: Any, job: Any, flower: Flower, own_redis: Any
) -> None:
    job("noop")
    with worker():
        trigger.delay("noop").get(timeout=20)
        own_redis.kill()
        until("Flower to notice", lambda: "onnect" in flower.running.output())
        own_redis.start()

        later: set[str] = set()

        def seen() -> bool:
            result = trigger.delay("noop")
            result.get(timeout=20)
            later.add(result.id)
            return bool(later & set(flower.tasks()) or time.sleep(0.5))

        until("Flower to show runs again", seen, 60)
        assert flower.running.process.poll() is None


def test_browser_shows_the_runs(
    worker: Any, trigger: Any, job: Any, flower: Flower, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        missing.skip("needs Chromium: apt-get install -y chromium")
    job("orders_to_warehouse", handler="noop")
    job("daily_report", handler="fail", max_attempts=1)
    with worker():
        results = [trigger.delay("orders_to_warehouse") for _ in range(3)]
        results.append(trigger.delay("daily_report", message="no orders on that day"))
        until("Flower to know them", lambda: {r.id for r in results} <= set(flower.tasks()))
        until("all to end", lambda: all(result.ready() for result in results))
        picture = Path(os.environ.get("CLAIMCHECK_TEST_SCREENSHOTS", tmp_path), "flower.png")
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--window-size=1400,700",
            "--virtual-time-budget=15000",
        ]
        page = subprocess.run(
            [*command, "--dump-dom", f"{flower.url}/tasks"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        subprocess.run(
            [*command, f"--screenshot={picture}", f"{flower.url}/tasks"],
            capture_output=True,
            timeout=120,
            check=True,
        )
    table = page[page.index("<tbody") :]
    assert table.count("orders_to_warehouse") >= 3
    assert "daily_report" in table
    assert "SUCCESS" in table
    assert "FAILURE" in table
    assert "tasks.trigger" not in table
    assert picture.stat().st_size > 10_000
