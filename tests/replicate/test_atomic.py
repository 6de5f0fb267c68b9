"""Mode complete-atomic: readers see the old or the new content, and never wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import sql
from replication_kit import Database, Job
from support.waiting import until

from dispatch.context import HandlerFailure
from tasks.replicate import modes
from tasks.replicate.connector import Counts, Fenced, Load, SinkError
from tasks.replicate.connectors.postgresql import publishing, staging
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink

Make = Callable[..., Job]
DDL = "create table t (id int primary key, version int not null, name text unique)"


@pytest.fixture
def filled(source: Database, sink: Database) -> None:
    for database, version in ((source, 2), (sink, 1)):
        database.execute(DDL)
        database.execute(
            "insert into t select i, %s, 'n' || i from generate_series(1, 20000) i", version
        )


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("way", ["delete", "diff", "truncate", "rename"])
def test_readers_see_one_content_and_never_wait(
    source: Database, sink: Database, job: Make, way: str
) -> None:
    done = threading.Event()
    seen: set[tuple[int, int, int]] = set()
    waited: list[psycopg.Error] = []

    def look() -> None:
        with psycopg.connect(sink.url, autocommit=True) as reader:
            if way in ("delete", "diff"):
                # The server itself tells a wait from a machine that is busy.
                reader.execute("set lock_timeout = '100ms'")
            while not done.is_set():
                try:
                    row = reader.execute(
                        "select count(*), min(version), max(version) from t"
                    ).fetchone()
                except psycopg.errors.LockNotAvailable as error:
                    waited.append(error)
                    continue
                assert row is not None
                seen.add(row)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        outcome = job("complete-atomic", atomic=way, verify="checksum").run()
    finally:
        done.set()
        reader.join(timeout=10)
    assert seen
    assert seen <= {(20000, 1, 1), (20000, 2, 2)}
    assert sink.execute("select * from t order by id") == source.execute(
        "select * from t order by id"
    )
    assert not waited
    if way == "diff":
        assert outcome.counters["updated"] == 20000
    names = sink.execute("select indexname from pg_indexes where tablename = 't' order by 1")
    assert names == [("t_name_key",), ("t_pkey",)]
    assert sink.value("select count(*) from pg_class where relname ~ '^cc_stage'") == 0


@pytest.mark.parametrize("way", ["delete", "diff"])
@pytest.mark.parametrize("keyed", [True, False])
def test_what_a_writer_has_not_committed_does_not_stay_beside_the_new_content(
    source: Database, sink: Database, job: Make, way: str, keyed: bool
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int, version int)")
        if keyed or way == "diff":
            database.execute("alter table t add primary key (id)")
    source.execute("insert into t select i, 2 from generate_series(1, 100) i")
    task = job("complete-atomic", atomic=way, verify="checksum")
    with ThreadPoolExecutor(1) as pool, psycopg.connect(sink.url) as writer:
        writer.execute("insert into t values (-1, 1)")
        ran = pool.submit(task.run)
        until(
            "the run to wait for the writer",
            lambda: sink.execute(
                "select pid from pg_locks where not granted and relation = 't'::regclass"
            ),
        )
        assert sink.value("select count(*) from t") == 0, "a reader does not wait"
        writer.commit()
        ran.result(timeout=30)
    assert sink.execute("select count(*), min(id) from t") == [(100, 1)]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("way", ["delete", "diff"])
def test_statistics_that_are_gathered_meanwhile_lock_nothing_forever(
    sink: Database, job: Make, way: str
) -> None:
    with ThreadPoolExecutor(1) as pool, psycopg.connect(sink.url) as other:
        other.execute("analyze t")
        ran = pool.submit(job("complete-atomic", atomic=way).run)
        until(
            "the run to wait for analyze",
            lambda: sink.execute(
                "select pid from pg_locks where not granted and relation = 't'::regclass"
            ),
        )
        other.execute("insert into t values (-1, 1, 'other')")
        other.commit()
        ran.result(timeout=30)
    assert sink.execute("select min(id), min(version) from t") == [(1, 2)]


@pytest.mark.usefixtures("filled")
def test_a_failed_verification_changes_nothing(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.execute(
        "create function off() returns trigger language plpgsql as"
        " 'begin new.version = 9; return new; end';"
        "create trigger wrong before insert on t for each row execute function off()"
    )
    task = job("complete-atomic", verify="checksum")
    with pytest.raises(SinkError, match="trigger wrong"):
        task.run()
    # A trigger that the preflight cannot see: one that appears afterwards.
    sink.execute("alter table t disable trigger wrong")
    publish = PostgreSQLSink.publish

    def enabling(self: PostgreSQLSink, load: Load) -> Counts:
        self._connection.execute("alter table t enable trigger wrong")
        return publish(self, load)

    monkeypatch.setattr(PostgreSQLSink, "publish", enabling)
    with pytest.raises(HandlerFailure, match="checksum") as caught:
        task.run()
    assert caught.value.code == "verify_failed"
    assert caught.value.permanent, "what differs in one snapshot differs in the next"
    assert sink.execute("select distinct version from t") == [(1,)]


@pytest.mark.parametrize(
    ("ddl", "lost"),
    [
        ("create view v as select * from t", "views"),
        ("grant select on t to public", "grants"),
        ("create publication p for table t", "publications"),
        ("alter table t enable row level security", "row security"),
        ("alter table t add serial_no serial", "a serial sequence"),
        ("create policy p on t using (version > 0)", "row security"),
        (
            "alter default privileges in schema public grant select on tables to public",
            "fewer grants than default privileges give a new table",
        ),
        (
            "create function f() returns bigint begin atomic; select count(*) from t; end",
            r"function f\(\)",
        ),
        ("create function f(t) returns int language sql as 'select 1'", r"function f\(t\)"),
        ("create table other (id int, was t[])", "table other"),
        ("create domain d as t check (true)", "type d"),
        (
            "create table other (id int);"
            "create policy p on other using (exists (select from t where version = id))",
            "policy p on table other",
        ),
        (
            "alter table t add n int generated always as identity;"
            "create table other (id bigint default nextval('t_n_seq'))",
            "default value for column id of table other",
        ),
        ("alter table t alter name set statistics 500", "statistics targets or options of columns"),
        (
            "alter table t add n int generated always as identity;"
            "grant usage on sequence t_n_seq to public",
            "grants or a comment on an identity sequence",
        ),
        (
            "alter table t add n int generated always as identity;"
            "comment on sequence t_n_seq is 'counts'",
            "grants or a comment on an identity sequence",
        ),
        (
            "create index i on t (lower(name)); alter index i alter 1 set statistics 500",
            "statistics targets or options of columns",
        ),
    ],
)
@pytest.mark.usefixtures("filled")
def test_a_rename_that_would_lose_something_is_refused(
    source: Database, sink: Database, job: Make, ddl: str, lost: str
) -> None:
    sink.execute(ddl)
    with pytest.raises(SinkError, match=f"has {lost}, which a rename would lose"):
        job("complete-atomic", atomic="rename").run()
    assert sink.execute("select distinct version from t") == [(1,)]


@pytest.mark.usefixtures("filled")
def test_grants_that_are_gone_again_hinder_no_rename(sink: Database, job: Make) -> None:
    sink.execute("grant select on t to public; revoke all on t from public")
    assert sink.value("select relacl is not null from pg_class where oid = 't'::regclass")
    job("complete-atomic", atomic="rename").run()
    assert sink.execute("select distinct version from t") == [(2,)]


@pytest.mark.usefixtures("filled")
def test_a_dependent_that_appears_meanwhile_ends_the_rename_for_good(
    sink: Database, job: Make
) -> None:
    context = job("complete-atomic", atomic="rename").context()
    report = context.progress

    def depend(*arguments: object, **more: object) -> None:
        if more.get("phase") == "publishing":
            sink.execute("create view v as select * from t")
        report(*arguments, **more)  # type: ignore[arg-type]

    context.progress = depend  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="other objects depend on it") as caught:
        modes.run(context)
    assert caught.value.permanent
    assert sink.execute("select distinct version from t") == [(1,)]


@pytest.mark.usefixtures("filled")
def test_an_attempt_that_is_fenced_takes_its_staging_along__R_F5(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = job("complete-atomic")
    task.run()

    def write(self: PostgreSQLSink, *arguments: object, **more: object) -> int:
        sink.execute("update claimcheck_fence set fence = 99 where step = 0 and fence > 0")
        return original(self, *arguments, **more)  # type: ignore[arg-type]

    original = PostgreSQLSink.write
    monkeypatch.setattr(PostgreSQLSink, "write", write)
    with pytest.raises(Fenced):
        task.run()
    assert sink.value("select count(*) from pg_class where relname ~ '^cc_stage'") == 0


KEPT = """
select c.relpersistence::text, c.reloptions, c.relreplident::text, obj_description(c.oid),
       (select reloptions from pg_class where oid = c.reltoastrelid),
       array(select concat(stxnamespace::regnamespace, '.', stxname,
                           coalesce(to_jsonb(s) ->> 'stxstattarget', '-1'))
             from pg_statistic_ext s where stxrelid = c.oid order by 1),
       array(select concat(indexrelid::regclass, indisreplident, indisclustered,
                           pg_get_indexdef(indexrelid), obj_description(indexrelid))
             from pg_index where indrelid = c.oid order by 1),
       array(select concat(attname, attidentity, pg_get_serial_sequence('t', attname),
                           attgenerated, pg_get_expr(adbin, adrelid))
             from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
             where attrelid = c.oid and attnum > 0 and not attisdropped),
       array(select conname::text from pg_constraint where conrelid = c.oid order by 1)
