"""One way of moving the table, run once in a process of its own.

``python -m benchmarks.replication_paths NAME`` reads the places to use as JSON on standard input
and prints seconds and peak memory as JSON. Only the move is timed, not Python's start; the memory
is the whole process's. A replication of ours runs without the worker around it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import sqlite3
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {"csv_file": "t.csv", "parquet_file": "t.parquet"}
"""Tables of the two file datasources."""

TEXTS = "select id, uid, name, note, amount, at, flag, doc, n::text as n, d from t"
"""Digits as text: only the sink can tell whether they are a number, and COPY goes through text."""


def _bare_packages() -> None:
    """Import ``tasks.replicate`` without the Celery app, as a part's process does."""
    package = types.ModuleType("tasks")
    package.__path__ = [str(Path(__file__).resolve().parents[1] / "tasks")]
    sys.modules.setdefault("tasks", package)


def ours(
    place: dict[str, Any],
    source: str = "postgresql",
    sink: str = "postgresql",
    *,
    to: str = "t",
    lane: str | None = None,
    query: str | None = None,
    **more: Any,
) -> None:
    """A replication job in mode complete, as a worker would run it."""
    _bare_packages()
    from dispatch.context import BoundDatasource, RunContext
    from tasks.replicate import modes, registry
    from tasks.replicate.connector import Lane

    if lane is not None:
        with registry.get("postgresql").source(place["postgresql"]) as end:
            type(end).lanes = (Lane(lane),)
    run_id = uuid.uuid4()
    reads = {"table": FILES.get(source, "t")} if query is None else {"query": query}
    definition = {
        "source": {"datasource": "source", **reads},
        "sink": {"datasource": "sink", "table": FILES.get(sink, to)},
        "mode": "complete",
        "create": sink in FILES,
        **more,
    }
    names = ["file" if end in FILES else end for end in (source, sink)]
    sink_config = place["sink" if sink == "postgresql" else sink]
    context = RunContext(
        id=run_id,
        root_run_id=run_id,
        job="bench",
        job_id=run_id,
        attempt=1,
        fence=1,
        definition=definition,
        params={},
        source=BoundDatasource(uuid.uuid4(), "source", names[0], place[source]),
        sink=BoundDatasource(uuid.uuid4(), "sink", names[1], sink_config),
    )
    outcome = modes.run(context)
    assert outcome.rows_processed == place["rows"], outcome


def psql(place: dict[str, Any]) -> None:
    """The practical limit: one psql into another, in binary."""
    _truncate(place)
    out = [place["psql"], place["postgresql"]["url"], "-qc", "copy t to stdout (format binary)"]
    into = [place["psql"], place["sink"]["url"], "-qc", "copy t from stdin (format binary)"]
    with subprocess.Popen(out, stdout=subprocess.PIPE) as reader:
        subprocess.run(into, stdin=reader.stdout, check=True)
        assert reader.wait() == 0


def _truncate(place: dict[str, Any], table: str = "t") -> None:
    import psycopg
    from psycopg import sql

    with psycopg.connect(place["sink"]["url"], autocommit=True) as connection:
        connection.execute(sql.SQL("truncate {}").format(sql.Identifier(table)))


def _copy_rows(place: dict[str, Any], rows: Any, table: str = "t") -> None:
    import psycopg
    from psycopg import sql

    _truncate(place, table)
    with (
        psycopg.connect(place["sink"]["url"]) as connection,
        connection.cursor() as cursor,
        cursor.copy(sql.SQL("copy {} from stdin").format(sql.Identifier(table))) as copy,
    ):
        for row in rows:
            copy.write_row(row)


def script_sqlite(place: dict[str, Any]) -> None:
    """The best hand-written way from SQLite: its driver's rows into write_row."""
    with sqlite3.connect(place["sqlite_path"]) as connection:
        _copy_rows(place, connection.execute("select * from t"))


def script_mysql(place: dict[str, Any]) -> None:
    """The best hand-written way from MySQL: the fastest driver's streamed rows into write_row."""
    try:
        import MySQLdb as driver
        from MySQLdb.converters import conversions
        from MySQLdb.cursors import SSCursor
    except ImportError:
        import pymysql as driver
        from pymysql.converters import conversions
        from pymysql.cursors import SSCursor

    plain = dict(conversions)
    # Times and decimals stay text, as COPY wants them.
    for code in (7, 10, 11, 12, 246):
        plain[code] = str
    connection = driver.connect(**place["mysql_arguments"], conv=plain, charset="utf8mb4")
    with contextlib.closing(connection), connection.cursor(SSCursor) as cursor:
        cursor.execute("select * from t")
        _copy_rows(place, cursor, "wall")


