"""What a job may ask for besides its mode."""

from __future__ import annotations

import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from replication_kit import Database, Job, fresh_database

from dispatch.context import ChildJob, HandlerFailure, Progress, RunContext, RunStopped, Spawned
from tasks.replicate import checksum, modes
from tasks.replicate.connector import CommitUnknown, SinkError, SourceError
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink

Make = Callable[..., Job]


def test_create_names_every_column_whose_type_the_sink_lacks(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute(
        'create schema "My Sales"; create type "My Sales"."Mood" as enum (\'ok\');'
        "create type size as enum ('s'); create type colour as enum ('red')"
    )
    source.execute(
        'create table t (id int primary key, mood "My Sales"."Mood", sizes size[],'
        " colour colour, price numeric(10,2))"
    )
    sink.execute("create type colour as enum ('red')")
    with pytest.raises(SinkError) as caught:
        job("complete", create=True).run()
    assert caught.value.permanent
    assert str(caught.value) == (
        "sink public.t cannot be created: "
        'column mood needs the type "My Sales"."Mood", which the sink does not have; '
        "column sizes needs the type size[], which the sink does not have: create the missing "
        "types there, or the table itself with columns of type text in their place"
    )
    source.execute("insert into t values (1, 'ok', '{s}', 'red', 1.5)")
    sink.execute(
        "create table t (id int primary key, mood text, sizes text, colour text, price numeric)"
    )
    job("complete", create=True).run()
    assert sink.execute("select mood, sizes from t") == [("ok", "{s}")]
    sink.execute("drop table t")
    sink.execute(
        'create schema "My Sales"; create type "My Sales"."Mood" as enum (\'ok\');'
        "create type size as enum ('s')"
    )
    job("complete", create=True).run()
    with pytest.raises(SinkError, match=r"nowhere\.t cannot be created: schema \"nowhere\""):
        job("complete", to="nowhere.t", create=True).run()


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"sink": {"columns": ["one"]}}, SinkError, "sink.columns lists 1 names for 2 columns"),
        ({"source": {"columns": ["id", "nam"]}}, SourceError, "the source has no column nam"),
        ({"source": {"where": "nam = 1"}}, SourceError, 'source.where: column "nam" does not'),
        ({"source": {"query": "select 1; select 2", "table": None}}, SourceError, "source.query: "),
        (
            {"source": {"query": "select id from t group by nam", "table": None}},
            SourceError,
            'source.query: column "nam" does not',
        ),
        ({"mode": "incremental", "watermark": "at"}, SourceError, "no watermark column at"),
        ({"mode": "incremental", "watermark": "name"}, SourceError, "name"),
    ],
    ids=str,
)
def test_what_is_refused_makes_no_table(
    source: Database,
    sink: Database,
    job: Make,
    changes: dict[str, Any],
    kind: type[HandlerFailure],
    says: str,
) -> None:
    source.execute("create table t (id int primary key, name text)")
    task = job("complete", create=True)
    for key, value in changes.items():
        if isinstance(value, dict):
            merged = task.definition[key] | value
            task.definition[key] = {k: v for k, v in merged.items() if v is not None}
        else:
            task.definition[key] = value
    with pytest.raises(kind, match=re.escape(says)) as caught:
        task.run()
    assert caught.value.permanent
    assert sink.value("select to_regclass('t')") is None


def test_an_incremental_job_makes_no_table_without_a_key(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id int, updated_at timestamptz)")
    task = job("incremental", watermark="updated_at", create=True)
    with pytest.raises(SinkError, match=r"name its columns in sink\.key"):
        task.run()
    assert sink.value("select to_regclass('t')") is None
    task.definition["sink"]["key"] = ["id"]
    task.run()


def test_a_table_without_columns_is_refused(source: Database, sink: Database, job: Make) -> None:
    source.execute("create table t ()")
    sink.execute("create table t (n int)")
    with pytest.raises(SourceError, match="the source has no column"):
        job("complete").run()


