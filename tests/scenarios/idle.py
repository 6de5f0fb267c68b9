"""A fleet with nothing to do sends no statement, and acts within 50 ms of a deadline (R-D3).

    python -m tests.scenarios.idle --minutes 10
    python -m tests.scenarios.idle --minutes 5 --backstop 60
    python -m tests.scenarios.idle --minutes 0 --deadlines 100

Statements are counted by the server (pg_stat_statements where it has it, transactions in any case),
from a connection to another database.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import suppress
from typing import Any

import psycopg
from support.waiting import until

from scenarios import fleet as fleets
from scenarios.fleet import Fleet

LEASE_SECONDS = 3.0
JOBS = """
jobs:
  plain: {handler: plain, overlap: allow, params: {seconds: 0.05}}
  paused: {handler: plain, overlap: allow, paused: true}
  tomorrow:
    handler: plain
    schedules: [{name: tomorrow, every: 1d}]
"""


def count_statements(fleet: Fleet) -> bool:
    """Restart the server so that it counts what it is sent, and does nothing by itself."""
    with fleet.postgres.connect("postgres") as server:
        server.execute("alter system set autovacuum = off")
        server.execute("alter system set shared_preload_libraries = 'pg_stat_statements'")
    fleet.postgres.stop()
    try:
        fleet.postgres.start()
    except AssertionError:
        fleet.postgres.process = None
        raise
    with suppress(psycopg.Error), fleet.postgres.connect("postgres") as server:
        server.execute("create extension if not exists pg_stat_statements")
        return True
    return False


def counted(fleet: Fleet, with_texts: bool) -> dict[str, Any]:
    """What the control database has been sent so far: transactions, and statements by text."""
    with fleet.postgres.connect("postgres") as server:
        found = server.execute(
            "select xact_commit + xact_rollback from pg_stat_database where datname = 'control'"
        ).fetchone()
        assert found is not None
        texts: dict[str, int] = {}
        if with_texts:
            for text, calls in server.execute(
                """select left(s.query, 120), sum(s.calls)::bigint from pg_stat_statements s
                   join pg_database d on d.oid = s.dbid where d.datname = 'control' group by 1"""
            ):
                texts[text] = calls
    return {"transactions": int(found[0]), "texts": texts}


def be_busy(fleet: Fleet, runs: int) -> None:
    client = fleet.client()
    for _ in range(runs):
        client.trigger("plain")
    client.trigger("paused")
    client.end()
    fleet.clients.remove(client)
    until(
        "the runs to end",
        lambda: (
            fleet.rows("select count(*) as n from job_run where status = 'SUCCEEDED'")[0]["n"]
            >= runs
        ),
        60,
    )


def stay_idle(fleet: Fleet, minutes: float, backstop: float, beats: int) -> None:
    with_texts = count_statements(fleet)
    for name in ("one", "two"):
        fleet.worker(name, concurrency=2, ready=False)
    for number in range(beats):
        fleet.beat(f"beat{number}", ready=False)
    for member in fleet.members.values():
        member.await_ready()
    be_busy(fleet, 20)
    # Each beat looks once more when silence has lasted a lease; statistics follow within seconds.
    quiet_at = time.monotonic() + 2 * LEASE_SECONDS + 12
    until("two leases of silence", lambda: time.monotonic() > quiet_at, 60)

    before = counted(fleet, with_texts)
    ends = time.monotonic() + minutes * 60
    until(f"{minutes:g} idle minutes", lambda: time.monotonic() > ends, minutes * 60 + 10)
    # What was sent last is counted once the sender's statistics are written.
    flushed = time.monotonic() + 11
    until("the statistics", lambda: time.monotonic() > flushed, 30)
    after = counted(fleet, with_texts)

    texts = {
        text: calls - before["texts"].get(text, 0)
        for text, calls in after["texts"].items()
        if calls > before["texts"].get(text, 0)
    }
    transactions = after["transactions"] - before["transactions"]
    print(f"{minutes:g} idle minutes, {beats} beats, 2 workers: {transactions} transactions")
    for text, calls in texts.items():
        print(f"{calls:6} x {' '.join(text.split())}")
    allowed = 0 if not backstop else beats * (math.floor((minutes * 60 + 11) / backstop) + 1)
    assert transactions <= allowed, f"{transactions} transactions, where {allowed} are allowed"
    assert sum(texts.values()) <= allowed, f"{texts}, where {allowed} are allowed"


def measure_deadlines(fleet: Fleet, count: int) -> None:
    fleet.beat()
    client = fleet.client()
    late: list[float] = []
    for _ in range(count):
        run_id = client.trigger("plain", {}, countdown=1.3)
        until("the offer", lambda run_id=run_id: fleet.run(run_id)["offered_at"], 10)
        found = fleet.run(run_id)
        late.append((found["offered_at"] - found["available_at"]).total_seconds() * 1000)
        client.ask("cancel", run=run_id)
        # No worker takes the wake-ups, and a full queue would get no more of them (R-D5).
        with fleet.redis.client() as redis:
            redis.flushall()
    late.sort()
    print(
        f"{count} deadlines: offered after {late[count // 2]:.1f} ms (median), "
        f"{late[math.ceil(count * 0.99) - 1]:.1f} ms (p99), {late[-1]:.1f} ms (most)"
    )
    assert late[0] >= 0, f"offered {-late[0]:.1f} ms too early"
    assert late[-1] <= 50, f"a deadline was acted on {late[-1]:.1f} ms late"


def idle(minutes: float, backstop: float, beats: int, deadlines: int) -> None:
    settings = {
        "CLAIMCHECK_SWEEP_SECONDS": f"{backstop:g}",
        "CLAIMCHECK_LEASE_SECONDS": f"{LEASE_SECONDS:g}",
    }
    if minutes:
        with Fleet(settings=settings) as fleet:
            fleet.define(JOBS)
            stay_idle(fleet, minutes, backstop, beats)
    if deadlines:
        with Fleet(settings=settings) as fleet:
            fleet.define(JOBS)
            measure_deadlines(fleet, deadlines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.idle")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--backstop", type=float, default=0.0, help="seconds; 0 turns it off")
    parser.add_argument("--beats", type=int, default=2)
    parser.add_argument("--deadlines", type=int, default=0, help="how many delays to measure")
    chosen = parser.parse_args()
    fleets.main(lambda: idle(chosen.minutes, chosen.backstop, chosen.beats, chosen.deadlines))


if __name__ == "__main__":
    main()
