"""The beat's wait: silent until a deadline or a committed change (R-D3, R-D4, R-D6)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from run_support import Recorder, Rows, claim, new_job, run
from support.proxy import before_database
from support.waiting import until
from test_deadlines import set_up_schedule

from db import session
from dispatch import sweep as sweeping
from dispatch import watch as watching
from dispatch.deadlines import Scope
from dispatch.enqueue import enqueue, submit
from dispatch.watch import APPLICATION_NAME, Watch


class Beat:
    """A watch in a thread of its own, and when it swept what; a sweep counts once it has ended."""

    def __init__(self, recorder: Recorder) -> None:
        self.watch = Watch(recorder.ports)
        self.sweeps: list[tuple[float, tuple[Scope, ...]]] = []
        self.overlaps = threading.Event()
        sweeping_now = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        whole = self.watch.sweep.run

        def counted(connection: Any, scopes: Any = ()) -> bool:
            started = time.monotonic()
            is_alone = sweeping_now.acquire(blocking=False)
            if not is_alone:
                self.overlaps.set()
            try:
                return whole(connection, scopes)
            finally:
                if is_alone:
                    sweeping_now.release()
                self.sweeps.append((started, tuple(scopes)))

        self.watch.sweep.run = counted  # type: ignore[method-assign]

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.watch.step(0.2)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.watch.close()


@pytest.fixture
def beat(
    rows: Rows, recorder: Recorder, configure: Callable[..., Any], database: str
) -> Iterator[Callable[..., Beat]]:
    """``beat(CLAIMCHECK_SWEEP_SECONDS=0)`` starts one that listens already."""
    with contextlib.ExitStack() as stopping:

        def start(**settings: Any) -> Beat:
            configure(DATABASE_URL=database, REDIS_URL="redis://127.0.0.1:1/0", **settings)
            made = Beat(recorder)
            made.start()
            stopping.callback(made.stop)
            until("the beat to look", lambda: made.sweeps)
            until("the beat to wait", lambda: listeners(rows))
            return made

        yield start


def listeners(rows: Rows) -> list[dict[str, Any]]:
    """The beats' own connections that wait; ``query_start`` moves with each statement."""
    return rows(
        """select pid, query_start from pg_stat_activity
           where application_name = %s and state = 'idle' and datname = current_database()
           order by pid""",
        APPLICATION_NAME,
    )


def sessions(rows: Rows) -> list[dict[str, Any]]:
    """Every session of this database but the test's own, with its last statement's time."""
    return rows(
        """select pid, query_start from pg_stat_activity
           where datname = current_database() and pid <> pg_backend_pid()
             and backend_type = 'client backend' order by pid"""
    )


def offered(recorder: Recorder, run_id: UUID) -> bool:
    return run_id in [offer.run_id for offer in recorder.offered]


# --- deadlines and notifications (R-D3) ---------------------------------------------------------


def test_what_was_due_before_the_start_is_done_at_the_start__R_D6(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), -5)
    beat(CLAIMCHECK_SWEEP_SECONDS=0)
    [created] = until("the run", lambda: rows("select id from job_run"))
    until("its offer", lambda: offered(recorder, created["id"]))


def test_a_run_on_a_callers_connection_is_offered_after_its_commit__R_D3(
    beat: Any, rows: Rows, recorder: Recorder, database: str
) -> None:
    new_job(rows, "orders")
    beat(CLAIMCHECK_SWEEP_SECONDS=0)
    with psycopg.connect(database) as caller:
        handle = enqueue(caller, "orders")
        assert not offered(recorder, handle.run_id)
        caller.commit()
    until("the offer", lambda: offered(recorder, handle.run_id), 5)


def test_a_delay_is_kept_to_the_moment__R_D3(beat: Any, rows: Rows, recorder: Recorder) -> None:
    new_job(rows, "orders")
    beat(CLAIMCHECK_SWEEP_SECONDS=0)
    handle = submit(recorder.ports, "orders", countdown=1)
    assert recorder.offered == []
    until("the offer", lambda: offered(recorder, handle.run_id), 5)
    [found] = rows(
        "select extract(epoch from offered_at - available_at) as late from job_run where id = %s",
        handle.run_id,
    )
    # 50 ms on an idle machine, which this one need not be: tests/scenarios measures that.
    assert 0 <= found["late"] < 0.5


