"""Applying a definition file: whole or not at all, and only what changed."""

from __future__ import annotations

import pytest
from catalog_support import (
    CONNECTORS,
    FILE,
    KEYRING,
    OTHER_KEYRING,
    URLS,
    apply,
    dry_run,
    edit,
    keys,
    stored,
    summary,
)

from dispatch import catalog
from dispatch.catalog import datasources, jobs, jobschedules
from dispatch.catalog.export import as_yaml, export
from dispatch.definitions.documents import DefinitionError
from dispatch.errors import UnreadableKept


def test_a_file_is_stored_and_its_secrets_are_sealed__R_X1(rows, heard) -> None:
    assert summary(apply(FILE)) == [
        "add datasource shop", "add datasource warehouse", "add job orders", "add job report",
        "add schedule orders/orders-1", "add schedule orders/often",
    ]  # fmt: skip
    assert "secret" not in str(stored(rows))
    (orders,) = rows(
        "select j.*, s.name as source, t.name as sink, k.max from job j "
        "join datasource s on s.id = j.source_id join datasource t on t.id = j.sink_id "
        "join concurrency_key k on k.key = j.concurrency_key"
    )
    assert (orders["source"], orders["sink"], orders["max"]) == ("shop", "warehouse", 2)
    assert (orders["handler"], orders["overlap"], orders["max_attempts"], orders["queue"]) == (
        "replicate", "skip", 5, "runs",
    )  # fmt: skip
    (report,) = rows("select * from job where name = 'report'")
    assert (report["handler"], report["overlap"], report["priority"]) == ("report", "queue", 3)
    assert report["definition"]["params"] == {"day": "2026-11-01", "cost": "${5}"}
    for schedule in rows("select *, next_fire_at > clock_timestamp() as later from job_schedule"):
        assert schedule["later"]
    with catalog.reading() as session:
        shop = catalog.datasource(session, "shop")
        assert datasources.open_config(KEYRING, shop) == {"url": URLS["SHOP_URL"]}
    assert heard() == ["deadlines job:orders"]


def test_applying_again_changes_nothing_and_seals_nothing_anew(rows, heard) -> None:
    apply(FILE)
    before = stored(rows)
    heard()
    assert apply(FILE) == []
    assert stored(rows) == before
    assert heard() == []


def test_a_dry_run_tells_the_same_and_changes_nothing(rows) -> None:
    before = stored(rows)
    told = dry_run(FILE)
    assert stored(rows) == before
    assert told == apply(FILE)
    assert dry_run(FILE) == []


def test_only_what_changed_is_changed_and_no_secret_is_told__R_X2(rows) -> None:
    apply(FILE)
    before = rows("select name, envelope, updated_at from datasource order by name")
    text = FILE.replace("backoff: 90s", "backoff: 2m").replace("every: 15m", "every: 20m")
    changes = apply(text, {**URLS, "SHOP_URL": URLS["SHOP_URL"].replace("hunter2", "hunter3")})
    assert summary(changes) == [
        "edit datasource shop", "edit job orders", "edit schedule orders/often",
    ]  # fmt: skip
    assert keys(changes[0]) == [("url", "***", "***")]
    assert keys(changes[1]) == [("retry.backoff", 90.0, 120.0)]
    assert keys(changes[2]) == [("every", "15m", "20m")]
    after = rows("select name, envelope, updated_at from datasource order by name")
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert "hunter" not in str(stored(rows))


def test_each_change_has_one_audit_record__R_X4(rows) -> None:
    apply(FILE)
    apply(FILE.replace("priority: 3", "priority: 4"))
    apply(FILE.replace("priority: 3", "priority: 4"))
    found = rows(
        "select actor, action, subject_type, subject, outcome from audit_event order by id"
    )
    assert [tuple(event.values()) for event in found] == [
        ("test", "datasource.add", "datasource", "shop", "added"),
        ("test", "datasource.add", "datasource", "warehouse", "added"),
        ("test", "job.add", "job", "orders", "added"),
        ("test", "job.add", "job", "report", "added"),
        ("test", "schedule.add", "schedule", "orders/orders-1", "added"),
        ("test", "schedule.add", "schedule", "orders/often", "added"),
        ("test", "job.edit", "job", "report", "changed"),
    ]


