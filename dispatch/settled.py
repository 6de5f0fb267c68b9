"""A transaction whose COMMIT may get no answer: repeated until its outcome is known (R-R7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from db.failures import driver_error, first_line, is_connection_lost
from db.session import DeadlineExceeded
from dispatch.errors import ClaimcheckError, DatabaseUnavailable

ATTEMPTS = 3

Done = TypeVar("Done")


def settled(
    once: Callable[[], Done],
    what: str,
    *,
    refuse: Callable[[BaseException], None],
    advice: str = "",
    tells: tuple[type[ClaimcheckError], ...] = (),
) -> tuple[Done, bool]:
    """What ``once`` returns, and whether an earlier attempt of this call may have stored it.

    ``once`` is a transaction that may be repeated: it changes nothing where it landed before. It is
    tried three times while the connection is lost, and no more after an answer that did not come
    within its deadline. ``refuse`` raises our own error where the driver's stands for one.

    After an attempt without an answer, which may still be about to commit, no refusal of a later
    one tells that nothing was stored, except those that ``tells`` names: then, and where no attempt
    is answered, DatabaseUnavailable says that ``what`` may be stored, and gives ``advice``. Else
    raises what ``refuse`` does, what ``once`` raises of ours, and the driver's errors.
    """
    unanswered: BaseException | None = None
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return once(), unanswered is not None
        except (psycopg.Error, DBAPIError, PoolTimeout, ClaimcheckError) as error:
            if is_connection_lost(error):
                unanswered = error
                if attempt < ATTEMPTS and not isinstance(driver_error(error), DeadlineExceeded):
                    continue
            elif unanswered is None:
                if isinstance(error, PoolTimeout):
                    raise DatabaseUnavailable(
                        "all connections of this process to the control database are busy; "
                        "nothing was stored"
                    ) from None
                refuse(error)
                raise
            elif isinstance(error, tells):
                raise
        break
    assert unanswered is not None
    raise DatabaseUnavailable(
        f"the control database (DATABASE_URL) gave no answer, so {what} may be stored or not: "
        f"{first_line(unanswered)}{advice}"
    )
