"""Damage to a fleet: one deed after another, each undone after a while; some last side by side."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from scenarios.fleet import Fleet

REPAIR_SECONDS = 60.0

Deed = Callable[[], bool]
"""Does its damage, or tells that there is nothing to damage now."""


class Damage:
    """Picks deeds at random. What a deed breaks is busy until it is undone."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.busy: set[str] = set()
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._undoing: list[threading.Thread] = []

    def go_on_for(
        self, seconds: float, pause: tuple[float, float], deeds: Sequence[tuple[Deed, int]]
    ) -> None:
        """Do one of ``deeds``, by their weights, after each pause of that range in seconds."""
        until = time.monotonic() + seconds
        due = time.monotonic()
        while time.monotonic() < until:
            self._undo_due()
            if time.monotonic() >= due:
                [deed] = self.chance.choices([d for d, _ in deeds], [w for _, w in deeds])
                if deed():
                    self.counts[deed.__name__] += 1
                due = time.monotonic() + self.chance.uniform(*pause)
            time.sleep(0.05)

    def later(self, seconds: float, what: str, undo: Callable[[], None]) -> None:
        """Undo a deed after a while; ``what`` is busy until then."""
        self.busy.add(what)

        def done() -> None:
            undo()
            self.busy.discard(what)

        self._undo.append((time.monotonic() + seconds, done))

    def repair(self) -> None:
        """Undo all that is not undone yet."""
        self._undo = [(0.0, undo) for _, undo in self._undo]
        self._undo_due()
        for thread in self._undoing:
            thread.join(REPAIR_SECONDS)
            assert not thread.is_alive(), "some damage cannot be undone"

    def _undo_due(self) -> None:
        now = time.monotonic()
        due = [undo for at, undo in self._undo if at <= now]
        self._undo = [(at, undo) for at, undo in self._undo if at > now]
        for undo in due:
            # By itself: what unlocks a row waits for a server that another has yet to thaw.
            thread = threading.Thread(target=undo, daemon=True)
            thread.start()
            self._undoing.append(thread)
