"""The project's Celery app in the tests' own process, from one set of servers to the next."""

from __future__ import annotations

import importlib

import kombu.pools

from db import session


def forget_connections() -> None:
    """Let the app of this process find its servers anew."""
    from tasks import app

    kombu.pools.reset()
    app._after_fork()
    app._local.__dict__.pop("backend", None)
    app._backend_cache = None
    importlib.import_module("tasks.offers")._forget()
    importlib.import_module("tasks.events")._forget()
    session.dispose()
