"""The connectors there are, what they can do, and what a job asks of them."""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from tasks.replicate.connector import (
    DEFAULT_LAG_SECONDS,
    DEFAULT_LAG_UNITS,
    Connector,
    Problem,
)
from tasks.replicate.spec import ReplicationSpec

GROUP = "claimcheck.connectors"
BUILT_IN = {
    "postgresql": "tasks.replicate.connectors.postgresql:PostgreSQL",
    "mysql": "tasks.replicate.connectors.mysql:MySQL",
    "file": "tasks.replicate.connectors.file:Files",
    "sqlite": "tasks.replicate.connectors.sqlite:SQLite",
}
ALIASES = {"postgres": "postgresql", "mariadb": "mysql"}

log = logging.getLogger("claimcheck.replicate")


class UnknownConnector(ValueError):
    """There is no connector of that name; the message lists those there are."""


class MissingExtra(ValueError):
    """A connector's driver is not installed; the message gives the install command."""


@functools.cache
def connectors() -> Mapping[str, Connector]:
    """Every connector by name: the built-in ones and those of the entry point group.

    A third party's connector that cannot be imported is logged and left out; it cannot take
    a built-in name.
    """
    found: dict[str, Connector] = {}
    for name, path in BUILT_IN.items():
        module, _, attribute = path.partition(":")
        found[name] = getattr(importlib.import_module(module), attribute)()
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            log.warning(
                "connector %s of %s is left out: the name is taken", entry.name, entry.value
            )
            continue
        try:
            found[entry.name] = entry.load()()
        except Exception as error:
            log.warning(
                "connector %s of %s cannot be loaded: %s",
                entry.name,
                entry.value,
                type(error).__name__,
            )
    return found


def get(name: str) -> Connector:
    """The connector of that name, with its driver installed.

    Raises UnknownConnector or MissingExtra.
    """
    known = connectors()
    connector = known.get(ALIASES.get(name, name))
    if connector is None:
        close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UnknownConnector(f"no connector is named {name}{hint} (there are {', '.join(known)})")
    driver = connector.missing()
    if driver is not None:
        extra = connector.capabilities.extra
        command = f"pip install 'celery-claimcheck[{extra}]'" if extra else f"pip install {driver}"
        raise MissingExtra(f"connector {name} needs {driver}, which is not installed: {command}")
    return connector


def check_config(name: str, config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with a datasource's configuration, each without its values."""
    try:
        connector = get(name)
    except (UnknownConnector, MissingExtra) as error:
        return [Problem("", str(error))]
    return connector.check_config(config)


def test(name: str, config: Mapping[str, Any]) -> str:
    """Connect and tell product and version; raises ValueError or SourceError, both redacted."""
    connector = get(name)
    problems = connector.check_config(config)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return connector.test(config)


def problems(spec: ReplicationSpec, source_connector: str, sink_connector: str) -> list[Problem]:
    """What the job asks for that its connectors cannot do, for ``apply``; empty if all is well."""
    found: list[Problem] = []
    try:
        source, sink = get(source_connector), get(sink_connector)
    except (UnknownConnector, MissingExtra) as error:
        return [Problem("", str(error))]
    reads, writes = source.capabilities, sink.capabilities

    def problem(key: str, message: str) -> None:
        found.append(Problem(key, message))

    def need(able: bool, key: str, message: str) -> None:
        if not able:
            problem(key, message)

    if not reads.source_modes:
        problem("source", f"{source.name} cannot be a source")
    elif spec.mode not in reads.source_modes:
        can = ", ".join(sorted(reads.source_modes))
        problem("mode", f"{source.name} cannot be read in mode {spec.mode}; it can {can}")
    if not writes.sink_modes:
        problem("sink", f"{sink.name} cannot be a sink")
    elif spec.mode not in writes.sink_modes:
        can = ", ".join(sorted(writes.sink_modes))
        problem("mode", f"{sink.name} cannot be written in mode {spec.mode}; it can {can}")
    if spec.source.query is not None or spec.source.where is not None:
        need(reads.queries, "source", f"{source.name} has no query and no where; remove them")
    if spec.atomic is not None and spec.mode in writes.sink_modes:
        ways = ", ".join(writes.atomic) or "none"
        need(spec.atomic in writes.atomic, "atomic", f"{sink.name} can {ways}, not {spec.atomic}")
    if spec.parallelism > 1:
        need(
            reads.parallel_source, "parallelism", f"{source.name} is read by one reader; remove it"
        )
        need(
            writes.parallel_sink, "parallelism", f"{sink.name} is written by one writer; remove it"
        )
    if spec.sink.staging_schema is not None:
        need(
            writes.staging_schema,
            "sink.staging_schema",
            f"{sink.name} stages in no schema; remove it",
        )
    if spec.create:
        need(writes.create, "create", f"{sink.name} cannot create the sink; create it yourself")
    if spec.analyze:
        need(writes.analyze, "analyze", f"{sink.name} has no statistics to gather; remove it")
    if spec.tables is not None:
        need(reads.patterns, "tables", f"{source.name} cannot list tables; write a job for each")
    return found


def watermark_note(
    spec: ReplicationSpec, source_connector: str, watermark_type: str | None = None
) -> str | None:
    """One line for ``job show`` on how an incremental job's lower bound is found (R-F3).

    ``watermark_type`` is the stored watermark's; None before the first run, which finds it out.
    """
    if spec.mode != "incremental":
        return None
    kind = get(source_connector).capabilities.watermark
    lag = f"{DEFAULT_LAG_SECONDS} s (numbers: {DEFAULT_LAG_UNITS})"
    lagging = (
        f"lag of {lag if spec.lag is None else f'{spec.lag:g}'}: rows whose transaction takes "
        "longer than that to commit are missed; set lag above the longest transaction of the source"
    )
    if kind != "safe":
        return lagging
    safe = "safe bound, from the source's open transactions: no row is missed on a primary"
    if watermark_type == "xid8":
        return safe
    if watermark_type == "timestamptz":
        return (
            safe
            if spec.lag is None
            else (
                f"lag of {spec.lag:g} s below the oldest open transaction: rows whose time is not "
                "their transaction's are missed where they differ by more"
            )
        )
    if watermark_type is not None:
        return lagging
    return f"for timestamptz and xid8 {safe}; for other columns {lagging}"
