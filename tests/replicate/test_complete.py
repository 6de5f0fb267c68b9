"""Mode complete between PostgreSQL databases, by the byte lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from replication_kit import Database, Job, url_of

from dispatch.context import RunStopped
from tasks.replicate import modes
from tasks.replicate.connector import SinkError, SourceError
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink

Make = Callable[..., Job]


def test_rows_arrive_as_they_are(source: Database, sink: Database, job: Make) -> None:
    ddl = "create table t (id int primary key, name text, at timestamptz, price numeric(10,2))"
    source.execute(ddl)
    sink.execute(ddl)
    source.execute(
        "insert into t select i, nullif('n' || i, 'n7'), now(), i / 3.0"
        " from generate_series(1, 5000) i"
    )
    sink.execute("insert into t values (-1, 'old')")
    outcome = job("complete", verify="checksum").run()
    content = "select * from t order by id"
    assert sink.execute(content) == source.execute(content)
    assert outcome.rows_processed == 5000
    assert outcome.result["lane"] == "copy-binary"
    assert outcome.counters["read"] == outcome.counters["written"] == 5000


@pytest.mark.parametrize(
    "name", ["Mixed Case", "select", 'quo"ted', "per%cent", "brace{s}", "dot.ted", "ünïcode", "a'b"]
)
def test_names_are_quoted(source: Database, sink: Database, job: Make, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    table = f"{quoted}.{quoted}"
    names = {"name": sql.Identifier(name), "table": sql.Identifier(name, name)}
    for database in (source, sink):
        database.connection.execute(sql.SQL("create schema {name}").format(**names))
        database.connection.execute(
            sql.SQL("create table {table} ({name} int primary key)").format(**names)
        )
    source.connection.execute(sql.SQL("insert into {table} values (1), (2)").format(**names))
    job("complete", table, reads={"where": f"{quoted} > 1", "columns": [name]}).run()
    content = sink.connection.execute(sql.SQL("select * from {table}").format(**names))
    assert content.fetchall() == [(2,)]


def test_a_table_name_is_literal(source: Database, sink: Database, job: Make) -> None:
    for database in (source, sink):
        database.execute('create table public."T" (id int)')
    source.execute('insert into "T" values (1)')
    with pytest.raises(SourceError, match=r"public\.t does not exist") as caught:
        job("complete", "public.t", to="public.T").run()
    assert caught.value.permanent
    job("complete", "public.T").run()
    assert sink.value('select id from "T"') == 1


def test_a_query_is_a_source(source: Database, sink: Database, job: Make) -> None:
    source.execute("create table orders (id int, total numeric)")
    source.execute("insert into orders values (1, 10), (2, 20), (2, 5)")
    sink.execute("create table t (id int, total numeric)")
    query = "select id, sum(total) as total from orders group by id -- by order\n;"
    job("complete", None, reads={"query": query}).run()
    assert sink.execute("select * from t order by id") == [(1, 10), (2, 25)]


def test_columns_map_by_name_and_by_position(source: Database, sink: Database, job: Make) -> None:
    source.execute("create table t (a int, b text, c int)")
    source.execute("insert into t values (1, 'x', 2)")
    sink.execute("create table t (id int, name text, more text default 'd')")
    reads = {"columns": ["b", "a"]}
    job("complete", reads=reads, writes={"columns": {"a": "id", "b": "name"}}).run()
    assert sink.execute("select * from t") == [(1, "x", "d")]
    job("complete", reads=reads, writes={"columns": ["name", "id"]}).run()
    assert sink.execute("select * from t") == [(1, "x", "d")]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("create table u (id int)", "sink table public.t does not exist"),
        (
            "create table t (id int)",
            "column name is missing in the sink.s table public.t: add it there, or",
        ),
        ("create table t (id int, name date)", "column name: text does not go into date"),
        ("create table t (id int, name text, must int not null)", "column must of public.t is NOT"),
        ("create view t as select 1 as id, 'a' as name", "no ordinary or partitioned table"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_truncate(
    source: Database, sink: Database, job: Make, ddl: str, message: str
) -> None:
    source.execute("create table t (id int, name text)")
    source.execute("insert into t values (5, 'new')")
    sink.execute(ddl)
    kept = "must" in ddl
    if kept:
        sink.execute("insert into t values (1, 'old', 1)")
    with pytest.raises(SinkError, match=message) as caught:
        job("complete").run()
    assert caught.value.permanent
    if kept:
        assert sink.value("select name from t") == "old"
    assert sink.value("select to_regclass('claimcheck_fence')") is None


@pytest.mark.parametrize(
    ("ours", "value", "theirs"),
    [
        ("text", "'too long'", "character varying(5)"),
        ("text", "'pad  '", "character(5)"),
        ("bigint", "32768", "smallint"),
        ("numeric", "1.5", "integer"),
        ("numeric", "1.25", "numeric(6,1)"),
        (
            "timestamp(6) without time zone",
            "'2026-11-01 10:00:00.5'",
            "timestamp(0) without time zone",
        ),
    ],
)
def test_a_value_that_would_be_changed_is_explained_by_its_column(
    source: Database, sink: Database, job: Make, ours: str, value: str, theirs: str
) -> None:
    source.execute(f"create table t (x) as values ({value}::{ours})")
    sink.execute(f"create table t (x {theirs})")
    with pytest.raises(SinkError, match=r"column x: a value of x .* does not fit .* unchanged"):
        job("complete").run()


def test_a_missing_value_is_not_taken_for_one_that_would_be_changed(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (x) as values (null::bigint)")
    sink.execute("create table t (x smallint not null)")
    with pytest.raises(SinkError, match="column x: null value") as refused:
        job("complete").run()
    assert "does not fit" not in str(refused.value)


def test_a_column_that_goes_no_way_of_the_others_is_named(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id int, m money, n text)")
    sink.execute("create table t (id int, m money, n int)")
    if source.value("show lc_monetary") != sink.value("show lc_monetary"):
        pytest.skip("the servers' money differs")
    with pytest.raises(SinkError, match="convert n in a query"):
        job("complete").run()


def test_foreign_keys_and_triggers_are_refused(source: Database, sink: Database, job: Make) -> None:
    source.execute("create table t (id int primary key)")
    sink.execute("create table t (id int primary key)")
    sink.execute("create table child (t int references t)")
    with pytest.raises(SinkError, match="referenced by foreign keys of child"):
        job("complete").run()
    sink.execute("drop table child")
    sink.execute(
        "create function f() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger watch before insert on t for each row execute function f()"
    )
    with pytest.raises(SinkError, match="has the trigger watch on insert"):
        job("complete").run()
    sink.execute("alter table t enable replica trigger watch")
    job("complete").run()


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
def test_a_session_that_takes_itself_for_a_replica_is_refused(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    """Other triggers fire there than elsewhere, and foreign keys are not checked."""
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute("insert into t values (1, 'a')")
    sink.execute(
        "create function loud() returns trigger language plpgsql as"
        " $$begin new.name := upper(new.name); return new; end$$;"
        "create trigger loud before insert on t for each row execute function loud();"
        "alter table t enable replica trigger loud;"
    )
    role, name = sink.connection.info.user, sink.connection.info.dbname
    try:
        for database in (source, sink):
            database.execute(
                f"alter database {database.connection.info.dbname}"
                " set session_replication_role = replica"
            )
    except psycopg.errors.InsufficientPrivilege:
        pytest.skip("only a superuser may set session_replication_role")
    task = job(mode, **({"watermark": "id"} if mode == "incremental" else {}))
    with pytest.raises(SinkError, match="session_replication_role is replica") as caught:
        task.run()
    assert caught.value.permanent
    assert sink.value("select count(*) from t") == 0
    remedy = f"alter role {role} in database {name} set session_replication_role = origin"
    assert remedy in str(caught.value)
    sink.execute(remedy)
    task.run()
    # What the source is does not matter to a read.
    assert sink.execute("select * from t") == [(1, "a")]


def test_every_partition_of_a_sink_is_looked_at(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id int primary key, name text)")
    source.execute("insert into t values (1, 'a'), (12, 'b')")
    sink.execute(
        "create table t (id int primary key, name text) partition by range (id);"
        "create table low partition of t for values from (0) to (10);"
        "create table high partition of t for values from (10) to (20) partition by range (id);"
        "create table higher partition of high for values from (10) to (20);"
        "insert into t values (2, 'old'), (13, 'old');"
        "create table child (id int references higher on delete cascade);"
        "insert into child values (13);"
    )
    for mode in ("complete", "complete-atomic"):
        with pytest.raises(
            SinkError, match=r"partition higher of public.t is referenced by foreign keys of child"
        ):
            job(mode).run()
    assert sink.value("select count(*) from child") == 1
    sink.execute("drop table child")
    sink.execute(
        "create function f() returns trigger language plpgsql as"
        " 'begin new.name = ''mangled''; return new; end';"
        "create trigger watch before insert on low for each row execute function f()"
    )
    with pytest.raises(SinkError, match=r"partition low of public.t has the trigger watch on ins"):
        job("complete-atomic").run()
    sink.execute("drop trigger watch on low")
    # A partition's own rules and row security do not count for who writes to its parent.
    sink.execute("create rule no as on insert to low do instead nothing")
    sink.execute("alter table low enable row level security, force row level security")
    for mode in ("complete", "complete-atomic"):
        job(mode, verify="checksum").run()
    assert sink.execute("select * from t order by id") == [(1, "a"), (12, "b")]
    # One trigger of the parent is told once, and a key to the parent as well.
    sink.execute("create trigger watch after insert on t for each row execute function f()")
    sink.execute("create table child (id int references t)")
    with pytest.raises(SinkError) as caught:
        job("complete").run()
    assert str(caught.value).count("has the trigger") == 1
    assert str(caught.value).count("referenced by") == 1


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
def test_a_sink_that_others_inherit_from_is_refused(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    sink.execute("create table older () inherits (t)")
    sink.execute("insert into older values (7)")
    more = {"watermark": "id"} if mode == "incremental" else {}
    with pytest.raises(SinkError, match=r"tables older inherit from public\.t") as caught:
        job(mode, **more).run()
    assert caught.value.permanent
    assert sink.value("select count(*) from older") == 1
    sink.execute("alter table older no inherit t")
    job(mode, **more).run()
    assert sink.value("select count(*) from older") == 1


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_table_is_not_replicated_onto_itself(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    source.execute("create table t (id int primary key)")
    source.execute("insert into t values (1)")
    for reads in ({}, {"query": "select id from public.t where id > 0"}):
        task = job(mode, None if reads else "t", to="public.t", reads=reads)
        # Another spelling of the same database.
        task.sink = {"url": source.url + ("&" if "?" in source.url else "?") + "connect_timeout=9"}
        with pytest.raises(SinkError, match="both source and sink"):
            task.run()
    assert source.value("select count(*) from t") == 1


@pytest.mark.parametrize(("read", "written"), [("leaf", "t"), ("t", "leaf"), ("leaf", "middle")])
@pytest.mark.parametrize("kind", ["partitions", "inheritance"])
def test_a_table_is_not_replicated_onto_its_own_parent_or_partition(
    source: Database, job: Make, read: str, written: str, kind: str
) -> None:
    if kind == "partitions":
        source.execute(
            "create table t (id int primary key) partition by range (id);"
            "create table middle partition of t for values from (0) to (9) partition by range (id);"
            "create table leaf partition of middle for values from (0) to (9);"
            "create table beside partition of t for values from (10) to (19);"
        )
    else:
        source.execute(
            "create table t (id int);"
            "create table middle () inherits (t); create table leaf () inherits (middle);"
            "create table beside (id int primary key);"
        )
    source.execute("create view seen as select * from leaf")
    source.execute("insert into leaf values (1)")
    for table in (read, "seen"):
        task = job("complete", f"public.{table}", to=f"public.{written}")
        task.sink = source.config
        with pytest.raises(SinkError, match="both source and sink"):
            task.run()
    assert source.value("select count(*) from t") == 1
    # A partition beside it is another table.
    task = job("complete", "public.leaf", to="public.beside", reads={"where": "id < 0"})
    task.sink = source.config
    task.run()
    assert source.value("select count(*) from t") == 1


def test_missing_rights_are_told_with_the_grant(
    source: Database, sink: Database, job: Make
) -> None:
    role = "cc_writer_" + sink.url.partition("cc_rep_")[2][:20]
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
        # Until PostgreSQL 15 everybody could create there.
        database.execute("revoke create on schema public from public")
    # One of each server, which may be the same.
    servers = {database.connection.info.port: database for database in (source, sink)}.values()
    for database in servers:
        database.execute(f"create role {role} login")
    try:
        task = job("complete-atomic")
        task.sink = {"url": url_of(conninfo.make_conninfo(sink.url, user=role))}
        try:
            psycopg.connect(task.sink["url"]).close()
        except psycopg.OperationalError:
            pytest.skip("only where roles log in by trust")
        task.definition["create"] = True
        task.definition["sink"]["table"] = "public.made"
        with pytest.raises(SinkError, match=rf"denied for schema public; grant .* to {role}, or"):
            task.run()
        task.definition["create"] = False
        task.definition["sink"]["table"] = "public.t"
        with pytest.raises(SinkError, match=r"may not insert, delete, select on public\.t: grant"):
            task.run()
        sink.execute(f"grant insert, truncate on t to {role}")
        task.definition |= {"mode": "complete", "verify": "count"}
        with pytest.raises(SinkError, match=r"may not select on public\.t: grant select on"):
            task.run()
        task.definition |= {"mode": "complete-atomic", "verify": None}
        sink.execute(f"grant insert, delete, select on t to {role}")
        with pytest.raises(SinkError, match="grant create on schema public"):
            task.run()
        sink.execute(f"grant create on schema public to {role}")
        task.run()
        assert sink.value("select to_regclass('claimcheck_fence') is not null")
        sink.execute("insert into t values (7)")
        sink.execute(f"grant truncate on t to {role}")
        sink.execute("alter table t enable row level security")
        for mode in ("complete", "complete-atomic"):
            task.definition["mode"] = mode
            with pytest.raises(SinkError, match=r"row security of public\.t holds for role"):
                task.run()
        assert sink.value("select count(*) from t") == 1
        sink.execute("alter table t disable row level security")
        task.source = {"url": url_of(conninfo.make_conninfo(source.url, user=role))}
        with pytest.raises(SourceError, match=f"denied for table t .* role {role} needs .* select"):
            task.run()
        source.execute(f"grant select on t to {role}")
        source.execute("alter table t enable row level security")
        with pytest.raises(SourceError, match=f"row-level security .* alter role {role} bypassrls"):
            task.run()
    finally:
        for database in (source, sink):
            database.execute(f"drop owned by {role}")
        for database in servers:
            database.execute(f"drop role {role}")


@pytest.mark.parametrize("side", ["source", "sink"])
def test_settings_of_a_database_do_not_alter_values(
    source: Database, sink: Database, job: Make, side: str
) -> None:
    # A setting that tells on one side alone: names of types would not be the other's.
    quoting = source if side == "source" else sink
    try:
        source.execute("select '<a/>'::xml")
        words = "xml"
    except psycopg.errors.FeatureNotSupported:
        words = "text"  # this server is built without XML
    for database in (source, sink):
        name = sql.Identifier(database.connection.info.dbname)
        for setting, value in (
            ("array_nulls", "off"),
            ("bytea_output", "escape"),
            ("extra_float_digits", "-3"),
            ("datestyle", "SQL, DMY"),
            ("timezone", "Asia/Tokyo"),
            ("intervalstyle", "sql_standard"),
            ("xmloption", "document"),
            *([("quote_all_identifiers", "on")] if database is quoting else []),
        ):
            database.connection.execute(
                sql.SQL("alter database {} set {} = {}").format(
                    name, sql.Identifier(setting), sql.Literal(value)
                )
            )
        # Digits for a number make all columns travel as text.
        small = "text" if database is source else "integer"
        database.execute(
            f"create table t (id {small}, names text[], data bytea, double float8, day date,"
            f" at timestamptz, span interval, words {words})"
        )
    source.execute(
        "insert into t values ('1', array['a', null], '\\x00ff', 0.1 + 0.2::float8, '2026-11-02',"
        " '2026-11-02 03:04:05+00', '1 year -2 days', '<a/>b<c/>')"
    )
    outcome = job("complete").run()
    assert outcome.result["lane"] == "copy-text"
    for database in (source, sink):
        database.execute("set intervalstyle = 'postgres'; set timezone = 'UTC'")
    content = "select id::text, names, data, double, day, at, span, words::text from t"
    assert sink.execute(content) == source.execute(content)
    assert sink.value("select names[2] is null from t")


@pytest.mark.parametrize(
    ("step", "says"),
    [("begin", None), ("truncate", None), ("write", modes.EMPTIED), ("commit", None)],
)
def test_a_stop_says_what_the_sink_may_hold__R_F4(
    source: Database,
    sink: Database,
    job: Make,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    says: str | None,
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t values (1)")
    sink.execute("insert into t values (2)")
    context = job("complete").context()
    original = getattr(PostgreSQLSink, step)

    def stopped(self: PostgreSQLSink, *arguments: Any, **more: Any) -> Any:
        if step == "commit":
            raise SinkError("refused")
        done = original(self, *arguments, **more)
        context.stop("cancelled")
        return done

    monkeypatch.setattr(PostgreSQLSink, step, stopped)
    with pytest.raises((RunStopped, SinkError)):
        modes.run(context)
    assert context.warning == says
    assert sink.execute("select id from t") == ([] if says else [(2,)])


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_column_that_the_source_has_no_more_is_told(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, phone text, n int default 7)")
    source.execute("insert into t values (1, '555'); alter table t drop phone, drop n")
    (warning,) = job(mode).run().result["warnings"]
    assert "column phone of public.t is NULL in every row" in warning
    assert sink.execute("select * from t") == [(1, None, 7)]
    assert "warnings" not in job(mode, reads={"columns": ["id"]}).run().result
    assert "warnings" not in job(mode, None, "t", reads={"query": "select id from t"}).run().result


def test_a_column_that_only_the_sink_has_stays_where_rows_do(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id int primary key, n int)")
    sink.execute("create table t (id int primary key, n int, phone text)")
    source.execute("insert into t values (1, 1), (2, 3)")
    sink.execute("insert into t values (1, 1, '555'), (2, 2, '556')")
    assert "warnings" not in job("complete-atomic", atomic="diff").run().result
    assert sink.execute("select * from t order by id") == [(1, 1, "555"), (2, 3, "556")]