def test_create_makes_the_sink_from_the_sources_types(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute(
        "create table t (id bigint primary key, price numeric(10,2) not null, at timestamptz(3),"
        " tags text[], name varchar(20), total numeric generated always as (price * 2) stored)"
    )
    source.execute("insert into t values (1, 1.5, now(), '{a}', 'x')")
    job("complete", create=True, verify="checksum").run()
    types = (
        "select attname, format_type(atttypid, atttypmod), attnotnull from pg_attribute"
        " where attrelid = 't'::regclass and attnum > 0 order by attnum"
    )
    assert sink.execute(types) == source.execute(types)
    assert sink.value("select total from t") == 3
    job("complete", create=True).run()


def test_identity_columns_go_on_above_what_was_loaded(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute("create table t (id int primary key, n int)")
    source.execute("insert into t values (7, 1), (41, 1)")
    sink.execute("create table t (id int generated always as identity primary key, n serial)")
    for mode, more in (
        ("complete", {}),
        ("complete-atomic", {}),
        ("incremental", {"watermark": "id"}),
    ):
        job(mode, **more).run()
        assert sink.execute("insert into t default values returning id")[0][0] > 41
        assert sink.execute("select n from t order by id desc limit 1")[0][0] > 1
        sink.execute("delete from t")


def test_analyze_gathers_statistics(source: Database, sink: Database, job: Make) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t select generate_series(1, 1000)")
    job("complete", analyze=True).run()
    assert sink.value("select reltuples from pg_class where relname = 't'") == 1000


def test_bandwidth_is_one_total(source: Database, sink: Database, job: Make) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute("insert into t select i, repeat('x', 90) from generate_series(1, 10000) i")
    for parallelism in (1, 2):
        began = time.monotonic()
        outcome = job("complete", bandwidth="500kB", parallelism=parallelism).run()
        took = time.monotonic() - began
        assert isinstance(outcome.result, dict)
        assert outcome.result["bytes"] / took < 1.3 * 500_000


def test_fetch_size_does_not_change_the_rate_by_orders(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute("insert into t select i, repeat('x', 90) from generate_series(1, 20000) i")
    took = []
    for size in (100, 100_000):
        began = time.monotonic()
        job("complete", fetch_size=size).run()
        took.append(time.monotonic() - began)
    assert max(took) < 10 * min(took)


def test_a_bad_definition_is_a_permanent_failure(job: Make) -> None:
    with pytest.raises(HandlerFailure, match="watermark: is missing") as caught:
        job("incremental").run()
    assert caught.value.permanent


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_commit_of_unknown_outcome_is_settled__R_F5(
    source: Database,
    sink: Database,
    job: Make,
    monkeypatch: pytest.MonkeyPatch,
    landed: bool,
    mode: str,
) -> None:
    """The connection breaks at the last COMMIT, after or before the server has acted on it."""
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t values (1), (2)")
    commits = 0
    commit = PostgreSQLSink.commit

    def breaking(self: PostgreSQLSink) -> None:
        nonlocal commits
        commits += 1
        if commits < (2 if mode == "complete" else 1):
            commit(self)
            return
        if landed:
            commit(self)
        with socket.socket(fileno=socket.dup(self._connection.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
        try:
            commit(self)
        except CommitUnknown:
            raise
        raise AssertionError("the broken connection was not noticed")

    monkeypatch.setattr(PostgreSQLSink, "commit", breaking)
    task = job(mode)
    if landed:
        assert task.run().rows_processed == 2
        assert sink.value("select count(*) from t") == 2
    else:
        with pytest.raises(SinkError, match="nothing of it remained") as caught:
            task.run()
        assert not caught.value.permanent
        monkeypatch.undo()
        task.run()
        assert sink.value("select count(*) from t") == 2


def test_a_pattern_has_a_child_for_each_table(source: Database, sink: Database, job: Make) -> None:
    source.execute("create schema shop")
    for table in ("shop.orders", 'shop."Odd.Name"', "shop.audit_log", "public.other"):
        source.connection.execute(f"create table {table} (id int primary key)")  # type: ignore[arg-type]
    source.execute("create view shop.seen as select 1 as id")
    task = job("complete", None, tables=["shop.*", "!*.audit_*"], create=True, priority=3)
    task.definition["sink"] = {"datasource": "sink", "table_schema": "landing"}
    context = task.context()
    children: list[ChildJob] = []

    def spawn(context: RunContext, found: Sequence[ChildJob]) -> Spawned:
        children.extend(found)
        busy = [f"job/shop.t{n}" for n in range(7)]
        return Spawned(active=busy, gone=["job/shop.gone"])

    context._spawn = spawn
    outcome = modes.run(context)
    # The tables are no rows.
    assert context.take_progress() == Progress(0, phase="spawned")
    assert [child.name for child in children] == ['job/shop."Odd.Name"', "job/shop.orders"]
    assert children[1].definition == {
        "source": {"datasource": "source", "table": "shop.orders"},
        "sink": {"datasource": "sink", "table": "landing.orders"},
        "mode": "complete",
        "parallelism": 1,
        "create": True,
        "analyze": False,
        "fetch_size": 1000,
        "priority": 3,
    }
    assert isinstance(outcome.result, dict)
    assert outcome.result["tables"] == ['shop."Odd.Name"', "shop.orders"]
    busy, gone = outcome.result["warnings"]
    assert "no run was started of job/shop.t0, " in busy
    assert "job/shop.t4 and 2 more: each has an active run already" in busy
    assert "no table of the source is there for job/shop.gone: dropped, or not" in gone
    sink.execute("create schema landing")
    child = Job(source.config, sink.config, dict(children[0].definition), id=uuid.uuid4())
    assert child.run().rows_processed == 0
    assert sink.value("select to_regclass('landing.\"Odd.Name\"')") is not None


@pytest.mark.parametrize("reason", ["worker_shutdown", "timeout", "cancelled"])
def test_a_pattern_whose_children_are_started_heeds_no_stop(
    source: Database, job: Make, reason: str
) -> None:
    """Its work is done; another attempt, or a failure, would only hide that they go on."""
    source.execute("create table t (id int primary key)")
    task = job("complete", None, tables="public.t")
    task.definition["sink"] = {"datasource": "sink", "table_schema": "public"}
    context = task.context()

    def spawn(context: RunContext, found: Sequence[ChildJob]) -> Spawned:
        context.stop(reason)
        return Spawned()

    context._spawn = spawn
    assert modes.run(context).result == {"tables": ["public.t"]}


def test_a_pattern_that_matches_nothing_is_a_permanent_failure(
    source: Database, sink: Database, job: Make
) -> None:
    task = job("complete", None, tables="nothing.*")
    task.definition["sink"] = {"datasource": "sink"}
    with pytest.raises(
        HandlerFailure, match=r"no table of the source matches nothing\.\*"
    ) as caught:
        task.run()
    assert caught.value.permanent


def test_a_pattern_that_would_write_one_sink_table_twice_starts_nothing(
    source: Database, sink: Database, job: Make
) -> None:
    for schema in ("sa", "sb"):
        source.connection.execute(f"create schema {schema}")  # type: ignore[arg-type]
        for table in ("t", schema):
            source.connection.execute(f"create table {schema}.{table} (id int)")  # type: ignore[arg-type]
    task = job("complete", None, tables=["sa.*", "sb.*"])
    task.definition["sink"] = {"datasource": "sink", "table_schema": "public"}
    context = task.context()
    children: list[ChildJob] = []

    def spawn(context: RunContext, found: Sequence[ChildJob]) -> Spawned:
        children.extend(found)
        return Spawned()

    context._spawn = spawn
    with pytest.raises(HandlerFailure, match=r"sa\.t and sb\.t .* written to public\.t") as caught:
        modes.run(context)
    assert caught.value.permanent
    assert not children
    task.definition["tables"] = ["sa.*", "sb.*", "!sb.t"]
    context = task.context()
    context._spawn = spawn
    assert modes.run(context).result == {"tables": ["sa.sa", "sa.t", "sb.sb"]}
    assert len(children) == 3


def test_checksums_of_two_tables_can_be_compared(source: Database, sink: Database) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute("insert into t values (1, ''), (2, null)")
    sink.execute("insert into t values (2, null), (1, '')")
    one = checksum.of_table("postgresql", source.config, "public.t")
    assert checksum.of_table("postgresql", sink.config, "public.t") == one
    assert one.rows == 2
    sink.execute("update t set name = ''")
    assert checksum.of_table("postgresql", sink.config, "public.t") != one


@contextmanager
def silent_server() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_connect_to_a_silent_server_stops__R_K2(source: Database, job: Make) -> None:
    source.execute("create table t (id int)")
    task = job("complete")
    with silent_server() as port:
        task.sink = {"url": f"postgresql://user:secret-word@127.0.0.1:{port}/x"}
        context = task.context()
        at: list[float] = []

        def stop() -> None:
            at.append(time.monotonic())
            context.stop("cancelled")

        timer = threading.Timer(0.5, stop)
        timer.start()
        with pytest.raises(RunStopped):
            modes.run(context)
        assert time.monotonic() - at[0] < 1.0
        timer.join(timeout=5)


def test_credentials_are_in_no_error__R_X2(source: Database, job: Make) -> None:
    source.execute("create table t (id int)")
    task = job("complete")
    for url in (
        "postgresql://user:secret-word@127.0.0.1:1/x",
        "postgresql://user:secret-word@127.0.0.1:1:2/x",
        "postgresql://user:secret-word@no-such-host.invalid/x",
        "postgresql://user@127.0.0.1:1/x?password=secret-word&nonsense=1",
    ):
        task.sink = {"url": url}
        with pytest.raises((HandlerFailure, ValueError)) as caught:
            task.run()
        assert "secret-word" not in str(caught.value)
        assert "secret-word" not in repr(task.context().sink)


@pytest.mark.parametrize("encodings", [("LATIN1", "UTF8"), ("UTF8", "LATIN1")])
def test_databases_of_two_encodings_have_one_checksum(
    database_server: str, job: Make, encodings: tuple[str, str]
) -> None:
    with (
        fresh_database(database_server, encodings[0]) as one,
        fresh_database(database_server, encodings[1]) as two,
    ):
        for database in (one, two):
            database.execute("create table t (id int primary key, name text)")
        one.execute("insert into t values (1, 'caf' || %s), (2, null)", "\u00e9")
        task = job("complete", verify="checksum")
        task.source, task.sink = one.config, two.config
        assert task.run().rows_processed == 2
        assert two.value("select name from t where id = 1") == "caf\u00e9"


def test_a_second_job_waits_its_turn_and_a_stop_breaks_the_wait__R_K2(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    source.execute("insert into t select generate_series(1, 10)")
    job("complete").run()
    for mode in ("complete", "complete-atomic"):
        context = job(mode).context()
        with sink.connection.transaction():
            sink.execute("update claimcheck_fence set run_id = 'theirs' where fence = -1")
            timer = threading.Timer(0.5, context.stop, ("cancelled",))
            timer.start()
            started = time.monotonic()
            with pytest.raises(RunStopped):
                modes.run(context)
            assert 0.4 < time.monotonic() - started < 3
            timer.join()
        assert sink.value("select count(*) from t") == 10
