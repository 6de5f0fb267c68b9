"""MariaDB as source and sink, through both drivers: the suite, reading, and making tables."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conformance import (
    Harness,
    SinkConformance,
    SourceConformance,
    identity_plan,
    read_all,
    request_for,
)
from mysql_kit import (
    DRIVERS,
    SAMPLES,
    MySQLHarness,
    a_database,
    write,
)
from replication_kit import Job, definition

from tasks.replicate import checksum
from tasks.replicate.connector import (
    Column,
    ColumnType,
    Kind,
    Lane,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.mysql import MySQL, loading, mentions, types


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(driver: str) -> Iterator[MySQLHarness]:
    with a_database(driver) as made:
        yield made


@pytest.fixture
def one() -> Iterator[MySQLHarness]:
    """For what does not depend on the driver."""
    with a_database() as made:
        yield made


class TestMySQLSource(SourceConformance):
    @pytest.fixture
    def harness(self, driver: str) -> Iterator[Harness]:
        with a_database(driver) as made:
            yield made


class TestMySQLSink(SinkConformance):
    @pytest.fixture
    def harness(self, driver: str) -> Iterator[Harness]:
        with a_database(driver) as made:
            yield made


class TestMySQLSinkWithoutLoadData(SinkConformance):
    """A server that forbids LOAD DATA LOCAL gets INSERTs."""

    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
        monkeypatch.setattr(loading, "allowed", lambda session: False)
        with a_database() as made:
            yield made


@pytest.mark.parametrize("reads", ["t", "part", "parts", "query"])
def test_a_table_is_not_replicated_onto_itself(harness, reads):
    harness.make("t", {"id": "int"}, [(1,), (2,)], key=["id"])
    harness.make("other", {"id": "int"}, key=["id"])
    harness.sql("create view part as select m.id from other o right join t m using (id)")
    harness.sql("create view parts as select id from part where id = 1 union select 3")
    query = "select o.id, 1 from `other` o, (select id from t where id = 1) k"
    source = {"query": query} if reads == "query" else {"table": reads}
    job = Job(
        harness.config,
        {"url": f"{harness.config['url']}?charset=utf8"},
        definition(source, {"table": "t"}, "complete"),
        connectors=("mysql", "mysql"),
    )
    with pytest.raises(SinkError, match="t is both source and sink") as caught:
        job.run()
    assert caught.value.permanent
    assert harness.rows("t") == [(1,), (2,)]


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("select a, b from t x, u as y where x.c in (c, d)", "db.t db.u"),
        ("select f(a, b), 'from no', \"from no\" from `s``1` . `from` -- from no", "s`1.from"),
        ("select t.from, x from ((a join b.c on(a.i = b.j)) left join d using (e, f), g)",
         "db.a b.c db.d db.g"),
        ("select 1 from t use index (i, j) where exists (select 1 from u, v) order by k, l",
         "db.t db.u db.v"),
        ("with c as (select * from t) select * from (select * from c) k, u for update",
         "db.c db.t db.u"),
        ("select 1 from a # from no\n, b /* from no */ /*!50000 join c */ limit 1, 2",
         "db.a db.b db.c"),
        ("select 1 from a, lateral (select 1 from b) k, e union table d", "db.a db.b db.d db.e"),
        ("select 1 from a where b = 'it\\'s' and c in (select 1 from d) ) from", "db.a db.d"),
    ],
)  # fmt: skip
def test_the_tables_that_a_statement_names(statement, names):
    found = {place for place in mentions.named(statement, "db") if place[1] != "lateral"}
    assert found == {tuple(name.rsplit(".", 1)) for name in names.split()}


def test_a_read_sees_one_state_although_others_write(harness):
    harness.make("t", {"id": "int"}, [(i,) for i in range(100)], key=["id"])
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t", fetch_size=10)
        source.snapshot()
        pages = source.read(request, Part(0), Lane.ROWS)
        first = next(pages)
        harness.sql("delete from t")
        assert first.rows + sum(page.rows for page in pages) == 100
        assert source.count(request) == 100


def test_a_query_knows_its_types(harness):
    columns = {"a": "decimal(10,3)", "b": "varchar(5)", "c": "varbinary(5)", "d": "datetime(3)"}
    columns |= {"e": "bit(9)", "f": "float", "g": "bigint unsigned", "h": "timestamp(6) null"}
    row = ("1.500", "x", b"\xff", "2026-01-01 00:00:00.250", 5, 0.10000000149011612, 2**64 - 1)
    harness.make("t", columns, [(*row, "2026-01-01 00:00:00.000000+00")])
    with MySQL().source(harness.config) as source:
        request = ReadRequest(query="select t.*, a * 2 as twice from t;")
        relation = source.describe(request)
        kinds = {c.name: (c.type.kind, c.type.precision, c.type.scale) for c in relation.columns}
        assert kinds["a"] == (Kind.DECIMAL, 10, 3)
        assert kinds["b"][0] is Kind.TEXT
        assert kinds["c"][0] is Kind.BYTES
        assert kinds["d"][:2] == (Kind.TIMESTAMP, 3)
        assert kinds["e"][0] is kinds["g"][0] is Kind.INTEGER
        assert kinds["h"][0] is Kind.TIMESTAMPTZ
        request = request.planned(identity_plan(relation))
        source.snapshot()
        assert read_all(source, request) == [
            (*row, "2026-01-01 00:00:00.000000+00", "3.000"),
        ]


def test_names_are_literal_and_a_near_one_is_offered(one):
    one.make("Orders", {"id": "int"})
    with (
        MySQL().source(one.config) as source,
        pytest.raises(SourceError, match=r"orders does not exist.*did you mean Orders\?"),
    ):
        source.describe(ReadRequest(table=("orders",)))


def test_another_database_is_named_by_the_first_part(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    with MySQL().source(one.config) as source:
        request = ReadRequest(table=(one.database, "t"))
        request = request.planned(identity_plan(source.describe(request)))
        source.snapshot()
        assert read_all(source, request) == [(1,)]


def test_generated_defaults_and_keys_are_known(one):
    one.sql(
        "create table t (id int auto_increment primary key, a varchar(5) not null default 'x',"
        " n int not null, m datetime default current_timestamp on update current_timestamp,"
        " g int generated always as (n + 1) stored, v int generated always as (n * 2) virtual,"
        " unique key p (a(2)))"
    )
    with MySQL().sink(one.config) as sink:
        relation = sink.describe(("t",))
    assert relation is not None
    known = {c.name: (c.nullable, c.has_default, c.generated) for c in relation.columns}
    assert known == {
        "id": (False, True, False),
        "a": (False, True, False),
        "n": (False, False, False),
        "m": (True, True, False),
        "g": (True, False, True),
        "v": (True, False, True),
    }
    assert relation.detail["unique"] == [("id",)]


def test_watermarks_lag_behind_the_greatest_value__R_F3(one):
    one.make("t", {"w": "timestamp(6) null", "n": "bigint", "s": "varchar(9)"})
    one.sql("insert into t values ('2026-01-01 10:00:30.5', 500, 'x'), (null, null, null)")
    with MySQL().source(one.config) as source:
        request = ReadRequest(table=("t",), watermark="w")
        time_column, number, text = source.describe(request).columns
        bound = source.bound(request, time_column, 60)
        assert (bound.value, bound.type) == ("2026-01-01 09:59:30+00", "timestamptz")
        assert "60 s" in bound.warning
        later = replace(request, since="2026-01-01 09:59:45+00")
        assert source.bound(later, time_column, 60).value == "2026-01-01 09:59:45+00"
        assert source.bound(request, number, 10).value == "490"
        with pytest.raises(SourceError, match="watermark s"):
            source.bound(request, text, 10)


@pytest.mark.parametrize(("native", "lag"), [("datetime", None), ("date", None), ("date", 1e300)])
def test_times_that_no_lag_lies_below_are_refused_or_leave_the_bound__R_F3(one, native, lag):
    one.make("t", {"w": native}, [("0001-01-01",)])
    with MySQL().source(one.config) as source:
        request = ReadRequest(table=("t",), watermark="w")
        (column,) = source.describe(request).columns
        if lag is not None:
            with pytest.raises(SourceError, match="watermark w is a time, and lag is longer"):
                source.bound(request, column, lag)
            return
        assert source.bound(request, column, lag).value is None
        one.sql("set sql_mode = ''")
        one.sql("update t set w = '0000-00-00'")
        with pytest.raises(SourceError, match="watermark w: its highest value is no") as caught:
            source.bound(request, column, lag)
        assert caught.value.permanent


def test_a_long_number_bounds_exactly__R_F3(one):
    most = "9" * 34 + "7." + "9" * 29 + "7"
    one.make("t", {"id": "int", "w": "decimal(65,30)"}, [(1, most)], key=["id"])
    with MySQL().source(one.config) as source:
        request = request_for(source, "t", watermark="w")
        bound = source.bound(request, request.columns[1].source, 0)
        assert bound.value == most
        request = replace(request, since=bound.value)
        assert read_all(source, request) == [(1, most)]


def test_since_reads_times_and_numbers_from_the_bound_on__R_F3(one):
    rows: list[Row] = [
        (1, "2026-01-01 09:59:59.000000+00", "1.50"),
        (2, "2026-01-01 10:00:00.000000+00", "2.50"),
        (3, None, None),
    ]
    one.make("t", {"id": "int", "w": "timestamp(6) null", "d": "decimal(10,2)"}, rows)
    with MySQL().source(one.config) as source:
        source.snapshot()
        for column, since in (("w", "2026-01-01 10:00:00.5+00"), ("d", "1.75")):
            request = request_for(source, "t", watermark=column, since=since)
            assert sorted(row[0] for row in read_all(source, request)) == [2, 3]
            assert source.count(request) == 2


def test_a_table_made_for_another_engine_keeps_its_values(one):
    columns = [
        Column("id", ColumnType(Kind.INTEGER, "bigint", bits=64), nullable=False),
        Column("name", ColumnType(Kind.TEXT, "text")),
        Column("any", ColumnType(Kind.DECIMAL, "numeric")),
        Column("d", ColumnType(Kind.DECIMAL, "numeric(20,4)", precision=20, scale=4)),
        Column("b", ColumnType(Kind.BOOLEAN, "boolean")),
        Column("u", ColumnType(Kind.UUID, "uuid")),
        Column("j", ColumnType(Kind.JSON, "jsonb")),
        Column("t", ColumnType(Kind.TIMESTAMPTZ, "timestamp with time zone")),
        Column("o", ColumnType(Kind.BYTES, "bytea")),
    ]
    row = (
        1,
        "Case ",
        "1.1",
        "2.5",
        True,
        str(uuid.uuid4()),
        '{"a":1.10}',
        "2026-01-01 00:00:00+00",
        b"\0",
    )
    with MySQL().sink(one.config) as sink:
        sink.create(("t",), columns, ["id"], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        assert relation.key == ("id",)
        for column in columns:
            theirs = relation.column(column.name)
            assert theirs is not None
            assert sink.fit(column, theirs, "postgresql").refusal is None, column.name
    write(one, "t", [row])
    found = one.rows("t")[0]
    assert found[1] == "Case "
    assert found[4] == 1
    assert (found[5], found[6], found[8]) == (row[5], row[6], row[8])
    assert len(one.sql("select 1 from t where name = 'case ' or name = 'Case'")) == 0


def test_more_digits_than_mysql_holds_are_refused_by_column(one):
    wide = Column("d", ColumnType(Kind.DECIMAL, "numeric(80,40)", precision=80, scale=40))
    with MySQL().sink(one.config) as sink, pytest.raises(SinkError, match="column d: "):
        sink.create(("t",), [wide], [], "postgresql")


def test_both_tables_have_one_checksum_after_a_copy(harness):
    columns = {sample.name: sample.native for sample in SAMPLES}
    rows = list(zip(*(sample.cells for sample in SAMPLES), strict=True))
    harness.make("t", columns, rows)
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t")
        relation = source.describe(request)
        source.snapshot()
        found = read_all(source, request)
    with MySQL().sink(harness.config) as sink:
        sink.create(("u",), relation.columns, [], "mysql")
    write(harness, "u", found)
    sums = {checksum.of_table("mysql", harness.config, table).digest for table in ("t", "u")}
    assert len(sums) == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "url: is missing"),
        ("postgresql://u:geheim@h/d", "no MySQL URL"),
        ("mysql://u:geheim@h:port/d", "port is not a number"),
        ("mysql://u:geheim@h", "names no database"),
        ("mysql://u:geheim@h/d?colour=geheim", "parameter colour"),
        ("mysql://u:geheim@h/d?ssl=geheim", "ssl must be one of"),
    ],
)
def test_a_bad_url_is_explained_and_not_echoed(url, says):
    (problem,) = MySQL().check_config({"url": url})
    assert problem.key == "url"
    assert says in str(problem)
    assert "geheim" not in str(problem)
    assert MySQL().check_config({"url": "mariadb://u:p@h/d?ssl=verify&ssl_ca=/x"}) == []


def test_a_server_that_is_not_there_is_an_error_without_the_password():
    config = {"url": "mysql://u:geheim@127.0.0.1:1/d"}
    with pytest.raises(SourceError) as caught:
        MySQL().test(config)
    assert "geheim" not in str(caught.value)
    assert not caught.value.permanent


def test_the_product_and_version_are_told(harness):
    assert MySQL().test(harness.config).startswith(("MariaDB 10", "MariaDB 11", "MySQL 8"))


@pytest.mark.parametrize("version", ["8.0.36", "11.4.2-MariaDB", "5.5.5-10.11.6-MariaDB-1"])
def test_a_server_that_is_not_tested_is_told(harness, monkeypatch, version):
    about = f"select @@sql_mode, '{version}', connection_id(), database()"
    monkeypatch.setattr("tasks.replicate.connectors.mysql.session._ABOUT", about)
    told = MySQL().test(harness.config)
    product = "MariaDB" if "MariaDB" in version else "MySQL"
    untested = "" if "10.11" in version else ", untested: it is tested with MariaDB 10.11"
    assert told == f"{product} {version}{untested}"


def test_a_missing_driver_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MySQL().missing() == "pymysql"
    assert MySQL().capabilities.extra == "mysql"


def test_members_of_an_enum_are_read():
    assert types.members("enum('a','it''s','x,y','')") == ("a", "it's", "x,y", "")
