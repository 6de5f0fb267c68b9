"""``celery -A tasks keyring``: the keys that seal datasources, and their rotation (R-X1, R-X3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import click
import psycopg
from rich.progress import Progress
from sqlalchemy.exc import DBAPIError

from db import keyring as keyrings
from db import settings
from db.embedded import EmbeddedError
from db.failures import first_line, sqlstate
from db.keyring import Keyring, KeyringError
from db.urls import SettingsError
from dispatch import reencryption
from tasks.commands import console, control
from tasks.commands.console import Output

_NOT_MIGRATED = ("42P01", "3F000")


@click.group()
def keyring() -> None:
    """The keys that seal datasources. Rotate: add, spread the file, use, reencrypt, rm."""


@keyring.command()
@click.option("--force", is_flag=True, help="Also where stored datasources need another key.")
@console.command
def init(out: Output, force: bool) -> None:
    """Create the file with one fresh key.

    An existing file is never overwritten. Refused where the control database holds datasources,
    which a fresh key does not open: copy the file that sealed them.
    """
    path = settings.settings().keyring_path()
    if not force and not path.exists():
        _refuse_beside_datasources(out)
    made = keyrings.init(path)
    out.say(f"created {made.path} with the key version {made.current}")
    out.say("keep a copy of it apart from the database: without it no credential can be read")
    if out.as_json:
        out.document(_facts(made))


@keyring.command()
@console.command
def status(out: Output) -> int:
    """Show the key versions and their use.

    Exit 1 where stored envelopes need a key that is missing, or another one of the same name.
    """
    control.require_state()
    found = control.open_keyring()
    control.require_database()
    in_use = reencryption.versions_in_use()
    missing = sorted(set(in_use) - set(found.versions))
    mismatches = reencryption.mismatches(found)
    others = {mismatch.version: mismatch.sealed_otherwise for mismatch in mismatches}
    nothing = {"datasources": 0, "snapshots": 0}
    versions = [
        {
            "version": version,
            "current": version == found.current,
            "readable": version in found and version not in others,
            "sealed_with_another_key": others.get(version, []),
            **in_use.get(version, nothing),
        }
        for version in [*found.versions, *missing]
    ]
    free = reencryption.free_versions(found, in_use)
    if out.as_json:
        out.document({**_facts(found), "use": versions, "free": free, "missing": missing})
    else:
        out.say(f"{found.path}")
        out.table(
            ["version", "", "datasources", "snapshots", ""],
            [
                [
                    row["version"],
                    _state(row, missing),
                    row["datasources"],
                    row["snapshots"],
                    "free to remove" if row["version"] in free else "",
                ]
                for row in versions
            ],
            "no keys",
        )
    for version in missing:
        out.warn(
            f"envelopes need the key version {version}, which this keyring lacks: restore it from "
            "your backup, or set those credentials again: "
            "celery -A tasks apply FILE --replace-unreadable"
        )
    for mismatch in mismatches:
        out.warn(str(mismatch))
    return 1 if missing or mismatches else 0


@keyring.command()
@click.argument("version", required=False)
@click.option("--use", "make_current", is_flag=True, help="Seal with it from now on.")
@console.command
def add(out: Output, version: str | None, make_current: bool) -> None:
    """Add a fresh key.

    Give the file to every host before the key is used.
    """
    path = settings.settings().keyring_path()
    before = set(Keyring.load(path).versions)
    made = keyrings.add_version(path, version, make_current=make_current)
    (new,) = set(made.versions) - before
    out.say(f"added the key version {new} to {made.path}")
    if not make_current:
        out.say(f"when every host has the file: celery -A tasks keyring use {new}")
    if out.as_json:
        out.document({"added": new, **_facts(made)})


@keyring.command()
@click.argument("version")
@console.command
def use(out: Output, version: str) -> None:
    """Seal with this version from now on."""
    made = keyrings.set_current(settings.settings().keyring_path(), version)
    out.say(f"the current key version is {version}; next: celery -A tasks keyring reencrypt")
    if out.as_json:
        out.document(_facts(made))


@keyring.command()
@click.argument("version")
@console.command
def rm(out: Output, version: str) -> None:
    """Remove a version that no stored envelope needs."""
    path = settings.settings().keyring_path()
    Keyring.load(path)
    control.require_database()
    needed = reencryption.versions_in_use().get(version)
    if needed is not None:
        raise KeyringError(
            f"the key version {version!r} is needed by {needed['datasources']} datasources and "
            f"{needed['snapshots']} snapshots of runs; run `celery -A tasks keyring reencrypt`, "
            "and remove it when `keyring status` reports it as free"
        )
    made = keyrings.remove_version(path, version)
    out.say(f"removed the key version {version} from {made.path}")
    if out.as_json:
        out.document(_facts(made))


@keyring.command()
@click.option("--limit", type=click.IntRange(min=1), help="Change at most so many rows.")
@console.command
def reencrypt(out: Output, limit: int | None) -> int:
    """Wrap all data keys under the current key.

    Also those of retained snapshots. Repeat it while some remain.
    """
    control.require_state()
    found = control.open_keyring()
    control.require_database()
    with Progress(console=out.messages, transient=True) as bar:
        shown = bar.add_task("rewrapping", total=None)
        done = reencryption.reencrypt(
            found,
            actor=console.actor(),
            limit=limit,
            progress=lambda count: bar.update(shown, completed=count),
        )
    in_use = reencryption.versions_in_use()
    remaining = {version: counts for version, counts in in_use.items() if version != found.current}
    left = sum(sum(counts.values()) for counts in remaining.values())
    out.say(
        f"rewrapped {done.datasources:,} datasources and {done.snapshots:,} snapshots under "
        f"{found.current}; {left:,} remain"
    )
    for problem in done.unreadable:
        out.warn(problem)
    if left and not done.unreadable:
        out.say("what remains is held by a run, or beyond the limit: run the command again later")
    if out.as_json:
        out.document(
            {
                "current": found.current,
                "datasources": done.datasources,
                "snapshots": done.snapshots,
                "remaining": remaining,
                "unreadable": done.unreadable,
                "complete": left == 0,
                "free": reencryption.free_versions(found, in_use),
            }
        )
    return 1 if done.unreadable else 0


def _state(row: Mapping[str, Any], missing: Collection[str]) -> str:
    if row["sealed_with_another_key"]:
        return "ANOTHER KEY"
    return "MISSING" if row["version"] in missing else "current" if row["current"] else ""


def _refuse_beside_datasources(out: Output) -> None:
    """A fresh key beside datasources that another one sealed opens none of them.

    Where no database can be asked, as on the host that prepares a container's, it is only told.
    """
    try:
        control.require_state()
        sealed = reencryption.sealed_datasources()
    except SettingsError:
        return
    except (EmbeddedError, psycopg.Error, DBAPIError) as error:
        if sqlstate(error) not in _NOT_MIGRATED:
            out.warn(
                f"DATABASE_URL: the control database does not answer, {first_line(error)}: where "
                "it holds datasources already, use the keyring file that sealed them instead"
            )
        return
    if sealed:
        raise KeyringError(
            f"the control database holds {len(sealed):,} "
            f"{'datasource' if len(sealed) == 1 else 'datasources'} that a fresh key does not "
            "open: copy the keyring file from a host that has it, or restore it from your backup. "
            "Where it is lost, or meant for another database: celery -A tasks keyring init --force"
        )


def _facts(found: Keyring) -> dict[str, object]:
    return {
        "path": str(found.path),
        "current": found.current,
        "versions": list(found.versions),
    }
