"""The beat's wait: until the next known deadline, or until a committed change moves it (R-D3).

One connection listens and looks; while nothing is due and nothing is told, it is silent. Work
goes through the sweep, on connections of its own. No Celery here: `tasks.beat` calls `step`.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db import session, settings
from db.failures import first_line, is_connection_lost
from dispatch.deadlines import EVERYTHING, Scope
from dispatch.ports import Ports
from dispatch.sweep import Sweep

logger = logging.getLogger("claimcheck.beat")

QUIET_SECONDS = 1.0
"""After so long without a notification the next one is acted on at once, others wait as long."""
PATIENCE_SECONDS = 10.0
"""How long a look waits for an answer; a server that hangs is then left and tried again."""
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 5.0
APPLICATION_NAME = f"claimcheck-beat@{socket.gethostname()}"[:63]  # as long as a name may be


class Watch:
    """Sleeps and sweeps for one process. Times are monotonic; the database's clock decides (R-L2).

    What it knows it has read since it listens, so that no committed change is missed: a lost
    connection is opened again with growing pauses, and everything is read anew (R-D6).
    """

    def __init__(
        self,
        ports: Ports,
        *,
        clock: Callable[[], float] = time.monotonic,
        sweep: Sweep | None = None,
    ) -> None:
        chosen = settings.settings()
        self.sweep = sweep or Sweep(ports, clock=clock, grace=chosen.offer_grace_seconds)
        self._clock = clock
        self._lease = chosen.lease_seconds
        self._backstop = chosen.sweep_seconds
        self._connection: psycopg.Connection[object] | None = None
        self._scopes: list[Scope] = []
        self._acted = -QUIET_SECONDS
        self._look_again: float | None = None
        self._next_backstop: float | None = None
        self._retry = 0.0
        self._retry_length = 0.0
        self._away = False
        self._said: tuple[str, float] | None = None

    def step(self, longest: float) -> None:
        """Do what is due now, else wait for it, at most ``longest`` seconds. Raises nothing."""
        try:
            self._step(longest)
        except (psycopg.Error, DBAPIError, PoolTimeout, OSError) as error:
            self._failed(error)
        except Exception:
            logger.exception("the beat's sweep failed and is tried again")
            self._disconnect()

    def close(self) -> None:
        """Let go of the connection; a later `step` opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    # --- one step -----------------------------------------------------------------------------

    def _step(self, longest: float) -> None:
        now = self._clock()
        if self._connection is None:
            if now < self._retry:
                time.sleep(max(0.0, min(longest, self._retry - now)))
                return
            self._connect()
        assert self._connection is not None
        self._hear(self._connection)
        now = self._clock()
        due = self._next()
        if due is not None and due <= now:
            self._act(self._connection, now)
            self._retry_length = 0.0
            return
        wait = longest if due is None else min(longest, due - now)
        if wait > 0 and _readable(self._connection, wait):
            self._hear(self._connection)

    def _next(self) -> float | None:
        """When to act next: at a deadline, for what was told, for a second look or the backstop."""
        times = [self.sweep.next_deadline(), self._look_again, self._next_backstop]
        if self._scopes:
            # R-D4: at once after a quiet second, else a second after the last time.
            times.append(self._acted + QUIET_SECONDS)
        return min((known for known in times if known is not None), default=None)

    def _hear(self, connection: psycopg.Connection[object]) -> None:
        for heard in connection.notifies(timeout=0):
            self._scopes.append(Scope.of(heard.payload))

    def _act(self, connection: psycopg.Connection[object], now: float) -> None:
        scopes, self._scopes = self._scopes, []
        if scopes:
            self._acted = now
        backstop = self._next_backstop is not None and self._next_backstop <= now
        again = self._look_again is not None and self._look_again <= now
        if again:
            self._look_again = None
        if backstop:
            self._next_backstop = now + self._backstop
        if (
            self.sweep.run(connection, [*scopes, EVERYTHING] if backstop or again else scopes)
            or scopes
        ):
            # R-D3: a lease that begins now without a word is seen once silence has lasted as long.
            self._look_again = self._clock() + self._lease

    # --- the connection -----------------------------------------------------------------------

    def _connect(self) -> None:
        connection = session.connect_direct(APPLICATION_NAME, patience=PATIENCE_SECONDS)
        try:
            # Planned anew each time: a plan that was made while nothing waited suits no backlog.
            connection.prepare_threshold = None
            connection.execute("set jit = off")
            # Listening comes first: what commits from here on is told or seen, or both.
            connection.execute("listen claimcheck")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._scopes = [EVERYTHING]
        now = self._clock()
        self._acted = now - QUIET_SECONDS
        self._look_again = now + self._lease
        self._next_backstop = now + self._backstop if self._backstop else None
        if self._away:
            logger.warning("the control database (DATABASE_URL) is back; deadlines are read anew")
        self._away = False

    def _failed(self, error: Exception) -> None:
        lost = isinstance(error, OSError) or is_connection_lost(error)
        if not lost:
            self._say(f"the beat's statement failed and is tried again: {first_line(error)}")
        elif not self._away:
            logger.warning(
                "the control database (DATABASE_URL) is away: %s. The beat goes on when it is back",
                first_line(error),
            )
            self._away = True
        self._disconnect()

    def _say(self, text: str) -> None:
        """Log an error that may repeat, at most once a minute."""
        now = self._clock()
        if self._said is None or self._said[0] != text or now - self._said[1] >= 60:
            self._said = (text, now)
            logger.error("%s", text)

    def _disconnect(self) -> None:
        self.close()
        self._retry_length = min(
            LONGEST_RETRY_SECONDS, max(FIRST_RETRY_SECONDS, self._retry_length * 2)
        )
        self._retry = self._clock() + self._retry_length


def _readable(connection: psycopg.Connection[object], seconds: float) -> bool:
    """Wait until the server says something, at most ``seconds``; costs nothing meanwhile."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    # Rounded up: to wake a moment before a deadline would mean to wait for it twice.
    return bool(poll.poll(int(seconds * 1000) + 1))
