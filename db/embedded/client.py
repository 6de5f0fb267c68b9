"""What a process does to have the servers: ask the supervisor, and start it where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from db.embedded.place import (
    DATABASE,
    ROLE,
    STOPPED,
    VALKEY_SOCKET,
    EmbeddedError,
    Place,
    open_lock,
    prepare_home,
    recorded,
    take_lock,
)

_START_SECONDS = 180.0
_ANSWER_SECONDS = 150.0
_STOP_SECONDS = 60.0
_KEEP_SECONDS = 2.0
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Endpoints:
    """How to reach the servers of a state folder. Nothing in it is secret."""

    sockets: Path

    @property
    def database_conninfo(self) -> str:
        """libpq conninfo. The folder's path holds no character that would need quoting."""
        return f"host={self.sockets} port=5432 user={ROLE} dbname={DATABASE}"

    @property
    def redis_url(self) -> str:
        """As Celery's Redis transport reads it."""
        return f"redis+socket://{self.sockets / VALKEY_SOCKET}"


@dataclass(frozen=True, slots=True)
class Status:
    """What a state folder's supervisor says of itself."""

    running: bool
    home: Path
    data: Path | None = None
    sockets: Path | None = None
    servers: tuple[str, ...] = ()
    used_by: tuple[int, ...] = ()
    """Process numbers of those that asked for the servers and still live."""
    idle_seconds: float | None = None
    account: str | None = None


class _Interest:
    """The open connection by which this process, and what it forks, keeps the servers up."""

    def __init__(
        self,
        connection: socket.socket,
        endpoints: Endpoints,
        servers: set[str],
        idle_seconds: float | None,
    ) -> None:
        # Kept as a bare number: it is never read, and lives until the process ends.
        self.handle = connection.detach()
        self.endpoints = endpoints
        self.servers = servers
        self.idle_seconds = idle_seconds
        self.pid = os.getpid()

    def holds(self) -> bool:
        # The supervisor sends nothing after its answer: readable means that it has ended.
        poll = select.poll()
        poll.register(self.handle, select.POLLIN | select.POLLHUP)
        return not poll.poll(0)

    def close(self) -> None:
        os.close(self.handle)


_lock = threading.Lock()
_interests: dict[Path, _Interest] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def ensure(
    home: Path, *, database: bool = True, redis: bool = True, idle_seconds: float | None = None
) -> Endpoints:
    """The endpoints of a state folder's servers, started first where they do not run.

    They stay up as long as this process or a forked child of it lives, and `idle_seconds` longer
    (None: as others asked, else 300). Safe to call at once from any number of processes and
    threads. Takes well under a millisecond where this process has them already, some milliseconds
    where they run, and one to three seconds else. Raises `EmbeddedError`.
    """
    return _have(home, _names(database, redis), idle_seconds, unasked=False)


def revive(home: Path, *, database: bool = True, redis: bool = True) -> None:
    """For a process that had the servers and cannot connect: returns once they run again.

    It asks the supervisor anew, a millisecond where all is well. Servers that were stopped by
    command stay stopped: `EmbeddedError`.
    """
    _have(home, _names(database, redis), None, unasked=True)


def keep(home: Path, *, database: bool = True, redis: bool = True) -> None:
    """For a process that is connected: a user again, where the supervisor that it asked has ended.

    Costs well under a millisecond else. Starts no supervisor and raises nothing; where none answers
    within two seconds this process stays uncounted until the next call.
    """
    servers = _names(database, redis)
    if not _lock.acquire(timeout=_KEEP_SECONDS):
        return
    try:
        known = _known(home)
        if known is None or not (servers <= known.servers and known.holds()):
            with contextlib.suppress(EmbeddedError, OSError):
                idle_seconds = None if known is None else known.idle_seconds
                real = Path(os.path.realpath(home.expanduser()))
                found = _try_ask(real, servers, idle_seconds, _KEEP_SECONDS)
                if found is not None:
                    _adopt(home, found)
    finally:
        _lock.release()


def _names(database: bool, redis: bool) -> set[str]:
    return {name for name, asked in (("postgres", database), ("valkey", redis)) if asked}


def _have(home: Path, servers: set[str], idle_seconds: float | None, *, unasked: bool) -> Endpoints:
    with _lock:
        known = _known(home)
        if known is not None:
            if not unasked and servers <= known.servers and known.holds():
                return known.endpoints
            idle_seconds = known.idle_seconds if idle_seconds is None else idle_seconds
        if unasked and (home / STOPPED).exists():
            raise EmbeddedError(
                f"the embedded servers in {home} were stopped by command; the next new command of "
                "Claimcheck there starts them again."
            )
        found = _ask_for(prepare_home(home), servers, idle_seconds)
        _adopt(home, found)
        return found.endpoints


def _known(home: Path) -> _Interest | None:
    """This process's own interest in a state folder's servers. Under the lock."""
    known = _interests.get(home)
    # An inherited one is left alone: it was counted for the parent, and a parent that detached may
    # have closed it and reused its number.
    return known if known is not None and known.pid == os.getpid() else None


def _adopt(home: Path, found: _Interest) -> None:
    """Make it this process's interest, in the place of an earlier one. Under the lock."""
    known = _known(home)
    if known is not None:
        if known.holds():
            found.servers |= known.servers
        known.close()
    _interests[home] = found


