"""A whole installation of a scenario's own: servers, workers, beats and callers, all by their pid.

Processes that die are started again, as a process manager would, unless the scenario holds them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from psycopg.rows import dict_row
from support import processes
from support.processes import Redis, Running, free_port
from support.proxy import Proxy
from support.waiting import until

from scenarios import ledger
from scenarios.servers import Postgres

ACTIVE = ("PENDING", "RUNNING", "CANCEL_REQUESTED")
RESTART_SECONDS = 1.0


@dataclass
class Member:
    """A worker or a beat: how it is started, and what runs of it now."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    running: Running | None = None
    held: bool = False
    """The scenario wants it down."""
    restart_at: float = 0.0
    starts: list[Running] = field(default_factory=list)

    @property
    def is_worker(self) -> bool:
        return "worker" in self.command

    @property
    def pid(self) -> int:
        assert self.running is not None
        return self.running.pid

    def start(self) -> None:
        # Each start has a log of its own, so that a line that is awaited is of this start.
        log = self.log.with_suffix(f".{len(self.starts) + 1}.log")
        self.running = processes.start(self.command, log, **self.environment)
        self.starts.append(self.running)

    def await_ready(self, seconds: float = 40.0) -> None:
        assert self.running is not None
        self.running.await_line(" ready." if self.is_worker else "beat: Starting", seconds)

    def is_alive(self) -> bool:
        return self.running is not None and self.running.process.poll() is None

    def kill(self, number: int = signal.SIGKILL, *, group: bool = False) -> None:
        if self.is_alive():
            assert self.running is not None
            with contextlib.suppress(ProcessLookupError):
                self.running.signal(number, group=group)

    def children(self) -> list[int]:
        return self.running.children() if self.running is not None and self.is_alive() else []

    def family(self) -> list[int]:
        """The process ids of the worker and its children."""
        return [self.pid, *self.children()] if self.is_alive() else []

    def orphans(self) -> list[int]:
        """What is left of the groups of earlier starts."""
        gone = {started.pid for started in self.starts if started.process.poll() is not None}
        return [
            process.pid
            for process in psutil.process_iter()
            if process.pid not in gone and _group_of(process.pid) in gone
        ]

    def end(self) -> None:
        """What is left of its groups, for good."""
        for started in self.starts:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)
            started.process.wait(10)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


class Client:
    """A caller's process; one question at a time."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        given = {k: v for k, v in os.environ.items() if not k.startswith("CLAIMCHECK_")}
        path = os.pathsep.join([str(processes.ROOT), str(processes.ROOT / "tests")])
        self._lock = threading.Lock()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scenarios.client"],
                cwd=processes.ROOT,
                env=given | {"PYTHONPATH": path} | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        """What the call answered; never raises for what the call itself refused."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the client ended with {self._process.poll()}"
        found = json.loads(answer)
        assert isinstance(found, dict)
        return found

    def trigger(self, job: str, params: dict[str, Any] | None = None, **options: Any) -> str:
        """The run's id; raises where the call was refused."""
        answer = self.ask("trigger", job=job, params=params or {}, options=options)
        assert "error" not in answer, answer
        return str(answer["id"])

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Way(Proxy):
    """One process's own way to the control database, which may be hung or cut."""

    url: str = ""


