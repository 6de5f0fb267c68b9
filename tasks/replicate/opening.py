"""Connecting so that a stop need not wait for it: no driver's connect can be interrupted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Opening(Generic[C]):
    """A connect in a thread of its own, which is left behind when the run is stopped meanwhile
    (and closes what it still opens)."""

    def __init__(self, opener: Callable[[], C]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._left = False
        self._found: C | None = None
        self._error: BaseException | None = None

    def leave(self) -> None:
        """From any thread: wait no longer, and close what was opened and not handed out."""
        with self._lock:
            self._left = True
            found, self._found = self._found, None
        _close(found)
        self._done.set()

    def wait(self) -> C | None:
        """What was opened, or None where it was left; the opener's errors pass."""
        threading.Thread(target=self._open, name="claimcheck-connect", daemon=True).start()
        self._done.wait()
        with self._lock:
            found, self._found = self._found, None
            if self._error is not None and not self._left:
                raise self._error
        return found

    def _open(self) -> None:
        found: C | None = None
        try:
            found = self._opener()
        except BaseException as error:
            self._error = error
        with self._lock:
            if not self._left:
                self._found, found = found, None
        _close(found)
        self._done.set()


def _close(found: Closable | None) -> None:
    if found is not None:
        with contextlib.suppress(Exception):
            found.close()
