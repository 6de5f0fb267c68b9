"""Triggers in Celery's canvas: what is stored in Postgres, and what is refused at call time.

A wake-up's return is not the run's end, and what follows a run must not travel through Redis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dispatch.chains import Step
from dispatch.errors import InvalidParameters
from tasks import options as allowed
from tasks import wakeup

_WAY_OUT = "Put the steps into one handler, or wait for the run: trigger.delay(...).get()"
_LINKS = ("link", "link_error", "chord", "chain")
_ITERATING = frozenset({"celery.map", "celery.starmap", "celery.chunks"})


def refuse_triggers_in(
    options: Mapping[str, Any], name: str = "", kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse a trigger that would travel with another task's message. Raises InvalidParameters."""
    for option in _LINKS:
        if options.get(option) and holds_trigger(options[option]):
            raise InvalidParameters(refusal(option))
    if name in _ITERATING and holds_trigger((kwargs or {}).get("task")):
        raise InvalidParameters(refusal("map"))


def refuse_links(options: Mapping[str, Any]) -> None:
    """Refuse what would follow a wake-up instead of its run. Raises InvalidParameters."""
    for option in ("link", "link_error", "chord"):
        if options.get(option):
            raise InvalidParameters(refusal(option))


def steps_of(tail: Sequence[Mapping[str, Any]]) -> list[Step]:
    """The later steps of a chain, from Celery's ``chain`` option, which holds the last one first.

    Raises InvalidParameters where one is anything but ``trigger.si(job, **params)``.
    """
    steps = [_step(signature) for signature in reversed(tail)]
    for step in steps:
        if not step.job:
            raise InvalidParameters("each step of a chain names its job: trigger.si('orders')")
    return steps


def _step(signature: Mapping[str, Any]) -> Step:
    if signature.get("task") != wakeup.TASK or signature.get("subtask_type"):
        raise InvalidParameters(refusal("chain"))
    if not signature.get("immutable"):
        raise InvalidParameters(
            "trigger.s(...) in a chain would take its predecessor's result as an argument; "
            "use trigger.si(...)"
        )
    stated = signature.get("options") or {}
    refuse_links(stated)
    found = allowed.step(stated)
    return Step(
        job=allowed.job_of(signature.get("args")),
        params=dict(signature.get("kwargs") or {}),
        **found,
    )


def holds_trigger(found: object) -> bool:
    """Whether a trigger stands anywhere in a signature, or in a list of them."""
    return any(signature.get("task") == wakeup.TASK for signature in _signatures(found))


def _signatures(found: object) -> Iterator[Mapping[str, Any]]:
    pending = [found]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            if "task" not in item:
                continue
            yield item
            kwargs = item.get("kwargs") or {}
            if str(item["task"]).startswith("celery."):
                pending += [kwargs.get(part) for part in ("tasks", "header", "body", "task")]
            options = item.get("options") or {}
            pending += [options.get(option) for option in _LINKS]
        elif isinstance(item, list | tuple):
            pending += item


def refusal(option: str) -> str:
    what = {
        "link": "a trigger cannot be linked: link= would fire when the wake-up is taken, not "
        "when the run succeeds",
        "link_error": "a trigger cannot be linked: link_error= would see the wake-up fail, not "
        "the run",
        "chord": "a trigger cannot be part of a chord: it would count the wake-ups, not the runs",
        "chain": "a chain of triggers takes nothing but trigger.si(...), which is stored in "
        "Postgres; a tail with other tasks would travel through Redis",
        "map": "a trigger cannot be mapped over: its parameters would travel through Redis; use "
        "group(trigger.si(...) for ...)",
    }[option]
    return f"{what}. {_WAY_OUT}" if option != "map" else f"{what}."
