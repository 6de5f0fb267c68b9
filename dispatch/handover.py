"""Wake-ups that reached a worker which may not take their run: handed to another one (R-C2, R-C9).

A fleet in which not every worker knows every handler, as in any rolling release, would otherwise
wait for the sweep each time the wrong worker is the faster one.
"""

from __future__ import annotations

import logging
import threading
import time
from uuid import UUID

from db.link import Link
from dispatch.claims import RunClaims
from dispatch.ports import Ports

TIMES = 5
"""How often one run is handed on within FORGET_SECONDS; after that the sweep offers it (R-D5)."""
FORGET_SECONDS = 60.0
"""Monotonic. Also how often the same lack is told in the log."""
_MOST = 1_000

logger = logging.getLogger("claimcheck.coordinator")


class Handover:
    """What one process hands on. Shared by its threads."""

    def __init__(self, ports: Ports, claims: RunClaims) -> None:
        self._ports = ports
        self._claims = claims
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._times: dict[UUID, int] = {}
        self._told: set[str] = set()

    def hand_on(self, link: Link, run_id: UUID) -> None:
        """Offer a run again that this worker cannot take and another one can.

        Raises psycopg.Error.
        """
        beyond = self._claims.beyond(link, run_id)
        if beyond is None:
            return
        with self._lock:
            if time.monotonic() - self._since > FORGET_SECONDS or len(self._times) > _MOST:
                self._since = time.monotonic()
                self._times.clear()
                self._told.clear()
            times = self._times[run_id] = self._times.get(run_id, 0) + 1
            is_news = beyond.needs not in self._told
            self._told.add(beyond.needs)
        if is_news:
            logger.warning(
                "run %s is left to another worker of queue %s: this one lacks %s",
                run_id,
                beyond.offer.queue,
                beyond.needs,
            )
        if times <= TIMES:
            self._ports.offer([beyond.offer])
