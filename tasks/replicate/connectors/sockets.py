"""What a driver does not do with its connection's socket."""

from __future__ import annotations

import socket
import struct

ROOM = 1024 * 1024
"""Bytes that a Unix socket may hold for a busy server; systems allow less as they see fit."""
_NO_TIME = struct.pack("ii", 1, 0)


def break_off(wire: socket.socket) -> None:
    """Shut the connection down; its last close resets it. Raises OSError where it is gone.

    A server that waits to send hears of it by that reset: what arrived before may still be read,
    and a socket that is closed with nothing unread would leave the server to wait for room, for a
    minute or longer, with its locks.
    """
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_TIME)
    wire.shutdown(socket.SHUT_RDWR)


def widen(wire: socket.socket) -> None:
    """Let whoever sends a whole batch go on while the server still reads it.

    A Unix socket holds about 200 KB and does not grow; a TCP connection's room does by itself, and
    would no longer if it were set.
    """
    if wire.family == socket.AF_UNIX:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
