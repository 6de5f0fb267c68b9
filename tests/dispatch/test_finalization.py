"""The end of an attempt: R-F1 to R-F4, R-R3, R-R4, R-R7, R-S2, R-X4."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job, run, waits_for_a_lock
from support.waiting import until
from worker_support import Claimer, new_datasource, new_run

from db import session
from dispatch import catalog, chains, enqueue, finalization
from dispatch.catalog import jobs
from dispatch.claims import ClaimedRun
from dispatch.context import Outcome
from dispatch.finalization import (
    WATERMARK_BASIS,
    FinishRefused,
    RunFinalizationService,
    failure,
    snooze,
    success,
)
from dispatch.lifecycle import JobRunStatus
from dispatch.policy import RetryPolicy, timeout_of
from dispatch.runlog import RunLog


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


@pytest.fixture
def service(recorder: Recorder) -> RunFinalizationService:
    return RunFinalizationService(recorder.ports, patience=20)


def held(rows: Rows, claimer: Claimer, job: UUID | None = None, **columns: Any) -> ClaimedRun:
    found = claimer.directed(new_run(rows, job or new_job(rows, "orders"), **columns))
    assert found is not None
    return found


def everything(rows: Rows) -> list[Any]:
    return [
        rows("select to_jsonb(r) as r from job_run r order by id"),
        rows("select to_jsonb(a) as a from audit_event a order by id"),
        rows("select to_jsonb(l) as l from run_log l"),
        rows("select to_jsonb(j) as j from job j"),
    ]


def request_cancel(rows: Rows, run_id: UUID) -> None:
    rows(
        "update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now() where id = %s",
        run_id,
    )


ENDINGS: dict[str, Callable[[ClaimedRun], finalization.Ending]] = {
    "success": lambda claimed: success(Outcome(result=1, watermark="9", watermark_type="bigint")),
    "failure": lambda claimed: failure(claimed, "handler_error", "wrong", permanent=True),
    "retry": lambda claimed: failure(claimed, "handler_error", "wrong"),
    "snooze": lambda claimed: snooze(10),
}


@pytest.mark.parametrize("end", ENDINGS)
def test_a_stale_token_writes_nothing__R_F1(
    rows: Rows,
    claimer: Claimer,
    service: RunFinalizationService,
    heard: Callable[[], list[str]],
    end: str,
) -> None:
    claimed = held(rows, claimer)
    rows("update job_run set lease_until = clock_timestamp()")
    rows(
        """update job_run set status = 'FAILED', error_code = 'lease_expired',
             finished_at = clock_timestamp()"""
    )
    heard()
    log = RunLog()
    log.add("too late")
    before = everything(rows)
    assert service.finish(claimer.link, claimed, ENDINGS[end](claimed), log=log) is None
    assert everything(rows) == before
    assert heard() == []


@pytest.mark.parametrize("end", ENDINGS)
def test_a_finish_is_recorded_once__R_F1__R_X4(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, end: str
) -> None:
    claimed = held(rows, claimer)
    assert service.finish(claimer.link, claimed, ENDINGS[end](claimed)) is not None
    before = everything(rows)
    assert service.finish(claimer.link, claimed, ENDINGS[end](claimed)) is None
    assert everything(rows) == before
    [audit] = rows("select * from audit_event")
    assert (audit["action"], audit["subject"], audit["run_id"]) == (
        "run.finish", "orders", claimed.id,
    )  # fmt: skip
    assert audit["outcome"] == run(rows, claimed.id)["status"]


def test_a_finish_after_the_expiry_counts_until_recovery_acts__R_F1(
    rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    claimed = held(rows, claimer)
    rows("update job_run set lease_until = clock_timestamp() - interval '1 hour'")
    finished = service.finish(claimer.link, claimed, success(Outcome()))
    assert finished is not None
    assert finished.status is JobRunStatus.SUCCEEDED


def test_all_of_an_end_commits_together_or_not_at_all__R_F2(
    rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    job = new_job(rows, "orders", watermark="1", watermark_type="bigint")
    claimed = held(rows, claimer, job)
    log = RunLog()
    log.add("a line")
    # The last part of the transaction is what fails.
    rows("alter table audit_event add constraint none check (action <> 'run.finish') not valid")
    before = everything(rows)
    outcome = Outcome(result=1, watermark="9", watermark_type="bigint", counters={"read": 3})
    with pytest.raises(FinishRefused):
        service.finish(claimer.link, claimed, success(outcome), log=log)
    assert everything(rows) == before
    rows("alter table audit_event drop constraint none")
    assert service.finish(claimer.link, claimed, success(outcome), log=log) is not None
    found = run(rows, claimed.id)
    assert (found["status"], found["counters"]) == ("SUCCEEDED", {"read": 3})
    assert rows("select watermark from job") == [{"watermark": "9"}]
    assert rows("select head from run_log") == [{"head": "a line\n"}]


def test_an_end_stays_on_the_connection_that_it_began_on__R_F2(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = held(rows, claimer)
    log = RunLog()
    log.add("a line")
    # As if the server had a word to say right after it answered the BEGIN.
    idle = psycopg.pq.TransactionStatus.IDLE
    monkeypatch.setattr(session, "is_alive", lambda link: link.info.transaction_status == idle)
    rows("alter table audit_event add constraint none check (action <> 'run.finish') not valid")
    before = everything(rows)
    with pytest.raises(FinishRefused):
        service.finish(claimer.link, claimed, success(Outcome()), log=log)
    assert everything(rows) == before


@pytest.mark.parametrize("end", ENDINGS)
def test_a_cancel_that_was_recorded_first_wins__R_F4(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, end: str
) -> None:
    job = new_job(rows, "orders", watermark="1", watermark_type="bigint")
    claimed = held(rows, claimer, job)
    request_cancel(rows, claimed.id)
    finished = service.finish(claimer.link, claimed, ENDINGS[end](claimed))
    assert finished is not None
    assert finished.status is JobRunStatus.CANCELLED
    found = run(rows, claimed.id)
    assert (found["error_code"], found["result"], found["committed_watermark"]) == (None,) * 3
    assert rows("select watermark from job") == [{"watermark": "1"}]
    assert len(rows("select 1 from job_run")) == 1


def test_a_cancel_that_commits_while_the_finish_waits_wins__R_F4(
    database: str, rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    job = new_job(rows, "orders", watermark="1", watermark_type="bigint")
    claimed = held(rows, claimer, job)
    outcome = Outcome(watermark="9", watermark_type="bigint")
    with psycopg.connect(database) as other:
        other.execute("update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()")
        asked = in_thread(lambda: service.finish(claimer.link, claimed, success(outcome)))
        until("the finish to wait", lambda: waits_for_a_lock(rows), 5)
        other.commit()
    finished = asked.result(10)
    assert finished.status is JobRunStatus.CANCELLED
    assert rows("select watermark from job") == [{"watermark": "1"}]


def test_the_warning_of_an_indeterminate_sink_is_stored_with_the_cancellation__R_F4(
    rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    claimed = held(rows, claimer)
    request_cancel(rows, claimed.id)
    ending = failure(claimed, "handler_error", "stopped", warning="the sink is empty")
    service.finish(claimer.link, claimed, ending)
    assert run(rows, claimed.id)["cancellation_warning"] == "the sink is empty"


WATERMARKS = [
    ("bigint", "9", "10", "10"),
    ("bigint", "10", "9", "10"),
    ("text", "9", "10", "9"),
    ("numeric", "1e2", "99.5", "1e2"),
    ("timestamptz", "2026-01-01 00:00:00+00", "2025-12-31 23:30:00-02", "2025-12-31 23:30:00-02"),
    ("timestamp without time zone", "2026-01-01", "2025-01-01", "2026-01-01"),
    ("date", "0044-03-15 BC", "0001-01-01", "0001-01-01"),
    ("uuid", str(UUID(int=2)), str(UUID(int=1)), str(UUID(int=2))),
    ("xid8", "9", "10", "10"),
]


@pytest.mark.parametrize(("kind", "before", "given", "kept"), WATERMARKS)
def test_a_watermark_moves_forward_only_by_its_type__R_F3(
    rows: Rows,
    claimer: Claimer,
    service: RunFinalizationService,
    kind: str,
    before: str,
    given: str,
    kept: str,
) -> None:
    job = new_job(rows, "orders", watermark=before, watermark_type=kind)
    claimed = held(rows, claimer, job)
    outcome = Outcome(watermark=given, watermark_type=kind)
    service.finish(claimer.link, claimed, success(outcome))
    assert rows("select watermark, watermark_type as t from job") == [
        {"watermark": kept, "t": kind}
    ]
    assert run(rows, claimed.id)["committed_watermark"] == kept


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(watermark="yesterday or so", watermark_type="timestamptz"),
        Outcome(watermark="99999999999999999999", watermark_type="bigint"),
        Outcome(watermark="1", watermark_type="no_such_type"),
        Outcome(watermark="1", watermark_type="bigint; drop table job"),
        Outcome(watermark="1"),
        Outcome(rows_processed=2**70),
        Outcome(result=float("nan")),
        Outcome(result="a\x00b"),
        Outcome(result={1: 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [None, "2020-01-01"])
def test_a_value_that_does_not_fit_is_refused__R_F3(
    rows: Rows,
    claimer: Claimer,
    service: RunFinalizationService,
    outcome: Outcome,
    before: str | None,
) -> None:
    job = new_job(
        rows, "orders", watermark=before, watermark_type=None if before is None else "timestamptz"
    )
    claimed = held(rows, claimer, job)
    with pytest.raises(FinishRefused):
        service.finish(claimer.link, claimed, success(outcome))
    assert run(rows, claimed.id)["status"] == "RUNNING"
    assert rows("select watermark from job") == [{"watermark": before}]


@pytest.mark.parametrize("end", ["failure", "retry", "snooze"])
def test_only_a_success_commits_a_watermark__R_F3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, end: str
) -> None:
    claimed = held(rows, claimer, new_job(rows, "orders", watermark="1", watermark_type="bigint"))
    service.finish(claimer.link, claimed, ENDINGS[end](claimed))
    assert rows("select watermark from job") == [{"watermark": "1"}]
    assert run(rows, claimed.id)["committed_watermark"] is None


def test_a_run_that_read_nothing_keeps_the_old_watermark__R_F3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    claimed = held(rows, claimer, new_job(rows, "orders", watermark="1", watermark_type="bigint"))
    service.finish(claimer.link, claimed, success(Outcome(rows_processed=0)))
    assert rows("select watermark from job") == [{"watermark": "1"}]


@pytest.mark.parametrize(
    "edit",
    [
        """update job set definition = '{"watermark": "id"}', watermark = null""",
        """update job set definition = '{"watermark": "at", "source": {"table": "b"}}'""",
        "update job set source_id = (select id from datasource where name = 'b')",
        "update job set sink_id = (select id from datasource where name = 'b')",
        "update job set watermark = null, watermark_type = null",
        """update datasource set envelope = envelope || '{"ciphertext": "b3RoZXI="}',
             updated_at = clock_timestamp() where name = 'a'""",
    ],
)
def test_a_run_from_before_an_edit_does_not_set_the_edited_jobs_watermark__R_F3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, edit: str
) -> None:
    source, _ = new_datasource(rows, "a"), new_datasource(rows, "b")
    job = new_job(
        rows, "orders", definition={"watermark": "at"}, source_id=source, sink_id=source,
        watermark="1", watermark_type="bigint",
    )  # fmt: skip
    claimed = held(rows, claimer, job)
    rows(edit)
    [before] = rows("select watermark from job")
    outcome = Outcome(watermark="9", watermark_type="bigint")
    assert service.finish(claimer.link, claimed, success(outcome)) is not None
    assert rows("select watermark from job") == [before]
    assert run(rows, claimed.id)["committed_watermark"] is None


@pytest.mark.parametrize("key", WATERMARK_BASIS)
def test_a_first_run_does_not_set_the_watermark_of_what_its_job_became__R_F3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, key: str
) -> None:
    """There is no watermark that the edit could have reset."""
    claimed = held(rows, claimer, new_job(rows, "orders", definition={key: "a"}))
    rows("update job set definition = %s", json.dumps({key: "b"}))
    outcome = Outcome(watermark="9", watermark_type="bigint")
    assert service.finish(claimer.link, claimed, success(outcome)) is not None
    assert rows("select watermark from job") == [{"watermark": None}]
    assert run(rows, claimed.id)["committed_watermark"] is None


@pytest.mark.parametrize("watermark", [None, "1"])
def test_a_run_from_before_a_reset_does_not_set_the_watermark_again__R_F3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, watermark: str | None
) -> None:
    job = new_job(
        rows, "orders", "allow", watermark=watermark, watermark_type=watermark and "bigint"
    )
    first, second = held(rows, claimer, job), held(rows, claimer, job)
    with catalog.editing() as session:
        change = jobs.reset_watermark(session, "orders", actor="somebody")
    assert change is not None
    assert change.note is not None
    third = held(rows, claimer, job)
    outcome = Outcome(watermark="9", watermark_type="bigint")
    assert service.finish(claimer.link, first, success(outcome)) is not None
    assert rows("select watermark from job") == [{"watermark": None}]
    service.finish(claimer.link, third, success(Outcome(watermark="5", watermark_type="bigint")))
    assert service.finish(claimer.link, second, success(outcome)) is not None
    assert rows("select watermark from job") == [{"watermark": "5"}]
    assert run(rows, second.id)["committed_watermark"] is None


def test_a_job_without_watermark_and_run_has_nothing_to_reset(rows: Rows, claimer: Claimer) -> None:
    new_job(rows, "orders")
    with catalog.editing() as session:
        assert jobs.reset_watermark(session, "orders", actor="somebody") is None


def test_a_retry_begins_anew_with_what_the_first_was_given__R_R3(
    rows: Rows, claimer: Claimer, service: RunFinalizationService, heard: Callable[[], list[str]]
) -> None:
    job = new_job(rows, "orders", "skip", definition={"retry": {"backoff": 0}})
    at = datetime(2026, 1, 1, tzinfo=UTC)
    parent = uuid4()
    claimed = held(
        rows, claimer, job, params='{"a": 1}', priority=7, parent_run_id=parent, scheduled_for=at,
        triggered_by="someone", queue="special",
    )  # fmt: skip
    heard()
    finished = service.finish(claimer.link, claimed, failure(claimed, "handler_error", "wrong"))
    assert finished is not None
    new = run(rows, finished.next_run_id)
    old = run(rows, claimed.id)
    assert (new["attempt"], new["status"], new["previous_run_id"]) == (2, "PENDING", claimed.id)
    same = ("params", "priority", "parent_run_id", "scheduled_for", "triggered_by", "queue",
            "root_run_id", "skip_key", "max_attempts", "job_id")  # fmt: skip
    assert {key: new[key] for key in same} == {key: old[key] for key in same}
    fresh = ("fence", "lease_token", "job_snapshot", "progress", "slot_no", "started_at")
    assert all(new[key] is None for key in fresh)
    assert heard() == ["deadlines queue:special"]
    assert [offer.run_id for offer in finished.offers] == [new["id"]]


def test_backoff_doubles_to_an_hour_with_jitter__R_R4() -> None:
    policy = RetryPolicy(backoff=60)
    for attempt, expected in ((1, 60), (2, 120), (5, 960), (7, 3600), (900, 3600)):
        delays = [policy.delay(attempt, "handler_error", None) for _ in range(200)]
        assert expected <= min(delays) < max(delays) <= expected * 1.25
        assert max(delays) - min(delays) > expected * 0.1
    assert RetryPolicy(backoff=0).delay(3, "timeout", None) == 0


def test_the_first_retry_after_a_lost_worker_is_due_at_once__R_R4() -> None:
    policy = RetryPolicy(backoff=60)
    for code in ("lease_expired", "worker_lost", "worker_shutdown"):
        assert policy.delay(1, code, None) == 0
        assert policy.delay(2, code, "handler_error") == 0
        assert policy.delay(2, code, "worker_lost") >= 120


@pytest.mark.parametrize(
    ("definition", "loss", "failure_"),
    [
        ({}, True, True),
        ({"mode": "incremental"}, True, True),
        ({"mode": "complete-atomic"}, True, True),
        ({"mode": "complete"}, False, False),
        ({"mode": "complete", "retry": {"on_worker_loss": True}}, True, False),
        ({"handler": "x", "retry": {"on_failure": False}}, True, False),
        ({"retry": "nonsense"}, True, True),
    ],
)
def test_what_is_retried_by_itself__R_R4(
    definition: dict[str, Any], loss: bool, failure_: bool
) -> None:
    policy = RetryPolicy.of(definition)
    for code in ("lease_expired", "worker_lost", "worker_shutdown"):
        assert policy.allows(code) is loss
    for code in ("handler_error", "timeout", "source_error"):
        assert policy.allows(code) is failure_
    assert not policy.allows("permanent")


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [(None, None), (5, 5.0), (0, None), (True, None), ("5", None), (0.5, 0.5)],
)
def test_an_unusable_timeout_is_none(stated: Any, seconds: float | None) -> None:
    assert timeout_of({"timeout": stated}) == seconds


def test_a_success_creates_the_next_run_of_its_chain_in_its_own_transaction__R_F2(
    rows: Rows, recorder: Recorder, claimer: Claimer, service: RunFinalizationService
) -> None:
    new_job(rows, "orders")
    new_job(rows, "report", "allow")
    step = chains.Step("report", {"day": 1})
    handle = enqueue.submit(recorder.ports, "orders", chain=chains.stored([step]))
    recorder.take()
    claimed = claimer.directed(handle.run_id)
    assert claimed is not None
    finished = service.finish(claimer.link, claimed, success(Outcome()))
    assert finished is not None
    assert run(rows, step.run_id)["params"] == {"day": 1}
    service.announce(finished)
    assert recorder.take() == [step.run_id]


@pytest.mark.parametrize("end", ["failure", "retry", "snooze", "cancelled"])
def test_only_a_success_goes_on_with_the_chain__R_F2(
    rows: Rows, recorder: Recorder, claimer: Claimer, service: RunFinalizationService, end: str
) -> None:
    new_job(rows, "orders")
    new_job(rows, "report", "allow")
    step = chains.Step("report")
    handle = enqueue.submit(recorder.ports, "orders", chain=chains.stored([step]))
    claimed = claimer.directed(handle.run_id)
    assert claimed is not None
    if end == "cancelled":
        request_cancel(rows, claimed.id)
    ending = success(Outcome()) if end == "cancelled" else ENDINGS[end](claimed)
    finished = service.finish(claimer.link, claimed, ending)
    assert finished is not None
    assert not rows("select 1 from job_run where id = %s", step.run_id)
    if finished.next_run_id is not None:
        assert run(rows, finished.next_run_id)["chain"] == run(rows, claimed.id)["chain"]


def test_a_chain_that_came_to_an_active_run_is_not_missed__R_F2(
    rows: Rows, recorder: Recorder, claimer: Claimer, service: RunFinalizationService
) -> None:
    job = new_job(rows, "orders", "skip")
    new_job(rows, "report", "allow")
    claimed = held(rows, claimer, job)
    assert not claimed.has_chain
    step = chains.Step("report")
    assert enqueue.submit(recorder.ports, "orders", chain=chains.stored([step])).created is False
    finished = service.finish(claimer.link, claimed, success(Outcome()))
    assert finished is not None
    assert run(rows, step.run_id)["status"] == "PENDING"


def test_a_finish_waits_for_who_holds_its_row__R_F1(
    database: str, rows: Rows, claimer: Claimer, service: RunFinalizationService
) -> None:
    claimed = held(rows, claimer)
    claimer.link.get().execute("set lock_timeout = '100ms'")
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run for update")
        asked = in_thread(lambda: service.finish(claimer.link, claimed, success(Outcome())))
        until("the finish to wait", lambda: waits_for_a_lock(rows), 5)
        until("it to be refused once", lambda: not waits_for_a_lock(rows), 5)
        other.rollback()
    assert asked.result(10).status is JobRunStatus.SUCCEEDED
