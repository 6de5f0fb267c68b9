"""Which keys retained envelopes need, whether a keyring has them, and wrapping anew (R-X3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from db import session, statements
from db.envelopes import EnvelopeError, OtherKey, check_key, rewrap
from db.keyring import Keyring

BATCH = 200
"""How many rows one transaction of a pass looks at, and rewraps at most."""
COUNTED = 2_000
"""How many attempts one statement counts the snapshots of."""
LOCK_SECONDS = 1.0

_SQL = statements.load("keys")
_EMPTY = json.dumps({})
_MOST_NAMED = 3


@dataclass(slots=True)
class Reencrypted:
    """What one pass did. ``unreadable`` names what needs a key that this keyring lacks."""

    datasources: int = 0
    snapshots: int = 0
    unreadable: list[str] = field(default_factory=list)
    complete: bool = True
    """False where ``limit`` ended the pass early; the next one goes on."""

    @property
    def total(self) -> int:
        return self.datasources + self.snapshots


def versions_in_use() -> dict[str, dict[str, int]]:
    """Retained envelopes by key version: ``{"v1": {"datasources": 2, "snapshots": 40}}``.

    Counted in short transactions. A claim takes its snapshots from the datasources, and these come
    first: an envelope that is in use all the while is found in one of the two places.
    """
    found: dict[str, dict[str, int]] = {}

    def add(kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if row["key_version"] is not None:
                counts = found.setdefault(row["key_version"], {"datasources": 0, "snapshots": 0})
                counts[kind] += row["envelopes"]

    with session.transaction() as connection:
        add("datasources", statements.rows(connection, _SQL["datasource_versions"]))
    after: UUID | None = None
    while True:
        asked = {"after": after, "batch": COUNTED}
        with session.transaction() as connection:
            rows = statements.rows(connection, _SQL["snapshot_versions"], asked)
        if not rows:
            return found
        add("snapshots", rows)
        after = rows[0]["last"]


@dataclass(slots=True)
class Mismatch:
    """A key version whose key in this keyring is not the one that sealed datasources.

    As text it says so, with the way out; it names datasources and shows nothing of their content.
    """

    keyring: Keyring
    version: str
    sealed_otherwise: list[str] = field(default_factory=list)
    opened: int = 0
    """How many datasources of that version the key does open."""

    @property
    def is_of_most(self) -> bool:
        """The key opens fewer than it does not: the file is the wrong one, not a datasource."""
        return self.opened < len(self.sealed_otherwise)

    def __str__(self) -> str:
        names = ", ".join(self.sealed_otherwise[:_MOST_NAMED])
        more = len(self.sealed_otherwise) - _MOST_NAMED
        return (
            f"the key {self.version} of {self.keyring.path} is another one than the {self.version} "
            f"that sealed {names}{f' and {more:,} more' if more > 0 else ''}: point "
            "CLAIMCHECK_KEYRING_FILE at a copy of the file of the host that stored them, or, where "
            "that key is lost, set their credentials again: "
            "celery -A tasks apply FILE --replace-unreadable"
        )


def sealed_datasources() -> list[dict[str, Any]]:
    """Name and envelope of each datasource that has one."""
    with session.transaction() as connection:
        return statements.rows(connection, _SQL["sealed"])


def mismatches(keyring: Keyring) -> list[Mismatch]:
    """The versions of the keyring by which another key sealed datasources; none where all fits.

    Versions have names only: two keyrings that were made apart both hold a ``v1``.
    """
    found: dict[str, Mismatch] = {}
    for row in sealed_datasources():
        version = row["envelope"].get("key_version")
        if version not in keyring:
            continue
        seen = found.setdefault(version, Mismatch(keyring, version))
        try:
            check_key(keyring, row["envelope"], name=row["name"])
            seen.opened += 1
        except OtherKey:
            seen.sealed_otherwise.append(row["name"])
        except EnvelopeError:
            continue  # an altered one says nothing of the key
    return [seen for seen in found.values() if seen.sealed_otherwise]


def free_versions(keyring: Keyring, in_use: Mapping[str, Any]) -> list[str]:
    """The versions of the keyring that nothing retained needs, the current one aside."""
    return [
        version
        for version in keyring.versions
        if version != keyring.current and version not in in_use
    ]


def reencrypt(
    keyring: Keyring,
    *,
    actor: str,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Reencrypted:
    """Wrap every retained data key under the current version, in short transactions.

    Repeating it is harmless, an interrupted pass is gone on with, and what a claim holds is
    passed over: see what remains afterwards with ``versions_in_use``. At most ``limit`` rows are
    changed. ``progress`` is told the rows changed so far. Raises the driver's errors.
    """
    done = Reencrypted()
    try:
        _pass(keyring, "datasources_to_rewrap", _rewrap_datasource, done, limit, progress)
        _pass(keyring, "runs_to_rewrap", _rewrap_run, done, limit, progress)
    finally:
        if done.total:
            detail = {"datasources": done.datasources, "snapshots": done.snapshots}
            with session.transaction() as connection:
                asked = {"actor": actor, "current": keyring.current, "detail": json.dumps(detail)}
                statements.rows(connection, _SQL["record_reencryption"], asked)
    return done


Rewrap = Callable[[Connection, Keyring, Mapping[str, Any], Reencrypted], None]


def _pass(
    keyring: Keyring,
    candidates: str,
    rewrap_row: Rewrap,
    done: Reencrypted,
    limit: int | None,
    progress: Callable[[int], None] | None,
) -> None:
    after: UUID | None = None
    changed = done.total
    while True:
        asked = {"current": keyring.current, "after": after, "batch": BATCH}
        with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
            rows = statements.rows(connection, _SQL[candidates], asked)
            for row in rows:
                if not row["to_rewrap"]:
                    continue
                if changed == limit:
                    done.complete = False
                    return
                try:
                    rewrap_row(connection, keyring, row, done)
                except EnvelopeError as error:
                    done.unreadable.append(str(error))
                else:
                    changed += 1
        if progress is not None:
            progress(done.total)
        if len(rows) < BATCH:
            return
        after = rows[-1]["id"]


def _rewrap_datasource(
    connection: Connection, keyring: Keyring, row: Mapping[str, Any], done: Reencrypted
) -> None:
    new = rewrap(keyring, row["envelope"], name=row["name"])
    asked = {"id": row["id"], **{key: new[key] for key in ("key_version", "wrapped_key")}}
    statements.rows(connection, _SQL["rewrap_datasource"], asked)
    done.datasources += 1


def _rewrap_run(
    connection: Connection, keyring: Keyring, row: Mapping[str, Any], done: Reencrypted
) -> None:
    asked: dict[str, Any] = {"id": row["id"]}
    count = 0
    for side in ("source", "sink"):
        snapshot = row[f"{side}_snapshot"]
        asked[side] = _EMPTY
        if snapshot is None or snapshot["key_version"] == keyring.current:
            continue
        name = f"the {side} of job {row['job_name']} in run {row['id']}"
        new = rewrap(keyring, snapshot, name=name)
        asked[side] = json.dumps({key: new[key] for key in ("key_version", "wrapped_key")})
        count += 1
    statements.rows(connection, _SQL["rewrap_snapshots"], asked)
    done.snapshots += count
