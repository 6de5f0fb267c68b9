"""Claimers of the storm: threads that claim and finish until a file appears."""

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from worker_support import Claimer

from db import settings
from dispatch.claims import ClaimedRun
from dispatch.context import Outcome
from dispatch.finalization import RunFinalizationService, failure, success
from dispatch.ports import Ports

SOME_WAITING_RUN = """
    select id from job_run where status = 'PENDING' and id >= gen_random_uuid() order by id limit 1
"""


def half_an_edit(held: ClaimedRun) -> str | None:
    """Each edit writes one version into all jobs and both datasources, in one transaction."""
    versions = {held.definition["version"]}
    versions |= {int(held.snapshot[side]["name"].rpartition("-")[2]) for side in ("source", "sink")}
    return f"half an edit: {sorted(versions)}" if len(versions) > 1 else None


def claim_and_finish(name: str, stop: Path, found: list[dict[str, Any]]) -> None:
    claimer = Claimer(name, lease=3.0)
    service = RunFinalizationService(Ports(), patience=30)
    chance = random.Random(name)
    with psycopg.connect(settings.services().database_conninfo, autocommit=True) as guide:
        while not stop.exists():
            began = time.monotonic()
            named: UUID | None = None
            if chance.random() < 0.4:
                row = guide.execute(SOME_WAITING_RUN).fetchone()
                named = None if row is None else row[0]
            held = claimer.next() if named is None else claimer.directed(named)
            if held is None:
                time.sleep(0.01)
                continue
            found.append(
                {
                    "id": str(held.id),
                    "began": began,
                    "ended": time.monotonic(),
                    "fault": half_an_edit(held),
                }
            )
            if chance.random() < 0.05:
                continue  # it crashes: the lease runs out
            ending = (
                success(Outcome(watermark=str(held.fence), watermark_type="bigint"))
                if chance.random() < 0.8
                else failure(held, "handler_error", "wrong")
            )
            service.finish(claimer.link, held, ending)
    claimer.close()


def main() -> None:
    name, threads, stop = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    found: list[dict[str, Any]] = []
    working = [
        threading.Thread(target=claim_and_finish, args=(f"{name}:{n}", stop, found))
        for n in range(threads)
    ]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