from pg_class c where c.oid = 't'::regclass
"""


@pytest.mark.parametrize("identity", ["full", "nothing", "using index t_name_key", "default"])
def test_a_rename_keeps_what_the_table_has(
    source: Database, sink: Database, job: Make, identity: str
) -> None:
    source.execute("create table t (id int, name text, part int, own int)")
    source.execute("insert into t select i, 'n' || i, i % 9, i from generate_series(1, 10) i")
    sink.execute(
        "create schema other;"
        "create unlogged table t (id int generated by default as identity (increment by 5),"
        " name text not null unique, part int check (part < 9),"
        " own int generated always as identity, primary key (id),"
        " twice int generated always as (id * 2) stored)"
        " with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05,"
        " toast.autovacuum_enabled = false);"
        'alter sequence t_id_seq rename to "Numbers of t";'
        "create statistics other.s2 on id, part from t; create statistics s1 on id, name from t;"
        "cluster t using t_pkey;"
        "comment on table t is 'what it''s for';"
        "create index by_part on t (part); comment on index by_part is 'parts';"
        'create index "Low" on t (lower(name)) where part > 3;'
        f"alter table t replica identity {identity};"
    )
    if sink.version >= 130000:
        sink.execute("alter statistics s1 set statistics 50")
    sink.execute("select setval('\"Numbers of t\"', 5000)")
    before = sink.execute(KEPT)
    task = job("complete-atomic", atomic="rename", verify="checksum")
    task.run()
    assert sink.execute(KEPT) == before
    assert sink.value("insert into t (name, part) values ('x', 1) returning id") == 5005
    sink.execute("delete from t where name = 'x'")
    task.run()
    assert sink.execute(KEPT) == before
    assert sink.value("insert into t (name, part) values ('y', 1) returning id") == 5010
    assert sink.value("select count(*) from pg_class where relname ~ '^cc_stage'") == 0


@pytest.mark.usefixtures("filled")
def test_orphaned_staging_is_swept(source: Database, sink: Database, job: Make) -> None:
    orphan = "cc_stage_" + "0" * 32 + "_7"
    sink.execute("create table " + orphan + " (id int)")
    owned = "cc_stage_" + "1" * 32 + "_7"
    sink.execute("create table " + owned + " (id int)")
    with psycopg.connect(sink.url, autocommit=True) as owner:
        owner.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (owned,))
        job("complete-atomic").run()
        assert sink.value("select to_regclass(%s)", orphan) is None
        assert sink.value("select to_regclass(%s)", owned) is not None


STAGES = "select relname from pg_class where relname ~ '^cc_stage' and relkind = 'r'"


@pytest.mark.usefixtures("filled")
def test_staging_that_another_session_holds_is_left_to_a_later_run(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pg_dump does, which locks every table until it has ended."""
    monkeypatch.setattr(staging, "DROP_SECONDS", 0.2)
    publish = PostgreSQLSink.publish
    task = job("complete-atomic")
    with psycopg.connect(sink.url) as holder:

        def held(self: PostgreSQLSink, load: Load) -> Counts:
            holder.execute(sql.SQL("lock table {} in access share mode").format(staging.name(load)))
            return publish(self, load)

        with monkeypatch.context() as patch:
            patch.setattr(PostgreSQLSink, "publish", held)
            outcome = task.run()
        (left,) = sink.execute(STAGES)
        (warning,) = outcome.result["warnings"]
        assert left[0] in warning
        assert sink.execute("select distinct version from t") == [(2,)]
        assert "warnings" not in task.run().result
        assert sink.execute(STAGES) == [left]
    task.run()
    assert sink.execute(STAGES) == []


