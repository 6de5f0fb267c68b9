"""A PostgreSQL of a scenario's own, which may be stopped in every way, hung and cut off."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import psycopg
from psycopg import sql
from support.processes import free_port
from support.waiting import until

from db.embedded import binaries, place
from db.embedded.server import as_account, server_environment

Stop = Literal["smart", "fast", "immediate", "crash"]
_SIGNALS = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    # Only the postmaster: its children notice, and end without a checkpoint.
    "crash": signal.SIGKILL,
}
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "120",
    # None by default, and then what a prepared transaction does cannot be seen.
    "max_prepared_transactions": "10",
    "shared_buffers": "64MB",
    # Nothing here outlives the machine; a killed server still finds what the kernel has.
    "fsync": "off",
    "full_page_writes": "off",
    # The scenarios compare commits, not statements.
    "track_commit_timestamp": "on",
    "autovacuum_naptime": "10s",
    "timezone": "UTC",
    "log_min_messages": "warning",
}


@dataclass
class Postgres:
    """One server under ``folder``, on a TCP port, where every local role is trusted."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    # Puts a build of another version into a folder, and returns where its programs are.
    install: Callable[[Path], Path] | None = None

    def __post_init__(self) -> None:
        self._place = place.settle(place.prepare_home(self.folder))
        # Beside the data: the server's account may read nothing else of ours.
        self._programs = self.install(self._place.data) if self.install else None
        self._data = self._place.data / "server"
        self.log = self.folder / "postgres.log"

    def url(self, database: str, port: int | None = None) -> str:
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}"

    def connect(self, database: str, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5, **options)

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self.process is None
        if not self._data.exists():
            self._data.mkdir(mode=0o700)
            self._place.give(self._data)
            self._run("initdb", "-D", str(self._data), "-U", "postgres", "--auth=trust",
                      "--encoding=UTF8", "--locale=C", "--no-sync")  # fmt: skip
        options = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self._program("postgres"), "-D", str(self._data),
                 "-p", str(self.port), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._place.data,
                env=server_environment(),
                start_new_session=True,
                **as_account(self._place),
            )  # fmt: skip
        until("PostgreSQL to answer", self._answers, 60)

    def stop(self, how: Stop = "fast") -> None:
        """Stop it and wait until all its processes have ended."""
        if self.process is None:
            return
        process, self.process = self.process, None
        family = self._family(process.pid)
        process.send_signal(signal.SIGCONT)
        process.send_signal(_SIGNALS[how])
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        # After a crash the others end by themselves; a new server refuses to start before.
        _, alive = psutil.wait_procs(family, timeout=15)
        for left in alive:
            left.kill()
        psutil.wait_procs(alive, timeout=10)

    def hang(self) -> None:
        """Freeze the whole server: connections stay open, and nothing answers."""
        assert self.process is not None
        # The postmaster first, so that it starts nothing meanwhile.
        os.kill(self.process.pid, signal.SIGSTOP)
        for child in self._family(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                child.suspend()

    def go_on(self) -> None:
        assert self.process is not None
        for child in self._family(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                child.resume()
        os.kill(self.process.pid, signal.SIGCONT)

    def cut(self, database: str, share: float = 1.0) -> int:
        """End that share of the client connections of a database; how many."""
        with self.connect("postgres") as connection:
            return len(
                connection.execute(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                       where datname = %s and pid <> pg_backend_pid()
                         and backend_type = 'client backend' and random() < %s""",
                    (database, share),
                ).fetchall()
            )

    def create(self, database: str) -> str:
        with self.connect("postgres") as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(database)))
        return self.url(database)

    def remove(self) -> None:
        """End it and remove its data, wherever they lie."""
        self.stop("immediate")
        for folder in {self._place.data, self._place.base} - {self._place.home}:
            shutil.rmtree(folder, ignore_errors=True)

    def _program(self, name: str) -> str:
        return str(
            self._programs / name if self._programs else binaries.postgres(self._place, name)
        )

    def _family(self, pid: int) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._program(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self._place.data,
            env=server_environment(),
            timeout=120,
            check=False,
            **as_account(self._place),
        )
        assert done.returncode == 0, done.stdout + done.stderr
