"""The fence: the number by which sinks tell a newer attempt from a stale one (R-F5)."""

from __future__ import annotations

from db import session, statements

_SQL = statements.load("database")


def move_on(by: int, *, actor: str) -> int:
    """Move the fence ``by`` so many past every known number, under audit; the next one is returned.

    For a database that was restored: it hands out numbers that lost attempts have used already.
    Raises sqlalchemy.exc.DBAPIError.
    """
    with session.transaction() as connection:
        moved = statements.row(connection, _SQL["bump_fence"], {"by": by, "actor": actor})
    assert moved is not None
    return int(moved["next_fence"])
