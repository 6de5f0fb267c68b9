"""A process that executes a run, forks a child that executes one, and executes another after it."""

import os
import sys
import time
from uuid import UUID

from worker_support import KEYRING

from db import session
from dispatch.context import RunContext
from dispatch.coordinator import WorkerDispatchCoordinator
from dispatch.ports import Ports


def work(run: RunContext) -> int:
    # Long enough for the heartbeat to open its connection.
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline:
        run.check_cancelled()
        time.sleep(0.01)
    return os.getpid()


def main() -> int:
    first, second, third = (UUID(value) for value in sys.argv[1:])
    coordinator = WorkerDispatchCoordinator(
        Ports(),
        executor=lambda: f"host:1:nonce:{os.getpid()}",
        keyring=lambda: KEYRING,
        known=lambda: ["fork"],
        handler=lambda name: work,
        slot_runs=1,
    )
    with session.transaction():
        pass
    assert coordinator.run(first, "runs") == [first]
    child = os.fork()
    if child == 0:
        with session.transaction():
            pass
        os._exit(0 if coordinator.run(second, "runs") == [second] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert coordinator.run(third, "runs") == [third]
    with session.transaction():
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
