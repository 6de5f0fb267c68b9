"""One part of a parallel run, in a process of its own: rows in Python keep one core busy each.

Started by :mod:`tasks.replicate.parts` as a script. Its task, credentials included, comes over
standard input; it reports in JSON lines on what was its standard output, and never logs. It opens
both ends and waits to be told that all parts have. When standard input ends, because the run was
stopped or its worker died, both ends are stopped and the process exits.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, BinaryIO

EXIT_SECONDS = 0.5
"""How long its ends have to stop: longer than a server that hangs is asked to cancel."""


def _bare_packages() -> None:
    """Let ``tasks.replicate`` be imported without ``tasks/__init__``, which builds the Celery app
    and reads its settings: a part needs neither."""
    here = Path(__file__).resolve().parent
    package = types.ModuleType("tasks")
    package.__path__ = [str(here.parent)]
    sys.modules["tasks"] = package


def _reports() -> BinaryIO:
    """Where to report; what a connector or a library prints goes to standard error instead."""
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return reports


def main(inward: BinaryIO, outward: BinaryIO) -> int:
    """Carry out the part whose task stands in ``inward``; returns the exit status."""
    sys.path[:] = json.loads(inward.readline())
    _bare_packages()
    task: dict[str, Any] = pickle.load(inward)
    from dispatch.context import HandlerFailure
    from tasks.replicate.part import Work

    lock = threading.Lock()

    def report(**message: Any) -> None:
        with lock:
            outward.write(json.dumps(message).encode() + b"\n")
            outward.flush()

    work = Work(task, report)

    def listen() -> None:
        for line in inward:
            message = json.loads(line)
            if "bandwidth" in message:
                work.throttle.limit = message["bandwidth"]
            else:
                work.begin()
        work.stop()
        # What does not end by itself ends with the process; its sessions are told by then.
        time.sleep(EXIT_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        work.run()
    except HandlerFailure as error:
        report(error=str(error), code=error.code, permanent=error.permanent)
        return 1
    except BaseException as error:
        report(
            error=f"a part failed: {type(error).__name__}", code="handler_error", permanent=False
        )
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(sys.stdin.buffer, _reports()))
