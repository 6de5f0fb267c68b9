"""The definition file: everything that is wrong is said at once, with its line and no secret."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from catalog_support import TwoConnectors

from dispatch.definitions import Definitions, Existing, load, parse
from dispatch.definitions.documents import DefinitionError

ENVIRON = {
    "SHOP_URL": "postgresql://app:hunter2-secret@shop/db",
    "WAREHOUSE_URL": "postgresql://app:tiger9-secret@warehouse/db",
    "LIMIT": "2",
    "TABLE": "public.orders",
}
GOOD = """
datasources:
  shop:      {connector: postgresql, url: "${SHOP_URL}"}
  warehouse: {connector: postgres, url: "${WAREHOUSE_URL}"}
jobs:
  orders:
    source: {datasource: shop, table: "${TABLE}"}
    sink:   {datasource: warehouse, table: public.orders}
    mode: incremental
    watermark: updated_at
    parallelism: 2
    retry: {max_attempts: 5, backoff: 90s}
    timeout: 1h
    concurrency: {key: warehouse, limit: 2}
    schedules:
      - {cron: "*/15 * * * *", timezone: Europe/Madrid, misfire: skip}
      - {every: 15m, name: often, enabled: false}
  report:
    handler: report
    params: {day: 2026-11-01, nested: {n: 1}}
    source: shop
