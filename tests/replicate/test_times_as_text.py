"""Dates and times that a file has as text: one meaning everywhere, or a refusal by column."""

from __future__ import annotations

from pathlib import Path

import pytest
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure

WORDS = ("now", "today", "Tomorrow", "yesterday", "epoch", "allballs", " now ", "now BC")
TYPES = ("date", "time", "timestamp", "timestamptz")


def _job(tmp_path: Path, sink: Database, text: str, format_: str = "csv", **more: object) -> Job:
    lines = f'id,x\n1,"{text}"\n' if format_ == "csv" else f'{{"id": 1, "x": "{text}"}}\n'
    (tmp_path / f"t.{format_}").write_text(lines)
    return Job(
        {"path": str(tmp_path), "format": format_},
        sink.config,
        definition({"table": "t"}, {"table": "public.t"}, "complete", **more),
        connectors=("file", "postgresql"),
    )


def _refused(job: Job, sink: Database) -> None:
    with pytest.raises(HandlerFailure, match="column x: ") as caught:
        job.run()
    assert caught.value.permanent
    assert sink.value("select count(*) from t") == 0


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_words_for_the_present_are_refused(tmp_path: Path, sink: Database, format_: str) -> None:
    for kind in TYPES:
        sink.execute(f"drop table if exists t; create table t (id int, x {kind})")
        for word in WORDS:
            _refused(_job(tmp_path, sink, word, format_), sink)
    for kind in ("date[]", "timestamptz[]", "daterange", "timetz", "moment"):
        sink.execute(
            "drop table if exists t; drop type if exists moment; create type moment as (at date);"
            f"create table t (id int, x {kind})"
        )
        form = {"daterange": "[now,)", "timetz": "allballs", "moment": "(now)"}.get(kind, "{now}")
        _refused(_job(tmp_path, sink, form, format_), sink)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", "11/02/2026"),
        ("date", "2026-11-02 10:00:00"),
        ("date", "J2451187"),
        ("timestamp", "2026-11-02 10:00:00+05"),
        ("timestamp", "0044-03-15 10:00:00+05 BC"),
        ("timestamp", "2026-11-02 10:00:00.1234567"),
        ("timestamptz", "2026-11-02 10:00:00"),
        ("timestamptz", "2026-11-02"),
        ("timestamptz", "2026-11-02 10:00:00 CST"),
        ("timestamptz", "2026-11-02 10:00:00.1234567+00"),
    ],
)
def test_forms_of_more_than_one_meaning_are_refused(
    tmp_path: Path, sink: Database, kind: str, text: str
) -> None:
    sink.execute(f"create table t (id int, x {kind})")
    _refused(_job(tmp_path, sink, text), sink)


def test_forms_of_one_meaning_arrive(tmp_path: Path, sink: Database) -> None:
    sink.execute("set timezone = 'UTC'")
    for kind, text, found in (
        ("date", "2026-11-02", "2026-11-02"),
        ("date", "0044-03-15 BC", "0044-03-15 BC"),
        ("date", "-infinity", "-infinity"),
        ("date", "20261-11-02", "20261-11-02"),
        ("time", "24:00:00", "24:00:00"),
        ("timestamp", "2026-11-02T10:00:00.500", "2026-11-02 10:00:00.5"),
        ("timestamp", "0044-03-15 10:00:00 BC", "0044-03-15 10:00:00 BC"),
        ("timestamptz", "2026-11-02T10:00:00Z", "2026-11-02 10:00:00+00"),
        ("timestamptz", "2026-11-02 10:00:00+05:30", "2026-11-02 04:30:00+00"),
        ("timestamptz", "0044-03-15 10:00:00+00 BC", "0044-03-15 10:00:00+00 BC"),
        ("date[]", "{2026-11-02,NULL}", "{2026-11-02,NULL}"),
        ("tsvector", "'now'", "'now'"),
    ):
        sink.execute(f"drop table if exists t; create table t (id int, x {kind})")
        _job(tmp_path, sink, text).run()
        assert sink.value("select x::text from t") == found
