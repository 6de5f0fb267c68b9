"""The embedded Valkey, for a process that misses it or is connected to it again.

All of it is nothing where ``REDIS_URL`` is set.
"""

from __future__ import annotations

import logging
import os
import threading

from db import settings
from db.embedded import EmbeddedError

logger = logging.getLogger("claimcheck.redis")

_bringing = threading.Lock()


def bring_back() -> None:
    """Start it again where a crash took it down; one that was stopped by command stays so.

    In a thread, one at a time: a Valkey that does not start may take minutes to say so, and the
    caller has a second for its broker (R-T4). Raises nothing.
    """
    if settings.settings().uses_embedded_redis and _bringing.acquire(blocking=False):
        threading.Thread(target=_bring_back, name="claimcheck-valkey", daemon=True).start()


def _bring_back() -> None:
    try:
        settings.services().revive_redis()
    except EmbeddedError as error:
        logger.warning("%s", error)
    finally:
        _bringing.release()


def keep() -> None:
    """Count as a user of it, where it was started anew by others. Raises nothing."""
    if settings.settings().uses_embedded_redis:
        settings.services().keep_redis()


def _forked() -> None:
    global _bringing
    _bringing = threading.Lock()


os.register_at_fork(after_in_child=_forked)
