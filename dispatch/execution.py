"""Doing the work of a held run: its inputs opened, its handler called, its end judged."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from db.envelopes import EnvelopeError, open_envelope
from db.keyring import Keyring, KeyringError
from dispatch import finalization
from dispatch.claims import ClaimedRun
from dispatch.context import (
    HANDLER_CODES,
    BoundDatasource,
    ChildJob,
    HandlerFailure,
    Outcome,
    RunContext,
    RunStopped,
    Snooze,
    Spawned,
)
from dispatch.finalization import MAX_MESSAGE, Ending
from dispatch.handlers import Handler
from dispatch.held import HeldRun
from dispatch.redaction import redact, secrets_of
from dispatch.runlog import RunLog, RunLogger

Spawn = Callable[[ClaimedRun, RunContext, Sequence[ChildJob]], Spawned]
"""Stores the child jobs of a run and enqueues a run of each: see ``RunContext.spawn``."""

FORK_CAME_BACK = 70
"""The exit status of a process that a handler forked and that returned from it."""

_STOPPED: Mapping[str, str] = {
    "worker_shutdown": "the worker shut down before the run ended",
    "timeout": "the run took longer than its job's timeout",
    "cancelled": "the run was cancelled",
}
_STOP_CODES = ("worker_shutdown", "timeout")
"""The reasons to stop that are error codes too."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A claim's datasources, opened; ``secrets`` are those of both."""

    source: BoundDatasource | None
    sink: BoundDatasource | None
    secrets: frozenset[str]


def open_inputs(claimed: ClaimedRun, keyring: Keyring) -> Inputs:
    """Open the snapshots of a claim. Raises EnvelopeError, which names the datasource."""
    source = _open(
        keyring, claimed.source_datasource_id, claimed.source_envelope, claimed.snapshot, "source"
    )
    sink = _open(
        keyring, claimed.sink_datasource_id, claimed.sink_envelope, claimed.snapshot, "sink"
    )
    secrets = frozenset[str]().union(*(secrets_of(side.config) for side in (source, sink) if side))
    return Inputs(source, sink, secrets)


def _open(
    keyring: Keyring,
    datasource_id: UUID | None,
    envelope: Mapping[str, Any] | None,
    snapshot: Mapping[str, Any],
    side: str,
) -> BoundDatasource | None:
    if datasource_id is None or envelope is None:
        return None
    named = snapshot.get(side) or {}
    name = str(named.get("name") or datasource_id)
    config = open_envelope(keyring, datasource_id, envelope, name=name)
    return BoundDatasource(datasource_id, name, str(named.get("connector")), config)


def context_of(
    claimed: ClaimedRun, log: RunLog, inputs: Inputs, spawn: Spawn | None = None
) -> RunContext:
    """The run as its handler sees it."""
    return RunContext(
        id=claimed.id,
        root_run_id=claimed.root_run_id,
        job=claimed.job,
        job_id=claimed.job_id,
        attempt=claimed.attempt,
        fence=claimed.fence,
        definition=claimed.definition,
        params=claimed.params,
        source=inputs.source,
        sink=inputs.sink,
        watermark=claimed.snapshot.get("watermark"),
        log=RunLogger(claimed.id, log),
        spawn=None if spawn is None else partial(spawn, claimed),
    )


def perform(run: HeldRun, handler: Handler) -> Ending | None:
    """Call the handler and judge how it ended; None where the run was fenced: nothing is written.

    What tells the process to end passes through. The secrets of the run should be known to
    dispatch.redaction meanwhile.
    """
    pid = os.getpid()
    try:
        return _performed(run, handler)
    finally:
        if os.getpid() != pid:
            # A fork of the handler's that came back: the run, the executor and the connections are
            # its parent's, which still works.
            os.write(2, b"claimcheck: a process that a handler forked came back; it ends here\n")
            os._exit(FORK_CAME_BACK)


