"""The one process that owns a state folder's servers.

It holds the folder's lock as long as it lives, answers requests on the control socket, restarts
a server that died, and ends when nobody has used the servers for a while. A client's open
connection is its interest: the kernel closes it with the client's last process, however it ends.

Requests and answers are one line of JSON each.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from db.embedded.place import STOPPED, EmbeddedError, open_lock, settle, take_lock
from db.embedded.postgres import Postgres
from db.embedded.server import Server
from db.embedded.valkey import Valkey

logger = logging.getLogger("claimcheck.embedded")

LOCK = "supervisor.lock"
_LOCK_SECONDS = 45.0  # longer than an ending supervisor needs to stop its servers
_LOOK_SECONDS = 15.0
_REQUEST_SECONDS = 2.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_CALM_SECONDS = 60.0


class Supervisor:
    """Runs until it is stopped; see the module."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.idle_seconds = 300.0
        self.clients: dict[socket.socket, int] = {}
        self.servers: dict[str, Server] = {}
        self.wanted: set[str] = set()
        self.used_at = time.monotonic()
        self.retry_at: dict[str, float] = {}
        self.pauses: dict[str, float] = {}
        self.touched_at = time.monotonic()
        self.ending = False

    def run(self, ready: Callable[[], None]) -> None:
        """Serve; calls `ready` once it can be asked. Raises `EmbeddedError` before that."""
        self.lock = open_lock(self.home / LOCK)
        if not take_lock(self.lock, _LOCK_SECONDS):
            raise EmbeddedError(
                f"another process holds {self.home / LOCK} and cannot be reached from here, "
                "perhaps in another container on the same volume. End it there, or set "
                "CLAIMCHECK_HOME to another folder."
            )
        self.place = settle(self.home)
        self._lock_data()
        self.servers = {"postgres": Postgres(self.place), "valkey": Valkey(self.place)}
        self._make_socket_folder()
        (self.home / STOPPED).unlink(missing_ok=True)
        with selectors.DefaultSelector() as self.selector, self._listen() as self.listener:
            signals, wake = socket.socketpair()
            with signals, wake:
                self._watch_signals(signals, wake)
                ready()
                try:
                    self._serve(signals)
                finally:
                    self._end()

    def _lock_data(self) -> None:
        """Data elsewhere have a lock of their own: a copied state folder names the same data."""
        if self.place.data == self.home:
            return
        self.data_lock = open_lock(self.place.data / LOCK)
        if not take_lock(self.data_lock, _LOCK_SECONDS):
            raise EmbeddedError(
                f"{self.place.data}, which {self.home} names as the place of its data, is in use "
                f"by the servers of another state folder. Stop those, or remove {self.home} to "
                "begin anew."
            )

    def _make_socket_folder(self) -> None:
        folder = self.place.sockets
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.place.give(folder)

    def _listen(self) -> socket.socket:
        self.place.control.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.place.control))
        self.place.control.chmod(0o600)
        owner = self.home.stat()
        if os.geteuid() == 0 and owner.st_uid:
            os.chown(self.place.control, owner.st_uid, owner.st_gid)
        listener.listen(128)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        return listener

    def _watch_signals(self, signals: socket.socket, wake: socket.socket) -> None:
        signals.setblocking(False)
        wake.setblocking(False)
        self.selector.register(signals, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    # --- the loop

    def _serve(self, signals: socket.socket) -> None:
        while not self.ending:
            for key, _ in self.selector.select(self._pause()):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is signals:
                    self._read_signals(signals)
                elif isinstance(key.fileobj, socket.socket):
                    self._forget(key.fileobj)
            if not self._still_ours():
                logger.warning("%s is gone; ending", self.home)
                return
            self._mend()
            self._keep_from_cleaners()
            if self._is_quiet():
                logger.info("unused for %.0f s; ending", self.idle_seconds)
                return

    def _pause(self) -> float:
        """Seconds until something has to be looked at without being told."""
        now = time.monotonic()
        down = [name for name in self.wanted if not self.servers[name].running]
        moments = [now + _LOOK_SECONDS, *(self.retry_at.get(name, now) for name in down)]
        if not self.clients:
            moments.append(self.used_at + self.idle_seconds)
        return max(0.0, min(moments) - now) + 0.01

    def _read_signals(self, signals: socket.socket) -> None:
        try:
            numbers = signals.recv(4096)
        except BlockingIOError:
            return
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            logger.info("told to end")
            self.ending = True

    # --- requests

    def _accept(self) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        try:
            client.settimeout(_REQUEST_SECONDS)
            with client.makefile("rb") as lines:
                request = json.loads(lines.readline(4096))
            answer, stays = self._answer(request)
            client.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            client.close()
            return
        if stays:
            self.used_at = time.monotonic()
            client.setblocking(False)
            self.clients[client] = int(request["pid"])
            self.selector.register(client, selectors.EVENT_READ)
        else:
            client.close()

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        match request["op"]:
            case "ensure":
                return self._ensure(request)
            case "stop":
                return self._stop(request), False
            case "status":
                return self._status(), False
        return {"error": "unknown request"}, False

    def _ensure(self, request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        if request["idle_seconds"] is not None:
            self.idle_seconds = float(request["idle_seconds"])
        try:
            for name in request["servers"]:
                if not self.servers[name].listens():
                    self._start(name)
                self.wanted.add(name)
        except EmbeddedError as error:
            return {"error": str(error)}, False
        return {"sockets": str(self.place.sockets)}, True

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        others = {pid for pid in self.clients.values() if pid != request["pid"]}
        if others and not request["force"]:
            return {"used_by": sorted(others)}
        logger.info("stopped by command")
        (self.home / STOPPED).touch(mode=0o600)
        self._stop_servers()
        self.ending = True
        return {}

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "servers": [name for name, server in self.servers.items() if server.running],
            "used_by": sorted(set(self.clients.values())),
            "idle_seconds": self.idle_seconds,
            "account": self.place.account.name if self.place.account else None,
        }

    def _forget(self, client: socket.socket) -> None:
        """A client's end: it has nothing more to say after its request."""
        self.selector.unregister(client)
        self.clients.pop(client, None)
        client.close()
        self.used_at = time.monotonic()

    # --- the servers' lives

    def _mend(self) -> None:
        """Start again what died by itself: at once, but with a doubling pause in a crash loop."""
        for name in sorted(self.wanted):
            now = time.monotonic()
            retry_at = self.retry_at.get(name, -math.inf)
            if self.ending or self.servers[name].running or now < retry_at:
                continue
            calm = now - retry_at > _CALM_SECONDS
            pause = _FIRST_PAUSE if calm else min(self.pauses[name] * 2, _LONGEST_PAUSE)
            logger.warning("%s has ended; starting it again", name)
            try:
                self._start(name)
            except EmbeddedError as error:
                logger.error("%s", error)
            self.pauses[name] = pause
            self.retry_at[name] = time.monotonic() + pause

    def _start(self, name: str) -> None:
        """Start a server. Raises `EmbeddedError`, whatever went wrong: the supervisor lives on."""
        server = self.servers[name]
        try:
            server.stop()
            server.start()
        except EmbeddedError:
            raise
        except Exception as error:
            logger.exception("%s cannot be started", name)
            raise EmbeddedError(
                f"the embedded {name} cannot be started ({type(error).__name__}); "
                f"{self.home / 'embedded.log'} says why"
            ) from None
        logger.info("%s runs", name)

    def _still_ours(self) -> bool:
        """Whether the folder, whose lock this process holds, is still the one in its place."""
        try:
            there = os.stat(self.home / LOCK)
        except OSError:
            return False
        ours = os.fstat(self.lock)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _keep_from_cleaners(self) -> None:
        """Touch the sockets now and then, so that nothing that tidies /tmp takes them for old."""
        if time.monotonic() - self.touched_at < 3600:
            return
        self.touched_at = time.monotonic()
        for path in (self.place.base, self.place.sockets, *self.place.sockets.iterdir()):
            try:
                os.utime(path, follow_symlinks=False)
            except OSError:
                continue

    def _is_quiet(self) -> bool:
        """Whether the quiet time is over. Programs that came without asking are seen here.

        The database is asked only when no process of ours is interested: an idle fleet must show
        no statement.
        """
        now = time.monotonic()
        if self.clients:
            self.used_at = now
        if now - self.used_at < self.idle_seconds:
            return False
        for name in self.wanted:
            server = self.servers[name]
            if server.running and server.connections() > 0:
                self.used_at = now
                return False
        return True

    def _stop_servers(self) -> None:
        for server in self.servers.values():
            server.stop()

    def _end(self) -> None:
        # The control socket goes first: who comes now starts the next supervisor, which waits for
        # the lock that this one keeps until its servers have ended.
        self.listener.close()
        if self._still_ours():
            self.place.control.unlink(missing_ok=True)
        for client in list(self.clients):
            self._forget(client)
        self._stop_servers()
