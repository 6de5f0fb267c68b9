"""Breaking a server's connection from this side, whoever waits on it."""

from __future__ import annotations

import socket
import struct

_NO_TIME = struct.pack("ii", 1, 0)


def break_off(wire: socket.socket) -> None:
    """Shut the connection down; its last close resets it. Raises OSError where it is gone.

    A server that waits to send hears of it by that reset: what arrived before may still be read,
    and a socket that is closed with nothing unread would leave the server to wait for room, for a
    minute or longer, with its locks.
    """
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_TIME)
    wire.shutdown(socket.SHUT_RDWR)
