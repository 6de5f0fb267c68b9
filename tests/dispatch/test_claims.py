"""Which run a claim takes, and which it leaves: R-C1 to R-C8, R-D3, R-R7."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from run_support import Rows, claim, finish, in_thread, new_job, request_cancel, run
from support.waiting import until
from worker_support import Claimer, new_datasource, new_run, new_runs

from dispatch import claims


@pytest.fixture
def claimer(rows: Rows) -> Iterator[Claimer]:
    made = Claimer()
    yield made
    made.close()


def taken(claimer: Claimer, queue: str = "runs") -> UUID | None:
    found = claimer.next(queue)
    return None if found is None else found.id


def block(rows: Rows, job_id: UUID, change: str) -> None:
    rows(f"update job set {change} where id = %s", job_id)  # noqa: S608


BLOCKS = {
    "disabled": "enabled = false",
    "paused": "paused = true",
    "source": "source_enabled = false",
    "sink": "sink_enabled = false",
    "handler": "handler = 'unknown here'",
}


@pytest.mark.parametrize("change", BLOCKS.values(), ids=BLOCKS)
def test_a_blocked_job_is_claimed_neither_way_and_waits__R_C2(
    rows: Rows, claimer: Claimer, change: str
) -> None:
    job = new_job(rows, "orders")
    run_id = new_run(rows, job)
    block(rows, job, change)
    assert claimer.directed(run_id) is None
    assert claimer.next() is None
    assert run(rows, run_id)["status"] == "PENDING"


@pytest.mark.parametrize("side", ["source_id", "sink_id"])
@pytest.mark.parametrize(
    "change", ["enabled = false", 'envelope = envelope || \'{"key_version": "v9"}\'']
)
def test_a_disabled_datasource_or_a_key_not_held_blocks_its_jobs__R_C2(
    rows: Rows, claimer: Claimer, side: str, change: str
) -> None:
    one, two = new_datasource(rows, "one"), new_datasource(rows, "two")
    sides: dict[str, Any] = {"source_id": one, "sink_id": one, side: two}
    run_id = new_run(rows, new_job(rows, "orders", **sides))
    free = new_run(rows, new_job(rows, "free", source_id=one, sink_id=one))
    rows(f"update datasource set {change} where id = %s", two)  # noqa: S608
    assert claimer.directed(run_id) is None
    assert taken(claimer) == free


@pytest.mark.parametrize("sides", ["", "source", "sink", "both", "same"])
def test_a_claim_resolves_what_its_job_has__R_C5(rows: Rows, claimer: Claimer, sides: str) -> None:
    one, two = new_datasource(rows, "one"), new_datasource(rows, "two")
    bound: dict[str, Any] = {
        "": {},
        "source": {"source_id": one},
        "sink": {"sink_id": one},
        "both": {"source_id": two, "sink_id": one},
        "same": {"source_id": one, "sink_id": one},
    }[sides]
    definition = {"retry": {"backoff": 1.5}}
    job = new_job(rows, "orders", definition=definition, watermark="7", watermark_type="bigint",
                  **bound)  # fmt: skip
    for way in ("directed", "next"):
        run_id = new_run(rows, job)
        held = claimer.directed(run_id) if way == "directed" else claimer.next()
        assert held is not None
        found = run(rows, run_id)
        assert found["source_datasource_id"] == bound.get("source_id")
        assert found["sink_datasource_id"] == bound.get("sink_id")
        for side in ("source", "sink"):
            snapshot = found[f"{side}_snapshot"]
            if f"{side}_id" in bound:
                [datasource] = rows("select * from datasource where id = %s", bound[f"{side}_id"])
                assert snapshot == datasource["envelope"]
                assert held.snapshot[side] == {
                    "name": datasource["name"], "connector": "postgresql",
                }  # fmt: skip
            else:
                assert snapshot is None
                assert held.snapshot[side] is None
        assert held.snapshot["definition"] == definition
        assert (held.snapshot["watermark"], held.snapshot["job"]) == ("7", "orders")
        assert found["datasources_resolved_at"] >= found["created_at"]
        assert found["lease_token"] == held.token
        assert str(held.token) not in repr(held)
        rows("update job_run set status = 'CANCEL_REQUESTED', cancel_requested_at = now() "
             "where id = %s", run_id)  # fmt: skip
        rows("update job_run set status = 'CANCELLED', finished_at = now() where id = %s", run_id)


def test_the_generic_order_is_priority_then_age__R_C3(rows: Rows, claimer: Claimer) -> None:
    job = new_job(rows, "orders", "allow")
    at = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 5)]
    low_old = new_run(rows, job, available_at=at[0])
    high_new = new_run(rows, job, priority=9, available_at=at[3])
    high_old = new_run(rows, job, priority=9, available_at=at[2])
    middle = new_run(rows, job, priority=5, available_at=at[0], created_at=at[1])
    middle_older = new_run(rows, job, priority=5, available_at=at[0], created_at=at[0])
    later = new_run(rows, job, priority=9, available_at=datetime(2126, 1, 1, tzinfo=UTC))
    order = [taken(claimer) for _ in range(6)]
    assert order == [high_old, high_new, middle_older, middle, low_old, None]
    assert run(rows, later)["status"] == "PENDING"


@pytest.mark.parametrize(
    "change", [*BLOCKS.values(), "concurrency_key = 'full'", "overlap = 'queue'"]
)
def test_ten_thousand_blocked_runs_do_not_stand_in_front__R_C3(
    rows: Rows, claimer: Claimer, change: str
) -> None:
    rows("insert into concurrency_key (key, max) values ('full', 1)")
    blocked = new_job(rows, "blocked", "allow")
    holder = new_run(rows, new_job(rows, "holder", "allow", concurrency_key="full"))
    assert taken(claimer) == holder
    if change == "overlap = 'queue'":
        claim(rows, new_run(rows, blocked))
    new_runs(rows, blocked, 10_000)
    block(rows, blocked, change)
    free = new_job(rows, "free", "allow")
    ids = [new_run(rows, free) for _ in range(40)]
    assert [taken(claimer) for _ in range(41)] == [*ids, None]


@pytest.mark.parametrize(
    "change", [*BLOCKS.values(), "concurrency_key = 'full'", "overlap = 'queue'"]
)
def test_blocked_runs_of_a_high_priority_let_no_lower_one_go_first__R_C3(
    rows: Rows, claimer: Claimer, change: str
) -> None:
    rows("insert into concurrency_key (key, max) values ('full', 1)")
    blocked = new_job(rows, "blocked", "allow")
    holder = new_run(rows, new_job(rows, "holder", "allow", concurrency_key="full"))
    assert taken(claimer) == holder
    if change == "overlap = 'queue'":
        claim(rows, new_run(rows, blocked))
    for _ in range(claims.WINDOW + 8):
        new_run(rows, blocked, priority=9)
    block(rows, blocked, change)
    free = new_job(rows, "free", "allow")
    low = [new_run(rows, free) for _ in range(2)]
    high = [new_run(rows, free, priority=9) for _ in range(2)]
    assert [taken(claimer) for _ in range(5)] == [*high, *low, None]
    late = new_run(rows, free, priority=9)
    assert taken(claimer) == late


def test_a_locked_run_of_a_high_priority_lets_no_lower_one_go_first__R_C3(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    waiting = new_job(rows, "one at a time", "queue")
    first, *_ = [new_run(rows, waiting, priority=9) for _ in range(claims.WINDOW + 8)]
    free = new_job(rows, "free", "allow")
    low = new_run(rows, free)
    high = new_run(rows, free, priority=9)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run where id = %s for update", [first])
        assert [taken(claimer) for _ in range(2)] == [high, low]
    assert taken(claimer) == first


def test_ten_thousand_locked_runs_do_not_stand_in_front__R_C3(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    job = new_job(rows, "orders", "allow")
    ids = new_runs(rows, job, 10_000)
    last = new_run(rows, job)
    with psycopg.connect(database) as other:
        other.execute("select 1 from job_run where id <> %s for update", [last])
        assert taken(claimer) == last
        assert taken(claimer) is None
    assert taken(claimer) == ids[0]


def test_an_open_edit_blocks_its_own_runs_only_and_leaves_them_untouched__R_C3__R_C4(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    one, two = new_datasource(rows, "one"), new_datasource(rows, "two")
    edited = new_job(rows, "edited", "allow", source_id=one, sink_id=two)
    new_runs(rows, edited, 2_000)
    free = new_run(rows, new_job(rows, "free", sink_id=two))
    with psycopg.connect(database) as other:
        other.execute("update datasource set updated_at = now() where name = 'one'")
        [before] = rows("select pg_current_wal_insert_lsn() as lsn")
        assert taken(claimer) == free
        assert taken(claimer) is None
        [wal] = rows("select pg_current_wal_insert_lsn() - %s::pg_lsn as bytes", before["lsn"])
        # Locks on two thousand runs would be a megabyte of them.
        assert wal["bytes"] < 100_000
        [locked] = rows("select count(*) as n from job_run where xmax <> 0 and status = 'PENDING'")
        assert locked["n"] == 0
        other.rollback()
    assert taken(claimer) is not None


def test_a_directed_claim_waits_for_an_edit_a_second_and_no_longer__R_C4(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    run_id = new_run(rows, new_job(rows, "orders", source_id=new_datasource(rows, "shop")))
    with psycopg.connect(database) as other:
        other.execute("update datasource set updated_at = now()  where name = 'shop'")
        [began] = rows("select clock_timestamp() as at")
        assert claimer.directed(run_id) is None
        [ended] = rows("select clock_timestamp() as at")
    assert 0.9 <= (ended["at"] - began["at"]).total_seconds() < 1.6
    assert claimer.directed(run_id) is not None


def test_a_directed_claim_waits_a_second_for_all_edits_together__R_C4(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    a, b = sorted(new_datasource(rows, name) for name in "ab")
    job = new_job(rows, "orders", source_id=a, sink_id=b)
    run_id = new_run(rows, job)
    held = [("job", job), ("datasource", a), ("datasource", b)]
    with ExitStack() as stack:
        others = [stack.enter_context(psycopg.connect(database)) for _ in held]
        for other, (table, key) in zip(others, held, strict=True):
            other.execute(f"update {table} set updated_at = now() where id = %s", [key])  # noqa: S608
        began = time.monotonic()
        asked = in_thread(lambda: claimer.directed(run_id))
        for other, at in zip(others, (0.7, 1.4, 2.1), strict=True):
            time.sleep(max(0.0, began + at - time.monotonic()))
            if at > 1.5:
                assert asked.done(), "the claim still waits"
            other.commit()
        assert asked.result(5) is None
    assert run(rows, run_id)["status"] == "PENDING"
    assert claimer.directed(run_id) is not None


def waiting_for(rows: Rows, name: str) -> Callable[[], bool]:
    """Whether the claimers wait for a row that someone else holds."""

    def look() -> bool:
        found = rows(
            """select count(*) as n from pg_stat_activity
               where datname = current_database() and application_name = %s
                 and wait_event_type = 'Lock'""",
            name,
        )
        return bool(found[0]["n"])

    return look


@pytest.mark.parametrize(
    "disable",
    [
        "update job set enabled = false",
        "update job set paused = true",
        "update job set sink_enabled = false",
        "update datasource set enabled = false where name = 'a'",
        "update datasource set enabled = false where name = 'b'",
    ],
)
def test_a_disable_that_commits_while_a_claim_waits_wins__R_C5(
    database: str, rows: Rows, claimer: Claimer, disable: str
) -> None:
    a, b = new_datasource(rows, "a"), new_datasource(rows, "b")
    run_id = new_run(rows, new_job(rows, "orders", source_id=a, sink_id=b))
    with psycopg.connect(database) as other:
        other.execute(disable)
        asked = in_thread(lambda: claimer.directed(run_id))
        until("the claim to wait", waiting_for(rows, "test claimer"), 5)
        other.commit()
    assert asked.result(10) is None
    assert run(rows, run_id)["status"] == "PENDING"


def test_an_edit_that_commits_while_a_claim_waits_is_seen_whole__R_C5(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    a, b, c = (new_datasource(rows, name) for name in "abc")
    job = new_job(rows, "orders", source_id=a, definition={"version": 1})
    run_id = new_run(rows, job)
    with psycopg.connect(database) as other:
        other.execute(
            "update job set definition = %s, source_id = %s, sink_id = %s",
            [json.dumps({"version": 2}), b, c],
        )
        asked = in_thread(lambda: claimer.directed(run_id))
        until("the claim to wait", waiting_for(rows, "test claimer"), 5)
        other.commit()
    held = asked.result(10)
    if held is None:
        # The edit replaced the datasources under the claim: it takes nothing rather than a mixture.
        held = claimer.directed(run_id)
    assert held is not None
    assert held.definition == {"version": 2}
    assert (held.source_datasource_id, held.sink_datasource_id) == (b, c)
    assert held.source_envelope is not None
    assert held.source_envelope["datasource"] == str(b)


def test_a_limit_that_is_lowered_while_a_claim_waits_is_kept__R_C8__R_C5(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 2)")
    job = new_job(rows, "one", "allow", concurrency_key="shared")
    first, second = new_runs(rows, job, 2)
    assert claimer.directed(first) is not None
    with psycopg.connect(database) as other:
        other.execute("update job set updated_at = now()")
        other.execute("update concurrency_key set max = 1")
        asked = in_thread(lambda: claimer.directed(second))
        until("the claim to wait", waiting_for(rows, "test claimer"), 5)
        other.commit()
    assert asked.result(10) is None
    assert run(rows, second)["status"] == "PENDING"


def test_locks_are_taken_on_the_run_then_the_job_then_datasources_by_id__R_C4(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    a, b = sorted(new_datasource(rows, name) for name in "ab")
    job = new_job(rows, "orders", source_id=b, sink_id=a)
    run_id = new_run(rows, job)
    holds = ("select 1 from datasource where id = %s for update", [b])

    def held_by_claim() -> set[str]:
        """The tables of the rows that the waiting claim holds, found by asking for each."""
        found = set()
        with psycopg.connect(database, autocommit=True) as probe:
            for table, key in (("job_run", run_id), ("job", job), ("datasource", a)):
                query = f"select 1 from {table} where id = %s for update skip locked"  # noqa: S608
                if not probe.execute(query, [key]).fetchall():
                    found.add(table)
        return found

    with psycopg.connect(database) as other:
        other.execute(*holds)
        asked = in_thread(lambda: claimer.directed(run_id))
        until("the claim to wait", waiting_for(rows, "test claimer"), 5)
        assert held_by_claim() == {"job_run", "job", "datasource"}
        other.commit()
    assert asked.result(10) is not None

    second = new_run(rows, new_job(rows, "two", source_id=b, sink_id=a))
    with psycopg.connect(database) as other:
        other.execute("select 1 from datasource where id = %s for update", [a])
        asked = in_thread(lambda: claimer.directed(second))
        until("the claim to wait", waiting_for(rows, "test claimer"), 5)
        with psycopg.connect(database, autocommit=True) as probe:
            query = "select 1 from datasource where id = %s for update skip locked"
            assert probe.execute(query, [b]).fetchall(), "the higher id was locked first"
        other.commit()
    assert asked.result(10) is not None


def test_claims_that_share_a_datasource_do_not_wait_for_each_other__R_C4(
    database: str, rows: Rows, claimer: Claimer
) -> None:
    a = new_datasource(rows, "a")
    one = new_run(rows, new_job(rows, "one", source_id=a, sink_id=a))
    two = new_run(rows, new_job(rows, "two", source_id=a, sink_id=a))
    with psycopg.connect(database) as other:
        # What an open claim of run one holds.
        other.execute("select 1 from job_run where id = %s for update", [one])
        other.execute("select 1 from job where name = 'one' for share")
        other.execute("select 1 from datasource where id = %s for share", [a])
        assert taken(claimer) == two


def test_a_claim_writes_no_job_and_no_datasource__R_C4(rows: Rows, claimer: Claimer) -> None:
    a = new_datasource(rows, "a")
    job = new_job(rows, "one", "allow", source_id=a)
    before = rows("select ctid, xmin from job union all select ctid, xmin from datasource")
    for run_id in new_runs(rows, job, 3):
        assert claimer.directed(run_id) is not None
    assert rows("select ctid, xmin from job union all select ctid, xmin from datasource") == before


def test_a_held_run_is_claimed_by_nobody_else__R_C7(rows: Rows, claimer: Claimer) -> None:
    run_id = new_run(rows, new_job(rows, "orders", "allow"))
    other = Claimer("host:1:nonce:3")
    try:
        assert claimer.directed(run_id) is not None
        assert other.directed(run_id) is None
        assert other.next() is None
        assert run(rows, run_id)["executor"] == "host:1:nonce:2"
    finally:
        other.close()


def test_a_run_that_waits_for_its_time_is_not_claimed__R_C2(rows: Rows, claimer: Claimer) -> None:
    later = datetime(2126, 1, 1, tzinfo=UTC)
    run_id = new_run(rows, new_job(rows, "orders"), available_at=later)
    assert claimer.directed(run_id) is None
    assert claimer.next() is None


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_one_run_at_a_time_of_a_job_that_does_not_allow_overlap__R_T6(
    rows: Rows, claimer: Claimer, overlap: str
) -> None:
    job = new_job(rows, "orders", "queue")
    first, second = new_runs(rows, job, 2)
    rows("update job set overlap = %s", overlap)
    assert taken(claimer) == first
    assert claimer.directed(second) is None
    assert claimer.next() is None
    finish(rows, first)
    assert taken(claimer) == second


def test_a_job_that_no_longer_allows_overlap_waits_for_what_still_runs__R_T6(
    rows: Rows, claimer: Claimer
) -> None:
    first, second = new_runs(rows, new_job(rows, "orders", "allow"), 2)
    assert taken(claimer) == first
    rows("update job set overlap = 'queue'")
    assert claimer.next() is None
    assert claimer.directed(second) is None


def test_slots_are_numbered_bounded_and_freed_by_the_end__R_C8(
    rows: Rows, claimer: Claimer
) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 2)")
    one = new_job(rows, "one", "allow", concurrency_key="shared")
    two = new_job(rows, "two", "allow", concurrency_key="shared")
    first, *_ = new_runs(rows, one, 2)
    new_runs(rows, two, 2)
    assert [taken(claimer) is not None for _ in range(3)] == [True, True, False]
    held = rows("select slot_no from job_run where status = 'RUNNING' order by slot_no")
    assert [row["slot_no"] for row in held] == [1, 2]
    finish(rows, first)
    assert claimer.next() is not None
    assert claimer.next() is None


def test_a_lowered_limit_is_kept_also_by_the_numbers_above_it__R_C8(
    rows: Rows, claimer: Claimer
) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 5)")
    job = new_job(rows, "one", "allow", concurrency_key="shared")
    new_runs(rows, job, 20)
    assert len([claimer.next() for _ in range(5)]) == 5
    rows("update concurrency_key set max = 2")
    assert claimer.next() is None
    by_slot = rows("select id, slot_no from job_run where status = 'RUNNING' order by slot_no")
    for row in by_slot[:4]:
        finish(rows, row["id"])
    # One above the limit is left: there is room for one more, whatever its number.
    assert claimer.next() is not None
    assert claimer.next() is None


def test_fence_numbers_rise_over_the_attempts_of_a_lineage__R_C6(
    rows: Rows, claimer: Claimer
) -> None:
    job = new_job(rows, "orders", "allow")
    fences = []
    for run_id in new_runs(rows, job, 3):
        held = claimer.directed(run_id)
        assert held is not None
        fences.append(held.fence)
    assert fences == sorted(set(fences))


def test_a_slot_race_is_lost_without_an_error__R_C8(database: str, rows: Rows) -> None:
    rows("insert into concurrency_key (key, max) values ('shared', 3)")
    job = new_job(rows, "one", "allow", concurrency_key="shared")
    ids = new_runs(rows, job, 30)
    claimers = [Claimer(f"host:1:nonce:{n}") for n in range(8)]
    try:
        asked = [
            in_thread(lambda c=c, r=r: c.directed(r)) for c, r in zip(claimers, ids, strict=False)
        ]
        held = [found for found in (one.result(20) for one in asked) if found is not None]
        assert 1 <= len(held) <= 3
        found = rows("select slot_no from job_run where status = 'RUNNING'")
        assert len({row["slot_no"] for row in found}) == len(held)
    finally:
        for one in claimers:
            one.close()


def test_claims_give_a_sign_of_life_once_in_a_third_of_a_lease__R_D3(
    rows: Rows, claimer: Claimer, heard: Callable[[], list[str]]
) -> None:
    new_runs(rows, new_job(rows, "orders", "allow"), 5)
    assert claimer.next("elsewhere") is None
    assert heard() == []
    for _ in range(5):
        assert claimer.next() is not None
    assert heard() == ["deadlines queue:runs"]


def test_a_claim_whose_answer_was_lost_is_found_by_its_token__R_R7(
    rows: Rows, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = new_run(rows, new_job(rows, "orders"))
    claimer.link.get()
    ask = claimer.link.row

    def lose_the_answer(statement: Any, parameters: Any = None, **options: Any) -> Any:
        found = ask(statement, parameters, **options)
        monkeypatch.setattr(claimer.link, "row", ask)
        claimer.link.close()
        assert found is not None
        raise psycopg.OperationalError("the connection broke")

    monkeypatch.setattr(claimer.link, "row", lose_the_answer)
    held = claimer.directed(run_id)
    assert held is not None
    assert held.token == run(rows, run_id)["lease_token"]


def test_a_bounded_look_finds_a_retry_from_before_its_bound__R_C3(
    rows: Rows, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SLOW_LOOK_SECONDS", 0.0)
    job = new_job(rows, "orders", "allow")
    new_runs(rows, job, 50)
    for _ in range(50):
        assert claimer.next() is not None
    older = new_run(rows, job, available_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert taken(claimer) == older


def test_an_unknown_run_is_no_error__R_C1(rows: Rows, claimer: Claimer) -> None:
    assert claimer.directed(uuid4()) is None
    done = new_run(rows, new_job(rows, "orders"))
    claim(rows, done)
    request_cancel(rows, done)
    assert claimer.directed(done) is None
