"""What a worker does with wake-ups: R-C1, R-C5, R-C6, R-D7, R-D8, R-F2, R-X2, R-X5."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from run_support import Recorder, Rows, in_thread, new_job, run
from support.waiting import until
from worker_support import KEYRING, PASSWORD, Gate, Worker, new_datasource, new_run, new_runs

from db.keyring import Keyring
from dispatch.context import HandlerFailure, Outcome, PermanentFailure, RunContext, Snooze
from dispatch.ports import Offer


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder)
    yield made
    made.close()


def test_a_wake_up_executes_its_run_and_stores_the_result__R_C1(rows: Rows, worker: Worker) -> None:
    job = worker.job("add", lambda run: {"sum": run.params["a"] + run.params["b"]})
    run_id = new_run(rows, job, params='{"a": 1, "b": 2}')
    assert worker.run(run_id) == [run_id]
    found = run(rows, run_id)
    assert (found["status"], found["result"], found["error_code"]) == (
        "SUCCEEDED",
        {"sum": 3},
        None,
    )
    assert found["executor"] == "host:1:nonce:2"
    assert [event.kind for event in worker.events] == ["received", "started", "succeeded"]
    [audit] = rows("select * from audit_event where run_id = %s", run_id)
    assert (audit["action"], audit["outcome"], audit["actor"]) == (
        "run.finish", "SUCCEEDED", "host:1:nonce:2",
    )  # fmt: skip


def test_a_missed_wake_up_takes_the_next_run_of_its_queue_only__R_C1(
    rows: Rows, worker: Worker
) -> None:
    job = worker.job("note", lambda run: None)
    gone, other, elsewhere = new_run(rows, job), new_run(rows, job), new_run(rows, job, queue="x")
    assert worker.run(gone)[0] == gone
    assert run(rows, other)["status"] == "SUCCEEDED"
    assert worker.run(gone) == []
    assert run(rows, elsewhere)["status"] == "PENDING"


def test_a_slot_goes_on_to_its_bound_and_then_hands_on_by_wake_ups__R_C1(
    rows: Rows, recorder: Recorder
) -> None:
    worker = Worker(rows, recorder, slot_runs=3)
    try:
        job = worker.job("many", lambda run: None, overlap="allow")
        ids = new_runs(rows, job, 8)
        assert worker.run(ids[0]) == ids[:3]
        assert set(recorder.take()) == set(ids[3:])
    finally:
        worker.close()


def test_each_run_of_a_slot_has_its_own_token_and_fence__R_C6(rows: Rows, worker: Worker) -> None:
    job = worker.job("many", lambda run: run.fence, overlap="allow")
    ids = new_runs(rows, job, 4)
    worker.run(None)
    found = rows("select lease_token, fence, result from job_run order by available_at")
    assert len({row["lease_token"] for row in found}) == len(ids)
    assert [row["fence"] for row in found] == [row["result"] for row in found]
    assert sorted(row["fence"] for row in found) == [row["fence"] for row in found]


def test_a_handler_sees_its_datasources_as_the_claim_resolved_them__R_C5(
    rows: Rows, worker: Worker
) -> None:
    seen: list[RunContext] = []
    source, sink = new_datasource(rows, "shop"), new_datasource(rows, "warehouse")
    definition = {"handler": "copy", "params": {}}
    job = worker.job("copy", seen.append, source_id=source, sink_id=sink, definition=definition)
    run_id = new_run(rows, job)
    worker.run(run_id)
    [context] = seen
    assert context.source is not None
    assert context.sink is not None
    assert (context.source.name, context.sink.name) == ("shop", "warehouse")
    assert context.source.config["url"] == f"postgresql://reader:{PASSWORD}@db.example/shop"
    assert context.definition == definition
    found = run(rows, run_id)
    assert found["source_snapshot"]["datasource"] == str(source)
    assert found["sink_datasource_id"] == sink
    assert found["job_snapshot"]["definition"] == definition


@pytest.mark.parametrize(
    ("raised", "code", "status"),
    [
        (ValueError("wrong"), "handler_error", "RETRY_SCHEDULED"),
        (HandlerFailure("away", code="source_error"), "source_error", "RETRY_SCHEDULED"),
        (HandlerFailure("odd", code="no such code"), "handler_error", "RETRY_SCHEDULED"),
        (PermanentFailure("never"), "permanent", "FAILED"),
        (HandlerFailure("never", code="sink_error", permanent=True), "sink_error", "FAILED"),
    ],
)
def test_a_failure_is_recorded_with_its_code_and_retried_unless_permanent__R_R4(
    rows: Rows, worker: Worker, raised: Exception, code: str, status: str
) -> None:
    def work(run: RunContext) -> None:
        raise raised

    run_id = new_run(rows, worker.job("broken", work))
    worker.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == (status, code)
    assert str(raised) in found["error_message"]
    following = rows("select * from job_run where previous_run_id = %s", run_id)
    assert len(following) == (1 if status == "RETRY_SCHEDULED" else 0)
    for row in following:
        delay = (row["available_at"] - found["finished_at"]).total_seconds()
        assert (row["attempt"], row["root_run_id"]) == (2, run_id)
        assert 60 <= delay <= 75


def test_the_last_attempt_fails_for_good__R_R4(rows: Rows, worker: Worker) -> None:
    definition = {"retry": {"max_attempts": 2, "backoff": 0}}
    worker.on("broken", lambda run: 1 / 0)
    job = new_job(rows, "broken", handler="broken", definition=definition, max_attempts=2)
    run_id = new_run(rows, job)
    assert len(worker.run(run_id)) == 2
    found = rows("select status, attempt, error_code from job_run order by attempt")
    assert [(row["status"], row["attempt"]) for row in found] == [
        ("RETRY_SCHEDULED", 1), ("FAILED", 2),
    ]  # fmt: skip


def test_a_snooze_gives_the_run_back_without_counting_an_attempt__R_R3(
    rows: Rows, worker: Worker
) -> None:
    def work(run: RunContext) -> str:
        if len(rows("select 1 from job_run")) == 1:
            raise Snooze(30)
        return "awake"

    run_id = new_run(rows, worker.job("tired", work))
    worker.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "snoozed")
    [later] = rows("select * from job_run where previous_run_id = %s", run_id)
    assert later["attempt"] == 1
    assert (later["available_at"] - found["finished_at"]).total_seconds() == 30
    assert worker.run(later["id"]) == []


def test_a_result_that_is_no_json_fails_the_run_and_says_why__R_F2(
    rows: Rows, worker: Worker
) -> None:
    run_id = new_run(rows, worker.job("odd", lambda run: {"at": object()}))
    worker.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("FAILED", "handler_error")
    assert "object is not a type of JSON" in found["error_message"]


def test_a_snapshot_that_cannot_be_opened_fails_by_name_and_without_content__R_X1(
    rows: Rows, worker: Worker
) -> None:
    other = Keyring("v1", {"v1": bytes(reversed(range(32)))})
    source = new_datasource(rows, "shop", keyring=other)
    run_id = new_run(rows, worker.job("copy", lambda run: None, source_id=source))
    worker.run(run_id)
    found = run(rows, run_id)
    assert found["error_code"] == "snapshot_unreadable"
    assert "'shop'" in found["error_message"]
    assert PASSWORD not in str(found)
    assert KEYRING.versions == other.versions


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda text: HandlerFailure(text, code="source_error"), "of leak): cannot reach"),
        (RuntimeError, "Traceback (most recent call last)"),
    ],
)
def test_no_secret_reaches_errors_or_logs__R_X2(
    rows: Rows,
    worker: Worker,
    caplog: pytest.LogCaptureFixture,
    fails: Callable[[str], Exception],
    told: str,
) -> None:
    caplog.set_level(logging.INFO)

    def work(run: RunContext) -> None:
        assert run.source is not None
        run.log.info("connecting to %s", run.source.config["url"])
        raise fails(f"cannot reach {run.source.config['url']}")

    source = new_datasource(rows, "shop")
    run_id = new_run(rows, worker.job("leak", work, source_id=source))
    worker.run(run_id)
    found = run(rows, run_id)
    assert "cannot reach postgresql://reader:***@db.example/shop" in found["error_message"]
    [log] = rows("select head from run_log where run_id = %s", run_id)
    assert "connecting to postgresql://reader:***@" in log["head"]
    assert told in log["head"]
    assert f"the run failed (run {run_id} of leak): " in caplog.text
    everything = caplog.text + log["head"] + str(found) + str(worker.events)
    assert PASSWORD not in everything
    assert str(found["lease_token"]) not in caplog.text + log["head"] + str(worker.events)


def test_a_run_log_holds_that_runs_lines_only__R_X5(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> None:
        logging.getLogger("somewhere.else").error("not mine")
        run.log.info("mine %s", run.params["n"])

    job = worker.job("talk", work, overlap="allow")
    ids = [new_run(rows, job, params=f'{{"n": {n}}}') for n in (1, 2)]
    worker.run(None)
    heads = [rows("select head from run_log where run_id = %s", one)[0]["head"] for one in ids]
    assert [head.split(" INFO ")[1] for head in heads] == ["mine 1\n", "mine 2\n"]


def test_a_drain_admits_nothing_and_gives_the_wake_up_back__R_D8(
    rows: Rows, recorder: Recorder, worker: Worker
) -> None:
    run_id = new_run(rows, worker.job("late", lambda run: None))
    worker.coordinator.drain(5)
    assert worker.coordinator.run(run_id, "runs", 7) == []
    assert run(rows, run_id)["status"] == "PENDING"
    # R-C3: higher first, also in Redis.
    assert recorder.offered == [Offer(run_id, "runs", 7)]


def test_a_drain_lets_a_run_end_within_its_time__R_D8(rows: Rows, worker: Worker) -> None:
    gate = Gate("done")
    job = worker.job("slow", gate, overlap="allow")
    run_id, following = new_run(rows, job), new_run(rows, job)
    working = in_thread(lambda: worker.run(run_id))
    assert gate.began.wait(10)
    worker.coordinator.drain(30)
    gate.go.set()
    assert working.result(10) == [run_id]
    assert run(rows, run_id)["status"] == "SUCCEEDED"
    assert run(rows, following)["status"] == "PENDING"


def test_a_drain_stops_what_outlives_it_and_admits_its_next_attempt__R_D8__R_K3(
    rows: Rows, recorder: Recorder, worker: Worker
) -> None:
    gate = Gate()
    run_id = new_run(rows, worker.job("slow", gate))
    working = in_thread(lambda: worker.run(run_id))
    assert gate.began.wait(10)
    worker.coordinator.drain(0.1)
    assert working.result(10) == [run_id]
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "worker_shutdown")
    [following] = rows("select * from job_run where previous_run_id = %s", run_id)
    assert (following["attempt"], following["available_at"]) == (2, found["finished_at"])
    assert following["id"] in recorder.take()
    assert not rows("select 1 from job_run where status in ('RUNNING', 'CANCEL_REQUESTED')")


def test_a_signal_in_the_midst_of_the_work_is_a_drain__R_K3(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> None:
        raise SystemExit(-(256 - signal.SIGTERM))  # what a child of a pool makes of a signal

    run_id = new_run(rows, worker.job("killed", work))
    with pytest.raises(SystemExit):
        worker.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "worker_shutdown")
    assert worker.coordinator.is_draining


def test_what_waits_for_a_jobs_turn_is_offered_when_the_turn_is_free__R_D7(
    rows: Rows, recorder: Recorder
) -> None:
    worker = Worker(rows, recorder, slot_runs=1)
    try:
        job = worker.job("one", lambda run: None)
        first, second = new_run(rows, job), new_run(rows, job, queue="elsewhere")
        worker.run(first)
        assert recorder.take() == [second]
        assert run(rows, second)["offer_count"] == 1
    finally:
        worker.close()


def test_a_free_turn_is_offered_in_each_queue_where_the_job_waits__R_D7(
    rows: Rows, recorder: Recorder
) -> None:
    """Whether a worker takes from a queue nobody knows: one wake-up may wait there for ever."""
    worker = Worker(rows, recorder)
    try:
        job = worker.job("one", lambda run: None)
        first = new_run(rows, job, queue="first")
        unserved = [new_run(rows, job, queue="unserved", priority=9) for _ in range(2)]
        served = [new_run(rows, job) for _ in range(2)]
        assert worker.run(first, "first") == [first]
        assert sorted(recorder.take()) == sorted([unserved[0], served[0]])
        counts = [run(rows, run_id)["offer_count"] for run_id in [*unserved, *served]]
        assert counts == [1, 0, 1, 0]
    finally:
        worker.close()


def test_what_waits_for_a_slot_is_offered_when_the_slot_is_free__R_D7(
    rows: Rows, recorder: Recorder
) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 1)")
    gate = Gate()
    one, two = Worker(rows, recorder), Worker(rows, recorder, executor="host:1:nonce:3")
    try:
        holder = one.job("holder", gate, overlap="allow", concurrency_key="shared")
        two.on("waiter", lambda run: None)
        waiter = new_job(rows, "waiter", "allow", handler="waiter", concurrency_key="shared")
        first, second = new_run(rows, holder), new_run(rows, waiter)
        working = in_thread(lambda: one.run(first))
        assert gate.began.wait(10)
        assert two.run(second) == []
        assert recorder.take() == []
        gate.go.set()
        working.result(10)
        assert recorder.take() == [second]
        assert two.run(second) == [second]
    finally:
        one.close()
        two.close()


def test_progress_and_counters_are_stored_with_the_end__R_F2(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> Outcome:
        run.progress(5, 10, phase="copying")
        return Outcome(result="ok", rows_processed=10, counters={"inserted": 7})

    run_id = new_run(rows, worker.job("copy", work))
    worker.run(run_id)
    found = run(rows, run_id)
    assert (found["rows_processed"], found["counters"]) == (10, {"inserted": 7})
    assert found["progress"]["phase"] == "copying"


def test_a_short_run_costs_no_second_connection__R_L4(rows: Rows, worker: Worker) -> None:
    def sessions() -> list[dict[str, Any]]:
        return rows(
            """select application_name as name from pg_stat_activity
               where datname = current_database() and application_name like 'claimcheck%%'
                 and %s""",
            True,
        )

    seen: list[list[dict[str, Any]]] = []
    job = worker.job("quick", lambda run: seen.append(sessions()), overlap="allow")
    new_runs(rows, job, 5)
    worker.run(None)
    assert len(seen) == 5
    assert all([row["name"] for row in found] == ["claimcheck worker"] for found in seen)
    until("the keeper to let go", lambda: not worker.coordinator.held)