def script_csv(place: dict[str, Any]) -> None:
    """The best way from CSV: the raw file into COPY."""
    import psycopg

    _truncate(place)
    with (
        psycopg.connect(place["sink"]["url"]) as connection,
        connection.cursor() as cursor,
        cursor.copy("copy t from stdin (format csv, header)") as copy,
        open(Path(place["csv"]["path"]) / "t.csv", "rb") as file,
    ):
        while block := file.read(64 * 1024):
            copy.write(block)


def sqlalchemy(place: dict[str, Any]) -> None:
    """Plain SQLAlchemy Core: read in pages, executemany into the sink."""
    import sqlalchemy as sa

    urls = [
        place[key]["url"].replace("postgresql://", "postgresql+psycopg://")
        for key in ("postgresql", "sink")
    ]
    _truncate(place)
    source, sink = (sa.create_engine(url) for url in urls)
    table = sa.Table("t", sa.MetaData(), autoload_with=source)
    with source.connect() as reading, sink.begin() as writing:
        rows = reading.execution_options(yield_per=5000).execute(
            sa.select(table).limit(place["rows"])
        )
        for page in rows.mappings().partitions():
            writing.execute(table.insert(), [dict(row) for row in page])


def dlt(place: dict[str, Any]) -> None:
    """dlt's SQL source with its fastest backend into its PostgreSQL destination."""
    import dlt as tool
    from dlt.sources.sql_database import sql_table
    from psycopg import conninfo

    sink = conninfo.conninfo_to_dict(place["sink"]["url"])
    credentials = {
        "drivername": "postgresql",
        "database": sink["dbname"],
        "username": sink["user"],
        "password": "none",
        "host": "localhost",
        "port": int(sink["port"] or 5432),
        # A socket's folder, which a host of theirs cannot be.
        "query": {"host": sink["host"]},
    }
    pipeline = tool.pipeline(
        f"bench_{uuid.uuid4().hex[:8]}",
        destination=tool.destinations.postgres(credentials),
        dataset_name="dlt_bench",
        pipelines_dir=place["folder"],
    )
    url = place["postgresql"]["url"].replace("postgresql://", "postgresql+psycopg2://")
    table = sql_table(url, table="t", backend="pyarrow", chunk_size=50_000)
    pipeline.run(table.add_limit(place["rows"] // 50_000 or 1), write_disposition="replace")


PATHS: dict[str, Callable[[dict[str, Any]], None]] = {
    "psql binary": psql,
    "PG -> PG, identical": lambda place: ours(place),
    "PG -> PG, casts": lambda place: ours(place, to="wide"),
    "PG -> PG, narrower": lambda place: ours(place, to="narrow"),
    "PG -> PG, text": lambda place: ours(place, query=TEXTS),
    "PG -> PG, two parts": lambda place: ours(place, parallelism=2),
    "PG -> PG, row lane": lambda place: ours(place, lane="rows"),
    "PG -> Parquet": lambda place: ours(place, "postgresql", "parquet_file"),
    "Parquet -> PG": lambda place: ours(place, "parquet_file"),
    "CSV -> PG": lambda place: ours(place, "csv_file"),
    "CSV -> PG, by hand": script_csv,
    "SQLite -> PG": lambda place: ours(place, "sqlite"),
    "SQLite -> PG, by hand": script_sqlite,
    "MariaDB -> PG": lambda place: ours(place, "mysql", to="wall"),
    "MariaDB -> PG, by hand": script_mysql,
    "SQLAlchemy": sqlalchemy,
    "dlt": dlt,
}


def import_ours() -> None:
    """A worker has imported everything long before a run."""
    _bare_packages()
    from tasks.replicate import modes, registry

    assert modes.run
    for connector in registry.connectors().values():
        with contextlib.suppress(Exception):
            # Opening nothing, but importing what an end needs.
            connector.source({})


def _import_all() -> None:
    """So has whoever writes by hand."""
    if sys.argv[1] in OURS:
        import_ours()
    importlib.import_module({"SQLAlchemy": "sqlalchemy", "dlt": "dlt"}.get(sys.argv[1], "psycopg"))


OURS = [name for name in PATHS if " -> " in name and "by hand" not in name]


def main() -> None:
    place = json.load(sys.stdin)
    _import_all()
    began = time.perf_counter()
    PATHS[sys.argv[1]](place)
    seconds = time.perf_counter() - began
    # Not ru_maxrss of this process, which begins with what its parent held.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) // 1024
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(json.dumps({"seconds": seconds, "peak_mb": max(peak, children)}))


if __name__ == "__main__":
    main()
