"""Where the embedded servers keep data and sockets, and the account they run under.

Normally all of it lies in the state folder. Two things can forbid that, and both lead to a
folder elsewhere that `place.json` in the state folder records:

- PostgreSQL refuses to run as root. Under root the servers run as the owner of the state folder
  or as `nobody`; where that account cannot pass through to the folder (as under /root), the data
  lie in /var/lib/claimcheck. No folder that was there before is ever given another mode.
- The path of a Unix socket has at most 107 bytes (103 on macOS), and not every client reads
  unusual characters in it: then the sockets lie in a short folder under /tmp.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
import re
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("claimcheck.embedded")

ACCOUNT = "nobody"
SHARED_FOLDERS = (Path("/var/lib/claimcheck"), Path("/var/tmp/claimcheck"))
SHORT_FOLDERS = (Path("/tmp"), Path("/var/tmp"))
RECORD = "place.json"
KEYRING = "keyring.json"
"""The keyring that is made on first use beside the embedded database."""
OWNER = "home"
"""A file beside data that lie elsewhere; it names their state folder."""
STOPPED = "stopped"
"""Left in the state folder by a stop on command: such servers are not brought back unasked."""
POSTGRES_SOCKET = ".s.PGSQL.5432"
VALKEY_SOCKET = "valkey.sock"
ROLE = "claimcheck"
DATABASE = "claimcheck"
_LONGEST_SOCKET_PATH = 100
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")


class EmbeddedError(Exception):
    """The embedded servers cannot be used. The message says why, and the way out."""


@dataclass(frozen=True, slots=True)
class Account:
    """An operating-system account to run the servers under."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one state folder's servers live. All paths are absolute."""

    home: Path
    data: Path
    """Holds PostgreSQL's data directory; may be the state folder itself."""
    base: Path
    """Holds the control socket and the folder of the servers' sockets."""
    account: Account | None
    """Whom to run the servers as; None: as the supervisor itself."""

    @property
    def control(self) -> Path:
        return self.base / "control"

    @property
    def sockets(self) -> Path:
        """Mode 0700, of the servers' account."""
        return self.base / "sockets"

    @property
    def postgres_data(self) -> Path:
        return self.data / "postgres"

    def give(self, path: Path | int) -> None:
        """Hand a file that root made to the servers' account."""
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)


def prepare_home(home: Path) -> Path:
    """Create the state folder where it is missing; returns its real path.

    Every part that keeps something in it comes through here, so that it has one mode: private,
    but under root with the right to pass through, for the account the servers run under.
    Raises `EmbeddedError` where it cannot be made or written.
    """
    home = Path(os.path.realpath(home.expanduser()))
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        try:
            home.mkdir(mode=0o700)
        except FileExistsError:
            pass
        else:
            if os.geteuid() == 0:
                home.chmod(0o711)
    except OSError as error:
        raise EmbeddedError(
            f"CLAIMCHECK_HOME: the state folder {home} cannot be made: {error.strerror}. "
            "Set CLAIMCHECK_HOME to a folder that you can write."
        ) from None
    if not home.is_dir():
        raise EmbeddedError(
            f"CLAIMCHECK_HOME: {home} is not a folder. Set CLAIMCHECK_HOME to one that you can "
            "write."
        )
    if not os.access(home, os.W_OK | os.X_OK):
        raise EmbeddedError(
            f"CLAIMCHECK_HOME: the state folder {home} belongs to {_name_of(home.stat().st_uid)} "
            "and cannot be written. Run as that account, or set CLAIMCHECK_HOME to another folder."
        )
    return home


def open_lock(path: Path) -> int:
    """Open a lock file, private and of the owner of its folder."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.geteuid() == 0:
        owner = path.parent.stat()
        if os.fstat(handle).st_uid != owner.st_uid:
            os.fchown(handle, owner.st_uid, owner.st_gid)
    return handle


def take_lock(handle: int, seconds: float) -> bool:
    """Wait for an exclusive lock at most so long."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def recorded(home: Path) -> Place | None:
    """What the state folder records, without any check. For clients."""
    record = _read_record(home)
    if record is None:
        return None
    return Place(home, _at(home, record["data"]), _at(home, record["base"]), None)


def settle(home: Path) -> Place:
    """Decide and record where everything lies. For the supervisor, under its lock.

    Raises `EmbeddedError` where there is no place or no account that would do.
    """
    account = _account_for(home)
    record = _read_record(home) or {}
    data = _at(home, record["data"]) if "data" in record else None
    if data is None:
        data = _find_data_folder(home, account)
    elif not data.is_dir():
        raise EmbeddedError(
            f"the data of the embedded database should be in {data}, as {home / RECORD} says, and "
            f"that folder is gone. Bring it back, or remove {home} to begin anew."
        )
    elif not can_enter(account, data):
        raise EmbeddedError(
            f"the account {account.name if account else _name_of(os.geteuid())} cannot reach "
            f"{data}, where the data of the embedded database are. Restore the right to pass "
            f"through its parent folders, or remove {home} to begin anew."
        )
    base = _find_base(data, record.get("base"))
    place = Place(home, data, base, account)
    _write_record(place)
    return place


