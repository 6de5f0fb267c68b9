"""``@handler``, and the loading of every function that can do a run's work."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from db import settings
from dispatch import handlers

Function = TypeVar("Function", bound=handlers.Handler)

_lock = threading.Lock()
_loaded = False


def handler(name: str) -> Callable[[Function], Function]:
    """Make a function the handler ``name``: ``@handler("report")`` above ``def report(run): ...``

    It makes no job: `trigger` needs a job that names the handler. The function itself stays as it
    is. Raises DuplicateHandler where another function holds the name.
    """
    if not isinstance(name, str) or not name:
        raise TypeError('name the handler: @handler("report")')

    def register(function: Function) -> Function:
        handlers.register(name, function)
        return function

    return register


def load() -> list[str]:
    """Load the built-in handler, CLAIMCHECK_HANDLERS and the entry points, once a process.

    The names of all handlers. Raises HandlerNotLoaded and DuplicateHandler, which say which one.
    """
    global _loaded
    with _lock:
        if not _loaded:
            from tasks import replicate

            run = getattr(replicate, "run", None)
            if run is not None:
                handlers.register(handlers.REPLICATE, run)
            modules = settings.settings().handlers
            if modules:
                _find_modules_here()
            handlers.load(modules)
            _loaded = True
    return handlers.known()


def _find_modules_here() -> None:
    """Let a team's modules be found in the working folder, as ``celery -A`` finds an app there.

    For the life of the process, since they may import more of themselves later; and last, so that
    nothing in the folder takes the place of an installed package.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
