"""``celery -A tasks datasource``: the places that jobs read from and write to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click

from db.envelopes import EnvelopeError
from db.models import Datasource, Job
from dispatch import catalog
from dispatch.catalog import datasources
from dispatch.context import HandlerFailure
from dispatch.definitions.documents import DefinitionError
from dispatch.redaction import redact, secrets_known, secrets_of
from tasks.commands import changes, console, control, values
from tasks.commands.console import Output
from tasks.connectors import CONNECTORS
from tasks.replicate import registry


@click.group()
def datasource() -> None:
    """Places that jobs read from and write to; their secrets are stored encrypted."""


@datasource.command()
@click.argument("name")
@click.option("--connector", required=True, help="postgresql, mysql, sqlite, file, ...")
@values.secret_options
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="A setting, not secret.")
@console.command
def add(
    out: Output,
    name: str,
    connector: str,
    url_env: str | None,
    url_stdin: bool,
    secret_env: tuple[str, ...],
    given: tuple[str, ...],
) -> None:
    """Store a new datasource.

    For example: datasource add shop --connector postgresql --url-env SHOP_URL
    """
    secrets = values.secrets_given(url_env, url_stdin, secret_env)
    with secrets_known(secrets_of(secrets)):
        canonical = CONNECTORS.canonical(connector)
        settings = values.settings_given(given, CONNECTORS.secret_keys(canonical))
        control.require_database(may_create=True)
        keyring = control.open_keyring()
        with _mistakes_of(name), catalog.editing() as session:
            change = datasources.add(
                session,
                keyring,
                CONNECTORS,
                name,
                {"connector": connector, **settings, **secrets},
                actor=console.actor(),
            )
        changes.tell(out, change, f"added datasource {name} ({canonical})")


@datasource.command()
@click.argument("name")
@click.option("--connector", help="Another connector; clear the settings that it does not take.")
@values.secret_options
@click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="A setting, not secret.")
@click.option("--clear", multiple=True, metavar="KEY", help="Remove a setting or a secret.")
@console.command
def edit(
    out: Output,
    name: str,
    connector: str | None,
    url_env: str | None,
    url_stdin: bool,
    secret_env: tuple[str, ...],
    given: tuple[str, ...],
    clear: tuple[str, ...],
) -> None:
    """Change what is named, keep the rest.

    The next claim uses it; a running attempt does not.
    """
    secrets = values.secrets_given(url_env, url_stdin, secret_env)
    with secrets_known(secrets_of(secrets)):
        control.require_database()
        keyring = control.open_keyring()
        with _mistakes_of(name), catalog.editing() as session:
            stored = catalog.datasource(session, name)
            known = CONNECTORS.canonical(connector) if connector else stored.connector
            settings = values.settings_given(given, CONNECTORS.secret_keys(known))
            change = datasources.edit(
                session,
                keyring,
                CONNECTORS,
                name,
                {**({"connector": known} if connector else {}), **settings, **secrets},
                clear=clear,
                actor=console.actor(),
            )
        changes.tell(out, change, f"changed datasource {name}")


@datasource.command("list")
@console.command
def list_(out: Output) -> None:
    """List all datasources, without their secrets."""
    control.require_database()
    with catalog.reading() as session:
        jobs = catalog.all_jobs(session)
        found = [_row(stored, jobs) for stored in catalog.all_datasources(session)]
    found.sort(key=lambda row: row["created_at"], reverse=True)
    if out.as_json:
        out.document(found)
    else:
        out.table(
            ["name", "connector", "enabled", "jobs", "key", "changed"],
            [
                [
                    row["name"],
                    row["connector"],
                    row["enabled"],
                    len(row["jobs"]),
                    row["key_version"],
                    row["updated_at"],
                ]
                for row in found
            ],
            "no datasources yet; add one with: celery -A tasks datasource add",
        )


@datasource.command()
@click.argument("name")
@console.command
def show(out: Output, name: str) -> None:
    """Show one: where it points, who uses it.

    Also what its connector can do.
    """
    control.require_database()
    keyring = control.open_keyring()
    with catalog.reading() as session:
        stored = catalog.datasource(session, name)
        found = _row(stored, catalog.all_jobs(session))
        secret = CONNECTORS.secret_keys(stored.connector)
        try:
            config = datasources.open_config(keyring, stored)
        except EnvelopeError as error:
            found |= {"config": None, "endpoint": None, "problem": str(error)}
        else:
            found |= {
                "config": datasources.shown_config(config, secret),
                "endpoint": datasources.endpoint(config),
                "problem": None,
            }
    connector = registry.connectors().get(found["connector"])
    found["capabilities"] = None if connector is None else capabilities(connector)
    if out.as_json:
        out.document(found)
    else:
        out.facts(found)


@datasource.command()
@click.argument("name")
@console.command
def test(out: Output, name: str) -> int:
    """Connect, and say what was found.

    Exit 1 where it cannot be reached.
    """
    control.require_database()
    keyring = control.open_keyring()
    with catalog.reading() as session:
        stored = catalog.datasource(session, name)
        config = datasources.open_config(keyring, stored)
        connector = stored.connector
    begun = time.monotonic()
    with secrets_known(secrets_of(config)):
        try:
            found = registry.test(connector, config)
        except (ValueError, HandlerFailure) as error:
            text = redact(str(error))
            out.fail(text if name in text else f"datasource {name}: {text}")
            return 1
    seconds = round(time.monotonic() - begun, 3)
    out.say(f"{name} answers: {found} ({seconds:.3f} s)", "green")
    if out.as_json:
        out.document(
            {"name": name, "connector": connector, "ok": True, "found": found, "seconds": seconds}
        )
    return 0


@datasource.command()
@click.argument("name")
@console.command
def enable(out: Output, name: str) -> None:
    """Let its jobs be claimed again."""
    _switch(out, name, True)


@datasource.command()
@click.argument("name")
@console.command
def disable(out: Output, name: str) -> None:
    """Hold the next claims of its jobs.

    A running attempt goes on.
    """
    _switch(out, name, False)


@datasource.command()
@click.argument("name")
@console.command
def rm(out: Output, name: str) -> None:
    """Remove a datasource that no job uses."""
    control.require_database()
    with catalog.editing() as session:
        change = datasources.remove(session, name, actor=console.actor())
    changes.tell(out, change, f"removed datasource {name}")


def capabilities(connector: Any) -> dict[str, Any]:
    """What a connector can do, as data."""
    can = connector.capabilities
    return {
        "title": can.title,
        "source_modes": sorted(can.source_modes),
        "sink_modes": sorted(can.sink_modes),
        "atomic": list(can.atomic),
        "queries": can.queries,
        "parallel_source": can.parallel_source,
        "parallel_sink": can.parallel_sink,
        "watermark": can.watermark,
        "transactional": can.transactional,
        "staging_schema": can.staging_schema,
        "create": can.create,
        "analyze": can.analyze,
        "patterns": can.patterns,
        "cancel": can.cancel,
        "tested": can.tested,
    }


def _row(stored: Datasource, jobs: list[Job]) -> dict[str, Any]:
    return {
        "id": stored.id,
        "name": stored.name,
        "connector": stored.connector,
        "enabled": stored.enabled,
        "jobs": [job.name for job in jobs if stored.id in (job.source_id, job.sink_id)],
        "key_version": (stored.envelope or {}).get("key_version"),
        "created_at": stored.created_at,
        "updated_at": stored.updated_at,
    }


def _switch(out: Output, name: str, enabled: bool) -> None:
    control.require_database()
    with catalog.editing() as session:
        change = datasources.set_enabled(session, name, enabled, actor=console.actor())
    changes.tell(out, change, f"{'enabled' if enabled else 'disabled'} datasource {name}")


@contextmanager
def _mistakes_of(name: str) -> Iterator[None]:
    """Mistakes in what is stored for a datasource name it, as those of a file do."""
    try:
        yield
    except DefinitionError as error:
        problems = [
            problem
            if problem.path[:1] == ("jobs",)
            else replace(problem, path=("datasources", name, *problem.path))
            for problem in error.problems
        ]
    else:
        return
    raise DefinitionError(problems)
