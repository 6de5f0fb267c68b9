"""The handlers of a scenario's workers: they write down what they do, and when."""

from __future__ import annotations

import os
import time
from typing import Any

from scenarios import ledger
from tasks import HandlerFailure, PermanentFailure, RunContext, Snooze, handler

STEP_SECONDS = 0.05


@handler("work")
def work(run: RunContext) -> dict[str, Any]:
    """Work for ``params["seconds"]``, heeding what it is told, then have one effect."""
    return _work(run, heeds=True)


@handler("plain")
def plain(run: RunContext) -> dict[str, Any]:
    """The same without any database, so that nothing but Claimcheck notices when one is away."""
    return _work(run, heeds=True, records=False)


@handler("deaf")
def deaf(run: RunContext) -> dict[str, Any]:
    """The same without ever looking whether it should stop."""
    return _work(run, heeds=False)


def _work(run: RunContext, *, heeds: bool, records: bool = True) -> dict[str, Any]:
    trace = ledger.Trace(run)
    try:
        trace.tell("began")
        url = os.environ["SCENARIO_LEDGER_URL"] if records else None
        with ledger.opened(url) as connection:
            ledger.begin(connection, run)
            seconds = float(run.params.get("seconds", 0.5))
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(STEP_SECONDS, left))
                trace.tell("at")
                if heeds:
                    run.progress(int(100 * (1 - left / seconds)), 100)
            if run.attempt <= int(run.params.get("fails", 0)):
                raise HandlerFailure("as it was told to")
            if run.params.get("permanent"):
                raise PermanentFailure("as it was told to")
            if run.params.get("snooze") and os.urandom(1)[0] < 128:
                raise Snooze(0.3)
            if heeds:
                run.check_cancelled()
            ledger.effect(connection, run)
            trace.tell("ended")
    finally:
        trace.close()
    return {"run": str(run.id), "attempt": run.attempt, "fence": run.fence}
