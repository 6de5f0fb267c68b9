"""A replication that was frozen thaws when its successor has long ended: the sink stays as it is.

    python -m tests.scenarios.stale --repeats 10 --seed 1

The source changes in between, so that whatever the stale attempt writes is seen (R-F5).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from typing import Any

from support.waiting import until

from scenarios import fleet as fleets
from scenarios.fleet import Client, Fleet
from scenarios.invariants import WATCH_WATERMARKS, Accepted, breaches
from scenarios.workload import SINK_TABLE, TABLES, compare

ROWS = 1500
SECONDS = 2.0
"""About how long a whole load takes."""
BODY = 32
JOBS = """
datasources:
  source: {connector: postgresql, url: "${SOURCE_URL}"}
  sink: {connector: postgresql, url: "${SINK_URL}"}
jobs:
  full: {mode: complete, SIDES}
  atomic: {mode: complete-atomic, SIDES}
  diff: {mode: complete-atomic, atomic: diff, SIDES}
  truncate: {mode: complete-atomic, atomic: truncate, SIDES}
  rename: {mode: complete-atomic, atomic: rename, SIDES}
  increment: {mode: incremental, watermark: version, SIDES}
"""
SIDES = """source: {datasource: source, table: public.thing},
    sink: {datasource: sink, table: public.thing_%s}, fetch_size: 100, bandwidth: %d,
    retry: {max_attempts: 5, backoff: 100ms, on_worker_loss: true}"""
MODES = ("full", "atomic", "diff", "truncate", "rename", "increment")


def prepare(fleet: Fleet) -> None:
    with fleet.postgres.connect("source") as source:
        for statement in TABLES.format(rows=ROWS).split(";"):
            source.execute(statement)  # type: ignore[call-overload]
    text = JOBS
    with fleet.postgres.connect("sink") as sink:
        for job in MODES:
            sink.execute(SINK_TABLE.format(table=f"thing_{job}"))  # type: ignore[call-overload]
            sides = SIDES % (job, int(ROWS * (BODY + 12) / SECONDS))
            text = text.replace("SIDES", sides, 1)
    fleet.define(text)
    fleet.rows(WATCH_WATERMARKS)


def change_source(fleet: Fleet) -> None:
    """All of it: what a stale attempt has read is wrong from now on."""
    fleet.rows(
        "update thing set version = nextval('version'), body = md5(random()::text)",
        database="source",
    )


def child_of(fleet: Fleet, run_id: str) -> int:
    return int(str(fleet.run(run_id)["executor"]).rpartition(":")[2])


def sessions(fleet: Fleet, fence: int) -> list[dict[str, Any]]:
    """The sessions that an attempt has at the source and the sink."""
    return fleet.rows(
        "select pid, state, query from pg_stat_activity where application_name like %s",
        f"cc/%/{fence}",
        database="postgres",
    )


def freeze(fleet: Fleet, client: Client, job: str, after: float) -> str:
    """Freeze a run ``after`` seconds of work, let another one take its place, and thaw it."""
    change_source(fleet)
    run_id = client.trigger(job)
    fleet.await_status(run_id, "RUNNING", "SUCCEEDED")
    moment = time.monotonic() + after
    until("the moment", lambda: time.monotonic() > moment, after + 5)
    pid = child_of(fleet, run_id)
    os.kill(pid, signal.SIGSTOP)
    try:
        frozen = fleet.run(run_id)
        change_source(fleet)
        end = fleet.await_status(run_id, "SUCCEEDED", "FAILED", seconds=40)
        assert end["status"] == "SUCCEEDED", (job, end["error_code"], end["error_message"])
        if frozen["status"] == "SUCCEEDED":
            return "came too late"
        fences = {"frozen": frozen["fence"], "now": end["fence"]}
        _same(fleet, job, "before the thaw", fences)
        before = fleet.run(run_id)
    finally:
        os.kill(pid, signal.SIGCONT)
    thawed = time.monotonic()
    until(
        "the stale attempt to end",
        lambda: time.monotonic() > thawed + 1.0 and not sessions(fleet, frozen["fence"]),
        20,
    )
    _same(fleet, job, "after the thaw", fences)
    assert fleet.run(run_id) == before, "the stale attempt changed its row"
    return "done again" if end["id"] != frozen["id"] else "not replaced"


def _same(fleet: Fleet, job: str, when: str, fences: dict[str, int]) -> None:
    found = compare(fleet, job)
    assert not found, f"{when}, {fences}: {found}"


def stale(repeats: int, seed: int, jobs: tuple[str, ...] = MODES) -> None:
    chance = random.Random(seed)
    with Fleet() as fleet:
        prepare(fleet)
        fleet.worker("one", ready=False)
        fleet.beat(ready=False)
        for member in fleet.members.values():
            member.await_ready()
        client = fleet.client()
        for job in jobs:
            fleet.await_status(client.trigger(job), "SUCCEEDED", seconds=40)
            ends = [
                freeze(fleet, client, job, chance.uniform(0.0, SECONDS + 0.5))
                for _ in range(repeats)
            ]
            shown = ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends)))
            print(f"{job}: of {repeats} frozen runs {shown}", flush=True)
        found = breaches(fleet, Accepted())
        assert not found, "\n".join(["", *found])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.stale")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    fleets.main(lambda: stale(chosen.repeats, chosen.seed))


if __name__ == "__main__":
    main()
