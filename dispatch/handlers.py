"""The functions that do a run's work, by name: a team's own and the built-in ones."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from dispatch.context import RunContext
from dispatch.errors import ClaimcheckError

ENTRY_POINTS = "claimcheck.handlers"
REPLICATE = "replicate"
"""The built-in handler, of replication jobs: what these do is their definition alone."""

Handler = Callable[[RunContext], Any]
"""Takes the run; returns an Outcome, or a JSON value (or None) that is stored as its result."""


class HandlerNotLoaded(ClaimcheckError):
    """A module or entry point that should define handlers cannot be imported."""


class DuplicateHandler(ClaimcheckError):
    """Two functions claim one handler's name."""


_handlers: dict[str, Handler] = {}
_lock = threading.Lock()


def register(name: str, handler: Handler, *, replace: bool = False) -> None:
    """Make ``handler`` known as ``name``. Raises DuplicateHandler where another one holds it.

    The same function may register again, as it does where its module is imported anew.
    """
    with _lock:
        before = _handlers.get(name)
        if before is not None and not replace and _place(before) != _place(handler):
            raise DuplicateHandler(
                f"the handler name {name!r} is taken by {_place(before)}; "
                f"{_place(handler)} needs another one"
            )
        _handlers[name] = handler


def get(name: str) -> Handler | None:
    """The handler of that name, or None where this process knows none."""
    return _handlers.get(name)


def known() -> list[str]:
    """The names of all handlers of this process, sorted; a claim takes only their runs (R-C2)."""
    with _lock:
        return sorted(_handlers)


def load(modules: Iterable[str]) -> None:
    """Import ``modules`` and the entry points ``claimcheck.handlers``, which register themselves.

    An entry point that names a function, rather than a module, is registered under its own name.
    Raises HandlerNotLoaded, naming the module and the fault.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise HandlerNotLoaded(
                f"CLAIMCHECK_HANDLERS: the module {module!r} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
        except Exception as error:
            raise HandlerNotLoaded(
                f"the entry point {entry.name!r} ({ENTRY_POINTS}) of {entry.value!r} cannot be "
                f"imported: {type(error).__name__}: {error}"
            ) from error
        if callable(found) and found not in _handlers.values():
            register(entry.name, found)


def _place(handler: Handler) -> str:
    module = getattr(handler, "__module__", None)
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    return f"{module}.{name}" if module else name