def test_a_schedule_that_is_set_up_while_the_beat_sleeps_fires_in_time__R_D3(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    job = new_job(rows, "orders")
    beat(CLAIMCHECK_SWEEP_SECONDS=0)
    set_up_schedule(rows, job, 1)
    rows("select claimcheck_notify('job:orders')")
    [created] = until("the run", lambda: rows("select id, scheduled_for from job_run"), 5)
    until("its offer", lambda: offered(recorder, created["id"]))


def test_an_unclaimed_run_is_offered_again_with_the_backstop_off__R_D3(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    beat(CLAIMCHECK_SWEEP_SECONDS=0, CLAIMCHECK_OFFER_GRACE_SECONDS=0.2)
    handle = submit(recorder.ports, "orders")
    until("three more offers", lambda: run(rows, handle.run_id)["offer_count"] >= 4, 10)
    found = run(rows, handle.run_id)
    assert (found["offered_at"] - found["created_at"]).total_seconds() >= 0.2 + 0.4 + 0.8


def test_a_worker_that_claims_and_dies_without_a_word_is_noticed__R_D3(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    beat(CLAIMCHECK_SWEEP_SECONDS=0, CLAIMCHECK_LEASE_SECONDS=1)
    silent = submit(recorder.ports, "orders").run_id  # gives the sign of life
    claim(rows, silent, lease=1)  # the claim itself does not notify
    until("its recovery", lambda: run(rows, silent)["status"] == "RETRY_SCHEDULED", 5)
    found = run(rows, silent)
    # In time: a lease after the claim, and the silence of a lease at most before it was seen.
    assert (found["finished_at"] - found["started_at"]).total_seconds() < 3


# --- coalescing (R-D4) --------------------------------------------------------------------------


def test_the_first_word_after_silence_is_acted_on_at_once_and_more_are_gathered__R_D4(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0)
    until("a quiet second", lambda: time.monotonic() - made.sweeps[-1][0] > 1.1)
    made.sweeps.clear()
    started = time.monotonic()
    for number in range(50):
        rows("select claimcheck_notify(%s, 'work')", f"queue:q{number}")
    until("the gathered words", lambda: sum(len(scopes) for _, scopes in made.sweeps) >= 50, 10)
    first, *rest = made.sweeps
    assert first[0] - started < 0.5
    assert len(rest) <= 2
    assert rest[0][0] - first[0] >= 0.95


def test_a_known_deadline_is_not_held_up_by_gathering__R_D4(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0)
    until("a quiet second", lambda: time.monotonic() - made.sweeps[-1][0] > 1.1)
    made.sweeps.clear()
    handle = submit(recorder.ports, "orders", countdown=0.4)
    until("the first word", lambda: made.sweeps)
    rows("select claimcheck_notify('queue:other', 'work')")
    until("the offer", lambda: offered(recorder, handle.run_id), 5)
    until("the second sweep to end", lambda: len(made.sweeps) >= 2)
    # The second word waits for its second; the deadline took it along before that.
    assert made.sweeps[1][0] - made.sweeps[0][0] < 0.95
    assert Scope(queue="other", work=True) in made.sweeps[1][1]


def test_two_sweeps_of_a_process_never_overlap__R_D4(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders", "allow")
    began, go = threading.Event(), threading.Event()
    publish = recorder.ports.offer

    def hold(offers: Any) -> int:
        began.set()
        assert go.wait(20), "nobody let the sweep go on"
        return publish(offers)

    made = beat(CLAIMCHECK_SWEEP_SECONDS=1)
    recorder.ports.offer = hold
    held = submit(recorder.ports, "orders", countdown=0.1)
    assert began.wait(10)
    # A sweep is under way: words, a deadline and the backstop come meanwhile.
    made.sweeps.clear()
    late = submit(recorder.ports, "orders", countdown=0.1)
    rows("select claimcheck_notify('queue:other', 'work')")
    assert not made.overlaps.wait(2.5)
    assert made.sweeps == []
    go.set()
    until("both offers", lambda: all(offered(recorder, one.run_id) for one in (held, late)), 10)
    told = Scope(queue="other", work=True)
    until("the word", lambda: any(told in scopes for _, scopes in made.sweeps), 10)
    assert not made.overlaps.is_set()


def test_a_word_about_work_of_one_queue_rescans_nothing_else__R_D6(
    beat: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[list[Scope]] = []
    whole = sweeping.look

    def noted(connection: Any, agenda: Any, scopes: Any, **options: Any) -> None:
        looked.append(list(scopes))
        whole(connection, agenda, scopes, **options)

    monkeypatch.setattr(sweeping, "look", noted)
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0)
    until("a quiet second", lambda: time.monotonic() - made.sweeps[-1][0] > 1.1)
    looked.clear()
    rows("select claimcheck_notify('queue:runs', 'work')")
    until("a look", lambda: looked)
    assert looked[0] == [Scope(queue="runs", work=True)]


# --- silence (R-D3) -----------------------------------------------------------------------------


def test_an_idle_beat_sends_no_statement__R_D3(beat: Any, rows: Rows, recorder: Recorder) -> None:
    job = new_job(rows, "orders")
    new_job(rows, "paused", paused=True)
    set_up_schedule(rows, job, 3600)
    submit(recorder.ports, "paused")
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0, CLAIMCHECK_LEASE_SECONDS=1)
    # A second look after a lease of silence, and then nothing.
    until("the second look", lambda: len(made.sweeps) >= 2)
    until("the beat to wait", lambda: listeners(rows))
    before = sessions(rows)
    quiet_until = time.monotonic() + 3
    until("three seconds", lambda: time.monotonic() > quiet_until)
    assert sessions(rows) == before
    assert len(before) >= 1


def test_the_backstop_costs_one_statement_each_time__R_D3(beat: Any, rows: Rows) -> None:
    made = beat(CLAIMCHECK_SWEEP_SECONDS=1, CLAIMCHECK_LEASE_SECONDS=1000)
    started = time.monotonic()
    seen = {listener["query_start"] for listener in listeners(rows)}

    def three_more() -> bool:
        seen.update(listener["query_start"] for listener in listeners(rows))
        return len(made.sweeps) >= 4

    until("three backstops", three_more, 10)
    assert time.monotonic() - started > 2.5
    assert len(seen) <= 4


def test_the_backstop_finds_what_nobody_told__R_D5(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    beat(CLAIMCHECK_SWEEP_SECONDS=1, CLAIMCHECK_LEASE_SECONDS=1000)
    rows("insert into job_run (job_id) select id from job")
    until("the offer", lambda: recorder.offered, 5)


# --- lost connections (R-D6) --------------------------------------------------------------------


def test_a_cut_connection_is_opened_again_and_deadlines_are_read_anew__R_D6(
    beat: Any, rows: Rows, recorder: Recorder
) -> None:
    new_job(rows, "orders")
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0, CLAIMCHECK_LEASE_SECONDS=1000)
    until("a quiet second", lambda: time.monotonic() - made.sweeps[-1][0] > 1.1)
    [listener] = listeners(rows)
    rows("begin")
    rows("select pg_terminate_backend(%s)", listener["pid"])
    # Committed while nobody listens; no word of it is ever heard.
    rows("insert into job_run (job_id) select id from job")
    rows("commit")
    until("the offer", lambda: recorder.offered, 5)
    assert [found["pid"] for found in listeners(rows)] != [listener["pid"]]


def test_a_database_that_goes_and_comes_back_needs_no_restart__R_D6(
    beat: Any, rows: Rows, recorder: Recorder, database_server: str, caplog: Any
) -> None:
    set_up_schedule(rows, new_job(rows, "orders"), 1)
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0, CLAIMCHECK_LEASE_SECONDS=1000)
    [name] = rows("select current_database() as name")
    database = sql.Identifier(name["name"])
    with psycopg.connect(database_server, autocommit=True) as server:
        server.execute(sql.SQL("alter database {} allow_connections false").format(database))
        server.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
               where datname = %s and application_name like 'claimcheck%%'""",
            [name["name"]],
        )
        until("the beat to notice", lambda: "is away" in caplog.text)
        swept = len(made.sweeps)
        out_until = time.monotonic() + 1.5
        until("the schedule to come due", lambda: time.monotonic() > out_until)
        assert len(made.sweeps) == swept
        server.execute(sql.SQL("alter database {} allow_connections true").format(database))
    until("the run", lambda: rows("select id from job_run"), 10)
    assert "is back" in caplog.text


def test_a_server_that_hangs_is_left_and_found_again__R_D6(
    rows: Rows,
    recorder: Recorder,
    configure: Callable[..., Any],
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(watching, "PATIENCE_SECONDS", 0.5)
    new_job(rows, "orders")
    with before_database(database) as (between, through):
        configure(
            DATABASE_URL=through, REDIS_URL="redis://127.0.0.1:1/0", CLAIMCHECK_SWEEP_SECONDS=1
        )
        session.dispose()
        made = Beat(recorder)
        made.start()
        try:
            until("the beat to look", lambda: made.sweeps)
            between.hang()
            rows("insert into job_run (job_id) select id from job")
            until("the beat to notice", lambda: "is away" in caplog.text)
            between.cut()
            between.resume()
            until("the offer", lambda: recorder.offered, 20)
        finally:
            between.resume()
            made.stop()


def test_a_silent_connection_is_noticed_by_keepalives__R_D6(rows: Rows) -> None:
    with (
        session.connect_direct(APPLICATION_NAME) as connection,
        socket.socket(fileno=os.dup(connection.fileno())) as found,
    ):
        if found.family == socket.AF_UNIX:
            pytest.skip("a local socket has no silent failure")
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, each, count = (
            found.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + each * count <= 30


def test_a_sweep_that_breaks_is_repeated__R_D9(
    beat: Any, rows: Rows, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    new_job(rows, "orders")
    made = beat(CLAIMCHECK_SWEEP_SECONDS=0)
    whole, calls = made.watch.sweep.run, []

    def once_broken(connection: Any, scopes: Any = ()) -> bool:
        calls.append(scopes)
        if len(calls) == 1:
            raise ArithmeticError("a bug")
        return bool(whole(connection, scopes))

    monkeypatch.setattr(made.watch.sweep, "run", once_broken)
    rows("insert into job_run (job_id) select id from job")
    rows("select claimcheck_notify('queue:runs', 'work')")
    until("the offer", lambda: recorder.offered, 5)
    assert "ArithmeticError" in caplog.text


# --- any number of beats (R-D1) -----------------------------------------------------------------


def test_three_beats_fire_each_slot_once__R_D1(beat: Any, rows: Rows, recorder: Recorder) -> None:
    for number in range(10):
        job = new_job(rows, f"job{number}", "allow", definition={"overlap": "allow"})
        set_up_schedule(rows, job, 1.0)
        rows("update job_schedule set every_seconds = 1 where job_id = %s", job)
    for _ in range(3):
        beat(CLAIMCHECK_SWEEP_SECONDS=0)
    until(
        "three slots of each schedule",
        lambda: rows("select count(*) as n from schedule_slot")[0]["n"] >= 30,
        20,
    )
    [twice] = rows(
        """select count(*) as n from (select schedule_id, scheduled_for from job_run
             group by 1, 2 having count(*) > 1) doubled"""
    )
    assert twice["n"] == 0
    [gaps] = rows(
        """select count(*) as n from (select fire_at - lag(fire_at) over (
             partition by schedule_id order by fire_at) as step from schedule_slot) steps
           where step > interval '1 second'"""
    )
    assert gaps["n"] == 0
