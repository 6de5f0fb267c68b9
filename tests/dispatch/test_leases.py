"""The lease and the threads that keep it: R-L1 to R-L4, R-K2, R-K3, R-F1, R-X5."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from run_support import Recorder, Rows, in_thread, new_job, run
from support.processes import ROOT
from support.proxy import Proxy, before_database
from support.waiting import until
from worker_support import Claimer, Gate, Worker, new_run, new_runs

from db import session
from dispatch.context import Progress, RunContext
from dispatch.leases import LeaseState, RunLeaseService
from dispatch.runlog import HEAD_BYTES, TAIL_BYTES, LogDelta, RunLog


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


LEASES = RunLeaseService(60.0)


def expire(rows: Rows, run_id: Any) -> None:
    rows("update job_run set lease_until = clock_timestamp() where id = %s", run_id)


def seconds_left(rows: Rows, run_id: Any) -> float:
    [row] = rows(
        """select extract(epoch from lease_until - clock_timestamp())::float8 as seconds
           from job_run where id = %s""",
        run_id,
    )
    return float(row["seconds"])


def test_a_renewal_prolongs_from_now_by_database_time__R_L1__R_L2(
    rows: Rows, claimer: Claimer
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    rows("update job_run set lease_until = clock_timestamp() + interval '1 second'")
    assert LEASES.renew(claimer.link, held.id, held.token) is LeaseState.HELD
    assert 59 < seconds_left(rows, held.id) <= 60


def test_only_the_token_renews_and_reports__R_L1__R_F1(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    before = run(rows, held.id)
    delta = LogDelta(0, "line\n", "", 0, 1)
    for token in (uuid4(), uuid4()):
        assert LEASES.renew(claimer.link, held.id, token) is LeaseState.FENCED
        assert LEASES.report(claimer.link, held.id, token, Progress(5)) is LeaseState.FENCED
        assert not LEASES.write_log(claimer.link, held.id, token, delta)
    assert run(rows, held.id) == before
    assert not rows("select 1 from run_log")
    assert LEASES.renew(claimer.link, uuid4(), held.token) is LeaseState.NOT_FOUND


@pytest.mark.parametrize("end", ["expired", "finished"])
def test_an_expired_or_finished_run_is_not_renewed__R_L1(
    rows: Rows, claimer: Claimer, end: str
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    if end == "expired":
        expire(rows, held.id)
    else:
        rows("update job_run set status = 'SUCCEEDED', finished_at = clock_timestamp()")
    before = run(rows, held.id)
    assert LEASES.renew(claimer.link, held.id, held.token) is LeaseState.FENCED
    assert run(rows, held.id) == before


@pytest.mark.parametrize("changes", [False, True], ids=["locked", "changed"])
def test_a_renewal_that_waited_past_the_expiry_is_refused__R_L1(
    database: str, rows: Rows, claimer: Claimer, changes: bool
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    rows("update job_run set lease_until = clock_timestamp() + interval '400 milliseconds'")
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run for update")
        asked = in_thread(lambda: LEASES.renew(claimer.link, held.id, held.token))
        until("the lease to expire", lambda: seconds_left(rows, held.id) < 0, 5)
        assert not asked.done()
        other.rollback()
    # It began before the expiry, so the transaction's start would have let it pass.
    assert asked.result(10) is LeaseState.FENCED


def test_a_renewal_tells_of_a_cancel__R_K2(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    rows("update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now()")
    assert LEASES.renew(claimer.link, held.id, held.token) is LeaseState.CANCEL_REQUESTED


def test_progress_between_renewals_changes_no_index__R_F1(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    rows("vacuum job_run")
    rows("select pg_stat_reset()")
    for done in range(5):
        assert LEASES.report(claimer.link, held.id, held.token, Progress(done, 10)).is_held

    def updates() -> Any:
        [row] = rows(
            "select n_tup_upd as all, n_tup_hot_upd as hot from pg_stat_user_tables "
            "where relname = 'job_run'"
        )
        return row if row["all"] >= 5 else None

    claimer.close()
    seen = until("the statistics", updates)
    assert seen["hot"] >= 4
    assert run(rows, held.id)["progress"] == {"done": 4, "total": 10, "total_is_estimate": False}


# The keeper's threads


@pytest.fixture
def worker(rows: Rows, recorder: Recorder) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        made.append(Worker(rows, recorder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_busy_core_keeps_its_lease__R_L4(rows: Rows, worker: Callable[..., Worker]) -> None:
    def compute(run: RunContext) -> int:
        until_ = time.monotonic() + 4
        count = 0
        while time.monotonic() < until_:
            count += 1
        return count

    busy = worker(lease=1.5)
    run_id = new_run(rows, busy.job("busy", compute))
    busy.run(run_id)
    found = run(rows, run_id)
    assert found["status"] == "SUCCEEDED"
    assert (found["finished_at"] - found["started_at"]).total_seconds() > 3


def test_progress_and_log_are_stored_while_the_work_goes_on__R_X5(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    gate = Gate("done")

    def work(run: RunContext) -> Any:
        run.log.info("halfway")
        run.progress(50, 100, phase="copying")
        return gate(run)

    one = worker()
    run_id = new_run(rows, one.job("copy", work))
    working = in_thread(lambda: one.run(run_id))
    until("the progress", lambda: run(rows, run_id)["progress"], 10)
    assert run(rows, run_id)["rows_processed"] == 50
    until(
        "the log", lambda: rows("select 1 from run_log where head like '%%halfway%%' and %s", True)
    )
    gate.go.set()
    working.result(10)
    assert run(rows, run_id)["progress"]["done"] == 50


def test_a_cancel_is_seen_within_a_second__R_K2(rows: Rows, worker: Callable[..., Worker]) -> None:
    gate = Gate()
    one = worker()
    job = one.job("slow", gate, overlap="allow")
    for moment in (0.0, 1.0):
        run_id = new_run(rows, job)
        gate.began.clear()
        working = in_thread(lambda run_id=run_id: one.run(run_id))
        assert gate.began.wait(10)
        # At once, before the heartbeat listens; and later, when it does.
        began = time.monotonic()
        until("the moment", lambda at=began + moment: time.monotonic() >= at)
        asked = time.monotonic()
        rows(
            """with asked as (update job_run set status = 'CANCEL_REQUESTED',
                 cancel_requested_at = clock_timestamp() where id = %s returning id)
               select pg_notify('claimcheck_cancel', id::text) from asked""",
            run_id,
        )
        working.result(10)
        assert time.monotonic() - asked < 1.0
        assert run(rows, run_id)["status"] == "CANCELLED"


def test_a_cancel_is_seen_at_the_next_renewal_without_a_notification__R_K2(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    gate = Gate()
    one = worker(lease=3.0)
    run_id = new_run(rows, one.job("slow", gate))
    working = in_thread(lambda: one.run(run_id))
    assert gate.began.wait(10)
    rows(
        "update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now() where id = %s",
        run_id,
    )
    working.result(5)
    assert run(rows, run_id)["status"] == "CANCELLED"


def test_a_cancel_breaks_a_blocking_call__R_K2(
    database: str, rows: Rows, worker: Callable[..., Worker]
) -> None:
    began = threading.Event()

    def work(run: RunContext) -> None:
        with psycopg.connect(database) as connection, run.stopping(connection.cancel_safe):
            began.set()
            connection.execute("select pg_sleep(60)")

    one = worker()
    run_id = new_run(rows, one.job("query", work))
    working = in_thread(lambda: one.run(run_id))
    assert began.wait(10)
    rows(
        "update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now() where id = %s",
        run_id,
    )
    rows("select pg_notify('claimcheck_cancel', %s)", str(run_id))
    working.result(5)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("CANCELLED", None)


def test_a_timeout_stops_the_work_and_is_retried_by_policy__R_K3(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    one = worker()
    run_id = new_run(rows, one.job("slow", Gate(), definition={"timeout": 0.3}))
    one.run(run_id)
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("RETRY_SCHEDULED", "timeout")


def test_work_that_does_not_stop_is_recorded_and_then_ended__R_K3(
    rows: Rows, recorder: Recorder, worker: Callable[..., Worker]
) -> None:
    ended: list[tuple[Any, str, str]] = []
    gate = Gate(heeds=False)

    def end(run_id: Any, reason: str) -> None:
        # The outcome is recorded before the process is ended.
        ended.append((run_id, reason, run(rows, run_id)["status"]))
        gate.go.set()

    one = worker(on_stuck=end)
    one.coordinator._keeper._stop_grace = 0.3
    definition = {"timeout": 0.2, "retry": {"on_failure": False}}
    run_id = new_run(rows, one.job("deaf", gate, definition=definition))
    one.run(run_id)
    found = run(rows, run_id)
    assert ended == [(run_id, "timeout", "FAILED")]
    assert (found["status"], found["error_code"]) == ("FAILED", "timeout")
    assert [event.kind for event in one.events] == ["received", "started", "failed"]
    assert len(rows("select 1 from audit_event where action = 'run.finish'")) == 1


def test_the_end_of_work_that_does_not_stop_offers_what_it_frees__R_D7(
    rows: Rows, recorder: Recorder, worker: Callable[..., Worker]
) -> None:
    """The process is ended next, and whoever releases its lease finds nothing RUNNING."""
    offered: list[Any] = []
    gate = Gate(heeds=False)

    def end(run_id: Any, reason: str) -> None:
        offered.extend(recorder.take())
        gate.go.set()

    one = worker(on_stuck=end)
    one.coordinator._keeper._stop_grace = 0.3
    job = one.job("deaf", gate, definition={"timeout": 0.2, "retry": {"on_failure": False}})
    first, second = new_run(rows, job), new_run(rows, job, queue="elsewhere")
    one.run(first)
    assert offered == [second]


def test_without_a_process_to_end_the_connections_are_cut_again__R_K3(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    cut = threading.Semaphore(0)
    gate = Gate(heeds=False)

    def work(run: RunContext) -> Any:
        with run.stopping(cut.release):
            return gate(run)

    one = worker()
    one.coordinator._keeper._stop_grace = 0.3
    run_id = new_run(rows, one.job("deaf", work, definition={"timeout": 0.2}))
    working = in_thread(lambda: one.run(run_id))
    assert cut.acquire(timeout=10)
    assert cut.acquire(timeout=10)
    assert run(rows, run_id)["status"] == "RETRY_SCHEDULED"
    gate.go.set()
    working.result(10)
    # What the work brought in the end is fenced.
    assert [event.kind for event in one.events] == ["received", "started", "retried"]
    assert run(rows, run_id)["result"] is None


def test_an_expired_lease_fences_its_work__R_L3__R_F1(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    gate = Gate("done")
    one = worker(lease=3.0)
    run_id = new_run(rows, one.job("slow", gate))
    working = in_thread(lambda: one.run(run_id))
    assert gate.began.wait(10)
    expire(rows, run_id)
    working.result(10)
    assert gate.contexts[0].stop_reason == "fenced"
    assert run(rows, run_id)["status"] == "RUNNING"
    assert [event.kind for event in one.events] == ["received", "started"]


@pytest.fixture
def through_proxy(database: str, rows: Rows, configure: Callable[..., Any]) -> Iterator[Proxy]:
    with before_database(database) as (made, through):
        configure(DATABASE_URL=through, REDIS_URL="redis://127.0.0.1:1/0")
        session.dispose()
        yield made
        made.resume()
        session.dispose()


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds", "deaf"])
def test_a_hung_database_connection_fences_before_the_lease_expires__R_L3(
    rows: Rows, through_proxy: Proxy, worker: Callable[..., Worker], heeds: bool
) -> None:
    ended: list[tuple[str, float]] = []
    gate = Gate("done", heeds=heeds)

    def end(run_id: Any, reason: str) -> None:
        ended.append((reason, seconds_left(rows, run_id)))
        gate.go.set()

    one = worker(lease=4.0, on_stuck=end)
    run_id = new_run(rows, one.job("slow", gate))
    working = in_thread(lambda: one.run(run_id))
    assert gate.began.wait(10)
    until("the heartbeat", lambda: one.coordinator._keeper.is_connected)
    through_proxy.hang()
    until("the work to be told", lambda: gate.contexts[0].stop_reason, 10)
    assert gate.contexts[0].stop_reason == "fenced"
    assert seconds_left(rows, run_id) > 0
    if not heeds:
        until("the process to be ended", lambda: ended, 10)
        [(reason, left)] = ended
        assert reason == "fenced"
        assert left > 0
    through_proxy.resume()
    working.result(20)
    if heeds:
        assert run(rows, run_id)["status"] == "RUNNING"
        assert not ended


def break_the_heartbeat(rows: Rows) -> None:
    """End its connection, and wait for another one."""

    def heartbeat() -> Any:
        return rows(
            """select pid from pg_stat_activity where datname = current_database()
               and application_name = %s""",
            "claimcheck heartbeat",
        )

    [old] = until("the heartbeat", heartbeat)
    rows("select pg_terminate_backend(%s)", old["pid"])
    until("another one", lambda: heartbeat() not in ([], [old]), 10)


def keepers_threads() -> dict[str, threading.Thread]:
    names = ("claimcheck-heartbeat", "claimcheck-watch")
    found = [thread for thread in threading.enumerate() if thread.name in names]
    assert len(found) <= len(names), found
    return {thread.name: thread for thread in found}


@pytest.mark.parametrize("lease", [3.0, 60.0])
def test_a_broken_heartbeat_connection_is_opened_again__R_L4__R_K2(
    rows: Rows, worker: Callable[..., Worker], lease: float
) -> None:
    """Long before the next renewal too: it is what hears of a cancel."""
    gate = Gate("done")
    one = worker(lease=lease)
    run_id = new_run(rows, one.job("slow", gate))
    working = in_thread(lambda: one.run(run_id))
    for _ in range(2):
        break_the_heartbeat(rows)
    rows(
        "update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now() where id = %s",
        run_id,
    )
    rows("select pg_notify('claimcheck_cancel', %s)", str(run_id))
    working.result(10)
    assert run(rows, run_id)["status"] == "CANCELLED"


def test_a_fenced_run_does_not_end_the_heartbeat_where_its_connection_breaks__R_L4(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    gate, next_gate = Gate(heeds=False), Gate("done")
    one = worker()
    run_id = new_run(rows, one.job("deaf", gate))
    working = in_thread(lambda: one.run(run_id))
    assert gate.began.wait(10)
    expire(rows, run_id)
    until("it to be fenced", lambda: gate.contexts[0].stop_reason, 10)
    before = keepers_threads()
    break_the_heartbeat(rows)
    next_id = new_run(rows, one.job("slow", next_gate))
    working_next = in_thread(lambda: one.run(next_id))
    assert next_gate.began.wait(10)
    rows("update job_run set lease_until = lease_until - interval '9 s' where id = %s", next_id)
    until("its renewal", lambda: seconds_left(rows, next_id) > 55, 30)
    assert keepers_threads() == before
    for one_gate, work in ((gate, working), (next_gate, working_next)):
        one_gate.go.set()
        work.result(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("dead", "step"), [("heartbeat", "_beat"), ("watch", "_look_at")], ids=["heartbeat", "watch"]
)
def test_a_thread_of_the_keeper_that_died_is_replaced_alone__R_L4(
    rows: Rows, worker: Callable[..., Worker], dead: str, step: str
) -> None:
    gates = [Gate("done"), Gate("done")]
    one = worker(lease=3.0)
    keeper = one.coordinator._keeper

    def die(*given: Any) -> None:
        delattr(keeper, step)
        raise SystemExit

    setattr(keeper, step, die)
    runs = [new_run(rows, one.job(f"slow{n}", gate)) for n, gate in enumerate(gates)]
    working = [in_thread(lambda: one.run(runs[0]))]
    assert gates[0].began.wait(10)
    until("it to die", lambda: not getattr(keeper, f"_{dead}").is_alive())
    [lived] = keepers_threads().values()
    working.append(in_thread(lambda: one.run(runs[1])))
    assert gates[1].began.wait(10)
    after = keepers_threads()
    assert len(after) == 2
    assert lived in after.values()
    for gate, work in zip(gates, working, strict=True):
        gate.go.set()
        work.result(10)


@pytest.mark.parametrize("thread", ["claimcheck-stop", "claimcheck-end"])
def test_a_thread_that_cannot_be_started_ends_no_watch__R_K3(
    rows: Rows, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    gate = Gate(heeds=thread == "claimcheck-stop")
    ended: list[str] = []

    def end(run_id: Any, reason: str) -> None:
        ended.append(reason)
        gate.go.set()

    start, refused = threading.Thread.start, iter([True])

    def begin(one: threading.Thread) -> None:
        if one.name == thread and next(refused, False):
            raise RuntimeError("can't start new thread")
        start(one)

    monkeypatch.setattr(threading.Thread, "start", begin)
    one = worker(on_stuck=end)
    one.coordinator._keeper._stop_grace = 0.3 if thread == "claimcheck-end" else 60.0
    definition = {"timeout": 0.2, "retry": {"on_failure": False}}
    run_id = new_run(rows, one.job("slow", gate, definition=definition))
    in_thread(lambda: one.run(run_id)).result(20)
    assert next(refused, None) is None
    assert ended == ([] if thread == "claimcheck-stop" else ["timeout"])
    found = run(rows, run_id)
    assert (found["status"], found["error_code"]) == ("FAILED", "timeout")


def test_a_locked_row_does_not_keep_other_runs_from_being_renewed__R_L4(
    database: str, rows: Rows, worker: Callable[..., Worker]
) -> None:
    gates = [Gate("done"), Gate("done")]
    one = worker(lease=3.0)
    runs = [new_run(rows, one.job(f"slow{n}", gate)) for n, gate in enumerate(gates)]
    working = [in_thread(lambda run_id=run_id: one.run(run_id)) for run_id in runs]
    for gate in gates:
        assert gate.began.wait(10)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run where id = %s for update", [runs[0]])
        [then] = rows("select clock_timestamp() + interval '5 seconds' as at")
        until("renewals", lambda: run(rows, runs[1])["lease_until"] > then["at"], 10)
    gates[1].go.set()
    working[1].result(10)
    assert run(rows, runs[1])["status"] == "SUCCEEDED"
    gates[0].go.set()
    working[0].result(10)


def test_an_idle_process_closes_the_heartbeats_connection__R_L4(
    rows: Rows, worker: Callable[..., Worker]
) -> None:
    gate = Gate("done")
    one = worker()
    run_id = new_run(rows, one.job("slow", gate))
    working = in_thread(lambda: one.run(run_id))
    until("the heartbeat", lambda: one.coordinator._keeper.is_connected)
    gate.go.set()
    working.result(10)
    until("it to be closed", lambda: not one.coordinator._keeper.is_connected, 10)


def test_a_forked_child_keeps_its_own_runs__R_L4(database: str, rows: Rows) -> None:
    """Connections and threads of the parent are not used in a child, and stay usable for it."""
    run_ids = new_runs(rows, new_job(rows, "orders", "allow", handler="fork"), 3)
    script = ROOT / "tests" / "dispatch" / "forked_worker.py"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, run_ids)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "dispatch")]),
            "DATABASE_URL": database,
            "REDIS_URL": "redis://127.0.0.1:1/0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [run(rows, run_id)["status"] for run_id in run_ids] == ["SUCCEEDED"] * 3
    assert "Error" not in done.stderr


# The run's log


def pending(log: RunLog) -> LogDelta:
    delta = log.pending()
    assert delta is not None
    return delta


def lines_of(log: RunLog) -> tuple[str, str, int]:
    delta = pending(log)
    return delta.head, delta.tail, delta.dropped_bytes


def test_a_log_keeps_the_first_three_quarters_and_the_last_quarter__R_X5() -> None:
    log = RunLog()
    for n in range(20_000):
        log.add(f"line {n:06} " + "é" * 20)
    head, tail, dropped = lines_of(log)
    size = len(f"line {0:06} ".encode()) + 40 + 1
    assert len(head.encode()) <= HEAD_BYTES
    assert len(tail.encode()) <= TAIL_BYTES
    assert head.startswith("line 000000")
    assert tail.endswith("line 019999 " + "é" * 20 + "\n")
    assert len(head.encode()) + len(tail.encode()) + dropped == 20_000 * size


def test_a_log_holds_what_no_database_can_and_the_longest_line__R_X5(
    rows: Rows, claimer: Claimer
) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    log = RunLog()
    log.add("a\x00b \ud800 c")
    log.add("x" * 1_000_000)
    for _ in range(200):
        log.add("y" * 5_000)
    assert LEASES.write_log(claimer.link, held.id, held.token, pending(log))
    [stored] = rows("select * from run_log")
    assert stored["head"].startswith("a\ufffdb ? c\n")
    assert stored["dropped_bytes"] > 0


def test_a_delta_that_is_written_twice_appends_once__R_R7(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    log = RunLog()
    log.add("één")
    first = pending(log)
    for _ in range(2):
        assert LEASES.write_log(claimer.link, held.id, held.token, first)
    log.add("twee")
    # Its answer was lost, so the next one holds it again; what is new in that one is kept.
    both = pending(log)
    assert (both.offset, both.head) == (0, "één\ntwee\n")
    for _ in range(2):
        assert LEASES.write_log(claimer.link, held.id, held.token, both)
        assert rows("select head from run_log") == [{"head": "één\ntwee\n"}]
    log.stored(first)
    second = pending(log)
    assert (second.offset, second.head) == (4, "twee\n")
    for _ in range(2):
        assert LEASES.write_log(claimer.link, held.id, held.token, second)
    assert rows("select head from run_log") == [{"head": "één\ntwee\n"}]
    log.stored(second)
    assert log.pending() is None


def test_a_delta_that_comes_late_takes_nothing_back__R_X5(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    log = RunLog()
    for n in range(60):
        log.add(f"{n:02} " + "é" * 2_500)
    late = pending(log)
    assert late.tail
    log.add("the last line")
    for delta in (pending(log), late):
        LEASES.write_log(claimer.link, held.id, held.token, delta)
    [stored] = rows("select head, tail, dropped_bytes from run_log")
    assert stored["head"] == late.head
    assert stored["tail"].endswith("the last line\n")
    log.add("one more")
    assert LEASES.write_log(claimer.link, held.id, held.token, pending(log))
    [stored] = rows("select head, tail, dropped_bytes from run_log")
    assert stored["tail"].endswith("the last line\none more\n")


def test_a_log_that_a_failover_took_lines_from_goes_on__R_X5(rows: Rows, claimer: Claimer) -> None:
    held = claimer.directed(new_run(rows, new_job(rows, "orders")))
    assert held is not None
    log = RunLog()
    for line in ("one", "two", "three"):
        log.add(line)
        delta = pending(log)
        assert LEASES.write_log(claimer.link, held.id, held.token, delta)
        log.stored(delta)
        if line == "two":
            rows("update run_log set head = %s", "one\n")
    assert rows("select head from run_log") == [{"head": "one\nthree\n"}]
