"""The nouns datasource, job and schedule, and apply and export, as a user types them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from commands_support import Cli
from commands_support import cli as cli
from psycopg import conninfo

from db import session
from tasks.replicate import registry

SECRET = "hunter2-s3cret"
FILE = """
datasources:
  shop: {connector: postgresql, url: "${SHOP_URL}"}
  warehouse: {connector: postgresql, url: "${SHOP_URL}"}
jobs:
  orders:
    source: {datasource: shop, table: public.orders, columns: [id, total]}
    sink: {datasource: warehouse, table: public.orders}
    mode: complete
    timeout: 1h
    schedules:
      - {cron: "30 3 * * *", timezone: Europe/Madrid}
  report: {handler: report, params: {day: "2026-11-01"}}
"""


@pytest.fixture
def url(database: str, environment: dict[str, str]) -> str:
    """A URL of the control database that carries a password; the server trusts us without it."""
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(database)
    host = parts.get("host") or "127.0.0.1"
    query = f"?host={host}" if str(host).startswith("/") else ""
    at = "" if query else f"{host}:{parts.get('port') or 5432}"
    user = parts.get("user") or "root"
    return f"postgresql://{user}:{SECRET}@{at}/{parts['dbname']}{query}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(FILE)
    return path


# apply and export


def test_apply_tells_its_changes_once_and_then_none(cli: Cli, file: Path, url: str) -> None:
    dry = cli("apply", file, "--dry-run", "--json", SHOP_URL=url).done()
    assert dry.json["applied"] is False
    done = cli("apply", file, "--json", SHOP_URL=url).done()
    assert [
        (change["action"], change["kind"], change["name"]) for change in done.json["changes"]
    ] == [
        ("add", "datasource", "shop"),
        ("add", "datasource", "warehouse"),
        ("add", "job", "orders"),
        ("add", "job", "report"),
        ("add", "schedule", "orders/orders-1"),
    ]
    assert done.json["changes"] == dry.json["changes"]
    assert cli("apply", file, "--json", SHOP_URL=url).done().json["changes"] == []
    assert "nothing to change" in cli("apply", file, SHOP_URL=url).done().stdout
    assert SECRET not in done.stdout + done.stderr + dry.stdout


def test_commands_read_the_catalog_behind_a_pooler(
    cli: Cli, file: Path, url: str, database: str, configure: Callable[..., Any]
) -> None:
    cli("apply", file, SHOP_URL=url).done()
    # Spelt differently, so that it is another endpoint: sessions are nobody's from here on.
    configure(DATABASE_DIRECT_URL=conninfo.make_conninfo(database, connect_timeout=7))
    assert session.is_pooled()
    assert cli("apply", file, "--dry-run", "--json", SHOP_URL=url).done().json["changes"] == []
    assert [row["name"] for row in cli("job", "list", "--json").done().json] == ["report", "orders"]
    assert cli("job", "show", "orders", "--json").done().json["source"] == "shop"
    assert cli("datasource", "show", "shop", "--json").done().json["jobs"] == ["orders"]
    assert len(cli("schedule", "next", "--json").done().json) == 1
    assert set(cli("export", "--json").done().json["jobs"]) == {"orders", "report"}
    assert cli("audit", "list", "--json").done().json[0]["action"] == "schedule.add"


def test_apply_names_every_mistake_with_file_and_line(cli: Cli, file: Path, rows: Any) -> None:
    file.write_text(FILE.replace("complete", "sometimes").replace("30 3 * * *", "99 3 * * *"))
    answer = cli("apply", file, "--json").failed()
    assert "4 mistakes; nothing was changed" in answer.stderr
    for line in (3, 4, 9, 12):
        assert f"{file}: line {line}: " in answer.stderr
    assert answer.json["error"].startswith("4 mistakes")
    assert rows("select from job") == []


def test_a_missing_variable_hides_no_other_mistake(cli: Cli, file: Path) -> None:
    file.write_text(
        """
datasources:
  shop: {connector: postgres, url: "${NOWHERE}", nonsense: 1}
  out: {connector: file, path: "${NOWHERE}", format: xls}
