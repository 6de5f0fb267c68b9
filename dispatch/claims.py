"""Taking a run: directed or the next of a queue, each in one statement (R-C1 to R-C8)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg

from db import statements
from db.failures import is_connection_lost
from db.link import Link
from dispatch.backoff import Backoff
from dispatch.deadlines import sign_of_life
from dispatch.ports import Offer

PRIORITIES = tuple(range(9, -1, -1))
WINDOW = 32
"""How many due runs of each priority, or of each job in a wide look, are looked at."""
TRIES = 16
"""How many of them are tried, in order, until one is not locked."""
DEEP_WINDOW = 20_000
SLOW_LOOK_SECONDS = 0.003
"""A look that costs more is cut short by bounds until it has paid for itself."""
LOOK_SHARE = 20
SHORTEST_BOUND_SECONDS = 0.02

Place = tuple[datetime, datetime, UUID]
"""A run's place among those of its queue and priority: ``available_at``, ``created_at``, ``id``."""

_RACES = 8
_RACED_ON = frozenset({"job_run_one_held", "job_run_slot", "job_run_slot_is_whole"})
_SQL = statements.load("claims")


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that this process holds, with what the claim resolved for it (R-C5).

    ``asked_at`` is the monotonic time just before the claim was sent: the lease counts from there
    (R-L3). The token proves the hold and is shown nowhere (R-C6).
    """

    id: UUID
    job_id: UUID
    job: str
    root_run_id: UUID
    previous_run_id: UUID | None
    previous_code: str | None
    attempt: int
    max_attempts: int
    fence: int
    queue: str
    priority: int
    params: Mapping[str, Any]
    has_chain: bool
    exclusive: bool
    slot_key: str | None
    snapshot: Mapping[str, Any]
    source_datasource_id: UUID | None
    sink_datasource_id: UUID | None
    asked_at: float
    executor: str
    token: UUID = field(repr=False)
    source_envelope: Mapping[str, Any] | None = field(repr=False)
    sink_envelope: Mapping[str, Any] | None = field(repr=False)

    @property
    def definition(self) -> Mapping[str, Any]:
        found = self.snapshot.get("definition")
        return found if isinstance(found, Mapping) else {}


@dataclass(slots=True)
class _Look:
    """What is known of a queue's head, so that a dear look need not begin there each time.

    Someone's long transaction keeps dead index entries from being removed, and each look from the
    head steps over all of them. The bounds leave out what was taken already; work that appears
    before them (a retry, a late commit) waits for the next look without bounds, which comes after
    ``LOOK_SHARE`` times the cost of the last one.
    """

    bounds: dict[int, Place] = field(default_factory=dict)
    bounded_until: float = 0.0
    deep_after: float = 0.0

    def paid(self, cost: float) -> None:
        """A look without bounds cost so many seconds of the server's time."""
        if cost > SLOW_LOOK_SECONDS:
            self.bounded_until = time.monotonic() + max(SHORTEST_BOUND_SECONDS, LOOK_SHARE * cost)

    @property
    def usable_bounds(self) -> Mapping[int, Place]:
        """The bounds, while the next look is to be a bounded one; else none."""
        return self.bounds if time.monotonic() < self.bounded_until else {}


