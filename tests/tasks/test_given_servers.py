"""On the servers that the tests were given, which may be anybody's: else on embedded ones."""

from __future__ import annotations

import uuid
from typing import Any

import pytest


@pytest.fixture
def environment(environment: dict[str, str], redis_server: str) -> dict[str, str]:
    return environment | {"REDIS_URL": redis_server}


def test_a_run_goes_its_whole_way_on_the_tests_servers(
    worker: Any, celery_app: Any, trigger: Any, job: Any, rows: Any
) -> None:
    queue = f"test-{uuid.uuid4().hex[:12]}"
    job("noop", queue=queue)
    try:
        with worker(arguments=["-Q", queue]):
            assert trigger.delay("noop", result=1).get(timeout=20) == 1
    finally:
        with celery_app.connection_for_write() as connection:
            client = connection.default_channel.client
            client.delete(*client.keys(f"*{queue}*"))
    assert rows("select status, queue from job_run") == [{"status": "SUCCEEDED", "queue": queue}]