jobs:
  orders:
    source: {datasource: shop, table: public.orders, mode: complete}
    sink: {datasource: shop, table: public.orders, create: true}
    mode: complete
    atomic: diff
    query: select 1
    schedules: [{cron: "99 * * * *", timezone: UTC}]
"""
    )
    answer = cli("apply", file).failed()
    for says in (
        "line 3: datasources.shop.nonsense: is no setting of postgresql",
        "line 4: datasources.out.format: must be one of csv, jsonl, parquet",
        "line 7: jobs.orders.source.mode: belongs to the job itself: write mode: beside source",
        "line 8: jobs.orders.sink.create: belongs to the job itself: write create: true beside",
        "line 8: jobs.orders.sink.table: is the source's own table: write to another table",
        "line 10: jobs.orders.atomic: is only for mode complete-atomic",
        "line 11: jobs.orders.query: belongs under source",
        "line 12: jobs.orders.schedules[0].cron: '99 * * * *': bad minute",
    ):
        assert says in answer.stderr
    assert "10 mistakes" in answer.stderr


def test_a_key_is_sent_to_the_job_only_where_the_job_takes_it(
    cli: Cli, file: Path, url: str
) -> None:
    file.write_text(
        """
datasources: {shop: {connector: postgresql, url: "${U}"}}
jobs:
  orders:
    source: {datasource: shop, table: a, timeout: 1h, description: x, name: y, verfy: count}
    sink: {datasource: shop, table: b, paused: true, params: {}}
    mode: complete
"""
    )
    answer = cli("apply", file, U=url).failed()
    for says in (
        "line 5: jobs.orders.source.timeout: belongs to the job itself: write timeout: beside",
        "line 5: jobs.orders.source.description: is no key of a replication job; there are",
        "line 5: jobs.orders.source.name: is no key of a replication job",
        "line 5: jobs.orders.source.verfy: is no key of a replication job",
        "line 6: jobs.orders.sink.paused: belongs to the job itself: write paused: true beside",
        "line 6: jobs.orders.sink.params: is no key of a replication job",
    ):
        assert says in answer.stderr
    assert "6 mistakes" in answer.stderr


def test_what_a_jobs_connectors_cannot_do_is_told_by_key(
    cli: Cli, file: Path, url: str, rows: Callable[..., Any]
) -> None:
    file.write_text(
        """
datasources:
  shop: {connector: postgresql, url: "${U}"}
  out: {connector: file, path: /tmp/out.csv, format: csv}
jobs:
  orders:
    source: {datasource: shop, table: public.orders}
    sink: {datasource: out, table: orders}
    mode: incremental
    watermark: updated_at
    parallelism: 2
"""
    )
    answer = cli("apply", file, U=url).failed()
    for says in (
        "line 9: jobs.orders.mode: file cannot be written in mode incremental; it can ",
        "line 11: jobs.orders.parallelism: file is written by one writer; remove it",
    ):
        assert says in answer.stderr
    assert "2 mistakes" in answer.stderr
    assert rows("select from job") == []


def test_a_job_of_a_connector_without_its_driver_is_refused_with_the_install_command(
    cli: Cli, file: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mysql = 'my: {connector: mysql, url: "mysql://u:p@shop/db"}'
    pg = 'shop: {connector: postgresql, url: "${U}"}'
    file.write_text(f"datasources:\n  {mysql}\n  {pg}\n")
    cli("apply", file, U=url).done()
    monkeypatch.setattr(type(registry.get("mysql")), "missing", lambda self: "pymysql")
    file.write_text(
        """
jobs:
  orders:
    source: {datasource: my, table: orders}
    sink: {datasource: shop, table: public.orders}
    mode: complete
