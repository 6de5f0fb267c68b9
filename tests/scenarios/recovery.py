"""How long a fleet takes to go on after a loss, over repeats, and that nothing wrong happens then.

    python -m tests.scenarios.recovery [--repeats 10]

Writes benchmarks/results/recovery.json. Times are in seconds, from the loss to the moment that the
database gave to the row (both by the machine's one clock).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

from support.waiting import until

from scenarios import fleet as fleets
from scenarios import ledger
from scenarios.fleet import Client, Fleet, Way

JOBS = """
jobs:
  work: {handler: work, overlap: allow, retry: {max_attempts: 9, backoff: 100ms}}
  deaf: {handler: deaf, overlap: allow, retry: {max_attempts: 9, backoff: 100ms}}
"""


class Lost:
    """One loss: the attempt that was running, and the one that took its place."""

    def __init__(self, fleet: Fleet, run_id: str, pid: int, at: float) -> None:
        self._fleet, self.run_id, self.pid, self.at = fleet, run_id, pid, at

    def recovered(self, seconds: float) -> dict[str, float]:
        """Until the next attempt was admitted and until it started, once it has."""

        def look() -> dict[str, Any] | None:
            found = self._fleet.rows(
                """select extract(epoch from created_at)::float8 as admitted,
                     extract(epoch from started_at)::float8 as started
                   from job_run where previous_run_id = %s and started_at is not null""",
                self.run_id,
            )
            return found[0] if found else None

        row = until(f"the next attempt of {self.run_id} to start", look, seconds)
        return {"admitted": row["admitted"] - self.at, "started": row["started"] - self.at}


def begin(fleet: Fleet, client: Client, job: str = "work", **params: Any) -> tuple[str, int]:
    """Start a long run; its id, and the process that works on it."""
    run_id = client.trigger(job, {"seconds": 60, **params})

    def working() -> int | None:
        found = [s.pid for s in ledger.stretches(fleet.trace) if s.run == run_id]
        return found[0] if found else None

    return run_id, until(f"run {run_id} to work", working, 20)


def _last_seen(fleet: Fleet, run_id: str, since: float) -> float:
    """The last sign of an attempt's code, once there was none for a second after ``since``.

    Both by the monotonic clock.
    """

    def look() -> float | None:
        [last] = [s.last for s in ledger.stretches(fleet.trace) if s.run == run_id]
        return last if time.monotonic() - max(last, since) > 1.0 else None

    return until(f"the code of run {run_id} to stop", look, 20)


def stop(fleet: Fleet, client: Client, run_id: str) -> None:
    client.ask("cancel", run=run_id)
    fleet.await_status(run_id, "CANCELLED")


def kill_child(fleet: Fleet, client: Client) -> dict[str, float]:
    """kill -9 of the prefork child that works, under the default lease of a minute."""
    run_id, pid = begin(fleet, client)
    lost = Lost(fleet, run_id, pid, time.time())
    os.kill(pid, signal.SIGKILL)
    took = lost.recovered(20)
    assert fleet.run(run_id)["error_code"] == "worker_lost"
    stop(fleet, client, run_id)
    return took


def kill_worker(fleet: Fleet, client: Client) -> dict[str, float]:
    """kill -9 of the whole worker that works, while another one is alive."""
    run_id, pid = begin(fleet, client)
    [worker] = [m for m in fleet.members.values() if m.is_worker and pid in m.family()]
    lost = Lost(fleet, run_id, pid, time.time())
    with fleet.holding(worker):
        worker.kill(group=True)
        took = lost.recovered(30)
    assert fleet.run(run_id)["error_code"] == "lease_expired"
    worker.start()
    worker.await_ready()
    stop(fleet, client, run_id)
    return took


def freeze_child(fleet: Fleet, client: Client) -> dict[str, float]:
    """SIGSTOP of the child past its lease, then SIGCONT: it stops by itself and writes nothing."""
    run_id, pid = begin(fleet, client)
    lost = Lost(fleet, run_id, pid, time.time())
    os.kill(pid, signal.SIGSTOP)
    try:
        took = lost.recovered(30)
        before = fleet.run(run_id)
        audit = fleet.rows("select * from audit_event where run_id = %s", run_id)
        thawed = time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)

    last = _last_seen(fleet, run_id, since=thawed)
    took["stopped_after_thaw"] = max(0.0, last - thawed)
    # Its process goes on to other work, or was ended; either way it holds nothing of this run.
    stop(fleet, client, run_id)
    assert fleet.run(run_id) == before, "the fenced attempt changed its row"
    assert fleet.rows("select * from audit_event where run_id = %s", run_id) == audit
    effects = fleet.rows(
        "select * from entry where run_id = %s and what = 'effect'", run_id, database="ledger"
    )
    assert not effects, "the fenced attempt had an effect"
    return took


def _after_renewal(fleet: Fleet, run_id: str) -> float:
    """Wait for a renewal, when the lease is at its longest; when it expires, monotonic."""
    first = fleet.run(run_id)["lease_until"]
    until("a renewal", lambda: fleet.run(run_id)["lease_until"] > first, 10)
    expires = fleet.run(run_id)["lease_until"].timestamp()
    return float(expires + time.monotonic() - time.time())


def hang_database(fleet: Fleet, client: Client) -> dict[str, float]:
    """The whole server hangs past the lease: the work stops before the lease would expire."""
    run_id, _ = begin(fleet, client)
    expires = _after_renewal(fleet, run_id)
    fleet.postgres.hang()
    hung = time.monotonic()
    try:
        last = _last_seen(fleet, run_id, since=hung)
    finally:
        fleet.postgres.go_on()
    back = time.time()
    took = Lost(fleet, run_id, 0, back).recovered(30)
    stop(fleet, client, run_id)
    return {"stopped": last - hung, "before_expiry": _margin(expires, last), **took}


def cut_off_worker(
    fleet: Fleet, client: Client, ways: dict[str, Way], job: str
) -> dict[str, float]:
    """One worker alone loses the database without a word, and the others do not wait for it."""
    # What is deaf is not to be waited for long in the end.
    run_id, pid = begin(fleet, client, job, seconds=8 if job == "deaf" else 60)
    [worker] = [m for m in fleet.members.values() if m.is_worker and pid in m.family()]
    expires = _after_renewal(fleet, run_id)
    lost = Lost(fleet, run_id, pid, time.time())
    cut = time.monotonic()
    ways[worker.name].hang()
    try:
        last = _last_seen(fleet, run_id, since=cut)
        took = lost.recovered(30)
        before = fleet.run(run_id)
    finally:
        ways[worker.name].resume()
    stop(fleet, client, run_id)
    assert fleet.run(run_id) == before, "the fenced attempt changed its row"
    return {"stopped": last - cut, "before_expiry": _margin(expires, last), **took}


def _margin(expires: float, last: float) -> float:
    margin = expires - last
    assert margin > 0, f"the work went on for {-margin:.2f} s after its lease had expired (R-L3)"
    return margin


def summary(measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Median, least and most of each figure."""
    return {
        name: {
            "median": round(statistics.median(one[name] for one in measured), 3),
            "min": round(min(one[name] for one in measured), 3),
            "max": round(max(one[name] for one in measured), 3),
        }
        for name in measured[0]
    }


