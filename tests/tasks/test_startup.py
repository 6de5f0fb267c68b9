"""A process that cannot work says why at its start: the setting, the way out, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support import processes

from db import embedded, keyring
from db.envelopes import seal
from db.keyring import Keyring

CLOSED = processes.free_port()

Case = tuple[dict[str, str], str]


def faults(tmp_path: Path, empty_database: str) -> dict[str, Case]:
    """What is wrong in the settings, and what must be said of it."""
    malformed = tmp_path / "malformed.json"
    malformed.write_text(json.dumps({"current": "v1", "keys": {"v1": "c2hvcnQ="}}))
    malformed.chmod(0o600)
    return {
        "no database there": (
            {"DATABASE_URL": f"postgresql://me:s3cret@127.0.0.1:{CLOSED}/x"},
            "DATABASE_URL",
        ),
        "not a database": ({"DATABASE_URL": "mysql://me:s3cret@host/x"}, "DATABASE_URL"),
        "not migrated": ({"DATABASE_URL": empty_database}, "celery -A tasks db upgrade"),
        "no keyring named": ({"CLAIMCHECK_KEYRING_FILE": ""}, "CLAIMCHECK_KEYRING_FILE"),
        "no keyring there": (
            {"CLAIMCHECK_KEYRING_FILE": str(tmp_path / "none.json")},
            "CLAIMCHECK_KEYRING_FILE",
        ),
        "malformed keyring": (
            {"CLAIMCHECK_KEYRING_FILE": str(malformed)},
            "CLAIMCHECK_KEYRING_FILE",
        ),
        "no broker there": ({"REDIS_URL": f"redis://:s3cret@127.0.0.1:{CLOSED}/0"}, "REDIS_URL"),
        "not a broker": ({"REDIS_URL": "amqp://me:s3cret@host"}, "REDIS_URL"),
        "not a number": ({"CLAIMCHECK_LEASE_SECONDS": "soon"}, "CLAIMCHECK_LEASE_SECONDS"),
        "no such handlers": ({"CLAIMCHECK_HANDLERS": "no.such.module"}, "CLAIMCHECK_HANDLERS"),
    }


def ended(running: processes.Running) -> str:
    assert running.await_end() == 1, running.output()
    output = running.output()
    assert "Traceback" not in output
    assert "s3cret" not in output
    assert output.count("claimcheck:") == 1, output
    return output


def test_worker_that_cannot_work_says_why_and_exits_1(
    environment: dict[str, str], tmp_path: Path, empty_database: str
) -> None:
    for number, (fault, (wrong, says)) in enumerate(faults(tmp_path, empty_database).items()):
        log = tmp_path / f"{number}.log"
        with processes.celery(log, "worker", "--pool", "solo", **(environment | wrong)) as running:
            assert says in ended(running), fault


def test_worker_with_another_key_of_the_same_name_refuses_to_start__R_X3(
    environment: dict[str, str], rows: Callable[..., Any], tmp_path: Path
) -> None:
    right = Keyring.load(environment["CLAIMCHECK_KEYRING_FILE"])
    wrong = keyring.init(tmp_path / "wrong.json")

    def store(name: str, keys: Keyring) -> None:
        found = uuid4()
        envelope = json.dumps(seal(keys, found, {"url": "postgresql://app:s3cret@h/x"}))
        rows(
            "insert into datasource (id, name, connector, envelope) values (%s, %s, %s, %s)",
            found, name, "postgresql", envelope,
        )  # fmt: skip

    store("shop", right)
    settings = environment | {"CLAIMCHECK_KEYRING_FILE": str(wrong.path)}
    with processes.celery(tmp_path / "wrong.log", "worker", "--pool", "solo", **settings) as found:
        said = ended(found)
    assert f"the key v1 of {wrong.path} is another one than the v1 that sealed shop:" in said
    # One that only the other key opens stops no worker that can run the others.
    store("warehouse", wrong)
    with processes.worker(tmp_path / "right.log", pool="solo", **environment) as running:
        assert "another one than the v1 that sealed warehouse:" in running.output()


def test_beat_that_cannot_work_says_why_and_exits_1(
    environment: dict[str, str], tmp_path: Path, empty_database: str
) -> None:
    cases = faults(tmp_path, empty_database)
    for fault in ("no database there", "not migrated", "not a broker"):
        wrong, says = cases[fault]
        with processes.celery(
            tmp_path / f"{says}.log".replace("/", "-"), "beat", **(environment | wrong)
        ) as running:
            assert says in ended(running), fault


def test_beat_starts_without_redis__R_D3(environment: dict[str, str], tmp_path: Path) -> None:
    wrong = {"REDIS_URL": f"redis://127.0.0.1:{CLOSED}/0"}
    with processes.celery(
        tmp_path / "beat.log", "beat", "-l", "INFO", **(environment | wrong)
    ) as running:
        running.await_line("beat: Starting")
        assert running.process.poll() is None


def test_pool_that_would_hold_up_the_leases_is_refused(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import hooks

    with pytest.raises(SystemExit, match="Use --pool prefork, threads or solo"):
        hooks.worker_starts("w@host", options={"pool_cls": "celery.concurrency.gevent:TaskPool"})


def test_import_is_quick_and_starts_nothing(tmp_path: Path) -> None:
    """The embedded servers start when a connection is first asked for, not before."""
    code = "import tasks; print(tasks.app.main, tasks.trigger.name, tasks.handler)"
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        cwd=processes.ROOT,
        env={"PATH": "/usr/bin:/bin", "CLAIMCHECK_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "claimcheck tasks.trigger" in found.stdout
    assert not (tmp_path / "home").exists()
    for heavy in ("tasks.replicate", "pyarrow", "alembic", "rich", "dispatch.coordinator"):
        assert f" {heavy}\n" not in found.stderr.replace("|", " "), heavy


@pytest.mark.parametrize("code", ["import tasks", "import tasks.results"])
def test_mistaken_setting_ends_an_import_with_its_message(code: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=processes.ROOT,
        env={"PATH": "/usr/bin:/bin", "CLAIMCHECK_SWEEP_SECONDS": "never"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert "CLAIMCHECK_SWEEP_SECONDS" in found.stderr
    assert "Traceback" not in found.stderr


def test_worker_on_the_embedded_servers_migrates_them_itself(tmp_path: Path) -> None:
    home = tmp_path / "home"
    try:
        for _ in range(2):
            with processes.worker(
                tmp_path / "worker.log", pool="solo", CLAIMCHECK_HOME=str(home)
            ) as running:
                assert "using the embedded PostgreSQL and Valkey" in running.output()
        assert (home / "keyring.json").stat().st_mode & 0o777 == 0o600
    finally:
        embedded.remove(home)
