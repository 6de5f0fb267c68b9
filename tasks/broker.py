"""``REDIS_URL`` as Celery takes it: TLS that checks certificates, Sentinel by name, deadlines.

The options make publishing fail fast (R-T4): a broker that refuses costs milliseconds, one that
hangs a second. Workers keep reconnecting all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from db.urls import SettingsError

CONNECT_SECONDS = 0.5
ANSWER_SECONDS = 1.0
LOWEST_PRIORITY = 9

_OPTIONS: Mapping[str, Any] = {
    "max_retries": 0,
    "socket_connect_timeout": CONNECT_SECONDS,
    "socket_timeout": ANSWER_SECONDS,
    "socket_keepalive": True,
    # One list for each priority; the transport takes from the lowest number first.
    "priority_steps": list(range(LOWEST_PRIORITY + 1)),
}


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker URL and its transport options. The URL may hold a password, so ``repr`` hides it."""

    url: str = field(repr=False)
    master_name: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**_OPTIONS, **self.result_options}

    @property
    def result_options(self) -> dict[str, Any]:
        return {} if self.master_name is None else {"master_name": self.master_name}


def of(redis_url: str) -> Broker:
    """The broker that a checked ``REDIS_URL`` names. Raises SettingsError."""
    addresses = []
    masters = set()
    for address in redis_url.strip().split(";"):
        address = address.strip()
        parts = urlsplit(address)
        given = dict(parse_qsl(parts.query))
        query = {name: value for name, value in given.items() if name != "master_name"}
        masters |= {value for name, value in given.items() if name == "master_name"}
        if parts.scheme == "rediss":
            # Celery's own default is to accept any certificate.
            query.setdefault("ssl_cert_reqs", "required")
        if query != given:
            address = urlunsplit(parts._replace(query=urlencode(query)))
        addresses.append(address)
    sentinel = any(address.startswith("sentinel://") for address in addresses)
    if sentinel != bool(masters) or len(masters) > 1:
        raise SettingsError(
            "REDIS_URL: Sentinel needs the name of its master, and only Sentinel takes one: "
            "sentinel://host:26379;sentinel://other:26379/0?master_name=mymaster"
        )
    return Broker(";".join(addresses), masters.pop() if masters else None)


def message_priority(priority: int) -> int:
    """The number that makes a run of ``priority`` (0 to 9, higher first) go first in Redis."""
    return LOWEST_PRIORITY - priority


def run_priority(number: object) -> int:
    """The priority of the run whose wake-up came with ``number``; 0 where that is none of ours."""
    if isinstance(number, int) and 0 <= number <= LOWEST_PRIORITY:
        return LOWEST_PRIORITY - number
    return 0