def children(repeats: int) -> dict[str, Any]:
    """The figures of `kill_child`. A dead child's run must not have to wait for its lease."""
    with Fleet(lease_seconds=60, settings={"CLAIMCHECK_SWEEP_SECONDS": "60"}) as fleet:
        fleet.define(JOBS)
        _up(fleet, ("one",))
        client = fleet.client()
        found = summary([kill_child(fleet, client) for _ in range(repeats)])
        assert found["admitted"]["max"] < 2, found
        return found


def leases(repeats: int, *, lease: float = 3.0) -> dict[str, Any]:
    """The figures of the losses that only the lease tells."""
    with Fleet(lease_seconds=lease) as fleet:
        fleet.define(JOBS)
        ways = _up(fleet, ("one", "two"))
        client = fleet.client()
        found = {
            "kill_worker": summary([kill_worker(fleet, client) for _ in range(repeats)]),
            "freeze_child": summary([freeze_child(fleet, client) for _ in range(repeats)]),
            "hang_database": summary([hang_database(fleet, client) for _ in range(repeats)]),
        }
        for loss, job in (("cut_off_worker", "work"), ("cut_off_deaf_work", "deaf")):
            found[loss] = summary(
                [cut_off_worker(fleet, client, ways, job) for _ in range(repeats)]
            )
        for loss in ("kill_worker", "freeze_child", "cut_off_worker", "cut_off_deaf_work"):
            # A worker that is cut off may have taken the next attempt's wake-up: its start then
            # waits for another one, its admission for nobody.
            assert found[loss]["admitted"]["max"] <= lease + 1, found
        assert found["freeze_child"]["stopped_after_thaw"]["max"] < 1, found
        return found


def _up(fleet: Fleet, names: Sequence[str]) -> dict[str, Way]:
    """Start workers, each with a way to PostgreSQL of its own, and a beat."""
    ways = {name: fleet.way(name) for name in names}
    members = [fleet.worker(name, ready=False, DATABASE_URL=way.url) for name, way in ways.items()]
    for member in [*members, fleet.beat(ready=False)]:
        member.await_ready()
    return ways


def recovery(repeats: int) -> None:
    from benchmarks.machine import write

    figures: dict[str, Any] = {
        "repeats": repeats,
        "unit": "seconds",
        "kill_child": {"lease_seconds": 60, **children(repeats)},
        "lease_seconds": 3,
        **leases(repeats),
    }
    path = write("recovery", f"python -m tests.scenarios.recovery --repeats {repeats}", figures)
    print(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.recovery")
    parser.add_argument("--repeats", type=int, default=10)
    chosen = parser.parse_args()
    fleets.main(lambda: recovery(chosen.repeats))


if __name__ == "__main__":
    main()
