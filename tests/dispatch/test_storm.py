"""Sixteen claimers at once over jobs that share two datasources, edited and disabled meanwhile.

R-C4 to R-C8, R-F3, R-K1, R-R1, R-R2: no deadlock, each run claimed once, claims overlap, none after
a disable, an edit never half seen, limits kept, whatever crashes or is cancelled in between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job
from support.processes import ROOT
from support.waiting import until
from worker_support import KEYRING, new_datasource, new_runs

from db.envelopes import seal
from dispatch.cancel import cancel
from dispatch.errors import NotCancellable, TriggerBusy
from dispatch.recovery import recover_expired

PROCESSES, THREADS = 4, 4
LIMITS = {"one": 1, "three": 3}
SHAPES: list[dict[str, Any]] = [
    {"overlap": "allow"},
    {"overlap": "allow"},
    {"overlap": "queue"},
    {"overlap": "allow", "concurrency_key": "one"},
    {"overlap": "allow", "concurrency_key": "three"},
    {"overlap": "queue", "concurrency_key": "three"},
]


def defined(version: int) -> dict[str, Any]:
    return {"version": version, "retry": {"backoff": 0}}


class Weather:
    """What goes on around the claimers, each part on a connection of its own."""

    def __init__(self, database: str, recorder: Recorder) -> None:
        self.database = database
        self.recorder = recorder
        self.stop = threading.Event()
        self.faults: list[str] = []
        self.edits = 0

    def edit(self, jobs: list[UUID], datasources: list[UUID]) -> None:
        """Give all jobs and both datasources a new version; disable a job for a while."""
        chance = random.Random(99)
        with psycopg.connect(self.database) as connection:
            while not self.stop.wait(0.1):
                self.edits += 1
                version = self.edits + 1
                # In the one order of R-C4: jobs, then datasources, each by its id.
                with connection.cursor() as cursor:
                    cursor.executemany(
                        "update job set definition = %s where id = %s",
                        [[json.dumps(defined(version)), job] for job in sorted(jobs)],
                    )
                    cursor.executemany(
                        "update datasource set name = %s, envelope = %s where id = %s",
                        [
                            [
                                f"{name}-{version}",
                                json.dumps(seal(KEYRING, datasource, {})),
                                datasource,
                            ]
                            for datasource, name in sorted(zip(datasources, "ab", strict=True))
                        ],
                    )
                connection.commit()
                job = chance.choice(jobs)
                connection.execute("update job set enabled = false where id = %s", [job])
                connection.commit()
                before = self.newest(connection, job)
                self.stop.wait(0.1)
                if self.newest(connection, job) != before:
                    self.faults.append("a claim after a disable")
                connection.execute("update job set enabled = true where id = %s", [job])
                connection.commit()

    def newest(self, connection: psycopg.Connection[Any], job: UUID) -> Any:
        query = "select max(fence) from job_run where job_id = %s"
        found = connection.execute(query, [job]).fetchone()
        connection.commit()
        return found

    def recover(self) -> None:
        while not self.stop.wait(0.2):
            if failed := recover_expired(self.recorder.ports).failed:
                self.faults.append(f"not recovered: {failed}")

    def cancel(self) -> None:
        query = """select id from job_run where status in ('PENDING', 'RUNNING')
                   order by random() limit 1"""
        with psycopg.connect(self.database, autocommit=True) as connection:
            while not self.stop.wait(0.1):
                for (run_id,) in connection.execute(query).fetchall():
                    with contextlib.suppress(NotCancellable, TriggerBusy):
                        cancel(self.recorder.ports, run_id, actor="storm")

    def watch_limits(self) -> None:
        with psycopg.connect(self.database, autocommit=True) as connection:
            while not self.stop.wait(0.03):
                for key, held in connection.execute(
                    """select slot_key, count(*) from job_run where slot_key is not null
                       and status in ('RUNNING', 'CANCEL_REQUESTED') group by 1"""
                ):
                    if held > LIMITS[key]:
                        self.faults.append(f"{held} runs hold {key}")


@pytest.mark.timeout(240)
def test_a_storm_of_claims__R_C4__R_C5__R_C6__R_C7__R_C8__R_F3__R_K1__R_R1__R_R2(
    database: str, rows: Rows, recorder: Recorder, tmp_path: Path
) -> None:
    datasources = [new_datasource(rows, f"{name}-1") for name in "ab"]
    for key, limit in LIMITS.items():
        rows("insert into concurrency_key (key, max) values (%s, %s)", key, limit)
    jobs = [
        new_job(
            rows, f"job{n}", definition=defined(1), max_attempts=50,
            source_id=datasources[n % 2], sink_id=datasources[1 - n % 2], **shape,
        )
        for n, shape in enumerate(SHAPES)
    ]  # fmt: skip
    for job in jobs:
        new_runs(rows, job, 200)
    stop = tmp_path / "stop"
    claimers = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/dispatch/storm_claimer.py"),
             f"host:1:nonce:{n}", str(THREADS), str(stop)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests/dispatch"))),
                "DATABASE_URL": database,
            },
            stdout=subprocess.PIPE,
        )
        for n in range(PROCESSES)
    ]  # fmt: skip
    weather = Weather(database, recorder)
    parts = [weather.recover, weather.recover, weather.cancel, weather.watch_limits]
    try:
        around = [in_thread(lambda: weather.edit(jobs, datasources)), *map(in_thread, parts)]

        def claims() -> bool:
            return rows("select last_value as n from fence_seq")[0]["n"] > 800

        until("eight hundred claims", lambda: claims() and weather.edits > 10, 120)
    finally:
        stop.touch()
        weather.stop.set()
        printed = [claimer.communicate(timeout=60)[0] for claimer in claimers]
    for one in around:
        one.result(30)
    assert [claimer.returncode for claimer in claimers] == [0] * PROCESSES

    found = [claim for text in printed for claim in json.loads(text)]
    assert weather.faults == []
    assert {claim["fault"] for claim in found} == {None}
    assert [one for one, count in Counter(c["id"] for c in found).items() if count > 1] == []
    [state] = rows("select deadlocks from pg_stat_database where datname = current_database()")
    assert state["deadlocks"] == 0
    # Claims that share both datasources were under way at the same time.
    spans = sorted((claim["began"], claim["ended"]) for claim in found)
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))

    fences: dict[UUID, list[int]] = defaultdict(list)
    for row in rows(
        """select root_run_id as root, fence from job_run where fence is not null
           order by attempt, created_at"""
    ):
        fences[row["root"]].append(row["fence"])
    assert any(len(numbers) > 1 for numbers in fences.values())
    assert all(numbers == sorted(set(numbers)) for numbers in fences.values())
    [kept] = rows(
        """select bool_and(j.watermark::bigint = m.most) as all from job j join (
             select job_id, max(committed_watermark::bigint) as most from job_run
             where committed_watermark is not null group by 1) m on m.job_id = j.id"""
    )
    assert kept["all"]
    assert not rows(
        """select r.id from job_run r where r.status = 'RETRY_SCHEDULED'
           and (select count(*) from job_run n where n.previous_run_id = r.id) <> 1"""
    )
