"""Settings: what is accepted, what an error says, and what it never shows."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from db import embedded, settings, urls
from db.settings import Settings, SettingsError

Configure = Callable[..., Settings]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cc-test-"))
    folder.chmod(0o711)
    yield folder / "home"
    if (folder / "home" / "place.json").exists():
        embedded.remove(folder / "home")
    shutil.rmtree(folder, ignore_errors=True)


# --- values -----------------------------------------------------------------------------------


def test_defaults_are_the_contracts(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    found = configure()
    assert (
        found.lease_seconds,
        found.sweep_seconds,
        found.offer_grace_seconds,
        found.idempotency_hours,
        found.shutdown_seconds,
        found.retention_days,
        found.slot_runs,
        found.handlers,
    ) == (60, 60, 10, 24, 30, 90, 100, ())
    assert found.home == Path.cwd() / ".claimcheck"
    monkeypatch.chdir("/")
    assert found.home != Path.cwd() / ".claimcheck", "fixed when it was read"


def test_values_are_read(configure: Configure) -> None:
    found = configure(
        CLAIMCHECK_LEASE_SECONDS="2.5",
        CLAIMCHECK_SWEEP_SECONDS=0,
        CLAIMCHECK_HANDLERS=" shop.reports, shop.exports ,",
        CLAIMCHECK_HOME="~/state",
        CLAIMCHECK_SLOT_RUNS=7,
    )
    assert (found.lease_seconds, found.sweep_seconds, found.slot_runs) == (2.5, 0, 7)
    assert found.handlers == ("shop.reports", "shop.exports")
    assert found.home == Path.home() / "state"


def test_an_empty_variable_is_an_unset_one(configure: Configure) -> None:
    found = configure(DATABASE_URL="", REDIS_URL="", CLAIMCHECK_LEASE_SECONDS="")
    assert found.uses_embedded_database
    assert found.uses_embedded_redis
    assert found.lease_seconds == 60


def test_settings_are_read_once(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    first = configure(CLAIMCHECK_LEASE_SECONDS=5)
    monkeypatch.setenv("CLAIMCHECK_LEASE_SECONDS", "6")
    assert settings.settings() is first
    settings.reset()
    assert settings.settings().lease_seconds == 6


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CLAIMCHECK_LEASE_SECONDS", "soon", "CLAIMCHECK_LEASE_SECONDS='soon' is not a number"),
        ("CLAIMCHECK_LEASE_SECONDS", "0", "must be 1.0 or more; leave it unset for 60"),
        ("CLAIMCHECK_LEASE_SECONDS", "nan", "CLAIMCHECK_LEASE_SECONDS='nan'"),
        ("CLAIMCHECK_SWEEP_SECONDS", "-1", "must be 0.0 or more"),
        ("CLAIMCHECK_IDEMPOTENCY_HOURS", "0", "must be more than 0.0"),
        ("CLAIMCHECK_RETENTION_DAYS", "99999", "must be 36500.0 or less"),
        ("CLAIMCHECK_SLOT_RUNS", "1.5", "is not a whole number"),
        ("CLAIMCHECK_SLOT_RUNS", "9" * 5000, "is not a whole number of a size that counts"),
        ("CLAIMCHECK_REQUIRE_SERVICES", "perhaps", "is neither 1 nor 0"),
        ("CLAIMCHECK_HANDLERS", "shop/reports.py", "'shop/reports.py' is not a module's name"),
        ("DATABASE_URL", "mysql://u:hunter2@h/d", "DATABASE_URL: the scheme 'mysql'"),
        ("DATABASE_URL", "u:hunter2@h/d", "DATABASE_URL: it is neither a URL nor a libpq"),
        ("DATABASE_URL", "postgresql://u:hunter2@h:port/d", "DATABASE_URL: its port is not"),
        ("DATABASE_URL", "postgresql://u:p@hunter2@h/d", "percent-encode special characters"),
        ("DATABASE_URL", "postgresql+psycopg://u:p@hunter2@h/d", "percent-encode special"),
        ("DATABASE_URL", "postgresql+psycopg://h/d?sslmod=x", "'sslmod' is not a connection"),
        ("DATABASE_URL", "postgresql://u:hunter2@h/d?sslmod=x", "'sslmod' is not a connection"),
        ("DATABASE_DIRECT_URL", "u:hunter2@h/d", "DATABASE_DIRECT_URL: it is neither"),
        ("REDIS_URL", "amqp://u:hunter2@h//", "REDIS_URL: its scheme must be one of redis://"),
        ("REDIS_URL", "redis://:hunter2@h:port/0", "REDIS_URL: its host or port"),
        ("REDIS_URL", "redis://:hunter2@/0", "REDIS_URL: it names no host"),
        ("REDIS_URL", "redis+socket://run/redis.sock", "three slashes"),
    ],
)
def test_a_bad_value_is_named_with_the_way_out__R_X2(
    configure: Configure, name: str, value: str, says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(**{name: value})
    message = str(caught.value)
    assert name in message
    assert says in message
    assert "hunter2" not in message
    # Nor does a traceback carry the value along.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_every_mistake_is_told_at_once(configure: Configure) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(CLAIMCHECK_LEASE_SECONDS="x", CLAIMCHECK_SLOT_RUNS="y", REDIS_URL="z")
    names = {line.partition(":")[0].partition("=")[0] for line in str(caught.value).splitlines()}
    assert names == {"CLAIMCHECK_LEASE_SECONDS", "CLAIMCHECK_SLOT_RUNS", "REDIS_URL"}


def test_no_secret_in_any_representation__R_X2(configure: Configure) -> None:
    found = configure(
        DATABASE_URL="postgresql://u:hunter2@h/d",
        DATABASE_DIRECT_URL="postgresql://u:hunter2@h:6000/d",
        REDIS_URL="redis://:hunter2@h:6379/0",
        CLAIMCHECK_KEYRING_FILE="/k",
    )
    served = settings.services()
    for shown in (repr(found), str(found), str(found.model_dump()), repr(served), str(served)):
        assert "hunter2" not in shown


def test_a_misspelt_variable_gets_a_hint(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "claimcheck.settings"):
        configure(CLAIMCHECK_LEASE_SECOND=5, CLAIMCHECK_QZX=1, CLAIMCHECK_TEST_X=1)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "did you mean CLAIMCHECK_LEASE_SECONDS?" in messages[0]
    assert "CLAIMCHECK_QZX" in messages[1]
    assert "did you mean" not in messages[1]


# --- URLs -------------------------------------------------------------------------------------

PLAIN = {"user": "u", "password": "p", "host": "h", "port": "5433", "dbname": "d"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://u:p@h:5433/d", PLAIN),
        ("postgres://u:p@h:5433/d", PLAIN),
        ("postgresql+psycopg://u:p@h:5433/d", PLAIN),
        ("postgresql+psycopg2://u:p@h:5433/d", PLAIN),
        ("host=h port=5433 dbname=d user=u password=p", PLAIN),
        ("  postgresql://u:p@h:5433/d\n", PLAIN),
        ("postgresql://u:p%40ss%2F@h/d", {**PLAIN, "password": "p@ss/", "port": None}),
        ("postgresql+psycopg://u:p%40ss@h:5433/d", {**PLAIN, "password": "p@ss"}),
        (
            "postgresql://u:p@h:5433/d?sslmode=require&application_name=x%20y",
            {**PLAIN, "sslmode": "require", "application_name": "x y"},
        ),
        ("postgresql:///d?host=/run/pg", {"dbname": "d", "host": "/run/pg"}),
        ("postgresql+psycopg://u@/d?host=/run/pg", {"user": "u", "dbname": "d", "host": "/run/pg"}),
        ("postgresql://one:1,two:2/d", {"dbname": "d", "host": "one,two", "port": "1,2"}),
        (
            "postgresql+psycopg:///d?host=one:1&host=two:2",
            {"dbname": "d", "host": "one,two", "port": "1,2"},
        ),
        ("service=mine", {"service": "mine"}),
        ("host=h password='it''s'", None),
    ],
)
def test_database_urls_of_every_spelling(
    given: str, expected: dict[str, str | None] | None
) -> None:
    if expected is None:
        with pytest.raises(SettingsError):
            urls.parse_database_url("DATABASE_URL", given)
        return
    found = conninfo.conninfo_to_dict(urls.parse_database_url("DATABASE_URL", given))
    assert found == {name: value for name, value in expected.items() if value is not None}


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://:p%40ss@h:6379/0",
        "rediss://h:6380/1?ssl_cert_reqs=required",
        "sentinel://one:26379;sentinel://two:26379",
        "redis+socket:///run/redis/redis.sock?virtual_host=1",
    ],
)
def test_redis_urls_that_celery_takes(configure: Configure, url: str) -> None:
    found = configure(REDIS_URL=url)
    assert found.redis_url is not None
    assert found.redis_url.get_secret_value() == url


# --- services ---------------------------------------------------------------------------------


def test_given_services_are_used_as_they_are(configure: Configure) -> None:
    """Nothing listens there, and nothing else takes their place."""
    configure(
        DATABASE_URL="postgresql://u:p@127.0.0.1:1/d",
        DATABASE_DIRECT_URL="postgresql://u:p@127.0.0.1:2/d",
        REDIS_URL="redis://127.0.0.1:3/0",
        CLAIMCHECK_HOME="/nonexistent/home",
    )
    found = settings.services()
    assert conninfo.conninfo_to_dict(found.database_conninfo)["port"] == "1"
    assert conninfo.conninfo_to_dict(found.direct_conninfo)["port"] == "2"
    assert found.redis_url == "redis://127.0.0.1:3/0"
    assert (found.embedded_database, found.embedded_redis) == (False, False)
    settings.database().revive()
    found.revive_redis()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(found.database_conninfo)
    assert settings.services() is found


def test_an_unset_url_means_the_embedded_server_and_is_said_once(
    configure: Configure, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(CLAIMCHECK_HOME=home, CLAIMCHECK_EMBEDDED_IDLE_SECONDS=77)
    found = settings.services()
    with psycopg.connect(found.database_conninfo) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    settings.reset()
    settings.services()
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.count("embedded PostgreSQL and Valkey") == 1
    assert str(home) in told.err
    assert embedded.status(home).idle_seconds == 77


def test_who_was_told_by_the_process_before_is_not_told_again(
    configure: Configure,
    home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(settings.NOTICED, "1")
    configure(CLAIMCHECK_HOME=home, DATABASE_URL="host=127.0.0.1 port=1 dbname=d")
    settings.services()
    assert capfd.readouterr().err == ""


def test_database_and_broker_are_independent(
    configure: Configure, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(CLAIMCHECK_HOME=home, DATABASE_URL="host=127.0.0.1 port=1 dbname=d")
    found = settings.services()
    assert (found.embedded_database, found.embedded_redis) == (False, True)
    assert embedded.status(home).servers == ("valkey",)
    told = capfd.readouterr().err
    assert "Valkey" in told
    assert "PostgreSQL" not in told


@pytest.mark.parametrize("variable", ["CLAIMCHECK_REQUIRE_SERVICES", "KUBERNETES_SERVICE_HOST"])
def test_in_a_cluster_an_unset_service_is_an_error(configure: Configure, variable: str) -> None:
    with pytest.raises(SettingsError, match=r"(?s)DATABASE_URL is not set.*REDIS_URL is not set"):
        configure(**{variable: "1"})
    with pytest.raises(SettingsError, match=r"^REDIS_URL is not set"):
        configure(DATABASE_URL="dbname=d")
    configure(REDIS_URL="redis://h")


def test_a_kubernetes_build_may_say_otherwise(configure: Configure) -> None:
    found = configure(KUBERNETES_SERVICE_HOST="10.0.0.1", CLAIMCHECK_REQUIRE_SERVICES=0)
    assert found.uses_embedded_database


def test_a_direct_url_alone_is_refused(configure: Configure) -> None:
    with pytest.raises(SettingsError, match="DATABASE_DIRECT_URL is set and DATABASE_URL is not"):
        configure(DATABASE_DIRECT_URL="dbname=d")


# --- the keyring file -------------------------------------------------------------------------


def test_the_keyring_lies_beside_the_embedded_database_only(
    configure: Configure, tmp_path: Path
) -> None:
    found = configure(CLAIMCHECK_HOME=tmp_path)
    assert (found.keyring_path(), found.keyring_may_be_created) == (tmp_path / "keyring.json", True)
    found = configure(DATABASE_URL="dbname=d")
    assert not found.keyring_may_be_created
    with pytest.raises(SettingsError, match=r"CLAIMCHECK_KEYRING_FILE is not set.*keyring init"):
        found.keyring_path()
    found = configure(CLAIMCHECK_KEYRING_FILE=tmp_path / "k.json")
    assert (found.keyring_path(), found.keyring_may_be_created) == (tmp_path / "k.json", False)
    found = configure(DATABASE_URL=None)
    assert not found.keyring_may_be_created, "a named file is never made up"


# --- processes --------------------------------------------------------------------------------


def test_forked_children_have_the_servers_without_a_second_notice(home: Path) -> None:
    code = """
import os, sys
from db import settings
settings.services()
child = os.fork()
settings.database().revive()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CLAIMCHECK_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_tests_own_servers_are_never_those_of_the_shells_settings() -> None:
    """Who has exported a production database and types `make test` tests nothing there."""
    shell = {"DATABASE_URL": "postgresql://h/production", "REDIS_URL": "redis://h/0"}
    tests = {"CLAIMCHECK_TEST_DATABASE_URL": "dbname=t", "CLAIMCHECK_TEST_REDIS_URL": "redis://t"}
    code = "import conftest; print(conftest.GIVEN_DATABASE, conftest.GIVEN_REDIS)"
    for given, expected in ((shell, "None None"), (shell | tests, "dbname=t redis://t")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **given},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stdout.strip() == expected, result.stderr
