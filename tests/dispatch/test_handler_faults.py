"""Handlers that misbehave: what they do is their run's failure, told at once and truthfully."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from run_support import Recorder, Rows, new_job, run
from worker_support import PASSWORD, Worker, new_datasource, new_run

from dispatch.context import HandlerFailure, Outcome, RunContext, RunStopped, Snooze


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Worker]:
    made = Worker(rows, recorder)
    yield made
    made.close()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class MuteText:
    __repr__ = __str__ = Mute.__str__  # type: ignore[assignment]


def cancelled(run: RunContext) -> None:
    raise asyncio.CancelledError


def leaves(run: RunContext) -> None:
    sys.exit("enough")


def mute(run: RunContext) -> None:
    raise Mute


def group(run: RunContext) -> None:
    raise BaseExceptionGroup("many", [KeyError("a"), GeneratorExit()])


def no_number(run: RunContext) -> None:
    run.progress(0, float("nan"))  # type: ignore[arg-type]


def too_many(run: RunContext) -> None:
    run.progress(2**70)


def negative(run: RunContext) -> None:
    run.progress(-5)


def no_counters(run: RunContext) -> Outcome:
    return Outcome(counters=None)  # type: ignore[arg-type]


def odd_rows(run: RunContext) -> Outcome:
    return Outcome(rows_processed="many")  # type: ignore[arg-type]


def odd_watermark(run: RunContext) -> Outcome:
    return Outcome(watermark=object(), watermark_type="text")  # type: ignore[arg-type]


def snoozes_text(run: RunContext) -> None:
    raise Snooze("abc")  # type: ignore[arg-type]


def snoozes_nothing(run: RunContext) -> None:
    raise Snooze(float("nan"))


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (cancelled, "CancelledError"),
        (leaves, "SystemExit: enough"),
        (mute, "Mute: its message cannot be read (RuntimeError)"),
        (group, "BaseExceptionGroup: many"),
        (no_number, "progress: total is a number"),
        (too_many, "progress: done is a number"),
        (negative, "progress: done is a number"),
        (no_counters, "the handler's outcome: "),
        (odd_rows, "the handler's outcome: "),
        (odd_watermark, "the handler's outcome: "),
        (snoozes_text, "Snooze takes seconds"),
        (snoozes_nothing, "Snooze takes seconds"),
    ],
)
def test_what_a_handler_does_wrong_is_its_failure_and_obeys_its_policy__R_R4(
    rows: Rows, worker: Worker, work: Callable[[RunContext], Any], says: str
) -> None:
    worker.on("odd", work)
    job = new_job(rows, "odd", handler="odd", definition={"retry": {"on_failure": False}})
    run_id = new_run(rows, job)
    assert worker.run(run_id) == [run_id]
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("FAILED", "handler_error")
    assert says in found["error_message"]
    assert len(rows("select from job_run")) == 1


class Bare(HandlerFailure):
    def __init__(self) -> None:
        """Says nothing to its base, so that it has no code."""

    def __str__(self) -> str:
        return "bare"


@pytest.mark.parametrize(
    "raised",
    [
        *(
            HandlerFailure("chosen", code=code)
            for code in (
                "snoozed",
                "worker_lost",
                "lease_expired",
                "worker_shutdown",
                "timeout",
                "no_handler",
                "snapshot_unreadable",
            )
        ),
        HandlerFailure("chosen", code=["source_error"]),  # type: ignore[arg-type]
        Bare(),
        RunStopped("snoozed"),
        RunStopped("worker_lost"),
        RunStopped("worker_shutdown"),
        RunStopped("timeout"),
    ],
    ids=repr,
)
def test_a_handler_cannot_choose_a_code_that_the_system_gives__R_R4__R_R6(
    rows: Rows, worker: Worker, raised: BaseException
) -> None:
    """Else it could be tried again at once, and `snoozed` for ever: no attempt would count."""

    def work(run: RunContext) -> None:
        raise raised

    run_id = new_run(rows, worker.job("sly", work))
    assert worker.run(run_id) == [run_id]
    assert run(rows, run_id)["error_code"] == "handler_error"
    [following] = rows("select * from job_run where previous_run_id = %s", run_id)
    assert following["attempt"] == 2
    assert (following["available_at"] - following["created_at"]).total_seconds() >= 60


def test_numbers_of_other_types_are_progress(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> None:
        run.progress(Decimal(7), 9.0, bytes=True, phase="a\0b")  # type: ignore[arg-type]

    run_id = new_run(rows, worker.job("numbers", work))
    worker.run(run_id)
    assert run(rows, run_id)["progress"] == {
        "done": 7, "total": 9, "total_is_estimate": False, "bytes": 1, "phase": "a\ufffdb",
    }  # fmt: skip


def test_a_log_line_that_cannot_be_read_harms_no_run(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> str:
        run.log.info("%s", MuteText())
        run.log.info("after it")
        return "done"

    run_id = new_run(rows, worker.job("lazy", work))
    worker.run(run_id)
    assert run(rows, run_id)["result"] == "done"
    [log] = rows("select head from run_log")
    assert "after it" in log["head"]


def test_a_snooze_takes_a_second_at_least__R_R3(rows: Rows, worker: Worker) -> None:
    def work(run: RunContext) -> None:
        raise Snooze(0)

    run_id = new_run(rows, worker.job("restless", work))
    assert worker.run(run_id) == [run_id]
    [later] = rows("select * from job_run where previous_run_id = %s", run_id)
    assert (later["available_at"] - later["created_at"]).total_seconds() == 1


def test_what_a_handler_tells_is_redacted_where_it_is_stored__R_X2(
    rows: Rows, worker: Worker
) -> None:
    def work(run: RunContext) -> None:
        run.progress(1, 2, phase=f"with {PASSWORD}")
        run.sink_indeterminate(f"half done, {PASSWORD}")
        raise ValueError("no")

    source = new_datasource(rows, "shop")
    run_id = new_run(rows, worker.job("teller", work, source_id=source))
    worker.run(run_id)
    found = run(rows, run_id)
    assert found["progress"]["phase"] == "with ***"
    # Also without a cancel, what the sink may hold is told.
    assert found["error_message"] == "ValueError: no; half done, ***"
    assert PASSWORD not in str(found)


def test_a_cancel_that_meets_a_handler_at_its_end_tells_of_the_sink__R_F4(
    rows: Rows, worker: Worker
) -> None:
    def work(run: RunContext) -> None:
        run.sink_indeterminate("the rows are in place")
        rows(
            "update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()"
            " where id = %s",
            run.id,
        )

    run_id = new_run(rows, worker.job("late", work))
    worker.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["cancellation_warning"]) == (
        "CANCELLED",
        "the rows are in place",
    )


def test_a_fork_that_comes_back_from_a_handler_ends_there__R_F1(rows: Rows, worker: Worker) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "returns": lambda: "the child's",
        "raises": lambda: 1 / 0,
        "exits": lambda: sys.exit(0),
    }

    def work(run: RunContext) -> Any:
        pid = os.fork()
        if pid == 0:
            return ways[run.params["how"]]()
        _, status = os.waitpid(pid, 0)
        return {"parent": os.waitstatus_to_exitcode(status)}

    job = worker.job("forks", work)
    for how in ways:
        run_id = new_run(rows, job, params=f'{{"how": "{how}"}}')
        assert worker.run(run_id) == [run_id]
        found = run(rows, run_id)
        assert (found["status"], found["result"]) == ("SUCCEEDED", {"parent": 70})


def test_a_failure_of_megabytes_is_told_in_bounds_and_in_time__R_X5(
    rows: Rows, worker: Worker
) -> None:
    def work(run: RunContext) -> None:
        run.log.error("Duplicate entry '17' was found; " * 200_000)
        raise ValueError("too many of these; " * 500_000)

    run_id = new_run(rows, worker.job("verbose", work))
    began = time.monotonic()
    worker.run(run_id)
    assert time.monotonic() - began < 10
    found = run(rows, run_id)
    assert found["error_code"] == "handler_error"
    assert len(found["error_message"]) == 8_000
