"""Work that has ended is not stopped any more: only its end is left to be recorded (R-F1, R-L3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from run_support import Rows, in_thread, run
from support.proxy import Proxy, before_database
from support.waiting import until
from worker_support import Gate, Worker, new_run

from db import session


@pytest.fixture
def through_proxy(database: str, rows: Rows, configure: Callable[..., Any]) -> Iterator[Proxy]:
    with before_database(database) as (made, through):
        configure(DATABASE_URL=through, REDIS_URL="redis://127.0.0.1:1/0")
        session.dispose()
        yield made
        made.resume()
        session.dispose()


def test_end_of_work_is_recorded_though_the_database_hung_past_the_lease__R_F1(
    rows: Rows, through_proxy: Proxy
) -> None:
    ended: list[str] = []
    gate = Gate("done")
    worker = Worker(rows, lease=1.5, on_stuck=lambda run_id, reason: ended.append(reason))
    try:
        run_id = new_run(rows, worker.job("slow", gate))
        working = in_thread(lambda: worker.run(run_id))
        assert gate.began.wait(10)
        through_proxy.hang()
        gate.go.set()
        until(
            "the lease to run out",
            lambda: rows("select from job_run where lease_until < clock_timestamp()"),
        )
        through_proxy.resume()
        working.result(20)
    finally:
        through_proxy.resume()
        worker.close()
    assert not ended, "the process was ended, and the success with it"
    assert run(rows, run_id)["status"] == "SUCCEEDED"
    assert run(rows, run_id)["result"] == "done"
