"""Waiting for something to become true, never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(what: str, look: Callable[[], Found], seconds: float = 15.0) -> Found:
    """The first truthy answer of ``look``. Fails, naming what was waited for, after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}; last seen: {found!r}")
        time.sleep(0.02)
