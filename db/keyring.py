"""The versioned key-encryption keys, kept in a file outside Postgres (R-X1, R-X3).

The file is ``{"current": "v2", "keys": {"v1": "<base64, 32 bytes>", "v2": "..."}}``. Every
version in it can be read; what is sealed from now on uses the current one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from db import settings

SETTING = "CLAIMCHECK_KEYRING_FILE"
KEY_BYTES = 32
_LARGEST_FILE = 1024 * 1024
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

logger = logging.getLogger(__name__)


class KeyringError(Exception):
    """The keyring cannot be used; the message names the setting, the file and the way out."""


class Keyring:
    """Key-encryption keys by version. Immutable; its repr, like its errors, shows no key."""

    __slots__ = ("_current", "_keys", "_path")

    def __init__(self, current: str, keys: dict[str, bytes], path: Path | None = None) -> None:
        if current not in keys:
            raise KeyringError(f"the current key version {current!r} is not among the keys")
        self._current = current
        self._keys = dict(keys)
        self._path = path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keyring:
        """Read and check the keyring file.

        A file that others may write is refused: whoever replaces the key chooses the key that
        seals the next secret. One that others may merely read is a logged warning, because
        secrets mounted into containers arrive with mode 0444 and cannot be changed there.

        Raises KeyringError.
        """
        where = Path(path)
        text, mode = _read(where)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            _fail(
                where,
                f"is writable by others (mode {mode:04o}), so its keys cannot be trusted",
                f"check its content, then run: chmod 600 {where}",
            )
        keyring = _parse(text, where)
        if mode & stat.S_IROTH:
            logger.warning(
                "%s: %s is readable by every user of this machine (mode %04o); "
                "unless it is a container's secret mount, run: chmod 600 %s",
                SETTING,
                where,
                mode,
                where,
            )
        return keyring

    @property
    def current(self) -> str:
        """The version that new envelopes are sealed with."""
        return self._current

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions that can be read, in the file's order."""
        return tuple(self._keys)

    @property
    def path(self) -> Path | None:
        return self._path

    def key(self, version: str) -> bytes:
        """The key of ``version``. Raises KeyError with the version's name only."""
        return self._keys[version]

    def __contains__(self, version: object) -> bool:
        return version in self._keys

    def __repr__(self) -> str:
        return f"<Keyring current={self._current!r} versions={list(self._keys)!r}>"

    def __reduce__(self) -> NoReturn:
        # A pickled keyring would carry its keys into whatever stores or sends the pickle.
        raise TypeError("a keyring cannot be pickled")


def init(path: str | os.PathLike[str]) -> Keyring:
    """Create the keyring file with one fresh key, ``v1``, and mode 0600.

    The file appears whole or not at all, and an existing one is never overwritten: that would
    make every stored credential unreadable. Raises KeyringError.
    """
    where = Path(path)
    keyring = Keyring("v1", {"v1": secrets.token_bytes(KEY_BYTES)}, where)
    try:
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _temporary_beside(where, _serialize(keyring), mode=0o600) as temporary:
            try:
                # A hard link, not a rename: it fails where the name exists already.
                os.link(temporary, where)
            except FileExistsError:
                _fail_as_it_exists(where)
            except OSError:
                _place_without_link(temporary, where)
        _sync_directory(where.parent)
    except OSError as error:
        _fail(where, f"cannot be created: {_reason(error)}", "choose a folder that can be written")
    return keyring


def load_or_init(path: str | os.PathLike[str]) -> Keyring:
    """Load the keyring, creating it first if there is none; several processes may race.

    Raises KeyringError.
    """
    where = Path(path)
    if not where.exists():
        try:
            return init(where)
        except KeyringError:
            if not where.exists():
                raise
    return Keyring.load(where)


def in_force() -> Keyring:
    """This process's keyring, created on first use beside the embedded database only.

    Raises SettingsError and KeyringError.
    """
    found = settings.settings()
    path = found.keyring_path()
    return load_or_init(path) if found.keyring_may_be_created else Keyring.load(path)


def add_version(
    path: str | os.PathLike[str], version: str | None = None, *, make_current: bool = True
) -> Keyring:
    """Add a fresh key as ``version`` (default: the next free ``vN``); the file changes atomically.

    With ``make_current=False`` the key can be read and is not used yet: the first step of a
    rotation in a fleet, whose workers must all hold a key before anything is sealed with it.
    Raises KeyringError.
    """
    with _editing(Path(path)) as (keyring, write):
        if version is None:
            version = _next_version(keyring)
        if not _VERSION.fullmatch(version):
            _fail(
                Path(path),
                f"cannot take the key version {version!r}",
                "use letters, digits, '.', '_' and '-', at most 64 of them",
            )
        if version in keyring:
            _fail(Path(path), f"has a key version {version!r} already", "choose another name")
        keys = {known: keyring.key(known) for known in keyring.versions}
        keys[version] = secrets.token_bytes(KEY_BYTES)
        return write(Keyring(version if make_current else keyring.current, keys, keyring.path))


def set_current(path: str | os.PathLike[str], version: str) -> Keyring:
    """Make a version that the file holds the current one. Raises KeyringError."""
    with _editing(Path(path)) as (keyring, write):
        if version not in keyring:
            _fail(
                Path(path),
                f"holds no key version {version!r}",
                f"it holds {', '.join(keyring.versions)}",
            )
        keys = {known: keyring.key(known) for known in keyring.versions}
        return write(Keyring(version, keys, keyring.path))