def test_a_failure_in_the_middle_stores_nothing(rows) -> None:
    rows("create function refuse() returns trigger language plpgsql as "
         "$$ begin raise exception 'no' using errcode = '23514'; end $$")  # fmt: skip
    rows("create trigger refuse before insert on job_schedule "
         "for each row execute function refuse()")  # fmt: skip
    before = stored(rows)
    with pytest.raises(Exception, match="no"):
        apply(FILE)
    assert stored(rows) == before


def test_what_the_file_does_not_name_is_left_alone(rows) -> None:
    apply(FILE)
    edit(jobs.set_switch, "orders", "enabled", False)
    edit(datasources.set_enabled, "shop", False)
    edit(jobschedules.add, "report", {"every": "1h"})
    assert apply(FILE) == []
    assert rows("select enabled from job where name = 'orders'") == [{"enabled": False}]
    assert rows("select enabled from datasource where name = 'shop'") == [{"enabled": False}]
    # A job with a list of schedules gets exactly those; one without keeps what it has.
    edit(jobschedules.add, "orders", {"every": "1h", "name": "extra"})
    assert summary(apply(FILE)) == ["remove schedule orders/extra"]
    assert len(rows("select from job_schedule")) == 3


def test_a_lost_key_is_mended_by_applying_with_the_secrets_again__R_X3(rows) -> None:
    apply(FILE)
    before = stored(rows)
    with pytest.raises(UnreadableKept, match="cannot open what is stored of shop, warehouse;"):
        apply(FILE, keyring=OTHER_KEYRING)
    assert stored(rows) == before
    changes = apply(FILE, keyring=OTHER_KEYRING, replace_unreadable=True)
    assert summary(changes) == ["edit datasource shop", "edit datasource warehouse"]
    assert changes[0].note is not None
    assert "cannot be opened" in changes[0].note
    assert "hunter2" not in repr(changes)
    with catalog.reading() as session:
        shop = catalog.datasource(session, "shop")
        assert datasources.open_config(OTHER_KEYRING, shop) == {"url": URLS["SHOP_URL"]}
    assert apply(FILE, keyring=OTHER_KEYRING) == []


def test_limits_of_one_key_must_agree_with_stored_jobs__R_C8(rows) -> None:
    apply(FILE)
    text = "jobs: {more: {handler: x, concurrency: {key: warehouse, limit: 3}}}"
    with pytest.raises(DefinitionError, match="the stored job orders limits it to 2"):
        apply(text)
    assert rows("select max from concurrency_key") == [{"max": 2}]
    apply(FILE.replace("limit: 2", "limit: 3"))
    apply(text)
    assert rows("select max from concurrency_key") == [{"max": 3}]


def test_a_key_that_nobody_names_any_more_is_removed(rows) -> None:
    apply(FILE)
    apply(FILE.replace("concurrency: {key: warehouse, limit: 2}", ""))
    assert rows("select * from concurrency_key") == []


def test_another_connector_is_checked_against_stored_jobs(rows) -> None:
    apply(FILE)
    apply("jobs: {wide: {mode: complete, parallelism: 2, source: {datasource: shop, table: t}, "
          "sink: {datasource: warehouse}}}")  # fmt: skip
    text = "datasources: {warehouse: {connector: sqlite, url: 'sqlite:x'}}"
    with pytest.raises(DefinitionError, match=r"the job wide: parallelism: sqlite is written by"):
        apply(text)
    with pytest.raises(DefinitionError, match=r"the job wide: parallelism: sqlite is written by"):
        edit(datasources.edit, KEYRING, CONNECTORS, "warehouse",
             {"connector": "sqlite", "url": "sqlite:x"})  # fmt: skip
    edit(jobs.edit, CONNECTORS, "wide", {"parallelism": 1})
    apply(text)


