"""A wake-up that reaches a worker which may not take its run goes on to another one: R-C2, R-C9."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from run_support import Recorder, Rows, new_job, run
from worker_support import Worker, new_datasource, new_run

from db.keyring import Keyring
from dispatch.handover import TIMES


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder)
    yield made
    made.close()


def test_a_worker_without_the_handler_hands_the_wake_up_on__R_C2(
    rows: Rows, recorder: Recorder, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = new_run(rows, new_job(rows, "report"), priority=7)
    with caplog.at_level(logging.WARNING, "claimcheck.coordinator"):
        assert worker.run(run_id) == []
    [offer] = recorder.offered
    assert (offer.run_id, offer.queue, offer.priority) == (run_id, "runs", 7)
    assert "lacks the handler 'report': name its module in CLAIMCHECK_HANDLERS" in caplog.text
    assert run(rows, run_id)["status"] == "PENDING"


def test_a_worker_without_the_key_hands_the_wake_up_on__R_C2(
    rows: Rows, recorder: Recorder, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    other = Keyring("v9", {"v9": bytes(32)})
    job = worker.job("load", lambda run: None, source_id=new_datasource(rows, "shop", other))
    run_id = new_run(rows, job)
    assert worker.run(run_id) == []
    assert recorder.take() == [run_id]
    assert "a key that its keyring does not hold" in caplog.text


def test_a_run_that_nobody_knows_is_handed_on_a_few_times_only__R_D5(
    rows: Rows, recorder: Recorder, worker: Worker
) -> None:
    run_id = new_run(rows, new_job(rows, "report"))
    for _ in range(3 * TIMES):
        worker.run(run_id)
    assert len(recorder.offered) == TIMES


def test_what_no_worker_could_take_now_is_not_handed_on__R_C9(
    rows: Rows, recorder: Recorder, worker: Worker
) -> None:
    ended = new_run(rows, worker.job("note", lambda run: None))
    paused = new_run(rows, new_job(rows, "paused", paused=True))
    later = new_run(rows, new_job(rows, "later"), available_at="2999-01-01T00:00:00Z")
    worker.run(ended)
    recorder.take()
    for run_id in (ended, paused, later):
        assert worker.run(run_id) == []
    assert recorder.take() == []
