"""Callers: triggers, cancels, retries and edits, from several processes at once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg

from scenarios.fleet import Client, Fleet
from scenarios.invariants import Accepted
from scenarios.workload import HANDLED, REPLICATED, SCHEDULES

LENGTHS = (0.0, 0.1, 0.5, 2.0, 5.0)
TURNS = (0.0, 0.1, 0.5)

# What a caller may be told while the servers are being broken.
_EXCUSED = frozenset(
    {
        "DatabaseUnavailable",
        "TriggerBusy",
        "JobDisabled",
        "CatalogBusy",
        "NotCancellable",
        "NotRetryable",
        "OverlapRefused",
        "OperationalError",
        "InterfaceError",
        "DBAPIError",
        "AdminShutdown",
        "CannotConnectNow",
        "ConnectionTimeout",
        "DeadlineExceeded",
        "CrashShutdown",
        "InternalError",
    }
)


class Callers:
    """Threads that each ask a client process for one thing after another."""

    def __init__(self, fleet: Fleet, count: int, seed: int, pause: float) -> None:
        self.fleet = fleet
        self.accepted = Accepted()
        self.surprises: list[str] = []
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pause = pause
        self.clients = [fleet.client() for _ in range(count)]
        self._threads = [
            threading.Thread(
                target=self._call, args=(client, random.Random(f"{seed} {n}")), daemon=True
            )
            for n, client in enumerate(self.clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a caller hangs"

    def _call(self, client: Client, chance: random.Random) -> None:
        deeds = [(self._trigger, 10), (self._enqueue, 3), (self._cancel, 3), (self._retry, 2),
                 (self._chain, 2), (self._get, 2),
                 (self._edit, 1), (self._switch, 1)]  # fmt: skip
        while not self._stop.wait(self._pause * chance.uniform(0.5, 1.5)):
            [deed] = chance.choices(*zip(*deeds, strict=True))
            try:
                deed(client, chance)
            except AssertionError as error:
                self.surprises.append(str(error))
                return

    def _ask(self, client: Client, do: str, **asked: Any) -> dict[str, Any] | None:
        began = time.monotonic()
        answer = client.ask(do, **asked)
        seconds = time.monotonic() - began
        with self._lock:
            if seconds > 40:
                self.surprises.append(f"{do} {asked} took {seconds:.0f} s: {answer}")
            if "error" not in answer:
                self.counts[do] += 1
                return answer
            self.counts[f"{do}: {answer['error']}"] += 1
            if answer["error"] not in _EXCUSED:
                self.surprises.append(f"{do} {asked}: {answer}")
        return None

    def _params(self, chance: random.Random, lengths: Sequence[float]) -> dict[str, Any]:
        params: dict[str, Any] = {"seconds": chance.choice(lengths)}
        kind = chance.random()
        if kind < 0.1:
            params["fails"] = chance.randint(1, 3)
        elif kind < 0.15:
            params["permanent"] = True
        elif kind < 0.2:
            params["snooze"] = True
        return params

    def _trigger(self, client: Client, chance: random.Random) -> None:
        job = chance.choice([*HANDLED, *HANDLED, *REPLICATED, "once"])
        lengths = TURNS if job == "turn" else LENGTHS
        params = {} if job in REPLICATED else self._params(chance, lengths)
        options: dict[str, Any] = {"priority": chance.randint(0, 9)}
        if chance.random() < 0.2:
            options["countdown"] = round(chance.uniform(0, 4), 2)
        key = None
        if job == "work" and chance.random() < 0.5:
            # Few keys, so that several callers use the same one at the same time.
            key = f"{int(time.monotonic())}-{chance.randint(0, 1)}"
            options["idempotency_key"] = params["key"] = key
        answer = self._ask(client, "trigger", job=job, params=params, options=options)
        if answer is not None:
            with self._lock:
                self.accepted.runs.append(answer["id"])
                if key is not None:
                    self.accepted.by_key[job, key].add(answer["id"])

    def _enqueue(self, client: Client, chance: random.Random) -> None:
        answer = self._ask(
            client,
            "enqueue",
            job=chance.choice(("work", "slots")),
            params=self._params(chance, LENGTHS),
            options={},
            commit=chance.random() < 0.7,
        )
        if answer is not None:
            with self._lock:
                kept = self.accepted.runs if answer["committed"] else self.accepted.rolled_back
                kept.append(answer["id"])

    def _chain(self, client: Client, chance: random.Random) -> None:
        steps = [self._params(chance, TURNS) for _ in range(chance.randint(2, 4))]
        answer = self._ask(client, "chain", job="work", steps=steps)
        if answer is not None:
            with self._lock:
                self.accepted.chains.append(answer["ids"])
                self.accepted.runs.append(answer["ids"][0])

    def _get(self, client: Client, chance: random.Random) -> None:
        run = self._some_run(chance, 8)
        if run is None:
            return
        answer = self._ask(client, "get", run=run, timeout=chance.uniform(0, 5))
        if answer is not None:
            with self._lock:
                self.accepted.results.append((run, answer["told"]))

    def _some_run(self, chance: random.Random, newest: int) -> str | None:
        with self._lock:
            runs = self.accepted.runs[-newest:]
        return chance.choice(runs) if runs else None

    def _cancel(self, client: Client, chance: random.Random) -> None:
        run = self._some_run(chance, 12)
        if run is not None and self._ask(client, "cancel", run=run) is not None:
            with self._lock:
                self.accepted.cancelled.append(run)

    def _retry(self, client: Client, chance: random.Random) -> None:
        try:
            failed = self.fleet.rows("select id from job_run where status = 'FAILED'")
        except psycopg.OperationalError:
            return
        if failed:
            self._ask(client, "retry", run=str(chance.choice(failed)["id"]))

    def _edit(self, client: Client, chance: random.Random) -> None:
        changes = chance.choice(
            [{"priority": chance.randint(0, 9)}, {"retry": {"backoff": chance.choice([0.2, 0.4])}}]
        )
        self._ask(client, "edit", job=chance.choice([*HANDLED, *REPLICATED]), changes=changes)

    def _switch(self, client: Client, chance: random.Random) -> None:
        if chance.random() < 0.3:
            self._ask(client, "schedule", name=chance.choice(SCHEDULES), enabled=False)
            return self.restore(client, ("schedule",))
        job = chance.choice([*HANDLED, *REPLICATED])
        if job in REPLICATED and chance.random() < 0.5:
            name = chance.choice(("source", "sink"))
            self._ask(client, "datasource", name=name, enabled=False)
        else:
            name = chance.choice(("enabled", "paused"))
            self._ask(client, "switch", job=job, name=name, value=name == "paused")
        time.sleep(chance.uniform(0, 1))
        return self.restore(client, ("switch", "datasource"))

    def restore(self, client: Client, parts: tuple[str, ...]) -> None:
        """Switch on again whatever may be off."""
        for job in (*HANDLED, *REPLICATED) if "switch" in parts else ():
            self._ask(client, "switch", job=job, name="enabled", value=True)
            self._ask(client, "switch", job=job, name="paused", value=False)
        for name in ("source", "sink") if "datasource" in parts else ():
            self._ask(client, "datasource", name=name, enabled=True)
        for name in SCHEDULES if "schedule" in parts else ():
            self._ask(client, "schedule", name=name, enabled=True)
