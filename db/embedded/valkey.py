"""Valkey as an embedded server."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from db.embedded import binaries
from db.embedded.place import VALKEY_SOCKET
from db.embedded.server import Server


class Valkey(Server):
    """Valkey on a Unix socket, without persistence: it carries only wake-ups."""

    name = "valkey"
    stop_signal = signal.SIGTERM
    hard_stop_signal = signal.SIGKILL

    @property
    def socket_path(self) -> Path:
        return self.place.sockets / VALKEY_SOCKET

    def answers(self) -> bool:
        return self._ask(b"PING\r\n").startswith(b"+PONG")

    def connections(self) -> int:
        for line in self._ask(b"INFO clients\r\n").splitlines():
            if line.startswith(b"connected_clients:"):
                return int(line.partition(b":")[2]) - 1
        return 0

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(2)
                connection.connect(str(self.socket_path))
                connection.sendall(request)
                return connection.recv(65_536)
        except OSError:
            return b""

    def _sweep(self) -> None:
        self.socket_path.unlink(missing_ok=True)

    def _command(self) -> list[str]:
        return [str(binaries.valkey(self.place)), "-"]

    def _input(self) -> bytes:
        lines = (
            "port 0",
            f"unixsocket {self.socket_path}",
            "unixsocketperm 700",
            'save ""',
            "appendonly no",
            "daemonize no",
            "maxmemory-policy noeviction",
        )
        return "\n".join(lines).encode() + b"\n"
