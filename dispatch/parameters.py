"""What a trigger may hand over: checked before anything is stored; a refusal names its value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from dispatch.errors import InvalidParameters

MAX_PARAMS_BYTES = 256 * 1024
"""How large a run's parameters may be as JSON; larger data belongs where the handler reads it."""
MAX_NAME = 200
MAX_KEY = 500
MAX_COUNTDOWN = timedelta(days=36525)


def to_json(value: Any, what: str, limit: int = MAX_PARAMS_BYTES) -> str:
    """``value`` as JSON that jsonb can hold. Raises InvalidParameters, naming the place."""
    try:
        _check(value, what)
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidParameters(f"{what} is nested too deeply, or contains itself") from None
    except ValueError as error:  # an integer of more digits than Python writes
        raise InvalidParameters(f"{what} cannot be written as JSON: {error}") from None
    size = len(text.encode())
    if size > limit:
        raise InvalidParameters(
            f"{what} take {size} bytes as JSON; at most {limit} are stored with a run. "
            "Store large data elsewhere and hand over where it is"
        )
    return text


def params_json(params: Mapping[str, Any] | None) -> str:
    """The run's parameters as a JSON object. Raises InvalidParameters."""
    if params is None:
        return "{}"
    if not isinstance(params, Mapping):
        raise InvalidParameters(
            f"the parameters must be a mapping of names to values, not {type(params).__name__}"
        )
    return to_json(dict(params), "the parameters")


def _check(value: Any, what: str) -> None:
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        check_text(value, what)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidParameters(f"{what}: JSON has no {value}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidParameters(f"{what}: the key {key!r} must be a string")
            check_text(key, f"{what}: the key {key[:40]!r}")
            _check(item, f"{what}: {key[:40]!r}" if "'" not in what else what)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, what)
    else:
        hint = ""
        if isinstance(value, datetime):
            hint = "; hand it over as text, with .isoformat()"
        elif isinstance(value, UUID):
            hint = "; hand it over as text, with str()"
        raise InvalidParameters(f"{what}: {type(value).__name__} is not a type of JSON{hint}")


def check_text(value: str, what: str) -> None:
    """Refuse what no text of PostgreSQL can hold. Raises InvalidParameters."""
    if "\x00" in value:
        raise InvalidParameters(f"{what} contains a NUL character, which PostgreSQL cannot store")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameters(
            f"{what} contains half of a surrogate pair, which is no text"
        ) from None


def name(value: str | None, what: str, limit: int = MAX_NAME) -> str | None:
    """A non-empty name on one line, or None. Raises InvalidParameters."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidParameters(f"{what} must be a string, not {type(value).__name__}")
    check_text(value, what)
    if not value.strip() or len(value) > limit or not value.isprintable():
        raise InvalidParameters(f"{what} must be 1 to {limit} printable characters")
    return value


def run_id(value: UUID | str | None, what: str) -> UUID | None:
    """A run's id, or None. Raises InvalidParameters."""
    if value is None or isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidParameters(f"{what} must be a UUID, not {str(value)[:60]!r}") from None


def priority(value: int | None) -> int | None:
    """0 to 9, or None for the job's own. Raises InvalidParameters."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 9:
        raise InvalidParameters(f"priority must be a whole number from 0 to 9, not {value!r}")
    return value


def start(
    countdown: float | timedelta | None, eta: datetime | None
) -> tuple[float, datetime | None]:
    """When the run may start: seconds from now by the database's clock, or an instant.

    Raises InvalidParameters. What lies in the past means now.
    """
    if countdown is not None and eta is not None:
        raise InvalidParameters("give countdown or eta, not both")
    if eta is not None:
        if not isinstance(eta, datetime) or eta.tzinfo is None:
            raise InvalidParameters("eta must be a datetime with a time zone")
        return 0.0, eta.astimezone(UTC)
    if countdown is None:
        return 0.0, None
    if isinstance(countdown, timedelta):
        countdown = countdown.total_seconds()
    if isinstance(countdown, bool) or not isinstance(countdown, int | float):
        raise InvalidParameters(f"countdown must be a number of seconds, not {countdown!r}")
    if not math.isfinite(countdown) or countdown > MAX_COUNTDOWN.total_seconds():
        raise InvalidParameters("countdown must be a number of seconds within a century")
    return max(0.0, float(countdown)), None