def remove_version(path: str | os.PathLike[str], version: str) -> Keyring:
    """Take a version out of the file; the current one is refused.

    The caller must have seen that no retained envelope needs it (R-X3). Raises KeyringError.
    """
    with _editing(Path(path)) as (keyring, write):
        if version not in keyring:
            _fail(
                Path(path),
                f"holds no key version {version!r}",
                f"it holds {', '.join(keyring.versions)}",
            )
        if version == keyring.current:
            _fail(Path(path), f"uses {version!r} as its current key", "make another one current")
        keys = {known: keyring.key(known) for known in keyring.versions if known != version}
        return write(Keyring(keyring.current, keys, keyring.path))


# Reading


def _read(where: Path) -> tuple[str, int]:
    try:
        with where.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        _fail(
            where,
            "does not exist",
            "where datasources are stored already, copy the file from a host that has it (a new "
            "key opens none of them); to begin anew: celery -A tasks keyring init",
        )
    except OSError as error:
        _fail(where, f"cannot be read: {_reason(error)}", "check its path, owner and mode")
    if len(content) > _LARGEST_FILE:
        _fail(where, "is larger than 1 MiB", "point the setting at a keyring")
    try:
        return content.decode("utf-8"), mode
    except UnicodeDecodeError:
        _fail(where, "is not UTF-8 text", "restore it from your backup")


def _parse(text: str, where: Path) -> Keyring:
    shape = 'it must read {"current": "v1", "keys": {"v1": "<base64 of 32 bytes>"}}'
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        # The decoder's own message would carry the whole document as an attribute.
        _fail(where, f"is not JSON (line {error.lineno}, column {error.colno})", shape)
    except _Duplicate as error:
        _fail(where, f"names {error.name!r} twice", "keep one of the two")
    if not isinstance(content, dict) or set(content) != {"current", "keys"}:
        _fail(where, 'does not hold exactly "current" and "keys"', shape)
    current, encoded = content["current"], content["keys"]
    if not isinstance(current, str) or not isinstance(encoded, dict) or not encoded:
        _fail(where, "is malformed", shape)
    keys: dict[str, bytes] = {}
    for version, value in encoded.items():
        if not _VERSION.fullmatch(version):
            _fail(
                where,
                f"has a key version with a bad name, {version!r}",
                "use letters, digits, '.', '_' and '-', at most 64 of them",
            )
        keys[version] = _decode_key(where, version, value)
    if current not in keys:
        _fail(
            where,
            f"names {current!r} as current, which is not among its keys",
            f"set current to one of {', '.join(keys)}, or restore the missing key",
        )
    if len(set(keys.values())) < len(keys):
        _fail(where, "holds the same key under two versions", "give each version a key of its own")
    return Keyring(current, keys, where)


def _decode_key(where: Path, version: str, value: Any) -> bytes:
    way_out = "restore it from your backup; a new key is 32 random bytes in base64"
    try:
        key = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        _fail(where, f"holds no base64 text as key {version!r}", way_out)
    if len(key) != KEY_BYTES:
        _fail(where, f"holds {len(key)} bytes as key {version!r}, not {KEY_BYTES}", way_out)
    return key


class _Duplicate(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise _Duplicate(name)
        content[name] = value
    return content


# Writing


def _serialize(keyring: Keyring) -> bytes:
    keys = {
        version: base64.b64encode(keyring.key(version)).decode() for version in keyring.versions
    }
    return (json.dumps({"current": keyring.current, "keys": keys}, indent=2) + "\n").encode()


class _Write:
    """Replaces the locked file by a new content, keeping its owner and mode."""

    def __init__(self, target: Path, descriptor: int) -> None:
        self._target = target
        self._descriptor = descriptor

    def __call__(self, keyring: Keyring) -> Keyring:
        before = os.fstat(self._descriptor)
        mode = stat.S_IMODE(before.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH)
        with _temporary_beside(self._target, _serialize(keyring), mode=mode) as temporary:
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(temporary, before.st_uid, before.st_gid)
            os.replace(temporary, self._target)
        _sync_directory(self._target.parent)
        return keyring


@contextlib.contextmanager
def _editing(path: Path) -> Iterator[tuple[Keyring, _Write]]:
    """Lock the file, so that two rotations at once do not lose a key, and read what it holds."""
    Keyring.load(path)
    target = path.resolve()
    try:
        while True:
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Another writer may have replaced the file while this one waited.
                if not os.path.samestat(os.fstat(descriptor), os.stat(target)):
                    continue
                yield Keyring.load(path), _Write(target, descriptor)
                return
            finally:
                os.close(descriptor)
    except OSError as error:
        _fail(
            path,
            f"cannot be rewritten: {_reason(error)}",
            "rotate it where it comes from (your secret store), or make its folder writable",
        )


@contextlib.contextmanager
def _temporary_beside(target: Path, content: bytes, *, mode: int) -> Iterator[Path]:
    """A complete file in the target's folder, on disk, that is gone when the block ends."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        _create_exclusively(temporary, content)
        temporary.chmod(mode)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _place_without_link(temporary: Path, where: Path) -> None:
    """For file systems without hard links: who else begins a keyring waits for the folder."""
    folder = os.open(where.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if os.path.lexists(where):
            _fail_as_it_exists(where)
        os.rename(temporary, where)
    finally:
        os.close(folder)


def _create_exclusively(where: Path, content: bytes) -> None:
    descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems do not sync folders; the file itself is on disk by now.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _next_version(keyring: Keyring) -> str:
    numbers = [
        int(version[1:]) for version in keyring.versions if re.fullmatch(r"v[0-9]{1,9}", version)
    ]
    return f"v{max(numbers, default=0) + 1}"


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _fail_as_it_exists(where: Path) -> NoReturn:
    _fail(where, "exists already and is not overwritten", "use it, or move it away")


def _fail(where: Path, fault: str, way_out: str) -> NoReturn:
    raise KeyringError(f"{SETTING}: the keyring {where} {fault}; {way_out}") from None
