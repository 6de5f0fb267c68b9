"""Whose turn it is to write a table: two jobs with one target do not mix their rows.

Each attempt that begins (step 0) writes its run into the target's own row of the fence table and
holds that row until it commits. A later step share-locks the row and goes on only while it still
names the run. So loads in one transaction wait for each other, and one that emptied the target
first does not fill it after another has begun.

Beside files nothing is held: a run takes the turn as its step 0 replaces the file, and a later step
looks whose it is when it begins and again when it replaces the file.
"""

from __future__ import annotations

import hashlib

from tasks.replicate.connector import Load, SinkError

NO_FENCE = -1
"""What stands for the number in such a row: fences of two jobs are not compared."""


def scope(load: Load) -> str:
    """The target's scope in the fence table beside it; as short as any engine wants it."""
    return "table " + hashlib.sha256(load.table[-1].encode()).hexdigest()[:40]


def check(load: Load, found: str | None) -> None:
    """Raise SinkError where the target's row names another run than the load's."""
    if found != load.run_id:
        raise SinkError(
            f"sink: {'another run' if found is None else f'run {found}'} has begun to write "
            f"{load.table[-1]} since this one emptied it; the table holds what that one left. Let "
            "one job write a table, or give both a concurrency key with limit: 1"
        )
