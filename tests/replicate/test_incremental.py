"""Mode incremental: merge by key, and a lower bound that misses nothing (R-F3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql
from replication_kit import Database, Job, url_of
from support.waiting import until

from tasks.replicate.connector import SinkError, SourceError
from tasks.replicate.connectors.postgresql import watermarks

Make = Callable[..., Job]
DDL = "create table t (id int primary key, name text, updated_at timestamptz default now())"
CONTENT = "select id, name, updated_at from t order by id"


@pytest.fixture
def tables(source: Database, sink: Database) -> None:
    source.execute(DDL)
    sink.execute(DDL)
    source.execute("insert into t select i, 'n' || i from generate_series(1, 100) i")


@pytest.mark.usefixtures("tables")
def test_only_changes_are_read_and_merged(source: Database, sink: Database, job: Make) -> None:
    source.execute("update t set updated_at = now() - interval '1 hour'")
    task = job("incremental", watermark="updated_at", verify="checksum")
    first = task.run()
    assert first.counters["inserted"] == 100
    assert first.watermark_type == "timestamptz"
    source.execute("update t set name = 'new', updated_at = now() where id <= 2")
    source.execute("insert into t values (101, 'more', now())")
    second = task.run()
    counters = second.counters
    assert (counters["read"], counters["inserted"], counters["updated"]) == (3, 1, 2)
    assert sink.execute(CONTENT) == source.execute(CONTENT)
    third = task.run()
    assert third.counters["unchanged"] == third.counters["read"] <= 3
    assert third.counters["updated"] == third.counters["inserted"] == 0


@pytest.mark.usefixtures("tables")
def test_a_row_that_commits_late_is_not_missed__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    task = job("incremental", watermark="updated_at")
    with psycopg.connect(source.url) as late:
        late.execute("insert into t values (500, 'late', now())")
        source.execute("insert into t values (501, 'early', now())")
        task.run()
        assert sink.value("select count(*) from t where id = 501") == 1
        late.commit()
    task.run()
    assert sink.value("select count(*) from t where id = 500") == 1


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("create", [False, True])
def test_a_sink_that_is_gone_is_not_filled_from_the_watermark_on(
    sink: Database, job: Make, create: bool
) -> None:
    task = job("incremental", watermark="updated_at", create=create)
    task.run()
    sink.execute("drop table t")
    with pytest.raises(SinkError, match=r"not exist any more, .* job --reset-watermark") as found:
        task.run()
    assert found.value.permanent
    assert sink.value("select to_regclass('t')") is None
    task.watermark = None
    if create:
        assert task.run().counters["inserted"] == 100


@pytest.mark.usefixtures("tables")
def test_rows_without_a_watermark_arrive(source: Database, sink: Database, job: Make) -> None:
    task = job("incremental", watermark="updated_at")
    task.run()
    source.execute("insert into t values (700, 'no time', null)")
    task.run()
    assert sink.value("select name from t where id = 700") == "no time"


@pytest.mark.usefixtures("tables")
def test_equal_to_the_eye_is_not_equal_to_the_bit(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("alter table t add amount numeric")
    source.execute("update t set amount = 1.0")
    task = job("incremental", watermark="updated_at")
    task.run()
    source.execute("update t set amount = 1.00, updated_at = now() where id = 1")
    task.run()
    assert str(sink.value("select amount from t where id = 1")) == "1.00"


@pytest.mark.usefixtures("tables")
def test_a_sink_without_a_key_is_refused_by_name(
    source: Database, sink: Database, job: Make
) -> None:
    sink.execute("alter table t drop constraint t_pkey")
    with pytest.raises(SinkError, match=r"public\.t has no primary key") as caught:
        job("incremental", watermark="updated_at").run()
    assert caught.value.permanent
    assert sink.value("select count(*) from t") == 0


@pytest.mark.usefixtures("tables")
def test_a_new_column_is_told_with_what_fills_it(source: Database, job: Make) -> None:
    source.execute("alter table t add extra int default 5")
    with pytest.raises(SinkError, match=r"add it there \(and .* job edit --reset-watermark\)"):
        job("incremental", watermark="updated_at").run()


@pytest.mark.usefixtures("tables")
def test_without_the_right_to_see_transactions_it_fails_closed__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    role = f"cc_reader_{uuid4().hex[:12]}"
    source.execute(f"create role {role} login")
    try:
        source.execute(f"grant select on t to {role}")
        task = job("incremental", watermark="updated_at")
        task.source = {"url": url_of(conninfo.make_conninfo(source.url, user=role))}
        try:
            psycopg.connect(task.source["url"]).close()
        except psycopg.OperationalError:
            pytest.skip("only where roles log in by trust")
        with pytest.raises(SourceError, match="grant pg_read_all_stats") as caught:
            task.run()
        assert caught.value.permanent
        task.definition["lag"] = "10s"
        outcome = task.run()
        assert "lag of 10 s" in outcome.result["warnings"][0]
        assert sink.value("select count(*) from t") == 100
        del task.definition["lag"]
        source.execute(f"grant pg_read_all_stats to {role}")
        task.run()
    finally:
        source.execute(f"drop owned by {role}")
        source.execute(f"drop role {role}")


@pytest.mark.usefixtures("tables")
def test_a_prepared_transaction_holds_the_watermark__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    if source.value("show max_prepared_transactions") == "0":
        pytest.skip("this server allows no prepared transactions")
    with psycopg.connect(source.url) as other:
        other.execute("insert into t values (900, 'prepared', now())")
        other.execute("prepare transaction 'cc'")
    task = job("incremental", watermark="updated_at")
    assert task.run().watermark is None
    source.execute("commit prepared 'cc'")
    task.run()
    assert sink.value("select count(*) from t where id = 900") == 1


@pytest.mark.usefixtures("tables")
def test_what_is_prepared_while_the_bound_is_sought_holds_it__R_F3(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source.value("show max_prepared_transactions") == "0":
        pytest.skip("this server allows no prepared transactions")
    task = job("incremental", watermark="updated_at")
    with psycopg.connect(source.url) as other:
        other.execute("insert into t values (900, 'prepared', now())")
        planned = watermarks._refuse_other_times

        def prepares(*arguments: Any) -> None:
            # Planning waits for locks for as long as they are held.
            planned(*arguments)
            time.sleep(watermarks.MARGIN_SECONDS + 0.2)
            other.execute("prepare transaction 'cc_late'")

        with monkeypatch.context() as patched:
            patched.setattr(watermarks, "_refuse_other_times", prepares)
            assert task.run().watermark is None
    source.execute("commit prepared 'cc_late'")
    task.run()
    assert sink.value("select count(*) from t where id = 900") == 1


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("lag", [None, 0])
def test_a_session_that_hides_its_transactions_holds_the_watermark__R_F3(
    source: Database, sink: Database, job: Make, lag: float | None
) -> None:
    task = job("incremental", watermark="updated_at", **({} if lag is None else {"lag": lag}))
    with psycopg.connect(source.url, autocommit=True) as other:
        other.execute("set track_activities = off")
        other.execute("begin")
        other.execute("insert into t values (900, 'hidden', now())")
        time.sleep(watermarks.MARGIN_SECONDS + 0.2)
        outcome = task.run()
        assert outcome.watermark is None
        assert "hides its transactions" in outcome.result["warnings"][0]
        other.execute("commit")
    assert task.run().watermark is not None
    assert sink.value("select count(*) from t where id = 900") == 1


@pytest.mark.usefixtures("tables")
def test_a_transaction_that_was_hidden_when_it_began_holds_the_watermark__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    task = job("incremental", watermark="updated_at")
    with psycopg.connect(source.url, autocommit=True) as other:
        other.execute("set track_activities = off")
        other.execute("begin")
        other.execute("insert into t values (900, 'hidden', now())")
        other.execute("set track_activities = on")
        time.sleep(watermarks.MARGIN_SECONDS + 0.2)
        assert task.run().watermark is None
        other.execute("commit")
    task.run()
    assert sink.value("select count(*) from t where id = 900") == 1


@pytest.mark.usefixtures("tables")
def test_a_replication_connection_may_write__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    task = job("incremental", watermark="updated_at")
    writer = psycopg.pq.PGconn.connect(
        conninfo.make_conninfo(source.url, replication="database").encode()
    )
    try:
        if writer.status != psycopg.pq.ConnStatus.OK:
            pytest.skip("this server takes no replication connection")
        for statement in (b"begin", b"insert into t values (900, 'late', now())"):
            assert writer.exec_(statement).status == psycopg.pq.ExecStatus.COMMAND_OK
        time.sleep(watermarks.MARGIN_SECONDS + 0.2)
        task.run()
        writer.exec_(b"commit")
    finally:
        writer.finish()
    task.run()
    assert sink.value("select count(*) from t where id = 900") == 1


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("reads", ["m", "v"])
def test_a_materialized_view_needs_a_lag__R_F3(
    source: Database, sink: Database, job: Make, reads: str
) -> None:
    source.execute("create materialized view m as select * from t; create view v as table m")
    with pytest.raises(SourceError, match="when it is refreshed, with older times: set lag"):
        job("incremental", reads, to="t", watermark="updated_at").run()
    assert sink.value("select count(*) from t") == 0
    job("incremental", reads, to="t", watermark="updated_at", lag="1h").run()
    assert sink.value("select count(*) from t") == 100


def test_a_partition_of_a_subscribed_table_needs_a_lag__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    if source.version < 130000:
        pytest.skip("no subscription names a partitioned table before PostgreSQL 13")
    source.execute(
        "create table t (id int primary key, name text, updated_at timestamptz)"
        " partition by range (id); create table one partition of t default"
    )
    sink.execute(DDL)
    # What a subscription would leave in the catalog, without another server.
    source.execute("set allow_system_table_mods = on")
    source.execute(
        "create subscription s connection 'dbname=nowhere' publication p"
        " with (connect = false, slot_name = none)"
    )
    try:
        source.execute(
            "insert into pg_subscription_rel (srsubid, srrelid, srsubstate)"
            " select oid, 't'::regclass, 'r' from pg_subscription where subname = 's'"
            " and subdbid = (select oid from pg_database where datname = current_database())"
        )
        with pytest.raises(SourceError, match="a subscription"):
            job("incremental", watermark="updated_at").run()
    finally:
        source.execute("drop subscription s")


def test_all_transactions_of_one_message_have_its_time__R_F3(source: Database) -> None:
    """Between two of them the session shows none, while the next one's now() is long past."""
    with psycopg.connect(source.url, autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        mine = "select query_start from pg_stat_activity where state = 'active' and pid = %s"
        sent = pool.submit(other.pgconn.exec_, b"begin; commit;" * 200_000 + b"begin")
        came = until("the message", lambda: source.execute(mine, other.info.backend_pid))[0][0]
        bound = sql.SQL("select bound::timestamptz from ({}) o").format(sql.SQL(watermarks._OLDEST))
        bounds = []
        while not sent.done():
            bounds += source.connection.execute(bound, (0,)).fetchall()
        assert sent.result().status == psycopg.pq.ExecStatus.COMMAND_OK
    assert len(bounds) > 20
    assert max(bounds)[0] <= came


@pytest.mark.usefixtures("tables")
def test_what_the_server_says_of_itself_decides__R_F3(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby, and a server with prepared transactions, where the tests have none to ask."""
    with monkeypatch.context() as standby:
        standby.setattr(watermarks, "_KNOWN", "select true, true, true")
        with pytest.raises(SourceError, match="the source is a standby"):
            job("incremental", watermark="updated_at").run()
    assert sink.value("select count(*) from t") == 0
    monkeypatch.setattr(watermarks, "_PREPARED", "select true")
    outcome = job("incremental", watermark="updated_at").run()
    assert outcome.watermark is None
    assert "prepared transaction" in outcome.result["warnings"][0]
    assert sink.value("select count(*) from t") == 100


@pytest.mark.parametrize(
    ("type_", "first", "later", "kind"),
    [
        ("bigint", "1000000", "1000500", "bigint"),
        ("numeric(20,2)", "1000000.5", "1000500.5", "numeric"),
        ("timestamp", "2026-01-01 00:00:00", "2026-01-01 00:04:00", "timestamp"),
        ("date", "2026-01-01", "2026-01-02", "date"),
    ],
)
def test_other_watermarks_have_a_lag_and_say_so__R_F3(
    source: Database, sink: Database, job: Make, type_: str, first: str, later: str, kind: str
) -> None:
    for database in (source, sink):
        database.execute(f"create table t (id int primary key, mark {type_})")
    source.execute("insert into t values (1, %s)", first)
    task = job("incremental", watermark="mark")
    outcome = task.run()
    assert outcome.watermark_type == kind
    assert "missed" in outcome.result["warnings"][0]
    source.execute("insert into t values (2, %s)", later)
    task.run()
    assert sink.value("select count(*) from t") == 2


@pytest.mark.parametrize("odd", ["NaN", "Infinity"])
def test_a_number_that_is_none_does_not_end_the_reads__R_F3(
    source: Database, sink: Database, job: Make, odd: str
) -> None:
    if odd == "Infinity" and min(source.version, sink.version) < 140000:
        pytest.skip("this server's numeric has no infinity")
    for database in (source, sink):
        database.execute("create table t (id int primary key, mark numeric)")
    task = job("incremental", watermark="mark", verify="checksum")
    source.execute("insert into t values (1, %s)", odd)
    assert task.run().watermark is None
    source.execute("insert into t values (2, 20000.5)")
    assert task.run().watermark == "10000.5"
    source.execute("insert into t values (3, 20001)")
    assert task.run().watermark == "10001"
    assert sink.execute("select id from t order by id") == [(1,), (2,), (3,)]
    task.watermark = odd
    with pytest.raises(SourceError, match="stored watermark of mark is") as caught:
        task.run()
    assert caught.value.permanent


LAGGING = [("timestamp", {}), ("date", {}), ("timestamptz", {"lag": 60}), ("bigint", {"lag": 0})]


@pytest.mark.parametrize(("type_", "more"), LAGGING)
def test_a_read_that_finds_no_row_leaves_the_bound_where_it_is__R_F3(
    source: Database, sink: Database, job: Make, type_: str, more: dict[str, int]
) -> None:
    """A present time or the like in its place would lie above what is inserted later."""
    for database in (source, sink):
        database.execute(f"create table t (id int primary key, mark {type_})")
    values = ("1", "2") if type_ == "bigint" else ("2020-01-01", "2020-01-02")
    task = job("incremental", watermark="mark", **more)
    assert task.run().watermark is None
    source.execute("insert into t values (1, null)")
    assert task.run().watermark is None
    source.execute("insert into t values (2, %s)", values[0])
    bound = task.run().watermark
    assert bound is not None
    source.execute("delete from t")
    task.run()
    assert task.watermark == bound
    source.execute("insert into t values (3, %s)", values[1])
    task.run()
    assert sink.execute("select id from t order by id") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("type_", ["timestamp", "date"])
@pytest.mark.parametrize("endless", ["infinity", "-infinity"])
def test_an_endless_time_does_not_count_for_the_bound__R_F3(
    source: Database, sink: Database, job: Make, type_: str, endless: str
) -> None:
    for database in (source, sink):
        database.execute(f"create table t (id int primary key, mark {type_})")
    source.execute("insert into t values (1, %s)", endless)
    task = job("incremental", watermark="mark")
    assert task.run().watermark is None
    source.execute("insert into t values (2, '2020-01-03')")
    assert (task.run().watermark or "")[:10] == "2020-01-02"
    assert sink.execute("select id from t order by id") == [(1,), (2,)]


def test_a_lag_of_more_than_a_century_is_refused_by_column__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, mark timestamp)")
    with pytest.raises(SourceError, match="watermark mark is a time, and lag is longer") as caught:
        job("incremental", watermark="mark", lag=1e15).run()
    assert caught.value.permanent


def test_a_part_of_a_unit_of_lag_is_a_unit__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, mark numeric)")
    source.execute("insert into t values (1, 1.5)")
    outcome = job("incremental", watermark="mark", lag=0.9).run()
    assert outcome.watermark == "0.5"
    assert "from 1 below the highest" in outcome.result["warnings"][0]


def test_an_xid8_watermark_is_safe__R_F3(source: Database, sink: Database, job: Make) -> None:
    for database in (source, sink):
        database.execute(
            "create table t (id int primary key, version xid8 default pg_current_xact_id())"
        )
    task = job("incremental", watermark="version")
    with psycopg.connect(source.url) as late:
        late.execute("insert into t values (1)")
        source.execute("insert into t values (2)")
        assert task.run().watermark_type == "xid8"
        late.commit()
    task.run()
    assert sink.execute("select id from t order by id") == [(1,), (2,)]
    task.watermark = "900000000000"
    with pytest.raises(SourceError, match=r"have not come that far.*--reset-watermark"):
        task.run()
    source.execute("create materialized view m as select * from t")
    with pytest.raises(SourceError, match="use a timestamptz column, and set lag"):
        job("incremental", "m", to="t", watermark="version").run()


@pytest.mark.usefixtures("tables")
def test_a_foreign_table_has_no_safe_bound__R_F3(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create extension file_fdw")
    source.execute("create server f foreign data wrapper file_fdw")
    source.execute(
        "create foreign table far (id int, updated_at timestamptz) server f"
        " options (program 'echo 1,2026-01-01', format 'csv')"
    )
    with pytest.raises(SourceError, match="another server"):
        job("incremental", "far", to="t", watermark="updated_at").run()


BLIND = "create collation blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
MODES = [("incremental", {"watermark": "n"}), ("complete-atomic", {"atomic": "diff"})]


@pytest.mark.parametrize(("mode", "more"), MODES)
def test_keys_that_a_collation_takes_for_one_are_not_merged(
    source: Database, sink: Database, job: Make, mode: str, more: dict[str, str]
) -> None:
    source.execute("create table t (k text primary key, n int not null)")
    source.execute("insert into t values ('Ann', 1), ('ann', 2)")
    try:
        sink.execute(BLIND)
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this server is built without ICU")
    sink.execute("create table t (k text collate blind primary key, n int not null)")
    task = job(mode, **more)
    with pytest.raises(SinkError, match="key column k: 1 key differs from another") as caught:
        task.run()
    assert caught.value.permanent
    source.execute("delete from t where k = 'ann'")
    task.run()
    assert sink.execute("select * from t") == [("Ann", 1)]
    source.execute("update t set k = 'ANN'")
    with pytest.raises(SinkError, match="key column k: 1 key differs from another"):
        task.run()
    if sink.execute("select from pg_available_extensions where name = 'citext'"):
        sink.execute("create extension citext; alter table t alter k type citext")
        with pytest.raises(SinkError, match="key column k: 1 key differs from another"):
            task.run()
    # Only the index is blind, and ON CONFLICT would heed it beside the primary key.
    sink.execute("drop table t; create table t (k text primary key, n int not null)")
    sink.execute("create unique index merges on t (k collate blind)")
    with pytest.raises(SinkError, match=r"unique index merges of public.t has the collation"):
        task.run()


@pytest.mark.parametrize(("mode", "more"), MODES)
def test_a_row_whose_key_is_null_is_refused(
    source: Database, sink: Database, job: Make, mode: str, more: dict[str, str]
) -> None:
    for database in (source, sink):
        database.execute("create table t (k int unique, n int not null)")
    source.execute("insert into t values (1, 1), (null, 2), (null, 3)")
    sink.execute("insert into t values (null, 9)")
    task = job(mode, writes={"key": ["k"]}, **more)
    with pytest.raises(SinkError, match="key column k: a row's key is NULL") as caught:
        task.run()
    assert caught.value.permanent
    assert sink.execute("select * from t") == [(None, 9)]
    source.execute("delete from t where k is null")
    task.run()


@pytest.mark.parametrize(
    ("index", "key", "reason"),
    [
        ("alter table t add constraint u unique (k) deferrable", ["k"], "u is deferrable, and ON"),
        ("alter table t add constraint u primary key (k) deferrable", None, "u is deferrable, and"),
        ("create unique index u on t (k) where n > 0", ["k"], "u covers a part of the rows only"),
        ("create unique index u on t (lower(k))", ["k"], "u is on an expression"),
        ("create unique index u on t (k)", None, "u allows NULL in k"),
    ],
)
@pytest.mark.parametrize("mode", ["incremental", "complete-atomic"])
def test_an_index_that_cannot_find_rows_is_named_with_the_reason(
    source: Database,
    sink: Database,
    job: Make,
    index: str,
    key: list[str] | None,
    reason: str,
    mode: str,
) -> None:
    for database in (source, sink):
        database.execute("create table t (k text, n int)")
    sink.execute("create table other (k text); create unique index v on other (k) where k > ''")
    sink.execute(index)
    sink.execute("create unique index w on t (n) where k > ''" if key else "select 1")
    more = {"watermark": "n"} if mode == "incremental" else {"atomic": "diff"}
    with pytest.raises(SinkError, match=rf" that can be used \({reason}") as caught:
        job(mode, writes={"key": key} if key else {}, **more).run()
    assert " w " not in str(caught.value)
    assert " v " not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "native"),
    [("9", "10", "int"), ("9.5", "10.5", "numeric"), ("2026-11-01", "12026-11-01", "date")],
)
@pytest.mark.parametrize("reads", ["table", "query"])
def test_a_sink_that_sorts_the_watermark_otherwise_does_not_tell_the_newest(
    source: Database, sink: Database, job: Make, old: str, new: str, native: str, reads: str
) -> None:
    source.execute(f"create table t (id int, name text, u {native})")
    source.execute("insert into t values (1, 'older', %s), (1, 'newest', %s)", old, new)
    sink.execute("create table t (id int primary key, name text, u text)")
    task = job("incremental", watermark="u", lag=0)
    if reads == "query":
        source.execute("create table o (id int primary key)")
        query = {"query": "select * from t"}
        task = job("incremental", None, "public.t", watermark="u", lag=0, reads=query)
    why = rf"nothing was changed: column u: .* one key \(id\).* text does not sort as {native}"
    with pytest.raises(SinkError, match=why) as caught:
        task.run()
    assert caught.value.permanent
    assert sink.value("select count(*) from t") == 0
    sink.execute(f"alter table t alter u type {native} using null")
    task.run()
    assert sink.value("select name from t") == "newest"


def test_a_key_of_the_source_that_is_the_sinks_leaves_nothing_to_tell(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (a int, b int, name text, u int, primary key (a, b))")
    source.execute("insert into t values (1, 1, 'one', 9), (1, 2, 'two', 10)")
    sink.execute("create table t (a int, bb int, name text, u text, primary key (bb, a))")
    task = job("incremental", watermark="u", writes={"columns": {"b": "bb"}})
    task.run()
    assert sink.value("select count(*) from t") == 2
    sink.execute("truncate t; alter table t drop constraint t_pkey, add primary key (a)")
    with pytest.raises(SinkError, match=r"one key \(a\)"):
        task.run()


def test_a_watermark_that_is_not_written_does_not_tell_the_newest(
    source: Database, sink: Database, job: Make
) -> None:
    columns = "name text, v int, u int generated always as (v * 2) stored"
    source.execute(f"create table t (id int, {columns})")
    source.execute("insert into t values (1, 'newest', 2), (1, 'older', 1)")
    sink.execute(f"create table t (id int primary key, {columns})")
    task = job("incremental", watermark="u")
    with pytest.raises(SinkError, match="watermark u, which tells it, is generated at the sink"):
        task.run()
    sink.execute("alter table t alter u drop expression")
    task.run()
    assert sink.value("select name from t") == "newest"


@pytest.mark.parametrize("part", ["whole", "partition"])
def test_an_unlogged_sink_is_warned_of_in_each_run(
    source: Database, sink: Database, job: Make, part: str
) -> None:
    source.execute("create table t (id int primary key, u timestamptz default now())")
    source.execute("insert into t values (1)")
    if part == "whole":
        sink.execute("create unlogged table t (id int primary key, u timestamptz)")
    else:
        sink.execute(
            "create table t (id int primary key, u timestamptz) partition by range (id);"
            "create unlogged table t_low partition of t for values from (0) to (9)"
        )
    name = "t" if part == "whole" else "t_low"
    task = job("incremental", watermark="u")
    for _ in range(2):
        (warning,) = task.run().result["warnings"]
        assert warning.startswith(f"{name} is unlogged: a crash")
        assert "--reset-watermark" in warning
    sink.execute(f"alter table {name} set logged")
    assert "warnings" not in task.run().result
    sink.execute(f"alter table {name} set unlogged")
    whole = job("complete-atomic")
    assert "warnings" not in whole.run().result