def _account_for(home: Path) -> Account | None:
    if os.geteuid() != 0:
        try:
            pwd.getpwuid(os.geteuid())
        except KeyError:
            raise EmbeddedError(
                f"this process runs as user id {os.geteuid()}, which has no name in /etc/passwd, "
                "and PostgreSQL needs one. Run as a named account, or set DATABASE_URL and "
                "REDIS_URL to servers of your own."
            ) from None
        return None
    owner = home.stat().st_uid
    try:
        entry = pwd.getpwuid(owner) if owner else pwd.getpwnam(ACCOUNT)
    except KeyError:
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and the account "
            f"{f'{owner}, which owns {home},' if owner else ACCOUNT!r} is not known here. "
            "Run as an ordinary user, or set DATABASE_URL and REDIS_URL to servers of your own."
        ) from None
    account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    if not can_enter(account, Path("/")):
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and this process may not switch to the account "
            f"{account.name!r}. Run as an ordinary user, or set DATABASE_URL and REDIS_URL to "
            "servers of your own."
        )
    return account


def can_enter(account: Account | None, folder: Path) -> bool:
    """Whether the account can make the folder its working directory."""
    return _as_account(account, lambda: os.chdir(folder))


def can_execute(account: Account | None, program: Path) -> bool:
    """Whether the account can reach, read and run the program."""

    def check() -> None:
        if not os.access(program, os.R_OK | os.X_OK):
            raise PermissionError

    return _as_account(account, check)


def _as_account(account: Account | None, action: object) -> bool:
    """Whether `action` works under the account: tried in a child, as no other answer is exact."""
    child = os.fork()
    if child == 0:
        try:
            if account is not None:
                os.setgroups([])
                os.setgid(account.gid)
                os.setuid(account.uid)
            action()  # type: ignore[operator]
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _find_data_folder(home: Path, account: Account | None) -> Path:
    if can_enter(account, home):
        return home
    assert account is not None
    for shared in SHARED_FOLDERS:
        folder = shared / secrets.token_hex(6)
        try:
            if not shared.exists():
                shared.mkdir()
                shared.chmod(0o711)
            if not _is_ours(shared):
                continue
            folder.mkdir()
            folder.chmod(0o711)
        except OSError:
            continue
        if can_enter(account, folder):
            _tell_of_leftovers(shared, home)
            (folder / OWNER).write_text(f"{home}\n")
            return folder
        folder.rmdir()
    raise EmbeddedError(
        f"PostgreSQL does not run as root, and the account {account.name!r} can reach neither "
        f"{home} nor {' nor '.join(map(str, SHARED_FOLDERS))}. Set CLAIMCHECK_HOME to a folder "
        "that others may pass through, run as an ordinary user, or set DATABASE_URL and REDIS_URL."
    )


def _tell_of_leftovers(shared: Path, home: Path) -> None:
    """A removed state folder leaves its data here. They may be a moved folder's: never deleted."""
    for owner in shared.glob(f"*/{OWNER}"):
        if owner.read_text().strip() == str(home):
            logger.warning(
                "%s holds data of an earlier state folder in this place; remove it if that is gone",
                owner.parent,
            )


def _find_base(data: Path, earlier: str | None) -> Path:
    if _fits(data):
        return data
    if earlier is not None and Path(earlier) != data and _fits(Path(earlier)):
        folder = Path(earlier)
        if _make_private(folder):
            return folder
    for parent in SHORT_FOLDERS:
        folder = parent / f"claimcheck-{secrets.token_hex(6)}"
        if parent.is_dir() and _make_private(folder):
            return folder
    raise EmbeddedError(
        f"the path {data} is too long or unusual for a Unix socket, and no short folder can be "
        "made in /tmp. Set CLAIMCHECK_HOME to a shorter path."
    )


def _fits(base: Path) -> bool:
    longest = os.fsencode(base / "sockets" / POSTGRES_SOCKET)
    return len(longest) <= _LONGEST_SOCKET_PATH and _PLAIN_PATH.fullmatch(str(base)) is not None


def _make_private(folder: Path) -> bool:
    """Make a folder in a place that everybody can write; False where it is somebody else's."""
    try:
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        else:
            if os.geteuid() == 0:
                folder.chmod(0o711)
    except OSError:
        return False
    return _is_ours(folder)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _at(home: Path, recorded_path: str) -> Path:
    # "." keeps its meaning when the folder is moved.
    return home if recorded_path == "." else Path(recorded_path)


def _read_record(home: Path) -> dict[str, str] | None:
    try:
        found = json.loads((home / RECORD).read_text())
        return {name: str(found[name]) for name in ("data", "base")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise EmbeddedError(
            f"{home / RECORD} cannot be read; it says where the embedded servers keep their data. "
            f"Restore it, or remove {home} to begin anew."
        ) from None


def _write_record(place: Place) -> None:
    record = {
        "data": "." if place.data == place.home else str(place.data),
        "base": "." if place.base == place.home else str(place.base),
    }
    new = place.home / f"{RECORD}.new"
    new.write_text(json.dumps(record) + "\n")
    owner = place.home.stat()
    if os.geteuid() == 0 and owner.st_uid:
        os.chown(new, owner.st_uid, owner.st_gid)
    new.replace(place.home / RECORD)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user id {uid}"
