"""Durable runs beside plain Celery, in one run: enqueue, drain, and idle submit -> start latency.

The machine is noisy: read the figures as ratios. Both sides use the same Redis, two prefork
worker processes and a task that only notes when it started. The durable side also has its beat.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from benchmarks.noop import STARTS, read_starts

DEFINITION = """
jobs:
  bench-noop: {handler: bench-noop, overlap: allow, queue: bench}
"""


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def processes(*commands: list[str]) -> Iterator[None]:
    """Run the commands in the background, and end each by its process id."""
    with tempfile.TemporaryFile() as log:
        running = [
            subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            for command in commands
        ]
        try:
            yield
            for process in running:
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{process.args} ended early:\n{log.read().decode()[-3000:]}")
        finally:
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in running:
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()


class Starts:
    """The file of starts, and the wait until it holds a given number of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        with open(self.path, "wb"):
            pass

    def wait(self, count: int, seconds: float) -> list[float]:
        """Block until `count` starts were noted; exits with an error after `seconds`."""
        deadline = time.monotonic() + seconds
        while os.path.getsize(self.path) < count * 8:
            if time.monotonic() > deadline:
                sys.exit(f"only {os.path.getsize(self.path) // 8} of {count} tasks had started")
            time.sleep(0.0005)
        return read_starts(self.path)


def enqueue_rate(submit: Callable[[], Any], count: int) -> float:
    """Submissions a second, one after another."""
    begun = time.perf_counter()
    for _ in range(count):
        submit()
    return count / (time.perf_counter() - begun)


def drain_rate(starts: Starts, count: int) -> float:
    """Starts a second from the first to the last of `count` tasks that wait already."""
    moments = sorted(starts.wait(count, seconds=600))
    return (count - 1) / (moments[-1] - moments[0])


def latencies(submit: Callable[[], Any], starts: Starts, count: int) -> list[float]:
    """Milliseconds from the call of `submit` to the task's first line, one at a time when idle."""
    measured = []
    for done in range(count):
        begun = time.time()
        submit()
        measured.append((starts.wait(done + 1, seconds=60)[-1] - begun) * 1000)
        time.sleep(0.005)
    return measured


def side(
    name: str,
    submit: Callable[[], Any],
    commands: list[list[str]],
    starts: Starts,
    count: int,
    samples: int,
) -> dict[str, Any]:
    """Measure one side; its workers run only while something is drained or awaited."""
    print(f"{name}: enqueue {count} ...", file=sys.stderr, flush=True)
    starts.clear()
    enqueued = enqueue_rate(submit, count)
    print(f"{name}: drain {count} ...", file=sys.stderr, flush=True)
    with processes(*commands):
        drained = drain_rate(starts, count)
        starts.clear()
        submit()  # the first after a drain may meet a process that still settles
        starts.wait(1, seconds=60)
        time.sleep(1)
        starts.clear()
        print(f"{name}: latency of {samples} when idle ...", file=sys.stderr, flush=True)
        waited = latencies(submit, starts, samples)
    return {
        "enqueue_per_second": round(enqueued, 1),
        "drain_per_second": round(drained, 1),
        "submit_to_start_ms": {
            "p50": round(statistics.median(waited), 2),
            "p99": round(percentile(waited, 0.99), 2),
        },
    }


def worker(app: str, queue: str) -> list[str]:
    celery = str(Path(sys.executable).parent / "celery")
    return [celery, "-A", app, "worker", "-Q", queue, "-c", "2", "--loglevel=WARNING"]


def measure(*, quick: bool = False) -> None:
    """Measure both sides and write benchmarks/results/core.json."""
    count, samples = (200, 20) if quick else (5000, 500)
    with tempfile.TemporaryDirectory(prefix="claimcheck-bench-") as folder:
        os.chmod(folder, 0o711)
        with services(Path(folder)):
            starts = Starts(str(Path(folder) / "starts"))
            os.environ[STARTS] = starts.path
            os.environ["CLAIMCHECK_HANDLERS"] = "benchmarks.handlers"
            define(Path(folder))

            from benchmarks.plain import noop
            from tasks import trigger

            celery = str(Path(sys.executable).parent / "celery")
            beat = [celery, "-A", "tasks", "beat", "--loglevel=WARNING"]
            plain = side(
                "plain Celery",
                noop.delay,
                [worker("benchmarks.plain", "plain")],
                starts,
                count,
                samples,
            )
            durable = side(
                "Claimcheck",
                lambda: trigger.delay("bench-noop"),
                [worker("tasks", "bench"), beat],
                starts,
                count,
                samples,
            )
    ratios = {
        "enqueue": round(durable["enqueue_per_second"] / plain["enqueue_per_second"], 3),
        "drain": round(durable["drain_per_second"] / plain["drain_per_second"], 3),
        "latency_p50": round(
            durable["submit_to_start_ms"]["p50"] / plain["submit_to_start_ms"]["p50"], 2
        ),
    }
    figures = {
        "runs": count,
        "latency_samples": samples,
        "plain_celery": plain,
        "claimcheck": durable,
        "claimcheck_to_plain": ratios,
    }
    path = write("core-quick" if quick else "core", "python -m benchmarks core", figures)
    print(path.read_text())


@contextmanager
def services(folder: Path) -> Iterator[None]:
    """The servers that are set in the environment, or embedded ones that end with the benchmark."""
    from db import embedded, settings

    os.environ.setdefault("CLAIMCHECK_HOME", str(folder / "home"))
    settings.reset()
    home = settings.settings().home
    endpoints = settings.services()
    os.environ["REDIS_URL"] = endpoints.redis_url  # plain Celery has to be told
    try:
        yield
    finally:
        embedded.stop(home)


def define(folder: Path) -> None:
    """Apply the benchmark's one job."""
    file = folder / "bench.yaml"
    file.write_text(DEFINITION)
    celery = str(Path(sys.executable).parent / "celery")
    subprocess.run([celery, "-A", "tasks", "apply", str(file)], check=True, stdout=sys.stderr)
