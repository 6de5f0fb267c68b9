"""Handlers of the tests' workers. What they did is told by files in the folder ``params["at"]``."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from tasks import HandlerFailure, PermanentFailure, RunContext, Snooze, app, handler, trigger


def mark(run: RunContext, what: str) -> None:
    """Leave the file ``WHAT-ATTEMPT`` with this process's id in it."""
    where = run.params.get("at")
    if where:
        Path(where, f"{what}-{run.attempt}").write_text(str(os.getpid()))


@handler("noop")
def noop(run: RunContext) -> Any:
    return run.params.get("result")


@handler("wait")
def wait(run: RunContext) -> str:
    """Work until the file ``go`` appears, stopping where it is told to."""
    mark(run, "started")
    deadline = time.monotonic() + float(run.params.get("seconds", 60))
    go = Path(run.params["at"], "go") if "at" in run.params else None
    while time.monotonic() < deadline and not (go is not None and go.exists()):
        run.check_cancelled()
        time.sleep(0.02)
    mark(run, "ended")
    return f"attempt {run.attempt}"


@handler("deaf")
def deaf(run: RunContext) -> None:
    """Work without ever looking whether it should stop."""
    mark(run, "started")
    deadline = time.monotonic() + float(run.params.get("seconds", 60))
    while time.monotonic() < deadline:
        time.sleep(0.02)


@handler("query")
def query(run: RunContext) -> None:
    """Block in a statement of ``params["seconds"]``, cut from another thread where it must stop."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        mark(run, "started")
        with run.stopping(connection.cancel_safe):
            connection.execute("select pg_sleep(%s)", [run.params.get("seconds", 60)])


@handler("die")
def die(run: RunContext) -> str:
    """Die like a killed process, at the first attempts of a run."""
    mark(run, "started")
    if run.attempt <= int(run.params.get("times", 1)):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"attempt {run.attempt}"


@handler("fail")
def fail(run: RunContext) -> str:
    """Fail at the first attempts of a run."""
    if run.attempt <= int(run.params.get("times", 99)):
        raise HandlerFailure(str(run.params.get("message", "it did not work")))
    return f"attempt {run.attempt}"


@handler("fail_for_good")
def fail_for_good(run: RunContext) -> None:
    raise PermanentFailure("it will never work")


@handler("snooze")
def snooze(run: RunContext) -> str:
    marked = Path(run.params["at"], "snoozed")
    if not marked.exists():
        marked.touch()
        raise Snooze(0.0)
    return "awake"


@handler("secret")
def secret(run: RunContext) -> dict[str, Any]:
    """Log the credentials of its source, and fail with a driver's error that holds them."""
    assert run.source is not None
    run.log.warning("connecting with %s", run.source.config["url"])
    logging.getLogger("shop").warning("connecting with %s", run.source.config)
    print("connecting with", run.source.config["url"])
    if run.params.get("fail"):
        raise RuntimeError(f"could not connect to {run.source.config['url']}")
    return {"host": run.source.config["url"].rpartition("@")[2]}


@handler("where")
def where(run: RunContext) -> dict[str, Any]:
    """Tell where it runs."""
    return {"pid": os.getpid(), "thread": threading.current_thread().name}


@handler("subprocess")
def in_subprocess(run: RunContext) -> str:
    return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout


# Ordinary tasks of the same app, as a team has them beside its handlers.


@app.task(name="test.add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="test.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="test.crash")
def crash() -> None:
    raise ValueError("an ordinary failure")


@app.task(name="test.start_run")
def start_run(job: str) -> str:
    """An ordinary task that triggers a run."""
    return str(trigger.delay(job).id)
