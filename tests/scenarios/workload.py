"""The jobs of a scenario, the tables that they replicate, and the writers that change these."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import psycopg

from scenarios.fleet import Fleet
from scenarios.invariants import WATCH_WATERMARKS

ROWS = 1500
JOBS = """
datasources:
  source: {connector: postgresql, url: "${SOURCE_URL}"}
  sink: {connector: postgresql, url: "${SINK_URL}"}
jobs:
  work: {handler: work, overlap: allow, retry: {max_attempts: 6, backoff: 300ms}}
  turn: {handler: work, overlap: queue, retry: {max_attempts: 6, backoff: 300ms}}
  deaf: {handler: deaf, overlap: allow, retry: {max_attempts: 6, backoff: 300ms}, timeout: 20s}
  slots:
    handler: work
    overlap: allow
    retry: {max_attempts: 6, backoff: 300ms}
    concurrency: {key: slots, limit: 2}
  once:
    handler: work
    overlap: skip
    params: {seconds: 0.4}
    retry: {max_attempts: 4, backoff: 300ms}
    schedules: [{name: once, every: 2s}]
  often:
    handler: work
    overlap: allow
    params: {seconds: 0.2}
    retry: {max_attempts: 4, backoff: 300ms}
    schedules: [{name: often, every: 3s, misfire: catch_up}]
  full:
    source: {datasource: source, table: public.thing}
    sink: {datasource: sink, table: public.thing_full}
    mode: complete
    fetch_size: 300
    bandwidth: 60kB/s
    schedules: [{name: full, every: 7s}]
  atomic:
    source: {datasource: source, table: public.thing}
    sink: {datasource: sink, table: public.thing_atomic}
    mode: complete-atomic
    fetch_size: 300
    bandwidth: 60kB/s
    retry: {max_attempts: 4, backoff: 300ms}
    schedules: [{name: atomic, every: 5s, misfire: skip}]
  increment:
    source: {datasource: source, table: public.thing}
    sink: {datasource: sink, table: public.thing_increment}
    mode: incremental
    watermark: version
    fetch_size: 300
    retry: {max_attempts: 4, backoff: 300ms}
    schedules: [{name: increment, every: 2s}]
"""
HANDLED = ("work", "turn", "deaf", "slots")
REPLICATED = ("full", "atomic", "increment")
SCHEDULES = ("once", "often", *REPLICATED)
TABLES = """
create sequence version;
create table thing (id int primary key, version bigint not null, body text not null);
insert into thing select n, nextval('version'), md5(n::text) from generate_series(1, {rows}) n
"""
SINK_TABLE = (
    "create table {table} (id int primary key, version bigint not null, body text not null)"
)


class Writers:
    """Transactions on the source that overlap and commit out of order, until they are stopped."""

    def __init__(self, fleet: Fleet, count: int = 2) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(n),), daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            with suppress(psycopg.Error), self._fleet.postgres.connect("source") as source:
                while not self._stop.is_set():
                    with source.transaction():
                        source.execute(
                            """update thing set version = nextval('version'),
                               body = md5(random()::text) where id = %s""",
                            (chance.randint(1, ROWS),),
                        )
                        source.execute(
                            """insert into thing
                               select coalesce(max(id), 0) + %s, nextval('version'), 'new'
                               from thing on conflict do nothing""",
                            (chance.randint(1, 50),),
                        )
                        self._stop.wait(chance.uniform(0, 0.5))
            self._stop.wait(0.3)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def prepare(fleet: Fleet) -> None:
    """The tables, the jobs, a first good run of each replication, and the logs of fences."""
    with fleet.postgres.connect("source") as source:
        for statement in TABLES.format(rows=ROWS).split(";"):
            source.execute(statement)  # type: ignore[call-overload]
    with fleet.postgres.connect("sink") as sink:
        for job in REPLICATED:
            sink.execute(SINK_TABLE.format(table=f"thing_{job}"))  # type: ignore[call-overload]
    fleet.define(JOBS)
    fleet.rows(WATCH_WATERMARKS)


def compare(fleet: Fleet, job: str) -> list[str]:
    """Where a sink differs from its source; rows only ever change and appear at the source."""
    query = "select id, version, body from {} order by id"
    source = fleet.rows(query.format("thing"), database="source")
    sink = fleet.rows(query.format(f"thing_{job}"), database="sink")
    if source == sink:
        return []
    missing = [row for row in source if row not in sink][:3]
    return [
        f"the sink of {job} differs from its source: {len(source)} rows there, {len(sink)} here, "
        f"such as {missing}"
    ]
