"""Single edits of the catalog: checked, audited, told to the beat, and locked in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from catalog_support import (
    CONNECTORS,
    FILE,
    KEYRING,
    OTHER_KEYRING,
    apply,
    edit,
    keys,
    stored,
    summary,
)
from run_support import in_thread, waits_for_a_lock
from support.waiting import until

from db import session as sessions
from db.envelopes import EnvelopeError
from dispatch import catalog
from dispatch.catalog import datasources, history, jobs, jobschedules
from dispatch.catalog.export import export
from dispatch.definitions.documents import DefinitionError
from dispatch.errors import (
    CatalogBusy,
    InUse,
    NameTaken,
    UnknownDatasource,
    UnknownJob,
    UnknownSchedule,
)

# Datasources


def test_a_datasource_is_edited_key_by_key(rows) -> None:
    edit(datasources.add, KEYRING, CONNECTORS, "shop",
         {"connector": "postgres", "url": "postgresql://u:p1@h", "schema": "a"})  # fmt: skip
    with pytest.raises(NameTaken, match="datasource edit shop"):
        edit(
            datasources.add, KEYRING, CONNECTORS, "shop", {"connector": "sqlite", "url": "sqlite:"}
        )
    change = edit(datasources.edit, KEYRING, CONNECTORS, "shop", {"schema": "b"})
    assert keys(change) == [("schema", "a", "b")]
    assert edit(datasources.edit, KEYRING, CONNECTORS, "shop", {"schema": "b"}) is None
    edit(datasources.edit, KEYRING, CONNECTORS, "shop", {}, clear=["schema"])
    with catalog.reading() as session:
        shop = catalog.datasource(session, "shop")
        assert datasources.open_config(KEYRING, shop) == {"url": "postgresql://u:p1@h"}
    for clear, says in ((["schema"], "is not set"), (["url"], "must start with")):
        with pytest.raises(DefinitionError, match=says):
            edit(datasources.edit, KEYRING, CONNECTORS, "shop", {}, clear=clear)
    with pytest.raises(UnknownDatasource, match="did you mean shop"):
        edit(datasources.edit, KEYRING, CONNECTORS, "shoop", {})
    with pytest.raises(EnvelopeError, match="'shop'"):
        edit(datasources.edit, OTHER_KEYRING, CONNECTORS, "shop", {"schema": "c"})


def test_another_connector_keeps_what_is_not_named_or_cleared(rows) -> None:
    edit(datasources.add, KEYRING, CONNECTORS, "shop",
         {"connector": "postgresql", "url": "postgresql://u:p1@h", "schema": "a"})  # fmt: skip
    with pytest.raises(DefinitionError, match=r"url: must start with sqlite:; .*--clear url") as no:
        edit(datasources.edit, KEYRING, CONNECTORS, "shop", {"connector": "sqlite"})
    assert "p1" not in str(no.value)
    # What is given is judged as it is.
    with pytest.raises(DefinitionError, match=r"^url: must start with sqlite:$"):
        edit(datasources.edit, KEYRING, CONNECTORS, "shop", {"connector": "sqlite", "url": "x"})
    change = edit(
        datasources.edit, KEYRING, CONNECTORS, "shop", {"connector": "sqlite", "url": "sqlite:x"}
    )
    assert [key for key, *_ in keys(change)] == ["connector", "url"]
    with catalog.reading() as session:
        shop = catalog.datasource(session, "shop")
        assert datasources.open_config(KEYRING, shop) == {"url": "sqlite:x", "schema": "a"}


def test_a_datasource_in_use_is_not_removed__R_S3(rows) -> None:
    apply(FILE)
    with pytest.raises(InUse, match="is used by orders; remove or rebind that job first"):
        edit(datasources.remove, "shop")
    edit(jobs.remove, "orders")
    edit(datasources.remove, "shop")
    assert [found["name"] for found in rows("select name from datasource")] == ["", "warehouse"]


def test_the_row_for_none_is_hidden(rows) -> None:
    for operation in (datasources.remove, lambda session, name, actor: (
        datasources.set_enabled(session, name, False, actor=actor))):  # fmt: skip
        with pytest.raises(UnknownDatasource):
            edit(operation, "")
    with catalog.reading() as session:
        assert catalog.all_datasources(session) == []


# Switches and what they free


@pytest.mark.parametrize(
    ("close", "reopen"),
    [
        *(
            (
                (jobs.set_switch, "orders", switch, switch == "paused"),
                (jobs.set_switch, "orders", switch, switch != "paused"),
            )
            for switch in ("enabled", "paused", "source_enabled", "sink_enabled")
        ),
        ((datasources.set_enabled, "shop", False), (datasources.set_enabled, "shop", True)),
        ((jobs.edit, CONNECTORS, "orders", {"concurrency": None}), None),
    ],
)  # fmt: skip
def test_the_change_that_frees_work_tells_of_it__R_D7(rows, heard, close, reopen) -> None:
    apply(FILE)
    heard()
    edit(*close)
    if reopen is None:
        assert heard() == ["work job:orders"]
        return
    assert heard() == []
    assert edit(*close) is None
    edit(*reopen)
    assert heard() == ["work job:orders"]
    assert edit(*reopen) is None
    assert heard() == []
    # One record for each that changed something, none for the repetitions.
    assert len(rows("select from audit_event where action !~ 'add$'")) == 2


def test_a_raised_limit_frees_all_jobs_of_the_key__R_D7(rows, heard) -> None:
    text = FILE + "  more: {handler: x, concurrency: {key: warehouse, limit: 2}}\n"
    apply(text)
    heard()
    apply(text.replace("limit: 2", "limit: 1"))
    assert heard() == []
    apply(text.replace("limit: 2", "limit: 4"))
    assert heard() == ["work job:more", "work job:orders"]


def test_a_switch_covers_the_child_jobs(rows) -> None:
    apply(FILE)
    rows(
        "insert into job (name, handler, parent_job_id, source_id) "
        "select 'orders/public.a', handler, id, source_id from job where name = 'orders'"
    )
    edit(jobs.set_switch, "orders", "enabled", False)
    assert rows("select name from job where not enabled order by name") == [
        {"name": "orders"}, {"name": "orders/public.a"},
    ]  # fmt: skip
    with catalog.reading() as session:
        assert "orders/public.a" not in export(session, KEYRING, CONNECTORS)["jobs"]
    edit(jobs.remove, "orders")
    assert rows("select name from job") == [{"name": "report"}]


# Jobs


def test_a_job_is_edited_key_by_key(rows) -> None:
    apply(FILE)
    change = edit(jobs.edit, CONNECTORS, "orders", {"retry": {"backoff": "5m"}, "timeout": None})
    assert keys(change) == [("retry.backoff", 90.0, 300.0), ("timeout", 3600.0, None)]
    (found,) = rows("select definition from job where name = 'orders'")
    assert found["definition"]["retry"]["max_attempts"] == 5
    assert edit(jobs.edit, CONNECTORS, "orders", {"retry": {"backoff": 300}}) is None
    with pytest.raises(DefinitionError, match=r"retry\.backof: is no key of retry"):
        edit(jobs.edit, CONNECTORS, "orders", {"retry": {"backof": 1}})
    with pytest.raises(UnknownJob, match="did you mean orders"):
        edit(jobs.edit, CONNECTORS, "order", {})
    with pytest.raises(NameTaken):
        edit(jobs.add, CONNECTORS, "orders", {"handler": "x"})
    changes = edit(jobs.add, CONNECTORS, "new", {"handler": "x", "schedules": [{"every": "5m"}]})
    assert summary(changes) == ["add job new", "add schedule new/new-1"]


def run(rows: Callable[..., Any], job: str) -> UUID:
    found = rows(
        "insert into job_run (job_id) select id from job where name = %s returning id", job
    )
    return found[0]["id"]


def test_a_job_with_an_active_run_is_not_removed__R_S3(rows) -> None:
    apply(FILE)
    waiting = run(rows, "orders")
    before = stored(rows)
    with pytest.raises(InUse, match=f"{waiting} of orders is PENDING"):
        edit(jobs.remove, "orders")
    assert stored(rows) == before


def test_removing_a_job_ends_its_schedules_and_keeps_its_runs__R_S3(rows, heard) -> None:
    apply(FILE)
    ended = run(rows, "orders")
    rows("update job_run set status = 'CANCELLED', cancel_requested_at = clock_timestamp(), "
         "finished_at = clock_timestamp()")  # fmt: skip
    heard()
    edit(jobs.remove, "orders")
    assert rows("select id, job_id, job_name from job_run") == [
        {"id": ended, "job_id": None, "job_name": "orders"}
    ]
    assert rows("select from job_schedule") == []
    assert rows("select * from concurrency_key") == []
    assert heard() == ["deadlines job:orders"]
    with pytest.raises(UnknownJob):
        edit(jobs.remove, "orders")


def updates_a_statement(rows) -> Callable[[], list[int]]:
    """How many runs each statement updates from here on, also one by a foreign key."""
    rows("create table updates (runs bigint)")
    rows(
        """create function note_updates() returns trigger language plpgsql as $$
           begin insert into updates select count(*) from changed; return null; end $$"""
    )
    rows(
        """create trigger note_updates after update on job_run referencing new table as changed
           for each statement execute function note_updates()"""
    )
    return lambda: [found["runs"] for found in rows("select runs from updates where runs > 0")]


def finished_runs(rows, count: int) -> None:
    """Finished runs of the job ``orders``, each also of its first schedule."""
    rows("update job set overlap = 'allow'")
    rows(
        """insert into job_run (job_id, schedule_id)
           select job.id, s.id from job join job_schedule s on s.job_id = job.id
             and s.name = 'orders-1', generate_series(1, %s) where job.name = 'orders'""",
        count,
    )
    rows("update job_run set status = 'CANCELLED', cancel_requested_at = clock_timestamp(), "
         "finished_at = clock_timestamp()")  # fmt: skip


def test_a_long_history_is_let_go_of_in_batches__R_S3(rows, monkeypatch) -> None:
    monkeypatch.setattr(history, "BATCH", 10)
    apply(FILE)
    finished_runs(rows, 25)
    # As a pattern job has them: its child's history goes likewise.
    rows("insert into job (name, handler, parent_job_id) select 'orders/a', 'x', id from job "
         "where name = 'orders'")  # fmt: skip
    rows("insert into job_run (job_id) select id from job, generate_series(1, 12) "
         "where name = 'orders/a'")  # fmt: skip
    rows("update job_run set status = 'CANCELLED', cancel_requested_at = clock_timestamp(), "
         "finished_at = clock_timestamp() where finished_at is null")  # fmt: skip
    updates = updates_a_statement(rows)
    edit(jobs.remove, "orders")
    assert sorted(updates()) == [2, 5, 10, 10, 10]
    assert rows("select job_name, count(*) as n from job_run where job_id is null "
                "and schedule_id is null group by 1 order by 1") == [
        {"job_name": "orders", "n": 25}, {"job_name": "orders/a", "n": 12},
    ]  # fmt: skip


def test_a_schedule_lets_go_of_its_runs_in_batches__R_S3(rows, monkeypatch) -> None:
    monkeypatch.setattr(history, "BATCH", 10)
    apply(FILE)
    finished_runs(rows, 25)
    run(rows, "orders")
    rows("update job_run set schedule_id = (select id from job_schedule where name = 'orders-1') "
         "where finished_at is null")  # fmt: skip
    updates = updates_a_statement(rows)
    edit(jobschedules.remove, "orders-1")
    assert sorted(updates()) == [1, 5, 10, 10]
    assert rows("select count(*) as n from job_run where schedule_id is null "
                "and job_id is not null") == [{"n": 26}]  # fmt: skip


def test_a_run_that_just_ends_is_waited_for__R_S3(rows) -> None:
    apply(FILE)
    ending = run(rows, "orders")
    with sessions.transaction() as connection:
        connection.exec_driver_sql(
            """update job_run set status = 'CANCELLED', cancel_requested_at = clock_timestamp(),
                 finished_at = clock_timestamp() where id = %s""",
            (ending,),
        )
        removing = in_thread(lambda: edit(jobs.remove, "orders"))
        until("the removal to wait for it", lambda: waits_for_a_lock(rows))
    removing.result(10)
    assert rows("select job_id from job_run") == [{"job_id": None}]


# Schedules


def test_an_edited_schedule_fires_next_after_the_edit__R_D2(rows, heard) -> None:
    apply(FILE)
    rows("update job_schedule set next_fire_at = clock_timestamp() + interval '40 days'")
    heard()
    text = FILE.replace('"*/15 * * * *"', '"0 3 * * *"')
    assert summary(apply(text)) == ["edit schedule orders/orders-1"]
    found = rows(
        "select name, next_fire_at - clock_timestamp() < interval '2 days' as soon, "
        "next_fire_at > clock_timestamp() as later from job_schedule order by name"
    )
    assert found == [
        {"name": "often", "soon": False, "later": True},
        {"name": "orders-1", "soon": True, "later": True},
    ]
    assert heard() == ["deadlines job:orders"]


def test_another_policy_for_misses_moves_no_fire(rows) -> None:
    apply(FILE)
    before = rows("select next_fire_at from job_schedule where name = 'orders-1'")
    apply(FILE.replace("misfire: skip", "misfire: catch_up"))
    assert rows("select next_fire_at from job_schedule where name = 'orders-1'") == before


def test_a_disabled_schedule_has_no_next_fire_and_an_enabled_one_has__R_D2(rows, heard) -> None:
    apply(FILE)
    heard()
    (before,) = rows("select updated_at from job_schedule where name = 'often'")
    edit(jobschedules.set_enabled, "often", False)
    (found,) = rows("select next_fire_at, updated_at from job_schedule where name = 'often'")
    assert found["next_fire_at"] is None
    assert found["updated_at"] > before["updated_at"]
    assert edit(jobschedules.set_enabled, "often", False) is None
    edit(jobschedules.set_enabled, "orders/often", True)
    assert rows(
        "select next_fire_at > clock_timestamp() as later from job_schedule where name = 'often'"
    ) == [{"later": True}]
    assert heard() == ["deadlines job:orders", "deadlines job:orders"]


def test_schedules_are_named_by_position_or_by_hand(rows) -> None:
    apply(FILE)
    names = [
        edit(jobschedules.add, "report", raw).name
        for raw in ({"every": "1h"}, {"every": "2h", "name": "report-3"}, {"every": "3h"})
    ]
    assert names == ["report/report-1", "report/report-3", "report/report-4"]
    edit(jobschedules.add, "report", {"every": "1h", "name": "often"})
    with pytest.raises(NameTaken):
        edit(jobschedules.add, "report", {"every": "1h", "name": "often"})
    with pytest.raises(UnknownSchedule, match="say which of orders/often, report/often"):
        edit(jobschedules.remove, "often")
    edit(jobschedules.remove, "report/often")
    edit(jobschedules.remove, "often")
    with pytest.raises(UnknownSchedule, match="did you mean report-1"):
        edit(jobschedules.remove, "report1")
    with pytest.raises(DefinitionError, match="lacks timezone"):
        edit(jobschedules.add, "report", {"cron": "@daily"})


CHANGES: list[Callable[[], Any]] = [
    lambda: apply(FILE.replace("every: 15m", "every: 20m")),
    lambda: edit(jobschedules.set_enabled, "often", False),
    lambda: apply(FILE.replace("name: often}", "name: often, misfire: catch_up}")),
    lambda: edit(jobschedules.remove, "often"),
    lambda: apply(FILE.replace("      - {every: 15m, name: often}\n", "")),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_slot_due_before_a_change_fires_once__R_D2(rows, change: Callable[[], Any]) -> None:
    apply(FILE)
    rows(
        "update job_schedule set anchor_at = clock_timestamp() - interval '900.5 seconds', "
        "next_fire_at = clock_timestamp() - interval '0.5 seconds' where name = 'often'"
    )
    change()
    assert len(rows("select from job_run where job_name = 'orders' and status = 'PENDING'")) == 1
    assert rows("select from job_schedule where next_fire_at <= clock_timestamp()") == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_slot_missed_before_a_change_is_not_released_by_it__R_D2(
    rows, change: Callable[[], Any]
) -> None:
    apply(FILE)
    # The last of the missed slots was five minutes ago.
    rows(
        "update job_schedule set anchor_at = clock_timestamp() - interval '185 minutes', "
        "next_fire_at = clock_timestamp() - interval '185 minutes' where name = 'often'"
    )
    change()
    assert rows("select from job_run") == []
    assert rows("select from job_schedule where next_fire_at <= clock_timestamp()") == []
    # A schedule that was removed has taken its slots along.
    left = 13 if rows("select from job_schedule where name = 'often'") else 0
    found = rows("select outcome, reason from schedule_slot")
    assert len(found) == left
    assert {row["outcome"] for row in found} <= {"skipped"}
    assert all("was changed" in row["reason"] for row in found)


# Locks


def test_an_edit_waits_for_a_claim_and_gives_up_in_time__R_C4(rows, database: str) -> None:
    apply(FILE)
    with psycopg.connect(database) as claim:
        claim.execute("select from job where name = 'orders' for share")
        with (
            pytest.raises(CatalogBusy, match="nothing was changed"),
            catalog.editing(lock_seconds=0.2) as session,
        ):
            jobs.set_switch(session, "orders", "enabled", False, actor="test")
    assert rows("select enabled from job where name = 'orders'") == [{"enabled": True}]
    edit(jobs.set_switch, "orders", "enabled", False)


def test_edits_wait_for_each_other_and_none_is_lost(rows) -> None:
    apply(FILE)
    start = threading.Barrier(6)
    failures: list[BaseException] = []

    def raise_limit(number: int) -> None:
        start.wait(timeout=10)
        try:
            edit(jobs.add, CONNECTORS, f"job{number}",
                 {"handler": "x", "concurrency": {"key": "shared", "limit": 3}})  # fmt: skip
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=raise_limit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert failures == []
    assert len(rows("select from job where concurrency_key = 'shared'")) == 6
