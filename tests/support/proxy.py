"""A proxy before a server, for cutting and hanging connections at a chosen moment."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from psycopg import conninfo

Trigger = Callable[[bytes], bool]


@dataclass(eq=False)
class _Pair:
    client: socket.socket
    server: socket.socket
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


@dataclass
class Proxy:
    """Passes bytes between clients and ``target`` until it is told otherwise.

    ``cut_when(seen)`` cuts the connection that sends such bytes: before they reach the server, or
    after the server has answered them, whose answer is swallowed (``answered=True``). ``hang``
    passes nothing and closes nothing, as a stopped server or a dead network does.
    """

    target: tuple[str, int] | str
    port: int = 0
    hanging: bool = False
    cuts: int = 0
    connections: int = 0
    """How many clients have come, served or not."""
    _trigger: Trigger | None = None
    _answered: bool = False
    _pairs: list[_Pair] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: bool = False

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._closing = True
        self.hanging = False
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        self._thread.join(5)
        self._listener.close()
        self.cut()

    def hang(self) -> None:
        self.hanging = True

    def resume(self) -> None:
        self.hanging = False

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def cut_when(self, trigger: Trigger, *, answered: bool) -> None:
        """Break the connection that next sends bytes for which ``trigger`` says so."""
        self._answered = answered
        self._trigger = trigger

    def _accept(self) -> None:
        while not self._closing:
            client, _ = self._listener.accept()
            if self._closing:
                client.close()
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._connect()
        except OSError:
            client.close()
            return
        pair = _Pair(client, server)
        with self._lock:
            self._pairs.append(pair)
        try:
            self._pass(pair)
        except (OSError, ValueError):
            pass
        finally:
            pair.close()

    def _connect(self) -> socket.socket:
        if not isinstance(self.target, str):
            return socket.create_connection(self.target, 5)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self.target)
        return server

    def _pass(self, pair: _Pair) -> None:
        swallow = False
        with selectors.DefaultSelector() as ready:
            ready.register(pair.client, selectors.EVENT_READ)
            ready.register(pair.server, selectors.EVENT_READ)
            while not pair.closed:
                found = ready.select(0.2)
                while self.hanging and not pair.closed:
                    time.sleep(0.01)
                for key, _ in found:
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is pair.server:
                        if swallow:
                            self.cuts += 1
                            return
                        pair.client.sendall(data)
                        continue
                    if self._trigger is not None and self._trigger(data):
                        self._trigger = None
                        if not self._answered:
                            self.cuts += 1
                            return
                        swallow = True
                    pair.server.sendall(data)


@contextlib.contextmanager
def proxy(target: tuple[str, int] | str) -> Iterator[Proxy]:
    """A started proxy before a host and port, or a socket's path."""
    found = Proxy(target)
    found.start()
    try:
        yield found
    finally:
        found.stop()


@contextlib.contextmanager
def before_database(database: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy before a PostgreSQL server, and the conninfo that goes through it."""
    given = conninfo.conninfo_to_dict(database)
    host, port = str(given.get("host") or "127.0.0.1"), str(given.get("port") or 5432)
    target = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, int(port))
    with proxy(target) as found:
        yield found, conninfo.make_conninfo(database, host="127.0.0.1", port=found.port)
