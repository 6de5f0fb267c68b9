"""Python's search for garbage, held back while rows pass."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 100_000
"""New objects after which Python searches, while rows pass; by default some hundreds."""

_lock = threading.Lock()
_usual: list[tuple[int, int, int]] = []
"""The thresholds to go back to, once for each block that is open."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """In the block, rows are made by thousands, and no cycle is among them: to search them over
    and over is for nothing. Blocks of several threads may overlap."""
    with _lock:
        _usual.append(_usual[0] if _usual else gc.get_threshold())
        often, *rest = _usual[0]
        # 0 is never.
        gc.set_threshold(max(often, OBJECTS) if often else 0, *rest)
    try:
        yield
    finally:
        with _lock:
            usual = _usual.pop()
            if not _usual:
                gc.set_threshold(*usual)