"""
    )
    assert (
        "line 3: jobs.orders: connector mysql needs pymysql, which is not installed: "
        "pip install 'celery-claimcheck[mysql]'"
    ) in cli("apply", file).failed().stderr


def test_an_alias_of_a_connector_is_noted(cli: Cli, file: Path, url: str) -> None:
    file.write_text('datasources: {shop: {connector: postgres, url: "${U}"}}')
    assert "postgres is another name of postgresql" in cli("apply", file, U=url).done().stderr


def test_apply_reads_standard_input(cli: Cli) -> None:
    assert cli("apply", "-", stdin="jobs: {a: {handler: x}}").done()
    assert "line 1" in cli("apply", "-", stdin="jobs: {a: {}}").failed().stderr
    assert "cannot be read" in cli("apply", "/nowhere.yaml").failed().stderr


def test_apply_says_when_a_handler_is_not_known_here(cli: Cli, file: Path, url: str) -> None:
    answer = cli("apply", file, SHOP_URL=url).done()
    assert "no handler named report is known here" in answer.stderr


def test_export_gives_back_what_apply_takes(cli: Cli, file: Path, url: str, tmp_path: Path) -> None:
    cli("apply", file, SHOP_URL=url).done()
    exported = tmp_path / "exported.yaml"
    answer = cli("export", "-o", exported).done()
    assert SECRET not in answer.stdout + exported.read_text()
    again = cli("apply", exported, "--json", SHOP_URL=url, WAREHOUSE_URL=url).done()
    assert again.json["changes"] == []
    found = cli("export", "--json").done().json
    assert found["datasources"]["shop"] == {"connector": "postgresql", "url": "${SHOP_URL}"}
    assert cli("export").done().stdout == exported.read_text()


# datasource


def test_a_datasource_lives_without_showing_its_secret__R_X2(
    cli: Cli, url: str, rows: Callable[..., Any]
) -> None:
    answers = [
        cli("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U", U=url),
        cli("datasource", "add", "other", "--connector", "postgresql", "--url-stdin", stdin=url),
        cli("datasource", "list", "--json"),
        cli("datasource", "list"),
        cli("datasource", "show", "shop", "--json"),
        cli("datasource", "show", "shop"),
        cli("datasource", "test", "shop", "--json"),
        cli("datasource", "test", "shop"),
        cli("datasource", "disable", "shop", "--json"),
        cli("datasource", "enable", "shop"),
        cli("datasource", "edit", "shop", "--url-env", "U", "--json", U=url),
        cli("audit", "list", "--json"),
    ]
    for answer in answers:
        assert SECRET not in answer.done().stdout + answer.stderr
    assert [row["name"] for row in answers[2].json] == ["other", "shop"]
    shown = answers[4].json
    assert shown["config"] == {"url": "***"}
    assert shown["endpoint"].startswith("postgresql://")
    assert shown["capabilities"]["transactional"] is True
    assert shown["capabilities"]["staging_schema"] is True
    assert shown["enabled"] is True
    assert "PostgreSQL" in answers[6].json["found"]
    assert answers[8].json["changed"] is True
    assert answers[10].json["changed"] is False
    assert SECRET not in str(rows("select * from datasource"))
    cli("datasource", "rm", "shop").done()
    assert [row["name"] for row in cli("datasource", "list", "--json").json] == ["other"]


def test_a_secret_is_removed_by_clear_alone(cli: Cli, url: str, tmp_path: Path) -> None:
    cli("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U", U=url).done()
    to_file = (
        "datasource", "edit", "shop", "--connector", "file",
        "--set", f"path={tmp_path}", "--set", "format=csv",
    )  # fmt: skip
    answer = cli(*to_file).failed()
    assert "datasources.shop.url: is no setting of file" in answer.stderr
    assert "--clear url" in answer.stderr
    assert SECRET not in answer.stdout + answer.stderr
    assert cli("datasource", "show", "shop", "--json").json["config"] == {"url": "***"}
    cli(*to_file, "--clear", "url").done()
    shown = cli("datasource", "show", "shop", "--json").json
    assert shown["config"] == {"path": str(tmp_path), "format": "csv"}


def test_a_secret_on_the_command_line_is_refused__R_X2(cli: Cli, url: str) -> None:
    add = ("datasource", "add", "shop", "--connector", "postgresql")
    answer = cli(*add, "--set", f"url={url}").failed(2)
    assert "--url-env VAR or --url-stdin" in answer.stderr
    assert SECRET not in answer.stderr
    assert "not set" in cli(*add, "--url-env", "NOWHERE").failed(2).stderr
    assert "one line" in cli(*add, "--url-stdin", stdin="").failed(2).stderr
    assert "not both" in cli(*add, "--url-stdin", "--url-env", "U", U=url).failed(2).stderr


def test_mistakes_about_datasources_are_plain(cli: Cli, url: str) -> None:
    add = ("datasource", "add", "shop", "--connector")
    assert (
        "did you mean postgresql?"
        in cli(*add, "postgresq", "--url-env", "U", U=url).failed().stderr
    )
    cli(*add, "postgresql", "--url-env", "U", U=url).done()
    assert (
        "is named 'shop' already"
        in cli(*add, "postgresql", "--url-env", "U", U=url).failed().stderr
    )
    answer = cli("datasource", "show", "shoop", "--json").failed()
    assert "did you mean shop?" in answer.json["error"]
    assert "is not set for" in cli("datasource", "edit", "shop", "--clear", "x").failed().stderr


def test_a_password_that_ends_early_is_refused_and_not_shown__R_X2(
    cli: Cli, url: str, file: Path
) -> None:
    raw = "postgresql://u2me:topsecret@hunter2tail@127.0.0.1/db"
    add = ("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U")
    edit = ("datasource", "edit", "shop", "--url-env", "U")
    refused = [cli(*add, U=raw).failed(), cli("apply", file, SHOP_URL=raw).failed()]
    cli(*add, U=url).done()
    refused.append(cli(*edit, U=raw).failed())
    for answer in refused:
        assert "datasources.shop.url: a raw @, /, # or ?" in answer.stderr
        assert "%40" in answer.stderr
        for part in ("topsecret", "hunter2tail", "127.0.0.1"):
            assert part not in answer.stdout + answer.stderr
    assert "line 3: datasources.shop.url" in refused[1].stderr


def test_a_datasource_that_does_not_answer_fails_the_test(cli: Cli) -> None:
    url = f"postgresql://app:{SECRET}@127.0.0.1:1/x?connect_timeout=3"
    cli("datasource", "add", "away", "--connector", "postgresql", "--url-env", "U", U=url).done()
    answer = cli("datasource", "test", "away", "--json").failed()
    assert SECRET not in answer.stdout + answer.stderr
    assert answer.json["error"].startswith("datasource away: ")


def test_without_its_key_a_datasource_says_so_and_can_be_replaced__R_X3(
    cli: Cli, url: str, environment: dict[str, str], tmp_path: Path
) -> None:
    add = ("datasource", "add", "shop", "--connector", "postgresql", "--url-env", "U")
    cli(*add, U=url).done()
    keyring = Path(environment["CLAIMCHECK_KEYRING_FILE"])
    keyring.unlink()
    assert "does not exist" in cli("datasource", "show", "shop").failed().stderr
    cli("keyring", "init", "--force").done()
    shown = cli("datasource", "show", "shop", "--json").done().json
    assert shown["config"] is None
    assert "'shop' cannot be opened" in shown["problem"]
    assert "'shop' cannot be opened" in cli("datasource", "test", "shop").failed().stderr
    path = tmp_path / "again.yaml"
    path.write_text("datasources: {shop: {connector: postgresql, url: '${U}'}}")
    assert "cannot be opened" in cli("apply", path, "--dry-run", U=url).done().stdout
    refused = cli("apply", path, U=url).failed().stderr
    assert "this keyring cannot open what is stored of shop; nothing was changed" in refused
    assert "--replace-unreadable" in refused
    assert cli("datasource", "show", "shop", "--json").done().json["config"] is None
    applied = cli("apply", path, "--replace-unreadable", U=url).done()
    assert "cannot be opened" in applied.stdout
    cli("datasource", "test", "shop").done()


# job


def test_a_job_is_added_shown_switched_and_removed(cli: Cli, rows: Callable[..., Any]) -> None:
    added = cli("job", "add", "report", "--handler", "report", "--param", "day=2026-11-01",
                "--param", "n=3", "--timeout", "5m", "--set", "retry.backoff=2m",
                "--concurrency", "key=2", "--json").done()  # fmt: skip
    assert added.json["definition"]["params"] == {"day": "2026-11-01", "n": 3}
    assert added.json["concurrency"] == {"key": "key", "limit": 2}
    edited = cli("job", "edit", "report", "--priority", "4", "--clear", "timeout", "--json").done()
    assert {row["key"]: row["to"] for row in edited.json["change"]["changes"]} == {
        "timeout": None, "priority": 4,
    }  # fmt: skip
    assert cli("job", "edit", "report", "--priority", "4", "--json").done().json["changed"] is False
    for verb, state in (("disable", "disabled"), ("enable", "enabled"), ("pause", "paused")):
        cli("job", verb, "report").done()
        assert state in cli("job", "list").done().stdout
    cli("job", "resume", "report").done()
    cli("job", "disable", "report", "--binding", "sink").done()
    shown = cli("job", "show", "report", "--json").done().json
    assert (shown["sink_enabled"], shown["source_enabled"], shown["enabled"]) == (False, True, True)
    assert shown["definition"]["retry"]["backoff"] == 120.0
    cli("job", "rm", "report").done()
    assert cli("job", "list", "--json").done().json == []
    assert "no job is named" in cli("job", "show", "report").failed().stderr
    assert rows("select outcome from audit_event where action = 'job.remove'") == [
        {"outcome": "removed"}
    ]


def test_a_replication_job_is_checked_with_its_connectors(cli: Cli, file: Path, url: str) -> None:
    cli("apply", file, SHOP_URL=url).done()
    add = ("job", "add", "copy", "--source", "shop", "--sink", "warehouse",
           "--source-table", "public.a", "--sink-table", "public.a")  # fmt: skip
    assert "mode: is missing" in cli(*add).failed().stderr
    assert "watermark: is missing" in cli(*add, "--mode", "incremental").failed().stderr
    overlap = cli(*add, "--mode", "complete", "--overlap", "allow").failed()
    assert "write skip or queue" in overlap.stderr
    cli(*add, "--mode", "incremental", "--watermark", "at").done()
    shown = cli("job", "show", "copy", "--json").done().json
    assert "safe bound" in shown["watermark_note"]
    assert shown["definition"]["source"] == {"datasource": "shop", "table": "public.a"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("source=pg17", "source: must be a mapping, such as {datasource: NAME, table: SCHEMA."),
        ("create=maybe", "create: must be true or false"),
        ("bandwidth=[1]", "bandwidth: must be bytes a second, such as 10MB"),
        ('source.where="a\\0b"', "source.where: holds a character that no database stores"),
        ('source.columns="\\ud800"', "source.columns: holds a character that no database stores"),
    ],
)
def test_a_wrong_value_is_told_and_not_a_fault(
    cli: Cli, file: Path, url: str, change: str, says: str
) -> None:
    cli("apply", file, SHOP_URL=url).done()
    assert says in cli("job", "edit", "orders", "--set", change).failed().stderr


def test_a_replication_takes_no_parameters__R_T8(
    cli: Cli, file: Path, url: str, rows: Callable[..., Any], trigger: Any
) -> None:
    from tasks import InvalidParameters

    added = cli("apply", file, SHOP_URL=url).done().stdout
    assert "+ job orders  complete, shop public.orders -> warehouse public.orders" in added
    assert "+ datasource shop  postgresql\n" in added
    refused = cli("run", "trigger", "orders", "--param", "day=1").failed().stderr
    assert "takes no parameters" in refused
    assert "celery -A tasks job show orders" in refused
    assert rows("select from job_run") == []
    cli("run", "trigger", "orders").done()
    # Also where an active run would be handed back: nothing is stored, no alias either.
    with pytest.raises(InvalidParameters, match="takes no parameters"):
        trigger.apply_async(("orders",), {"day": 1}, task_id=str(uuid4()))
    assert rows("select from run_alias") == []


def test_a_job_with_an_active_run_stays__R_S3(cli: Cli) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    run = cli("run", "trigger", "report", "--json").done().json["id"]
    assert f"run cancel {run}" in cli("job", "rm", "report").failed().stderr
    cli("run", "cancel", run).done()
    cli("job", "rm", "report").done()
    assert [row["id"] for row in cli("run", "list", "--json").done().json] == [run]


def test_a_watermark_is_reset_on_demand(cli: Cli, rows: Callable[..., Any]) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    rows("update job set watermark = '7', watermark_type = 'bigint'")
    done = cli("job", "edit", "report", "--reset-watermark").done()
    assert "its next run reads everything again" in done.stdout + done.stderr
    assert rows("select watermark, watermark_type from job") == [
        {"watermark": None, "watermark_type": None}
    ]


def test_the_watermark_of_a_child_is_reset_by_itself_or_with_all_of_its_pattern(
    cli: Cli, rows: Callable[..., Any]
) -> None:
    for name in ("all", "a", "b"):
        cli("job", "add", name, "--handler", "report").done()
    rows(
        "update job set watermark = '7', watermark_type = 'bigint', name = 'all/' || name,"
        " parent_job_id = (select id from job where name = 'all') where name <> 'all'"
    )
    marks = "select name, watermark from job where name <> 'all' order by name"
    cli("job", "edit", "all/a", "--reset-watermark").done()
    assert [row["watermark"] for row in rows(marks)] == [None, "7"]
    done = cli("job", "edit", "all", "--reset-watermark").done()
    assert "the watermark of 1 of its child jobs is reset" in done.stdout + done.stderr
    assert [row["watermark"] for row in rows(marks)] == [None, None]
    edited = cli("job", "edit", "all/a", "--priority", "3").failed()
    assert "is written by all, whose next run would undo an edit: edit that job" in edited.stderr


# schedule


def test_a_schedule_is_added_listed_switched_and_removed(cli: Cli) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    added = cli("schedule", "add", "report", "--cron", "30 3 * * *", "--timezone", "Europe/Madrid",
                "--misfire", "skip", "--json").done()  # fmt: skip
    assert (added.json["name"], added.json["misfire"]) == ("report-1", "skip")
    cli("schedule", "add", "report", "--every", "15m", "--name", "often").done()
    listed = cli("schedule", "list", "--json").done().json
    assert [(row["job"], row["name"], row["every"]) for row in listed] == [
        ("report", "often", "15m"), ("report", "report-1", None),
    ]  # fmt: skip
    coming = cli("schedule", "next", "report-1", "-n", "3", "--json").done().json
    times = [datetime.fromisoformat(moment) for moment in coming[0]["fire_times"]]
    assert [(moment.hour, moment.minute) for moment in times] == [(3, 30)] * 3
    assert times == sorted(set(times))
    assert all(moment.utcoffset() for moment in times)
    cli("schedule", "disable", "often").done()
    assert cli("schedule", "next", "often", "--json").done().json[0]["fire_times"] == []
    assert "disabled" in cli("schedule", "next").done().stdout
    cli("schedule", "enable", "report/often").done()
    cli("schedule", "rm", "often").done()
    assert [row["name"] for row in cli("schedule", "list", "--json").done().json] == ["report-1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "--cron", "* * * * *"], "lacks timezone"),
        (["report", "--cron", "99 * * * *", "--timezone", "UTC"], "minute"),
        (["report", "--every", "15m", "--timezone", "UTC"], "an interval knows no time zone"),
        (["report", "--every", "soon"], "is no duration"),
        (["report"], "needs one of cron"),
        (["nothing", "--every", "1h"], "no job is named"),
        (["report", "--cron", "@daily", "--timezone", "Europe/Madird"], "Europe/Madrid"),
    ],
)
def test_mistakes_about_schedules_are_plain(cli: Cli, words: list[str], says: str) -> None:
    cli("job", "add", "report", "--handler", "report").done()
    assert says in cli("schedule", "add", *words).failed().stderr


# all of them


def test_without_json_people_read_tables_and_with_it_programs_read_a_list(cli: Cli) -> None:
    for noun in ("datasource", "job", "schedule", "run", "audit"):
        answer = cli(noun, "list", "--json").done()
        assert answer.json == []
        assert answer.stderr == ""
        assert cli(noun, "list").done().stdout == ""


def test_wrong_usage_exits_with_2(cli: Cli) -> None:
    cli("job", "show").failed(2)
    cli("job", "list", "--nonsense").failed(2)
    cli("run", "show", "no-uuid").failed(2)
    cli("job", "add", "x", "--param", "novalue").failed(2)
