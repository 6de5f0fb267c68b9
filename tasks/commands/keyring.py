"""``celery -A tasks keyring``: the keys that seal datasources, and their rotation (R-X1, R-X3)."""

from __future__ import annotations

import click
from rich.progress import Progress

from db import keyring as keyrings
from db import settings
from db.keyring import Keyring, KeyringError
from dispatch import reencryption
from tasks.commands import console, control
from tasks.commands.console import Output


@click.group()
def keyring() -> None:
    """The keys that seal datasources. Rotate: add, spread the file, use, reencrypt, rm."""


@keyring.command()
@console.command
def init(out: Output) -> None:
    """Create the file with one fresh key.

    An existing file is never overwritten.
    """
    made = keyrings.init(settings.settings().keyring_path())
    out.say(f"created {made.path} with the key version {made.current}")
    out.say("keep a copy of it apart from the database: without it no credential can be read")
    if out.as_json:
        out.document(_facts(made))


@keyring.command()
@console.command
def status(out: Output) -> int:
    """Show the key versions and their use.

    Exit 1 where stored envelopes need a key that is missing.
    """
    control.require_state()
    found = control.open_keyring()
    control.require_database()
    in_use = reencryption.versions_in_use()
    missing = sorted(set(in_use) - set(found.versions))
    nothing = {"datasources": 0, "snapshots": 0}
    versions = [
        {
            "version": version,
            "current": version == found.current,
            "readable": version in found,
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
                    "current" if row["current"] else "" if row["readable"] else "MISSING",
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
            "your backup, or set those credentials again"
        )
    return 1 if missing else 0


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


def _facts(found: Keyring) -> dict[str, object]:
    return {
        "path": str(found.path),
        "current": found.current,
        "versions": list(found.versions),
    }
