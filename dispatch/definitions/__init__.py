"""The definition file: datasources and jobs in YAML, checked as a whole.

Every mistake is reported at once, each with its line. What the file leaves out is looked up among
what is stored already, so that a job may name a datasource that another file defined.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from dispatch.definitions.documents import (
    LARGEST_FILE,
    DefinitionError,
    Document,
    Path,
    Problem,
    Report,
    Unset,
    UnsetVariable,
    read,
)
from dispatch.definitions.fields import Fields, check_name
from dispatch.definitions.jobdefinition import (
    Connectors,
    JobDefinition,
    parse_job,
    resolve_replication,
)
from dispatch.names import did_you_mean
from dispatch.redaction import secrets_of

_SOUNDS_SECRET = re.compile(
    r"(?i)passw|pwd|secret|token|credential|api_?key|private_?key|_url$|_dsn$"
)


@dataclass(frozen=True, slots=True)
class DatasourceDefinition:
    """A datasource as defined; ``config`` may hold secrets and is not in the repr."""

    name: str
    connector: str
    config: Mapping[str, Any] = field(repr=False)
    enabled: bool | None = None
    path: Path = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Existing:
    """What is stored already: connectors by datasource, and (key, limit) by job."""

    datasources: Mapping[str, str] = field(default_factory=dict)
    concurrency: Mapping[str, tuple[str, int] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Definitions:
    """A checked definition file. ``notes`` are worth a reader's eye and forbid nothing."""

    datasources: Mapping[str, DatasourceDefinition]
    jobs: Mapping[str, JobDefinition]
    notes: tuple[Problem, ...] = ()


def load(
    path: str | os.PathLike[str],
    environ: Mapping[str, str],
    connectors: Connectors,
    *,
    existing: Existing | None = None,
    handlers: Collection[str] | None = None,
) -> Definitions:
    """Read and check a definition file; ``-`` is not a path here, see ``parse``.

    Raises DefinitionError with every mistake of the file, never with one of its values.
    """
    where = FilePath(path)
    try:
        with where.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DefinitionError(
            [Problem((), f"the file cannot be read: {reason}")], str(where)
        ) from None
    if len(content) > LARGEST_FILE:
        raise DefinitionError([Problem((), "the file is larger than 4 MiB; split it")], str(where))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DefinitionError([Problem((), "is not UTF-8 text", line)], str(where)) from None
    try:
        return parse(text, environ, connectors, existing=existing, handlers=handlers)
    except DefinitionError as error:
        raise DefinitionError(error.problems, str(where)) from None


def parse(
    text: str,
    environ: Mapping[str, str],
    connectors: Connectors,
    *,
    existing: Existing | None = None,
    handlers: Collection[str] | None = None,
) -> Definitions:
    """Check the text of a definition file. Raises DefinitionError with every mistake."""
    problems: list[Problem] = []
    document = read(text, environ, problems)
    report = Report(document.lines)
    existing = existing or Existing()
    top = Fields(document.values, (), report)
    top.refuse_unknown("a definition file (datasources, jobs)", ("datasources", "jobs"))
    datasources = _datasources(top.mapping("datasources") or {}, connectors, report)
    known: dict[str, str | None] = {
        **existing.datasources,
        # One that is refused is named all the same, and its jobs have no mistake by that.
        **dict.fromkeys(top.mapping("datasources") or {}),
        **{name: datasource.connector for name, datasource in datasources.items()},
    }
    jobs = _jobs(top.mapping("jobs") or {}, known, connectors, report)
    check_limits(jobs, existing, report)
    _keep_secrets_out(document, datasources, report)
    found = [*problems, *report.problems]
    if found:
        raise DefinitionError(_without_echoes(found))
    return Definitions(datasources, jobs, _notes(datasources, jobs, handlers, document))


def check_limits(jobs: Mapping[str, JobDefinition], existing: Existing, report: Report) -> None:
    """Jobs that share a concurrency key must state one limit: these jobs, and the stored others."""
    first: dict[str, tuple[str, int]] = {}
    for name, stored in existing.concurrency.items():
        if name not in jobs and stored is not None:
            first.setdefault(stored[0], (f"the stored job {name}", stored[1]))
    for name, job in jobs.items():
        if job.concurrency is None:
            continue
        key, limit = job.concurrency
        whose, before = first.setdefault(key, (name, limit))
        if limit != before:
            report.add(
                (*job.path, "concurrency"),
                f"limits {key!r} to {limit}, and {whose} limits it to {before}; one key has one "
                "limit, so change both or use another key",
            )


def _datasources(
    raw: Mapping[str, Any], connectors: Connectors, report: Report
) -> dict[str, DatasourceDefinition]:
    found: dict[str, DatasourceDefinition] = {}
    for name, entry in raw.items():
        datasource = parse_datasource(name, entry, ("datasources", name), connectors, report)
        if datasource is not None:
            found[name] = datasource
    return found


