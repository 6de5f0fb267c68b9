"""Connectors by name, what they can do, and what jobs are refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replication_kit import definition

from tasks.replicate import page, registry
from tasks.replicate.connector import Connector, Problem, SinkError, SourceError
from tasks.replicate.connectors import urls
from tasks.replicate.spec import ReplicationSpec, SpecError


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(registry.UnknownConnector, match="did you mean postgresql"):
        registry.get("postgresq")
    assert registry.get("mariadb").name == "mysql"


def test_a_missing_driver_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(registry.get("mysql")), "missing", lambda self: "pymysql")
    with pytest.raises(registry.MissingExtra, match=r"pip install 'celery-claimcheck\[mysql\]'"):
        registry.get("mysql")


@pytest.mark.parametrize("name", list(registry.BUILT_IN))
def test_a_wrong_configuration_is_told_without_its_values(name: str) -> None:
    for config in ({}, {"url": "nonsense://u:secret-word@h:x:y"}, {"nonsense": "secret-word"}):
        found = registry.check_config(name, config)
        assert found
        assert "secret-word" not in "".join(map(str, found))


@pytest.mark.parametrize("name", ["postgresql", "mysql"])
@pytest.mark.parametrize(
    "rest",
    [
        "u:topsecret@hunter2tail@127.0.0.1/db",
        "u@me:topsecret@127.0.0.1/db",
        "u:topsecret/hunter2tail@127.0.0.1/db",
        "u:12/hunter2tail@127.0.0.1/db",
        "u:12/secret?hunter2tail@127.0.0.1/db",
        "u:topsecret#hunter2tail@127.0.0.1/db",
        "u:topsecret?hunter2tail@127.0.0.1/db",
        "u:topsecret?a=hunter2tail@127.0.0.1/db",
        "u:top@secret?hunter2tail@127.0.0.1/db",
        "u:top@secret#hunter2tail@127.0.0.1/db",
    ],
)
def test_a_url_whose_password_ends_early_is_refused__R_X2(name: str, rest: str) -> None:
    found = registry.check_config(name, {"url": f"{name}://{rest}"})
    assert found == [Problem("url", urls.RAW)]
    assert "%40" in urls.RAW


@pytest.mark.parametrize("name", ["postgresql", "mysql"])
def test_a_port_that_is_none_is_refused(name: str) -> None:
    for port in ("99999", "0", "port", "65536"):
        found = registry.check_config(name, {"url": f"{name}://u:p@host:{port}/db"})
        assert found == [Problem("url", urls.PORT)]


def test_urls_that_can_be_told_apart_are_taken() -> None:
    for url in (
        "postgresql://u:p%40ss%2F%23%3F@host/db",
        "postgresql://u:p@one:5432,two:5433/db",
        "postgresql://u:p@[::1]:5432/db",
        "postgresql://u:p@/db?host=/run/a@b",
        "postgresql://u:p@host?application_name=a@b",
        "postgresql:///db?user=a@b&port=5432",
        "postgresql+psycopg://%2Frun%2Fpostgresql/db",
        "host=shop password='a@b/c'",
    ):
        assert registry.check_config("postgresql", {"url": url}) == [], url
    for url in ("mysql://u:p%40ss@host/db", "mysql://u:p@host/db?unix_socket=/run/a@b"):
        assert registry.check_config("mysql", {"url": url}) == [], url


def test_a_url_stored_before_it_was_refused_is_not_shown__R_X2() -> None:
    config = {"url": "postgresql://u:topsecret@hunter2tail@127.0.0.1/db"}
    with pytest.raises(SourceError, match="percent-encode") as caught:
        registry.get("postgresql").source(config)
    assert "hunter2tail" not in str(caught.value)
    assert caught.value.permanent
    with pytest.raises(SinkError, match="percent-encode"):
        registry.get("postgresql").sink(config)


def test_what_a_connector_cannot_do_is_refused_at_apply() -> None:
    spec = ReplicationSpec.parse(
        definition(
            {"table": "t", "where": "x"},
            {"table": "t"},
            "complete-atomic",
            atomic="rename",
            parallelism=2,
        )
    )
    assert registry.problems(spec, "postgresql", "postgresql") == []
    found = registry.problems(spec, "sqlite", "sqlite")
    assert [problem.key for problem in found] == ["atomic"] + ["parallelism"] * 2


@pytest.mark.parametrize("mode", ["complete-atomic", "incremental"])
def test_a_staging_schema_is_refused_where_the_sink_has_none(mode: str) -> None:
    watermark = {"watermark": "id"} if mode == "incremental" else {}
    sink = {"table": "t", "staging_schema": "landing"}
    spec = ReplicationSpec.parse(definition({"table": "t"}, sink, mode, **watermark))
    for name in ("postgresql", "mysql"):
        assert registry.problems(spec, "postgresql", name) == []
    for name in ("sqlite", "file"):
        found = registry.problems(spec, "postgresql", name)
        assert str(found[-1]) == f"sink.staging_schema: {name} stages in no schema; remove it"


@pytest.mark.parametrize(
    "more", [{"mode": "complete"}, {"mode": "complete-atomic", "atomic": "rename"}]
)
def test_a_staging_schema_is_refused_where_it_does_nothing(more: dict[str, Any]) -> None:
    sink = {"table": "t", "staging_schema": "landing"}
    with pytest.raises(SpecError) as caught:
        ReplicationSpec.parse(definition({"table": "t"}, sink, **more))
    assert [problem.key for problem in caught.value.problems] == ["sink.staging_schema"]
    del sink["staging_schema"]
    ReplicationSpec.parse(definition({"table": "t"}, sink, **more))


def test_a_definitions_mistakes_come_all_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        ReplicationSpec.parse(
            {
                "source": {"datasource": "a", "tabel": "x", "columns": "id"},
                "sink": {"datasource": "b", "table": 'a."b'},
                "mode": "complet",
                "bandwidth": "fast",
                "retry": {},
            }
        )
    assert [problem.key for problem in caught.value.problems] == [
        "source.columns",
        "source.tabel",
        "sink.table",
        "mode",
        "bandwidth",
    ]
    assert "did you mean table?" in str(caught.value)


def test_a_table_onto_itself_is_refused_where_both_sides_say_the_same() -> None:
    def problems(source: str | None, sink: str | None, **more: Any) -> list[str]:
        whole = definition({"table": source}, {"table": sink}, "complete", **more)
        whole["source"]["datasource"] = "sink"
        try:
            ReplicationSpec.parse(whole)
        except SpecError as error:
            return [problem.key for problem in error.problems]
        return []

    assert problems("public.t", 'public."t"') == ["sink.table"]
    assert problems("public.t", "public.T") == []
    assert problems("public.t", "t") == []
    assert problems(None, None, tables=["public.*"]) == ["sink"]
    ReplicationSpec.parse(definition({"table": "t"}, {"table": "t"}, "complete"))


@pytest.mark.parametrize(
    "lag", [-1, 1e300, float("inf"), float("nan"), "9" * 400, "1000000d", True]
)
def test_a_lag_that_cannot_be_is_a_mistake_of_the_definition(lag: Any) -> None:
    with pytest.raises(SpecError) as caught:
        ReplicationSpec.parse(
            definition({"table": "t"}, {"table": "t"}, "incremental", watermark="at", lag=lag)
        )
    assert [problem.key for problem in caught.value.problems] == ["lag"]


def test_a_stored_option_that_a_newer_version_knows_is_not_passed_by() -> None:
    stored = definition({"table": "t"}, {"table": "t"}, "complete", queue="q", priority=5, retry={})
    assert ReplicationSpec.parse(stored).mode == "complete"
    with pytest.raises(SpecError, match="masking: is no key of a replication job"):
        ReplicationSpec.parse({**stored, "masking": {"email": "hash"}})


def test_the_watermarks_bound_is_stated__R_F3() -> None:
    spec = ReplicationSpec.parse(
        definition({"table": "t"}, {"table": "t"}, "incremental", watermark="at", lag="90s")
    )
    assert "lag of 90" in (registry.watermark_note(spec, "postgresql") or "")
    assert "missed" in (registry.watermark_note(spec, "sqlite") or "")


@pytest.mark.parametrize(
    ("type_", "lag", "starts"),
    [
        (None, None, "for timestamptz and xid8 safe bound"),
        ("timestamptz", None, "safe bound"),
        ("timestamptz", "90s", "lag of 90 s below the oldest open transaction"),
        ("xid8", "90s", "safe bound"),
        ("bigint", None, "lag of 300 s (numbers: 10000)"),
        ("bigint", 5, "lag of 5:"),
        ("date", None, "lag of 300 s"),
    ],
)
def test_the_bound_of_a_known_watermark_is_stated_as_it_is__R_F3(
    type_: str | None, lag: Any, starts: str
) -> None:
    more = {} if lag is None else {"lag": lag}
    spec = ReplicationSpec.parse(
        definition({"table": "t"}, {"table": "t"}, "incremental", watermark="at", **more)
    )
    assert (registry.watermark_note(spec, "postgresql", type_) or "").startswith(starts)


def test_the_connectors_page_is_what_they_say_of_themselves() -> None:
    text = (Path(__file__).parents[2] / "docs" / "connectors.md").read_text()
    assert text == page.page(), "python -m tasks.replicate.page > docs/connectors.md"


def test_a_third_partys_connector_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Entry:
        name, value = "theirs", "theirs:Theirs"

        def load(self) -> type[Connector]:
            return type(registry.get("sqlite"))

    class Broken(Entry):
        name = "broken"

        def load(self) -> type[Connector]:
            raise ImportError("no such module")

    registry.connectors.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(), Broken()])
    try:
        assert "theirs" in registry.connectors()
        assert "broken" not in registry.connectors()
    finally:
        registry.connectors.cache_clear()
