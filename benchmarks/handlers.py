"""The durable side's handler; named by CLAIMCHECK_HANDLERS while the benchmark runs."""

from __future__ import annotations

from benchmarks.noop import note_start
from tasks import handler


@handler("bench-noop")
def noop(run: object) -> None:
    note_start()