@dataclass
class Fleet:
    """``with Fleet() as fleet:`` servers that run, and nothing else yet."""

    lease_seconds: float = 3.0
    settings: dict[str, str] = field(default_factory=dict)
    keep: Path | None = None
    """Where the logs shall stay; None removes them."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="cc-fleet-"))
        self.folder.chmod(0o711)
        self.members: dict[str, Member] = {}
        self.clients: list[Client] = []
        self._tending: threading.Thread | None = None
        self._closing = threading.Event()
        self.ways: dict[str, Way] = {}
        self.events: list[dict[str, Any]] = []
        self.last_active: list[dict[str, Any]] = []
        self.postgres = Postgres(self.folder / "postgres")
        self.redis = Redis(free_port(), self.folder)
        try:
            self.postgres.start()
            self.redis.start()
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._tending is not None:
            self._tending.join(30)
        for client in self.clients:
            client.end()
        for way in self.ways.values():
            way.stop()
        for member in self.members.values():
            member.end()
        self.redis.kill()
        self.postgres.remove()
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            for log in self.folder.glob("*.log"):
                shutil.copy(log, self.keep / log.name)
            if self.trace.exists():
                shutil.copy(self.trace, self.keep / self.trace.name)
            shutil.copy(self.postgres.log, self.keep / "postgres.log")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _prepare(self) -> None:
        keys = self.folder / "keyring.json"
        self.trace = self.folder / "trace.jsonl"
        self.environment = {
            "DATABASE_URL": self.postgres.create("control"),
            "REDIS_URL": self.redis.url,
            "CLAIMCHECK_HOME": str(self.folder / "home"),
            "CLAIMCHECK_KEYRING_FILE": str(keys),
            "CLAIMCHECK_HANDLERS": "scenarios.handlers",
            "CLAIMCHECK_LEASE_SECONDS": str(self.lease_seconds),
            "CLAIMCHECK_SWEEP_SECONDS": "10",
            "CLAIMCHECK_OFFER_GRACE_SECONDS": "2",
            "CLAIMCHECK_SHUTDOWN_SECONDS": "10",
            "SCENARIO_LEDGER_URL": self.postgres.create("ledger"),
            "SCENARIO_TRACE": str(self.trace),
            "SOURCE_URL": self.postgres.create("source"),
            "SINK_URL": self.postgres.create("sink"),
            **self.settings,
        }
        with self.postgres.connect("ledger") as connection:
            connection.execute(ledger.SCHEMA)
        self.command("keyring", "init")
        self.command("db", "upgrade")

    # Doing

    def command(self, *arguments: str, status: int = 0) -> str:
        """``celery -A tasks ARGUMENTS`` to its end; what it printed."""
        log = self.folder / "commands.log"
        before = log.stat().st_size if log.exists() else 0
        running = processes.start(
            [sys.executable, "-m", "celery", "-A", "tasks", *arguments], log, **self.environment
        )
        ended = running.await_end(60)
        printed = log.read_bytes()[before:].decode(errors="replace")
        assert ended == status, f"{arguments} ended with {ended}: {printed}"
        return printed

    def define(self, text: str) -> None:
        """Apply a definition file."""
        file = self.folder / "jobs.yaml"
        file.write_text(text)
        self.command("apply", str(file))

    def worker(
        self,
        name: str,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        ready: bool = True,
        **environment: str,
    ) -> Member:
        """Start a worker of the queue ``runs``; returns once it is ready."""
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--pool", pool,
                   "--concurrency", str(concurrency), "-n", f"{name}@%h", "-l", "INFO"]  # fmt: skip
        return self._add(name, command, environment, ready)

    def beat(self, name: str = "beat", *, ready: bool = True, **environment: str) -> Member:
        command = [sys.executable, "-m", "celery", "-A", "tasks", "beat", "-l", "INFO",
                   "--pidfile=", "-s", str(self.folder / f"{name}.schedule")]  # fmt: skip
        return self._add(name, command, environment, ready)

    def _add(
        self, name: str, command: Sequence[str], environment: dict[str, str], ready: bool
    ) -> Member:
        member = Member(
            name, command, {**self.environment, **environment}, self.folder / f"{name}.log"
        )
        self.members[name] = member
        member.start()
        if ready:
            member.await_ready()
        return member

    def way(self, name: str) -> Way:
        """A way to the control database; its ``url`` is the DATABASE_URL of who takes it."""
        way = self.ways[name] = Way(("127.0.0.1", self.postgres.port))
        way.start()
        way.url = self.postgres.url("control", way.port)
        return way

    def client(self) -> Client:
        client = Client(self.environment, self.folder / "clients.log")
        self.clients.append(client)
        return client

    # Tending

    def tend(self) -> None:
        """From now on start again what has died, unless it is held."""
        self._tending = threading.Thread(target=self._tend, name="tending", daemon=True)
        self._tending.start()

    def _tend(self) -> None:
        while not self._closing.wait(0.2):
            for member in list(self.members.values()):
                now = time.monotonic()
                if member.held or member.is_alive():
                    member.restart_at = now + RESTART_SECONDS
                elif now >= member.restart_at:
                    member.restart_at = now + RESTART_SECONDS
                    member.start()

    @contextlib.contextmanager
    def holding(self, member: Member) -> Iterator[None]:
        """Within the block a member that ends is not started again."""
        member.held = True
        try:
            yield
        finally:
            member.held = False

    def note(self, what: str, **more: Any) -> dict[str, Any]:
        """Write down what was done to the fleet, and when."""
        event = {"at": time.monotonic(), "what": what, **more}
        self.events.append(event)
        return event

    # Looking

    def rows(self, query: str, *values: Any, database: str = "control") -> list[dict[str, Any]]:
        """Run one statement, committed at once, on a connection of its own."""
        with self.postgres.connect(database, row_factory=dict_row) as connection:
            found = connection.execute(query, values or None)  # type: ignore[call-overload]
            return [] if found.description is None else found.fetchall()

    def run(self, run_id: str) -> dict[str, Any]:
        [found] = self.rows("select * from job_run where id = %s", run_id)
        return found

    def last(self, run_id: str) -> dict[str, Any]:
        """The last attempt of a run's lineage; the id may be an alias."""
        [found] = self.rows(
            """select r.* from job_run r
               where r.root_run_id = (select root_run_id from job_run where id = coalesce(
                 (select run_id from run_alias where id = %(id)s::uuid), %(id)s::uuid))
               and not exists (select from job_run n where n.previous_run_id = r.id)""".replace(
                "%(id)s", "%s"
            ),
            run_id,
            run_id,
        )
        return found

    def await_status(self, run_id: str, *statuses: str, seconds: float = 30.0) -> dict[str, Any]:
        """The lineage's last attempt, once it is in one of the states."""

        def look() -> dict[str, Any] | None:
            with contextlib.suppress(psycopg.OperationalError):
                found = self.last(run_id)
                return found if found["status"] in statuses else None
            return None

        return until(f"run {run_id} to be {' or '.join(statuses)}", look, seconds)

    def settle(self, seconds: float) -> float:
        """Wait until no run is active; how long it took. Fails, naming some, after ``seconds``."""
        began = time.monotonic()

        def look() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                active = self.rows(
                    """select id, job_name, status, attempt, available_at, offered_at, offer_count,
                         lease_until, executor, clock_timestamp() as now
                       from job_run where finished_at is null order by created_at limit 5"""
                )
                self.last_active = active or self.last_active
                return not active
            return False

        try:
            until("every run to end", look, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.last_active}") from None
        return time.monotonic() - began


def main(scenario: Callable[[], None]) -> None:
    """Run a scenario as a program: a signal ends it like an error, and nothing is left behind."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    try:
        scenario()
    except AssertionError as error:
        print(f"FAILED: {error}", flush=True)
        raise SystemExit(1) from None
    print("HELD", flush=True)
