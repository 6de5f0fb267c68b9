"""Handlers, and a broker that breaks once while the worker introduces itself."""

from __future__ import annotations

from celery.worker.heartbeat import Heart
from kombu.exceptions import OperationalError

from support import handlers

__all__ = ["handlers"]

_start = Heart.start
_broken = False


def start(self: Heart) -> None:
    global _broken
    if not _broken:
        _broken = True
        # As kombu reports a connection that is lost while it publishes.
        raise OperationalError("Timeout reading from socket")
    _start(self)


Heart.start = start
