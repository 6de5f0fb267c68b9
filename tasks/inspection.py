"""What a worker can take, asked through Celery's remote control: ``inspect claims``.

A worker answers with its queues, handlers, key versions and free executors (``free_slots``);
nothing of it is secret.
"""

from __future__ import annotations

from typing import Any

from db.keyring import Keyring, KeyringError
from db.settings import settings
from db.urls import SettingsError
from dispatch import handlers
from dispatch.waiting import Taker

COMMAND = "claims"
ANSWER_SECONDS = 1.0


def register() -> None:
    """Teach this worker to answer; call it where Celery's worker is loaded anyway."""
    from celery.worker.control import inspect_command

    inspect_command(name=COMMAND)(_answer)


def ask(app: Any) -> list[Taker]:
    """The workers that answer within a second. Raises what the broker's client raises."""
    with app.connection_for_write() as connection:
        # A broker that is away says so at once; a broadcast would try again and again.
        connection.default_channel.client.ping()
        answers = app.control.broadcast(
            COMMAND, reply=True, timeout=ANSWER_SECONDS, connection=connection
        )
    return [_taker(answer) for named in answers or () for answer in named.values()]


def _answer(state: Any) -> dict[str, Any]:
    from celery.worker import state as requests

    try:
        versions = list(Keyring.load(settings().keyring_path()).versions)
    except (KeyringError, SettingsError):
        versions = []
    executors = state.consumer.pool.num_processes
    return {
        "queues": sorted(queue.name for queue in state.consumer.task_consumer.queues),
        "handlers": handlers.known(),
        "key_versions": versions,
        "free_slots": max(0, executors - len(requests.active_requests)),
    }


def _taker(answer: Any) -> Taker:
    if not isinstance(answer, dict) or "queues" not in answer:
        # A worker of an earlier release, or one that could not answer: nothing is known of it.
        return Taker(queues=_Any())
    return Taker(answer["queues"], answer["handlers"], answer["key_versions"], answer["free_slots"])


class _Any(frozenset[str]):
    def __contains__(self, _: object) -> bool:
        return True