def stop(home: Path, *, force: bool = False) -> bool:
    """Stop a state folder's servers and wait until they have ended; False where none ran.

    Raises `EmbeddedError` where other processes use them, unless `force` is set.
    """
    real = Path(os.path.realpath(home.expanduser()))
    request = {"op": "stop", "force": force, "pid": os.getpid()}
    answer = _request(recorded(real), request, _STOP_SECONDS)
    if answer is None:
        return False
    if "used_by" in answer:
        raise EmbeddedError(
            f"the embedded servers in {home} are used by the processes "
            f"{', '.join(map(str, answer['used_by']))}. End these first, or add --force."
        )
    with _lock:
        known = _interests.pop(home, None)
        if known is not None and known.pid == os.getpid():
            known.close()
    _await_end(real)
    return True


def status(home: Path) -> Status:
    """What runs for a state folder; starts nothing."""
    home = Path(os.path.realpath(home.expanduser()))
    place = recorded(home)
    answer = _request(place, {"op": "status"}, 10)
    data, sockets = (place.postgres_data, place.sockets) if place else (None, None)
    if answer is None:
        return Status(False, home, data, sockets)
    return Status(
        True,
        home,
        data,
        sockets,
        tuple(answer["servers"]),
        tuple(answer["used_by"]),
        float(answer["idle_seconds"]),
        answer["account"],
    )


def holds_database(home: Path) -> bool:
    """Whether a database was ever made for a state folder; makes and starts nothing."""
    place = recorded(Path(os.path.realpath(home.expanduser())))
    if place is None:
        return False
    try:
        return place.postgres_data.exists()
    except PermissionError:  # another account's, so it is there
        return True


def _ask_for(home: Path, servers: set[str], idle_seconds: float | None) -> _Interest:
    for _ in range(_ATTEMPTS):
        found = _try_ask(home, servers, idle_seconds)
        if found is None:
            # One starts it, the others wait here and then find it.
            lock = open_lock(home / "start.lock")
            try:
                if not take_lock(lock, _START_SECONDS):
                    break
                found = _try_ask(home, servers, idle_seconds)
                if found is None:
                    _start(home)
                    found = _try_ask(home, servers, idle_seconds)
            finally:
                os.close(lock)
        if found is not None:
            return found
    raise EmbeddedError(
        f"the embedded servers in {home} end as soon as they start; {home / 'embedded.log'} may "
        "say why"
    )


def _try_ask(
    home: Path, servers: set[str], idle_seconds: float | None, seconds: float = _ANSWER_SECONDS
) -> _Interest | None:
    """Ask a running supervisor for servers; None where there is none, or it is just ending."""
    place = recorded(home)
    connection = _attach(place)
    if connection is None:
        return None
    request = {
        "op": "ensure",
        "servers": sorted(servers),
        "idle_seconds": idle_seconds,
        "pid": os.getpid(),
    }
    try:
        answer = _exchange(connection, request, seconds)
    except TimeoutError:
        connection.close()
        raise EmbeddedError(
            f"the supervisor of the embedded servers in {home} does not answer; "
            f"{home / 'embedded.log'} may say why"
        ) from None
    if answer is None or "error" in answer:
        connection.close()
        if answer is None:
            return None
        raise EmbeddedError(str(answer["error"]))
    return _Interest(connection, Endpoints(Path(answer["sockets"])), servers, idle_seconds)


def _start(home: Path) -> None:
    """Start the supervisor; returns once it can be asked. Raises `EmbeddedError`."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P and the folder: another package named `db` may stand where the caller works.
    command = [sys.executable, "-P", "-m", "db.embedded", "serve", "--home", str(home)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=root,
            env=_supervisor_environment(paths),
            start_new_session=True,
            timeout=_START_SECONDS,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(
            f"the supervisor of the embedded servers cannot be started: {type(error).__name__}"
        ) from None
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        raise EmbeddedError(lines[-1] if lines else "the embedded servers cannot be started")


def _supervisor_environment(paths: list[str]) -> dict[str, str]:
    """The supervisor outlives its starter: it takes over nothing that might be secret."""
    kept = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _attach(place: Place | None) -> socket.socket | None:
    if place is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place.control))
    except OSError:
        connection.close()
        return None
    return connection


def _exchange(
    connection: socket.socket, request: dict[str, Any], seconds: float
) -> dict[str, Any] | None:
    """One request and its answer; None where the supervisor ended instead."""
    connection.settimeout(seconds)
    try:
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline()
    except TimeoutError:
        raise
    except OSError:
        return None
    if not line:
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _request(place: Place | None, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    connection = _attach(place)
    if connection is None:
        return None
    with connection:
        try:
            return _exchange(connection, request, seconds)
        except TimeoutError:
            raise EmbeddedError("the supervisor of the embedded servers does not answer") from None


def _await_end(home: Path) -> None:
    """Wait for the supervisor's lock, so that the next one need not."""
    if not home.is_dir():
        return
    lock = open_lock(home / "supervisor.lock")
    try:
        take_lock(lock, _STOP_SECONDS)
    finally:
        os.close(lock)