def _performed(run: HeldRun, handler: Handler) -> Ending | None:
    context = run.context
    try:
        returned = handler(context)
    except Snooze as snoozed:
        return finalization.snooze(snoozed.delay, run.fresh_progress())
    except RunStopped as stopped:
        if context.stop_reason is not None:
            return stopped_by(run, context.stop_reason)
        # Nobody told the work to stop: it found that it is fenced, or the handler raised this.
        if stopped.reason == "fenced":
            return None
        return _failed(run, "handler_error", f"the handler stopped by itself: {stopped.reason}")
    except BaseException as error:
        if _ends_the_process(error):
            raise
        # Breaking a blocking call is how work is stopped, so its error is not the run's.
        if context.stop_reason is not None:
            return stopped_by(run, context.stop_reason)
        message = _message(error)
        # The worker's log has the lines of many runs.
        told = f"the run failed (run {context.id} of {context.job})"
        if isinstance(error, HandlerFailure):
            # A failure that the handler foresaw: its message says it all.
            context.log.error("%s: %s", told, message)
            return _failed(run, _code(error), message, permanent=_is_permanent(error))
        context.log.error("%s: %s", told, type(error).__name__, exc_info=error)
        return _failed(run, "handler_error", f"{type(error).__name__}: {message}")
    outcome = returned if isinstance(returned, Outcome) else Outcome(result=returned)
    return finalization.success(outcome, run.fresh_progress(), warning=context.warning)


def _ends_the_process(error: BaseException) -> bool:
    """Whether a signal raised it, or Celery. A handler's own ``sys.exit()`` is a failure like any.

    A pool's child turns a signal into SystemExit with a negative code; Celery has its own classes.
    """
    if type(error) is SystemExit:
        return isinstance(error.code, int) and error.code < 0
    return isinstance(error, SystemExit | KeyboardInterrupt)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"its message cannot be read ({type(broken).__name__})"


def _code(failure: HandlerFailure) -> str:
    """The code that a handler gave its failure, if that is its to give."""
    given = getattr(failure, "code", None)  # a class of its own may not have set it
    return given if isinstance(given, str) and given in HANDLER_CODES else "handler_error"


def _is_permanent(failure: HandlerFailure) -> bool:
    return bool(getattr(failure, "permanent", False))


def stopped_by(run: HeldRun, reason: str) -> Ending | None:
    """The end of work that was told to stop, or does not heed it; None where it was fenced."""
    if reason == "fenced":
        return None
    code = reason if reason in _STOP_CODES else "handler_error"
    return _failed(run, code, _STOPPED.get(reason, f"the run was stopped: {reason}"))


def refused(run: HeldRun, error: Exception) -> Ending:
    """The end of a run whose outcome cannot be stored: a failure that says why."""
    return finalization.failure(
        run.claimed,
        "handler_error",
        redact(str(error), limit=MAX_MESSAGE),
        permanent=True,
        warning=run.context.warning,
    )


def unreadable(claimed: ClaimedRun, error: EnvelopeError | KeyringError) -> Ending:
    """The end of a run whose snapshot this worker cannot open."""
    return finalization.failure(
        claimed, "snapshot_unreadable", redact(str(error), limit=MAX_MESSAGE)
    )


def unknown_handler(claimed: ClaimedRun, name: str) -> Ending:
    """The end of a run that was claimed and whose handler this process lost since."""
    return finalization.failure(
        claimed, "no_handler", f"this worker knows no handler {name!r}; see CLAIMCHECK_HANDLERS"
    )


def _failed(run: HeldRun, code: str, message: str, *, permanent: bool = False) -> Ending:
    warning = run.context.warning
    return finalization.failure(
        run.claimed,
        code,
        _told(message, warning),
        permanent=permanent,
        progress=run.fresh_progress(),
        warning=warning,
    )


def _told(message: str, warning: str | None) -> str:
    """A failure's message; what the sink may hold is the next question, so it follows."""
    if warning is None:
        return redact(message, limit=MAX_MESSAGE)
    rest = f"; {redact(warning)}"
    return redact(message, limit=MAX_MESSAGE - len(rest)) + rest
