"""The race experiment: writers that commit late, and pulls that must miss nothing (R-F3).

Six writers change rows with ``updated_at = now()``; some hold their transaction open. Pulls run
one after another meanwhile. In the end, after a last pull, every row of the source stands in the
sink as it is. The same experiment with the naive bound (the greatest value read) loses rows:
that it does so here proves that the race was run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import psycopg
import pytest
from replication_kit import Database, Job

Make = Callable[..., Job]
SECONDS = 8.0
WRITERS = 6
ROWS = 400


def _write(url: str, seed: int, done: threading.Event) -> None:
    chance = random.Random(seed)
    with psycopg.connect(url, autocommit=True) as connection:
        while not done.is_set():
            with connection.transaction():
                connection.execute("select now()")
                held = chance.random() < 0.06
                wait = chance.uniform(0.8, 1.6) if held else chance.uniform(0, 0.02)
                done.wait(wait)
                if chance.random() < 0.5:
                    connection.execute(
                        "insert into t values (nextval('ids'), %s, now())", (chance.random(),)
                    )
                else:
                    connection.execute(
                        "update t set value = %s, updated_at = now() where id = %s",
                        (chance.random(), chance.randint(1, ROWS)),
                    )


@pytest.mark.parametrize("naive", [False, True])
def test_no_row_is_missing_or_stale__R_F3(
    source: Database, sink: Database, job: Make, naive: bool
) -> None:
    ddl = "create table t (id int primary key, value float8, updated_at timestamptz not null)"
    source.execute(ddl)
    sink.execute(ddl)
    source.execute("create sequence ids start 1000")
    source.execute("insert into t select i, 0, now() from generate_series(1, %s) i", ROWS)
    task = job("incremental", watermark="updated_at")
    done = threading.Event()
    writers = [
        threading.Thread(target=_write, args=(source.url, seed, done)) for seed in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    pulls = 0
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            task.run()
            pulls += 1
            if naive:
                task.watermark = sink.value("select max(updated_at)::text from t")
    finally:
        done.set()
        for writer in writers:
            writer.join(timeout=20)
    task.run()
    content = "select * from t order by id"
    here, there = set(sink.execute(content)), set(source.execute(content))
    assert pulls > 10
    if naive:
        assert there - here, "the race did not happen: the naive bound missed nothing"
    else:
        assert here == there
