"""What the catalog's tests share: connectors without drivers, and a file that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from db.keyring import Keyring
from dispatch import catalog
from dispatch.catalog import plans
from dispatch.catalog.changes import Change
from dispatch.definitions import parse

KEYRING = Keyring("v1", {"v1": bytes(32)})
OTHER_KEYRING = Keyring("v2", {"v2": bytes(range(32))})

URLS = {
    "SHOP_URL": "postgresql://app:hunter2-secret@shop/db",
    "WAREHOUSE_URL": "postgresql://app:tiger9-secret@warehouse/db",
}

FILE = """
datasources:
  shop:      {connector: postgresql, url: "${SHOP_URL}"}
  warehouse: {connector: postgresql, url: "${WAREHOUSE_URL}"}
jobs:
  orders:
    source: {datasource: shop, table: public.orders}
    sink:   {datasource: warehouse, table: public.orders}
    mode: incremental
    watermark: updated_at
    retry: {max_attempts: 5, backoff: 90s}
    timeout: 1h
    concurrency: {key: warehouse, limit: 2}
    schedules:
      - {cron: "*/15 * * * *", timezone: Europe/Madrid, misfire: skip}
      - {every: 15m, name: often}
  report:
    handler: report
    params: {day: "2026-11-01", cost: "$${5}"}
    priority: 3
"""


class TwoConnectors:
    """Connectors as definitions see them; the url of each starts with its name."""

    def names(self) -> list[str]:
        return ["postgresql", "sqlite"]

    def canonical(self, name: str) -> str:
        if name == "postgres":
            return "postgresql"
        if name not in self.names():
            raise ValueError(f"no connector is named {name} (there are postgresql, sqlite)")
        return name

    def check_config(self, connector: str, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        known = ("url", "schema")
        found = [(key, f"is no setting of {connector}") for key in config if key not in known]
        if not str(config.get("url", "")).startswith(connector):
            found.append(("url", f"must start with {connector}:"))
        return found

    def secret_keys(self, connector: str) -> list[str]:
        return ["url"]

    def job_keys(self) -> list[str]:
        return ["mode", "source", "sink", "watermark", "lag", "parallelism"]

    def check_job(
        self, definition: Mapping[str, Any], source: str | None, sink: str | None
    ) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        found = []
        if definition.get("mode") not in ("complete", "complete-atomic", "incremental"):
            found.append(("mode", "must be complete, complete-atomic or incremental"))
        if "table" not in (definition.get("source") or {}):
            found.append(("source.table", "is missing"))
        if sink == "sqlite" and definition.get("parallelism", 1) > 1:
            found.append(("parallelism", "sqlite is written by one writer"))
        return dict(definition), found


CONNECTORS = TwoConnectors()


def apply(
    text: str, environ: Mapping[str, str] = URLS, keyring: Keyring = KEYRING, **options: Any
) -> list[Change]:
    with catalog.editing() as session:
        found = parse(text, environ, CONNECTORS, existing=catalog.existing(session))
        return plans.apply(session, found, keyring, CONNECTORS, actor="test", **options).changes


def dry_run(text: str, environ: Mapping[str, str] = URLS) -> list[Change]:
    with catalog.reading() as session:
        found = parse(text, environ, CONNECTORS, existing=catalog.existing(session))
        return plans.plan(session, found, KEYRING, CONNECTORS).changes


def summary(changes: list[Change]) -> list[str]:
    return [f"{change.action} {change.kind} {change.name}" for change in changes]


def keys(change: Change) -> list[tuple[str, Any, Any]]:
    return [(found.key, found.before, found.after) for found in change.differences]


def edit(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with catalog.editing() as session:
        return operation(session, *arguments, **options, actor="test")


def stored(rows: Callable[..., Any]) -> list[Any]:
    """All of the catalog, to compare before and after."""
    return [
        rows("select * from datasource order by id"),
        rows("select * from job order by id"),
        rows("select * from job_schedule order by id"),
        rows("select * from concurrency_key order by key"),
        rows("select * from audit_event order by id"),
    ]
