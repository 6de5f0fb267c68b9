"""A PgBouncer, where this machine has one."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import conninfo

from support.processes import free_port, start
from support.waiting import until


def program() -> str | None:
    return os.environ.get("CLAIMCHECK_TEST_PGBOUNCER") or shutil.which("pgbouncer")


@contextlib.contextmanager
def pooled(database: str, mode: str = "transaction", size: int = 2) -> Iterator[str]:
    """The conninfo of ``database`` through a PgBouncer of ``size`` server connections."""
    found = program()
    assert found is not None
    # As it is connected: what ``database`` leaves out, libpq fills in, and PgBouncer would not.
    with psycopg.connect(database) as connection:
        server = connection.info
        name, user = server.dbname, server.user
        given = conninfo.make_conninfo(
            "",
            host=server.host,
            port=server.port,
            dbname=name,
            user=user,
            password=server.password or None,
        )
    folder = Path(tempfile.mkdtemp(prefix="cc-pool-"))
    folder.chmod(0o755)
    port = free_port()
    (folder / "users").write_text(f'"{user}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
{name} = {given}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file = {folder}/users
pool_mode = {mode}
default_pool_size = {size}
logfile =
"""
    )
    command = [found, "-q", str(folder / "pgbouncer.ini")]
    if os.geteuid() == 0:
        # It refuses to run as root.
        command[1:1] = ["-u", "nobody" if getpass.getuser() == "root" else getpass.getuser()]
    running = start(command, folder / "log", LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    through = conninfo.make_conninfo("", host="127.0.0.1", port=port, user=user, dbname=name)

    def answers() -> bool:
        assert running.process.poll() is None, running.output()
        try:
            psycopg.connect(through, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        until(f"PgBouncer to answer: {running.output()}", answers)
        yield through
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)