def parse_datasource(
    name: str, raw: Any, path: Path, connectors: Connectors, report: Report
) -> DatasourceDefinition | None:
    """Read one datasource; every mistake goes to ``report``. None without a known connector."""
    check_name(name, "datasource", path, report)
    if not isinstance(raw, dict):
        report.add(path, "must hold keys, such as {connector: postgresql, url: ...}")
        return None
    fields = Fields(raw, path, report)
    stated = fields.text("connector")
    if stated is None:
        meant = next((key for key in raw if did_you_mean(key, ["connector"])), None)
        if "connector" not in raw and meant is not None:
            report.unknown_key((*path, meant), "a datasource", ["connector"])
        elif raw.get("connector") is None:
            report.add(path, f"lacks connector; there are {', '.join(connectors.names())}")
        return None
    connector = ""
    with report.catching((*path, "connector"), ValueError):
        connector = connectors.canonical(stated)
    if not connector:
        return None
    config = {key: raw[key] for key in raw if key not in ("connector", "enabled")}
    unset = {key for key, value in config.items() if isinstance(value, Unset)}
    for key, message in connectors.check_config(connector, config):
        if key in unset or (unset and not key):
            continue  # it may only follow from a variable that is not set
        report.add((*path, key) if key else path, message)
    return DatasourceDefinition(name, connector, config, fields.boolean("enabled", None), path)


def _jobs(
    raw: Mapping[str, Any],
    known: Mapping[str, str | None],
    connectors: Connectors,
    report: Report,
) -> dict[str, JobDefinition]:
    found: dict[str, JobDefinition] = {}
    for name, entry in raw.items():
        job = parse_job(name, entry, ("jobs", name), report, connectors)
        if job is not None:
            found[name] = bind(job, known, connectors, report)
    return found


def bind(
    job: JobDefinition, known: Mapping[str, str | None], connectors: Connectors, report: Report
) -> JobDefinition:
    """Check a job's datasources and its own keys against the connectors of those it names."""
    for side, name in (("source", job.source), ("sink", job.sink)):
        if name is not None and name not in known:
            report.add(
                (*job.path, side, "datasource"),
                f"no datasource is named {name}{did_you_mean(name, known)}",
            )
    source = known.get(job.source) if job.source else None
    sink = known.get(job.sink) if job.sink else None
    return resolve_replication(job, connectors, source, sink, report)


def _keep_secrets_out(
    document: Document, datasources: Mapping[str, DatasourceDefinition], report: Report
) -> None:
    """A job's definition is stored in plain text: what is secret belongs to a datasource (R-X1)."""
    secret_names = {
        name for names in document.variables_under(("datasources",)).values() for name in names
    }
    secrets = {
        secret for datasource in datasources.values() for secret in secrets_of(datasource.config)
    }
    for place, names in document.variables_under(("jobs",)).items():
        for name in sorted(names):
            if name in secret_names or _SOUNDS_SECRET.search(name):
                report.add(
                    place,
                    f"${{{name}}} may be secret, and a job is stored in plain text; put it into a "
                    "datasource and name that, or give the variable another name",
                )
    jobs = document.values.get("jobs")
    for place, text in texts(jobs, ("jobs",)):
        if any(len(secret) >= 6 and secret in text for secret in secrets):
            report.add(place, "holds the password of a datasource; name the datasource instead")


def texts(value: Any, path: Path) -> list[tuple[Path, str]]:
    """All texts that stand somewhere in a value, each with its place."""
    if isinstance(value, dict):
        return [item for key in value for item in texts(value[key], (*path, key))]
    if isinstance(value, list):
        return [item for index, entry in enumerate(value) for item in texts(entry, (*path, index))]
    return [(path, value)] if isinstance(value, str) else []


def _without_echoes(problems: list[Problem]) -> list[Problem]:
    """Leave out what only follows from a variable that is not set."""
    unset = {problem.path for problem in problems if isinstance(problem, UnsetVariable)}
    return [
        problem
        for problem in problems
        if problem.path not in unset or isinstance(problem, UnsetVariable)
    ]


def _notes(
    datasources: Mapping[str, DatasourceDefinition],
    jobs: Mapping[str, JobDefinition],
    handlers: Collection[str] | None,
    document: Document,
) -> tuple[Problem, ...]:
    notes = Report(document.lines)
    for datasource in datasources.values():
        stated = document.values["datasources"][datasource.name]["connector"]
        if stated != datasource.connector:
            notes.add(
                (*datasource.path, "connector"),
                f"{stated} is another name of {datasource.connector}, under which it is stored",
            )
    for job in jobs.values():
        if handlers is None or "params" not in job.definition or job.handler in handlers:
            continue
        notes.add(
            (*job.path, "handler"),
            f"no handler named {job.handler} is known here{did_you_mean(job.handler, handlers)}; "
            "its runs wait for a worker that has it (CLAIMCHECK_HANDLERS)",
        )
    return notes.problems