"""


def read(text: str, **options: Any) -> Definitions:
    return parse(textwrap.dedent(text), ENVIRON, TwoConnectors(), **options)


def mistakes(text: str, **options: Any) -> list[str]:
    with pytest.raises(DefinitionError) as caught:
        read(text, **options)
    message = str(caught.value)
    assert "secret" not in message.replace("may be secret", "")
    return message.splitlines()


def job(lines: str) -> str:
    return GOOD + textwrap.indent(textwrap.dedent(lines), "  ")


# What is read


def test_a_file_is_read_with_its_variables_and_defaults() -> None:
    found = read(GOOD)
    assert found.datasources["shop"].config == {"url": ENVIRON["SHOP_URL"]}
    assert found.datasources["warehouse"].connector == "postgresql"
    orders = found.jobs["orders"]
    assert (orders.handler, orders.source, orders.sink) == ("replicate", "shop", "warehouse")
    assert orders.definition == {
        "mode": "incremental",
        "source": {"datasource": "shop", "table": "public.orders"},
        "sink": {"datasource": "warehouse", "table": "public.orders"},
        "watermark": "updated_at",
        "parallelism": 2,
        "retry": {
            "max_attempts": 5, "backoff": 90.0, "on_worker_loss": True, "on_failure": True,
        },
        "timeout": 3600.0,
        "concurrency": {"key": "warehouse", "limit": 2},
        "queue": "runs",
        "priority": 0,
    }  # fmt: skip
    assert orders.overlap == "skip"
    assert orders.schedules is not None
    first, second = orders.schedules
    assert (first.name, first.cron, first.timezone, first.misfire, first.enabled) == (
        "orders-1", "*/15 * * * *", "Europe/Madrid", "skip", None,
    )  # fmt: skip
    assert (second.name, second.every_seconds, second.enabled) == ("often", 900.0, False)
    report = found.jobs["report"]
    assert report.handler == "report"
    assert report.definition["params"] == {"day": "2026-11-01", "nested": {"n": 1}}
    assert report.overlap == "queue"
    # What is not stated is not stored: for a schedule the default is another one (R-T6).
    assert "overlap" not in report.definition
    assert (report.source, report.sink, report.schedules) == ("shop", None, None)


@pytest.mark.parametrize(
    ("mode", "repeats"), [("complete", False), ("complete-atomic", True), ("incremental", True)]
)
def test_the_destructive_mode_is_not_repeated_by_default__R_R4(mode: str, repeats: bool) -> None:
    retry = (
        read(GOOD.replace("mode: incremental", f"mode: {mode}")).jobs["orders"].definition["retry"]
    )
    assert (retry["on_worker_loss"], retry["on_failure"]) == (repeats, repeats)


def test_a_plain_reference_is_typed_and_a_quoted_one_is_text() -> None:
    text = GOOD.replace(
        "{key: warehouse, limit: 2}", "\n      key: warehouse\n      limit: ${LIMIT}"
    )
    assert read(text).jobs["orders"].concurrency == ("warehouse", 2)
    assert mistakes(GOOD.replace("limit: 2}", 'limit: "${LIMIT}"}')) == [
        "line 14: jobs.orders.concurrency.limit: must be a whole number, 1 to 10000"
    ]


def test_a_doubled_dollar_is_the_text_itself() -> None:
    found = read(GOOD.replace("day: 2026-11-01", 'day: "$${HOME} costs $5"'))
    assert found.jobs["report"].definition["params"]["day"] == "${HOME} costs $5"


def test_a_file_may_be_json_as_other_programs_write_it() -> None:
    text = json.dumps({"jobs": {"report": {"handler": "report", "params": {"café": "😀"}}}})
    assert "\\ud83d\\ude00" in text
    assert read(text).jobs["report"].definition["params"] == {"café": "😀"}
    (only,) = mistakes(text.replace("\\ude00", ""))
    assert only.endswith("jobs.report.params.café: holds a character that no database stores")


def test_anchors_and_merges_work_and_keep_their_lines() -> None:
    text = job("""
        again: &base
          handler: report
          retry: &retry {max_attempts: 2}
        more:
          <<: *base
          retry: {<<: *retry, backoff: soon}
    """)
    (only,) = mistakes(text)
    assert only.startswith("line 28: jobs.more.retry.backoff: 'soon' is no duration")
    found = read(text.replace("soon", "0"))
    assert found.jobs["more"].definition["retry"]["max_attempts"] == 2


def test_a_job_may_name_what_is_stored_already() -> None:
    text = """
        jobs:
          one: {mode: complete, source: {datasource: old, table: t}, sink: {datasource: old}}
    """
    existing = Existing(datasources={"old": "sqlite"})
    assert read(text, existing=existing).jobs["one"].source == "old"
    assert mistakes(text, existing=Existing(datasources={"older": "sqlite"})) == [
        "line 3: jobs.one.source.datasource: no datasource is named old; did you mean older?",
        "line 3: jobs.one.sink.datasource: no datasource is named old; did you mean older?",
    ]


def test_an_empty_file_defines_nothing() -> None:
    for text in ("", "# nothing", "jobs:\ndatasources:\n"):
        found = read(text)
        assert (found.datasources, found.jobs) == ({}, {})


# What is refused


def test_a_connector_that_is_misspelled_is_told_at_its_line() -> None:
    text = """\
        datasources:
          shop: {conector: postgresql, url: "${SHOP_URL}"}
          warehouse:
            url: "${WAREHOUSE_URL}"
            Connector: postgresql
        jobs:
          orders:
            mode: complete
            source: {datasource: shop, table: a}
            sink: {datasource: warehouse, table: a}
    """
    assert mistakes(text) == [
        "line 2: datasources.shop.conector: is no key of a datasource; did you mean connector?",
        "line 5: datasources.warehouse.Connector: is no key of a datasource; did you mean "
        "connector?",
    ]


def test_every_mistake_is_reported_at_once_with_its_line() -> None:
    found = mistakes("""\
        datasource: {}
        datasources:
          shop: {connector: postgresq, url: "${SHOP_URL}"}
          bare: {url: "x"}
          lite: {connector: sqlite, url: "${NOWHERE}", colour: red}
          bad name: {connector: sqlite, url: "sqlite:x"}
        jobs:
          orders:
            mode: sometimes
            source: {datasource: shopp, table: a}
            sink: {datasource: lite}
            parallelism: 2
            retry: {max_attempts: 0, backof: 3}
            timeout: 1 fortnight
            overlap: allow
            concurency: {key: a, limit: 1}
            priority: 10
            schedules:
              - {cron: "61 * * * *", timezone: Europe/Madird}
              - {every: 15m, cron: "* * * * *"}
              - {every: 5m, timezone: UTC}
              - {cron: "@daily"}
              - {every: 1ms, misfire: never}
          report:
            handler: report
            params: [1]
            enabled: "yes"
          both: {handler: x, mode: complete}
          none: {queue: a}
          a/b: {handler: x}
          builtin: {handler: replicate}
    """)
    expected = [
        "line 1: datasource: is no key of a definition file (datasources, jobs); did you mean",
        "line 3: datasources.shop.connector: no connector is named postgresq",
        "line 4: datasources.bare: lacks connector; there are postgresql, sqlite",
        "line 5: datasources.lite.url: the environment variable NOWHERE is not set",
        "line 6: datasources.bad name: a datasource's name takes letters",
        "line 9: jobs.orders.mode: must be complete, complete-atomic or incremental",
        "line 10: jobs.orders.source.datasource: no datasource is named shopp",
        "line 12: jobs.orders.parallelism: sqlite is written by one writer",
        "line 13: jobs.orders.retry.backof: is no key of retry; did you mean backoff?",
        "line 13: jobs.orders.retry.max_attempts: must be a whole number, 1 to 1000",
        "line 14: jobs.orders.timeout: '1 fortnight' is no duration",
        "line 15: jobs.orders.overlap: allow would let two runs write one sink at once; "
        "write skip or queue",
        "line 16: jobs.orders.concurency: is no key of a replication job; did you mean concurr",
        "line 17: jobs.orders.priority: must be a whole number, 0 to 9",
        "line 19: jobs.orders.schedules[0].cron: ",
        "line 19: jobs.orders.schedules[0].timezone: unknown time zone 'Europe/Madird'",
        "line 20: jobs.orders.schedules[1]: needs one of cron (with timezone) and every",
        "line 21: jobs.orders.schedules[2].timezone: goes with cron",
        "line 22: jobs.orders.schedules[3]: lacks timezone",
        "line 23: jobs.orders.schedules[4].every: an interval of 1ms is too short",
        "line 23: jobs.orders.schedules[4].misfire: must be one of fire_once, skip, catch_up",
        "line 26: jobs.report.params: must hold keys",
        "line 27: jobs.report.enabled: must be true or false",
        "line 28: jobs.both.handler: stands beside mode",
        "line 29: jobs.none: needs handler: NAME, or mode: with source: and sink:",
        "line 30: jobs.a/b: a name with / belongs to the child jobs",
        "line 31: jobs.builtin.handler: is the built-in replication",
    ]
    assert len(found) >= len(expected)
    for line in expected:
        assert any(one.startswith(line) for one in found), (line, found)
    assert [int(one.split()[1].rstrip(":")) for one in found] == sorted(
        int(one.split()[1].rstrip(":")) for one in found
    )


def test_a_missing_variable_is_one_mistake_and_no_other() -> None:
    assert mistakes(GOOD.replace("${SHOP_URL}", "${SHOPURL}")) == [
        "line 3: datasources.shop.url: the environment variable SHOPURL is not set"
    ]


@pytest.mark.parametrize("reference", ["${}", "${A B}", "${LIMIT:-2}", "${1}"])
def test_a_reference_of_another_shape_is_refused(reference: str) -> None:
    (only,) = mistakes(GOOD.replace("${TABLE}", reference))
    assert only.startswith("line 7: jobs.orders.source.table: holds a ${ that is not ${NAME}")


def test_a_key_that_stands_twice_is_refused() -> None:
    assert mistakes(job("orders: {handler: x}")) == [
        "line 22: jobs.orders: stands twice (before on line 6)"
    ]


def test_one_concurrency_key_has_one_limit__R_C8() -> None:
    text = job("more: {handler: x, concurrency: {key: warehouse, limit: 3}}")
    (only,) = mistakes(text)
    assert only.startswith(
        "line 22: jobs.more.concurrency: limits 'warehouse' to 3, and orders limits it to 2"
    )


def test_one_concurrency_key_has_one_limit_also_with_what_is_stored__R_C8() -> None:
    stored = Existing(concurrency={"older": ("warehouse", 7), "free": None})
    (only,) = mistakes(GOOD, existing=stored)
    assert "limits 'warehouse' to 2, and the stored job older limits it to 7" in only
    # A job that the file itself redefines does not count.
    read(GOOD, existing=Existing(concurrency={"orders": ("warehouse", 7)}))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("day: 2026-11-01", 'day: "${SHOP_URL}"'),
        ("day: 2026-11-01", 'day: "${API_TOKEN}"'),
        ("day: 2026-11-01", "day: hunter2-secret"),
    ],
)
def test_no_secret_enters_a_job__R_X1(place: str, value: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse(GOOD.replace(place, value), {**ENVIRON, "API_TOKEN": "x"}, TwoConnectors())
    assert "hunter2" not in str(caught.value)
    assert "line 20: jobs.report.params.day" in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobs: [", "line 1: this is not YAML"),
        ("jobs:\n  a: {b: 1\n  c: 2\n", "this is not YAML"),
        ("jobs: {a: ${B}}", 'needs quotes: "${NAME}"'),
        ("- a", "line 1: the file must hold keys"),
        ("hello", "line 1: the file must hold keys"),
        ("jobs: {a: &x {handler: *x}}", "an alias refers to itself"),
        ("jobs: {a: &x [*x]}", "an alias refers to itself"),
        ("jobs: {a: *nowhere}", "this is not YAML"),
        ("jobs: !!python/object/apply:os.system [x]", "jobs: must hold keys"),
        ("jobs: {a: {handler: !!binary aGk=}}", "line 1: jobs.a.handler: is a kind of value"),
        ("jobs: {a: {handler: x, params: {n: .nan}}}", "jobs.a.params.n: is no number"),
        ('jobs: {a: {handler: x, params: {n: "\\0"}}}', "holds a character that no database"),
        ('jobs: {a: {handler: x, params: {n: "\\ud800"}}}', "holds a character that no database"),
        ("jobs: {? [a] : 1}", "a key must be a plain word"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
         "e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e]", "split it"),
        ("jobs: " + "[" * 5000, "nested too deeply"),
        ("a: \x01", "this is not YAML"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_definition_file_is_a_plain_error(text: str, says: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse(text, ENVIRON, TwoConnectors())
    assert says in str(caught.value)


def test_unreadable_files_are_plain_errors(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    with pytest.raises(DefinitionError, match="cannot be read: No such file") as caught:
        load(file, ENVIRON, TwoConnectors())
    assert caught.value.source == str(file)
    with pytest.raises(DefinitionError, match="cannot be read: Is a directory"):
        load(tmp_path, ENVIRON, TwoConnectors())
    file.write_bytes(b"jobs: {}\n# \xff\n")
    with pytest.raises(DefinitionError, match="line 2: is not UTF-8 text"):
        load(file, ENVIRON, TwoConnectors())
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert set(load(file, ENVIRON, TwoConnectors()).jobs) == {"orders", "report"}


def test_an_unknown_handler_is_a_note_and_no_mistake() -> None:
    good = GOOD.replace("postgres,", "postgresql,")
    assert read(good, handlers=["report"]).notes == ()
    (note,) = read(good, handlers=["reports"]).notes
    assert str(note).startswith(
        "line 19: jobs.report.handler: no handler named report is known here; did you mean reports?"
    )


def test_the_repr_of_a_datasource_shows_no_secret__R_X2() -> None:
    assert "hunter2" not in repr(read(GOOD))
