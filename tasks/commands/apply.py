"""``celery -A tasks apply`` and ``export``: definitions out of a file, and into one."""

from __future__ import annotations

import os
import sys

import click

from dispatch import catalog, definitions
from dispatch.catalog import plans
from dispatch.catalog.export import as_yaml
from dispatch.catalog.export import export as exported
from dispatch.definitions import Definitions
from dispatch.definitions.documents import DefinitionError
from dispatch.redaction import secrets_known, secrets_of
from tasks import handlers
from tasks.commands import changes, console, control
from tasks.commands.console import Output
from tasks.connectors import CONNECTORS


@click.command()
@click.argument("file", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@click.option(
    "--replace-unreadable",
    is_flag=True,
    help="Also replace stored datasources that this keyring cannot open.",
)
@console.command
def apply(out: Output, file: str, dry_run: bool, replace_unreadable: bool) -> None:
    """Bring datasources, jobs and schedules to what FILE says: all of it or nothing.

    What the file does not name is left alone. ${NAME} comes from the environment; - is standard
    input.
    """
    control.require_database(may_create=True)
    keyring = control.open_keyring()
    known = handlers.load()
    with catalog.reading() if dry_run else catalog.editing() as session:
        found = _load(file, known, catalog.existing(session))
        with secrets_known(_secrets(found)):
            try:
                plan = (
                    plans.plan(session, found, keyring, CONNECTORS)
                    if dry_run
                    else plans.apply(
                        session,
                        found,
                        keyring,
                        CONNECTORS,
                        actor=console.actor(),
                        replace_unreadable=replace_unreadable,
                    )
                )
            except DefinitionError as error:
                raise DefinitionError(error.problems, file) from None
    for note in found.notes:
        out.warn(f"{file}: {note}")
    if out.as_json:
        out.document(
            {
                "applied": not dry_run,
                "changes": [change.as_json() for change in plan.changes],
                "notes": [str(note) for note in found.notes],
            }
        )
        return
    styles = {"+": "green", "~": "yellow", "-": "red"}
    for sign, name, what in changes.lines(plan.changes):
        out.say(f"{sign} {name}" + (f"  {what}" if what else ""), styles[sign])
    count = len(plan.changes)
    things = f"{count} change{'' if count == 1 else 's'}"
    if not count:
        out.say("nothing to change")
    elif dry_run:
        out.say(f"{things} would be made; nothing was changed")
    else:
        out.say(f"{things} applied")


@click.command()
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write a file.")
@console.command
def export(out: Output, output: str | None) -> None:
    """Write all datasources and jobs as a definition file; each secret as ${NAME}."""
    control.require_database()
    keyring = control.open_keyring()
    with catalog.reading() as session:
        content = exported(session, keyring, CONNECTORS)
    if output is not None:
        try:
            with open(output, "w", encoding="utf-8") as file:
                file.write(as_yaml(content))
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
        out.say(f"wrote {output}")
    if out.as_json:
        out.document(content)
    elif output is None:
        click.echo(as_yaml(content), nl=False)


def _load(file: str, known: list[str], existing: definitions.Existing) -> Definitions:
    if file == "-":
        text = sys.stdin.read()
        return definitions.parse(text, os.environ, CONNECTORS, existing=existing, handlers=known)
    return definitions.load(file, os.environ, CONNECTORS, existing=existing, handlers=known)


def _secrets(found: Definitions) -> frozenset[str]:
    return frozenset(
        secret
        for datasource in found.datasources.values()
        for secret in secrets_of(datasource.config)
    )
