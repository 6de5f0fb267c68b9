"""The same nothing, as a plain Celery task and as a durable run: it writes down when it started.

Each start is eight bytes appended to one file, which costs both sides the same microseconds and
lets the benchmark read starts without asking a broker or a database.
"""

from __future__ import annotations

import os
import struct
import time

STARTS = "CLAIMCHECK_BENCH_STARTS"
RECORD = struct.Struct("=d")


def note_start() -> None:
    """Append this moment (wall clock, seconds) to the file that the environment names."""
    record = RECORD.pack(time.time())
    descriptor = os.open(os.environ[STARTS], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, record)
    finally:
        os.close(descriptor)


def read_starts(path: str) -> list[float]:
    """The starts noted so far, in the order in which they were written."""
    with open(path, "rb") as file:
        return [moment for (moment,) in RECORD.iter_unpack(file.read())]