@pytest.mark.usefixtures("filled")
def test_staging_of_an_attempt_that_is_just_ending_is_swept(sink: Database, job: Make) -> None:
    """Its server notices only after a moment that it was told to end."""
    task = job("complete-atomic")
    old = f"cc_stage_{task.id.hex}_0"
    sink.execute(f"create table {old} (id int)")
    with psycopg.connect(sink.url, autocommit=True) as ending:
        ending.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (old,))
        timer = threading.Timer(0.5, ending.close)
        timer.start()
        task.run()
        timer.join()
    assert sink.execute(STAGES) == []


@pytest.mark.usefixtures("filled")
def test_what_follows_the_commit_waits_for_a_limited_time(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FINISH_SECONDS", 0.2)
    unstage = PostgreSQLSink.unstage
    with psycopg.connect(sink.url) as holder:

        def held(self: PostgreSQLSink, load: Load) -> str | None:
            # As a vacuum or the build of an index does.
            holder.execute("lock table t in share update exclusive mode")
            return unstage(self, load)

        monkeypatch.setattr(PostgreSQLSink, "unstage", held)
        outcome = job("complete-atomic", analyze=True).run()
    (warning,) = outcome.result["warnings"]
    assert warning.startswith("the rows are in place, but what follows them failed: sink: ")
    assert "lock timeout" in warning


@pytest.mark.usefixtures("filled")
def test_staging_stands_in_its_own_schema(source: Database, sink: Database, job: Make) -> None:
    task = job("complete-atomic", writes={"staging_schema": "landing"})
    with pytest.raises(SinkError, match="staging schema landing does not exist: create schema"):
        task.run()
    sink.execute("create schema landing")
    task.run()
    assert sink.execute("select distinct version from t") == [(2,)]