@pytest.mark.parametrize(
    ("old", "new", "because"),
    [
        ("watermark: updated_at", "watermark: changed_at", "watermark"),
        ("table: public.orders}\n    sink", "table: public.other}\n    sink", "source"),
        ("timeout: 1h", "timeout: 2h", None),
    ],
)
def test_a_watermark_of_something_else_is_reset__R_X4(
    rows, old: str, new: str, because: str | None
) -> None:
    apply(FILE)
    rows("update job set watermark = '2026-01-01', watermark_type = 'date' where name = 'orders'")
    (change,) = apply(FILE.replace(old, new))
    assert (change.note is not None) == (because is not None)
    found = rows("select watermark, watermark_type from job where name = 'orders'")
    records = rows("select subject, detail from audit_event where action = 'job.reset-watermark'")
    if because is None:
        assert found == [{"watermark": "2026-01-01", "watermark_type": "date"}]
        assert records == []
    else:
        assert found == [{"watermark": None, "watermark_type": None}]
        detail = {"watermark": "2026-01-01", "because": because}
        assert records == [{"subject": "orders", "detail": detail}]


@pytest.mark.parametrize(
    ("before", "after", "reset"),
    [
        ("postgresql://app:a1@db/shop", "postgresql://app:b2@db/shop", False),
        ("postgresql://app:a1@db/shop", "postgresql+x://b:b2@DB/shop?sslmode=prefer", False),
        ("postgresql://app:a1@db/shop", "postgresql://app:a1@db/other", True),
        ("postgresql://app:a1@db/shop", "postgresql://app:a1@db2/shop", True),
        ("postgresql://app:a1@db/shop", "postgresql://app:a1@db:5433/shop", True),
        ("postgresql://app:a1@db/shop?host=/a", "postgresql://app:a1@db/shop?host=/b", True),
        ("postgresql://app:a1@db", "postgresql://other:a1@db", True),
        ("postgresql://app:a/1@db/shop", "postgresql://app:a/2@db/shop", True),
    ],
)  # fmt: skip
def test_a_datasource_that_points_elsewhere_resets_the_watermarks_of_its_jobs__R_F3(
    rows, before: str, after: str, reset: bool
) -> None:
    for name in URLS:
        apply(FILE, URLS | {name: before})
        rows("update job set watermark = '7', watermark_type = 'bigint' where name = 'orders'")
        rows("delete from audit_event")
        planned = dry_run(FILE, URLS | {name: after})
        (change,) = apply(FILE, URLS | {name: after})
        assert planned == [change]
        assert ("watermark of orders is reset" in (change.note or "")) == reset
        found = rows("select watermark, watermark_type from job where name = 'orders'")
        assert found == [
            {"watermark": None, "watermark_type": None}
            if reset
            else {"watermark": "7", "watermark_type": "bigint"}
        ]
        audited = rows("select subject, detail from audit_event where action like 'job.reset%'")
        because = {"watermark": "7", "because": f"datasource {change.name}"}
        assert audited == ([{"subject": "orders", "detail": because}] if reset else [])


def test_a_datasource_that_cannot_be_opened_resets_the_watermarks_as_well__R_F3(rows) -> None:
    apply(FILE)
    rows("update job set watermark = '7', watermark_type = 'bigint' where name = 'orders'")
    changes = apply(FILE, keyring=OTHER_KEYRING, replace_unreadable=True)
    assert "may point to another place: the watermark of orders" in (changes[0].note or "")
    assert rows("select watermark from job where name = 'orders'") == [{"watermark": None}]


def test_an_edited_datasource_resets_the_watermarks_of_its_jobs__R_F3(rows) -> None:
    apply(FILE)
    rows("update job set watermark = '7', watermark_type = 'bigint' where name = 'orders'")
    change = edit(
        datasources.edit, KEYRING, CONNECTORS, "warehouse", {"url": "postgresql://new/db"}
    )
    assert "watermark of orders" in change.note
    assert rows("select watermark from job where name = 'orders'") == [{"watermark": None}]


def test_export_and_apply_are_each_others_inverse(rows, database_server: str) -> None:
    apply(FILE)
    edit(jobs.set_switch, "report", "paused", True)
    edit(jobschedules.set_enabled, "often", False)
    with catalog.reading() as session:
        text = as_yaml(export(session, KEYRING, CONNECTORS))
    assert "secret" not in text
    assert apply(text) == []
    rows("delete from job")
    rows("delete from datasource where name <> ''")
    assert len(apply(text)) == 6
    with catalog.reading() as session:
        assert as_yaml(export(session, KEYRING, CONNECTORS)) == text
    # Without the key the secrets still have their names.
    with catalog.reading() as session:
        assert "${SHOP_URL}" in as_yaml(export(session, OTHER_KEYRING, CONNECTORS))
