"""Edits among claims, fires and triggers: no deadlock, and no claim after a disable."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from catalog_support import KEYRING, TwoConnectors, edit
from run_support import Recorder, Rows, in_thread
from support.waiting import until
from worker_support import Claimer

from dispatch import catalog
from dispatch.catalog import jobs, plans
from dispatch.context import Outcome
from dispatch.definitions import parse
from dispatch.enqueue import submit
from dispatch.errors import InUse, JobDisabled, TriggerBusy, UnknownJob
from dispatch.finalization import RunFinalizationService, success
from dispatch.schedules import ScheduleReconciler

LONGEST_SECONDS = 60.0
ENOUGH = {"claims": 100, "edits": 15, "triggers": 100, "removals": 3}
JOBS = ("one", "two") * 5 + ("three",)
FILE = """
datasources:
  a: {{connector: postgresql, url: "postgresql://x/{version}"}}
  b: {{connector: postgresql, url: "postgresql://y/{version}"}}
jobs:
  one:
    handler: report
    params: {{version: {version}}}
    source: a
    sink: b
    schedules: [{{every: 1s}}]
  two: {{handler: report, params: {{version: {version}}}, source: b, sink: a}}
  three: {{handler: report, source: a, sink: a, concurrency: {{key: k, limit: {limit}}}}}
"""


def test_edits_among_claims_and_fires__R_C4__R_C5(
    rows: Rows, recorder: Recorder, heard: Callable[[], list[str]]
) -> None:
    stop = threading.Event()
    service = RunFinalizationService(recorder.ports, patience=30)
    done = {"claims": 0, "edits": 0, "triggers": 0, "removals": 0}
    faults: list[str] = []

    def save(version: int) -> None:
        text = FILE.format(version=version, limit=1 + version % 3)
        with catalog.editing() as session:
            found = parse(text, {}, TwoConnectors(), existing=catalog.existing(session))
            plans.apply(session, found, KEYRING, TwoConnectors(), actor="test")

    def claim(number: int) -> None:
        claimer = Claimer(f"host:1:nonce:{number}", keys=list(KEYRING.versions))
        try:
            while not stop.is_set():
                held = claimer.next()
                if held is None:
                    stop.wait(0.005)
                    continue
                done["claims"] += 1
                service.finish(claimer.link, held, success(Outcome()))
        finally:
            claimer.close()

    def trigger() -> None:
        chance = random.Random(1)
        while not stop.is_set():
            try:
                submit(recorder.ports, chance.choice(JOBS))
                done["triggers"] += 1
            except (JobDisabled, TriggerBusy, UnknownJob):
                pass

    def fire() -> None:
        while not stop.is_set():
            if ScheduleReconciler().settle_due().failed:
                faults.append("a schedule could not be settled")
            stop.wait(0.02)

    def change() -> None:
        version = 1
        while not stop.is_set():
            version += 1
            save(version)
            edit(jobs.set_switch, "one", "enabled", False)
            before = newest("one")
            stop.wait(0.03)
            if newest("one") != before:
                faults.append("a claim after a disable")
            edit(jobs.set_switch, "one", "enabled", True)
            done["edits"] += 3

    def remove() -> None:
        while not stop.is_set():
            try:
                edit(jobs.remove, "three")
                done["removals"] += 1
            except (InUse, UnknownJob):
                stop.wait(0.01)

    lock = threading.Lock()

    def newest(job: str) -> Any:
        with lock:
            found = rows("select max(fence) as fence from job_run where job_name = %s", job)
        return found[0]["fence"]

    def happened_often() -> bool:
        # Also where another thread has failed: its error is raised below.
        return all(done[what] >= count for what, count in ENOUGH.items()) or any(
            thread.done() for thread in threads
        )

    save(1)
    threads = [in_thread(partial(claim, number)) for number in range(6)]
    threads += [in_thread(work) for work in (trigger, trigger, fire, change, remove)]
    try:
        until(f"all of it happened often: {done}", happened_often, LONGEST_SECONDS)
    finally:
        stop.set()
    for thread in threads:
        thread.result(timeout=60)
    assert faults == []
    counted = rows("select deadlocks from pg_stat_database where datname = current_database()")
    assert counted == [{"deadlocks": 0}]


pytestmark = pytest.mark.timeout(120)