class RunClaims:
    """Claims runs for the executor that calls. Shared by threads; each brings its own Link."""

    def __init__(
        self,
        executor: Callable[[], str],
        lease_seconds: float,
        *,
        handlers: Callable[[], Sequence[str]],
        key_versions: Callable[[], Sequence[str]],
    ) -> None:
        self._executor = executor
        self._lease_seconds = lease_seconds
        self._handlers = handlers
        self._key_versions = key_versions
        self._looks: dict[str, _Look] = {}

    def directed(self, link: Link, run_id: UUID) -> ClaimedRun | None:
        """Claim the named run, or None where it is not eligible, held, or its job stays locked.

        Waits at most a second for edits of its job and datasources. Raises psycopg.Error.
        """
        named = {"run_id": run_id}
        taken, seen = self._ask(link, _SQL["claim_directed"], named)
        if taken is None and seen.candidates:
            waiting = (_SQL["edit_patience"], _SQL["wait_for_edit"])
            try:
                taken, _ = self._ask(link, _SQL["claim_directed"], named, first=waiting)
            except psycopg.errors.QueryCanceled:
                return None
        return taken

    def beyond(self, link: Link, run_id: UUID) -> Beyond | None:
        """What the named run needs and this worker lacks, where that alone keeps it from it.

        Raises psycopg.Error.
        """
        asked = {
            "run_id": run_id,
            "handlers": list(self._handlers()),
            "key_versions": list(self._key_versions()),
        }
        found = link.row(_SQL["beyond_this_worker"], asked)
        if found is None:
            return None
        needs = (
            f"the handler {found['handler']!r}: name its module in CLAIMCHECK_HANDLERS"
            if found["is_unknown"]
            else "a key that its keyring does not hold: give it the current keyring file"
        )
        return Beyond(Offer(run_id, found["queue"], found["priority"]), needs)

    def next(self, link: Link, queue: str) -> ClaimedRun | None:
        """Claim the first eligible run of ``queue`` by R-C3's order, or None. Waits for nobody.

        Raises psycopg.Error.
        """
        look = self._looks.setdefault(queue, _Look())
        if bounds := look.usable_bounds:
            taken, _ = self._look(link, queue, bounds)
            if taken is not None:
                return taken
        return self._whole_look(link, queue, look)

    def _whole_look(self, link: Link, queue: str, look: _Look) -> ClaimedRun | None:
        taken, seen = self._look(link, queue, {})
        cost = seen.seconds
        if taken is None and (seen.candidates or seen.near >= WINDOW):
            # What stands in front is blocked or locked: look past it, job by job.
            for pause in (0.0, 0.004, 0.02):
                time.sleep(pause * random.random())
                taken, seen = self._look(link, queue, {}, wide=True)
                cost += seen.seconds
                if taken is not None or not seen.candidates:
                    break
            else:
                taken = self._deep_look(link, queue, look)
        look.paid(cost)
        return taken

    def _deep_look(self, link: Link, queue: str, look: _Look) -> ClaimedRun | None:
        """All that was looked at and is eligible is locked: look further, but rarely."""
        began = time.monotonic()
        if began < look.deep_after:
            return None
        taken, _ = self._look(link, queue, {}, wide=True, deep=True)
        now = time.monotonic()
        look.deep_after = now + max(0.5, LOOK_SHARE * (now - began))
        return taken

    def _look(
        self,
        link: Link,
        queue: str,
        bounds: Mapping[int, Place],
        *,
        wide: bool = False,
        deep: bool = False,
    ) -> tuple[ClaimedRun | None, _Seen]:
        looking = _looking(queue, bounds, wide=wide, deep=deep)
        taken, seen = self._ask(link, _SQL["claim_next"], looking)
        self._note(queue, taken, seen)
        return taken, seen

    def _note(self, queue: str, taken: ClaimedRun | None, seen: _Seen) -> None:
        if taken is not None and seen.place is not None:
            self._looks.setdefault(queue, _Look()).bounds[taken.priority] = seen.place

    def _ask(
        self,
        link: Link,
        statement: LiteralString,
        parameters: Mapping[str, Any],
        *,
        first: Sequence[LiteralString] = (),
    ) -> tuple[ClaimedRun | None, _Seen]:
        for _ in range(_RACES):
            asked = self._asked(parameters)
            link.get()
            asked_at = time.monotonic()
            try:
                found = link.row(statement, asked, first=first)
            except psycopg.errors.LockNotAvailable:
                return None, _Seen(candidates=1)
            except (psycopg.errors.UniqueViolation, psycopg.errors.CheckViolation) as error:
                # Another claim was a moment faster with the job's turn or the slot (R-C8).
                if error.diag.constraint_name not in _RACED_ON:
                    raise
                continue
            except psycopg.Error as error:
                if not is_connection_lost(error):
                    raise
                link.close()
                found = self._settle(link, asked)
            return self._taken(found, asked, asked_at), _Seen.of(found)
        return None, _Seen(candidates=1)

    def _asked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **parameters,
            "executor": self._executor(),
            "token": uuid4(),
            "lease_seconds": self._lease_seconds,
            "handlers": list(self._handlers()),
            "key_versions": list(self._key_versions()),
            "notify": sign_of_life.is_due(self._lease_seconds),
        }

    def _taken(
        self, found: Mapping[str, Any] | None, asked: Mapping[str, Any], asked_at: float
    ) -> ClaimedRun | None:
        if found is None or found["id"] is None:
            return None
        if asked["notify"]:
            sign_of_life.given()
        return _claimed(found, asked, asked_at)

    def _settle(self, link: Link, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The connection broke on the claim: did it land? One that lands later expires (R-R7).

        Asks for a third of a lease, as long as what landed would still be worth having.
        """
        backoff = Backoff(self._lease_seconds / 3)
        while True:
            try:
                return link.row(_SQL["claim_by_token"], asked)
            except psycopg.Error as error:
                link.close()
                if not is_connection_lost(error) or not backoff.pause():
                    raise

    # A claim in someone else's transaction

    def request(self, queue: str) -> ClaimRequest:
        """The next claim of ``queue`` as a statement, for a transaction that does something else
        first. It looks only at the head of the queue, and waits for nobody.
        """
        bounds = self._looks.setdefault(queue, _Look()).usable_bounds
        asked = self._asked(_looking(queue, bounds, wide=False, deep=False))
        return ClaimRequest(queue, _SQL["claim_next"], asked, time.monotonic(), bool(bounds))

    def received(self, request: ClaimRequest, row: Mapping[str, Any] | None) -> ClaimedRun | None:
        """What ``request`` took, once its transaction has committed."""
        taken, seen = self._taken(row, request.parameters, request.asked_at), _Seen.of(row)
        self._note(request.queue, taken, seen)
        if not request.is_bounded:
            self._looks[request.queue].paid(seen.seconds)
        return taken

    def settle(self, link: Link, request: ClaimRequest) -> ClaimedRun | None:
        """What ``request`` took where its COMMIT got no answer (R-R7). Raises psycopg.Error."""
        return self._taken(
            self._settle(link, request.parameters), request.parameters, request.asked_at
        )


@dataclass(frozen=True, slots=True)
class Beyond:
    """A run that another worker can take and this one cannot, and what this one lacks."""

    offer: Offer
    needs: str


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim to be made; its parameters hold the token."""

    queue: str
    statement: LiteralString = field(repr=False)
    parameters: Mapping[str, Any] = field(repr=False)
    asked_at: float
    is_bounded: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    near: int = 0
    candidates: int = 0
    seconds: float = 0.0
    place: Place | None = None

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> _Seen:
        if found is None:
            return cls()
        place = None
        if found["id"] is not None:
            place = (found["available_at"], found["created_at"], found["id"])
        return cls(
            found.get("near", 0), found.get("candidates", 0), found.get("seconds", 0.0), place
        )


def _looking(queue: str, bounds: Mapping[int, Place], *, wide: bool, deep: bool) -> dict[str, Any]:
    places = [bounds.get(priority) for priority in PRIORITIES]
    return {
        "queue": queue,
        "priorities": list(PRIORITIES),
        "after_available_at": [place[0].isoformat() if place else "-infinity" for place in places],
        "after_created_at": [place[1].isoformat() if place else "-infinity" for place in places],
        "after_id": [place[2] if place else UUID(int=0) for place in places],
        "wide": wide,
        "deep": deep,
        "window": DEEP_WINDOW if deep else WINDOW,
        "tries": DEEP_WINDOW if deep else TRIES,
    }


def _claimed(found: Mapping[str, Any], asked: Mapping[str, Any], asked_at: float) -> ClaimedRun:
    return ClaimedRun(
        id=found["id"],
        job_id=found["job_id"],
        job=found["job_name"],
        root_run_id=found["root_run_id"],
        previous_run_id=found["previous_run_id"],
        previous_code=found["previous_code"],
        attempt=found["attempt"],
        max_attempts=found["max_attempts"],
        fence=found["fence"],
        queue=found["queue"],
        priority=found["priority"],
        params=found["params"],
        has_chain=bool(found["chain"]),
        exclusive=found["exclusive"],
        slot_key=found["slot_key"],
        snapshot=found["job_snapshot"],
        source_datasource_id=found["source_datasource_id"],
        sink_datasource_id=found["sink_datasource_id"],
        asked_at=asked_at,
        executor=asked["executor"],
        token=asked["token"],
        source_envelope=found["source_snapshot"],
        sink_envelope=found["sink_snapshot"],
    )
