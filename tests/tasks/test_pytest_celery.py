"""A team's pytest-celery tests work with this app: the plugin's own components around our worker.

Its containers are local processes here (support.local_docker); with Docker the same tests would
use real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerContainer,
    RedisTestBroker,
)
from support import processes
from support.app import forget_connections
from support.local_docker import LocalDocker
from support.waiting import until


@pytest.fixture(scope="session")
def docker_client() -> Iterator[LocalDocker]:
    client = LocalDocker()
    with pytest.MonkeyPatch.context() as patch:
        # Else the ports inside would be taken, where the tests themselves run in a container.
        patch.setattr("pytest_docker_tools.wrappers.container.tests_inside_container", bool)
        yield client
    client.close()


class ClaimcheckWorker(CeleryWorkerContainer):
    """The plugin's worker, started with this project's app."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "tasks", "worker", "-l", "INFO", "-n", f"{cls.worker_name()}@%h",
                "--concurrency", "1", "--without-mingle", "--without-gossip", *args]  # fmt: skip


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    return ClaimcheckWorker


@pytest.fixture
def default_worker_initial_content() -> dict[str, bytes]:
    return {}


@pytest.fixture
def celery_broker_cluster(celery_redis_broker: RedisTestBroker) -> Iterator[CeleryBrokerCluster]:
    cluster = CeleryBrokerCluster(celery_redis_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def celery_backend_cluster() -> None:
    """Results come from PostgreSQL."""


@pytest.fixture
def default_worker_env(
    environment: dict[str, str], celery_broker_cluster: CeleryBrokerCluster
) -> dict[str, str]:
    [broker] = celery_broker_cluster.config()["urls"]
    return environment | {"REDIS_URL": broker, "CLAIMCHECK_HANDLERS": processes.HANDLERS}


@pytest.fixture
def celery_setup_app(
    default_worker_env: dict[str, str], configure: Callable[..., Any]
) -> Iterator[Any]:
    configure(**default_worker_env | {"CLAIMCHECK_HANDLERS": None})
    from tasks import app

    forget_connections()
    yield app
    # The plugin writes a restarted broker's URL into the app's configuration.
    app.conf.changes.pop("broker_url", None)
    forget_connections()


def test_run_ends_in_the_setup_of_pytest_celery(celery_setup: CeleryTestSetup, job: Any) -> None:
    from tasks import trigger

    job("noop")
    # Its answer to a ping counts within a second, which a busy machine may take.
    until("the setup to be ready", lambda: celery_setup.ready(control=True), 30)
    assert trigger.delay("noop", result=1).get(timeout=30) == 1


def test_broker_killed_and_started_again_loses_no_run__R_T4(
    celery_setup: CeleryTestSetup, job: Any
) -> None:
    from tasks import trigger

    job("noop", overlap="allow")
    assert trigger.delay("noop", result=0).get(timeout=30) == 0
    celery_setup.broker.kill()
    missed = trigger.delay("noop", result=1)
    assert missed.state == "PENDING"
    celery_setup.broker.restart()

    def taken() -> bool:
        # The slot that takes a later run goes on to the one whose wake-up was never published.
        trigger.delay("noop")
        return missed.ready()

    until("the missed run to end", taken, 60)
    assert missed.get(timeout=1) == 1


def test_worker_restarted_in_the_midst_of_a_run_begins_it_again__R_D8(
    celery_setup: CeleryTestSetup, job: Any, rows: Any, tmp_path: Path
) -> None:
    from tasks import trigger

    job("wait")
    result = trigger.delay("wait", at=str(tmp_path))
    until("the run to start", (tmp_path / "started-1").exists)
    celery_setup.worker.kill("SIGQUIT")
    until("the attempt to end", lambda: rows("select from job_run where attempt = 2"), 30)
    celery_setup.worker.restart()
    until("the next attempt to start", (tmp_path / "started-2").exists, 60)
    (tmp_path / "go").touch()
    assert result.get(timeout=30) == "attempt 2"
    [first, _] = rows("select error_code from job_run order by attempt")
    assert first["error_code"] == "worker_shutdown"
