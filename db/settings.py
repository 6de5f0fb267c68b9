"""The settings of a process, from its environment, checked before anything uses them.

`settings()` gives the checked values and touches nothing. `services()` gives the endpoints that
are in force, and starts the embedded servers where `DATABASE_URL` or `REDIS_URL` is unset;
`database()` gives the control database's alone, and starts nothing for a given one. What is set is
used as it is; nothing here falls back to an embedded server because another one cannot be reached.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from db import embedded, urls
from db.urls import SettingsError, parse_database_url

__all__ = [
    "NOTICED",
    "VARIABLES",
    "Database",
    "Services",
    "Settings",
    "SettingsError",
    "database",
    "load",
    "parse_database_url",
    "reset",
    "services",
    "settings",
]

logger = logging.getLogger("claimcheck.settings")


class Settings(BaseSettings):
    """Every setting, checked. Durations are in the unit that the variable's name gives.

    The three URLs are kept as secrets: neither `repr` nor an error shows them.
    """

    model_config = SettingsConfigDict(
        case_sensitive=True,
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        populate_by_name=False,
    )

    database_url: SecretStr | None = Field(None, validation_alias="DATABASE_URL")
    database_direct_url: SecretStr | None = Field(None, validation_alias="DATABASE_DIRECT_URL")
    redis_url: SecretStr | None = Field(None, validation_alias="REDIS_URL")
    home: Path = Field(Path(".claimcheck"), validation_alias="CLAIMCHECK_HOME")
    keyring_file: Path | None = Field(None, validation_alias="CLAIMCHECK_KEYRING_FILE")
    lease_seconds: float = Field(
        60, ge=1, le=86_400, allow_inf_nan=False, validation_alias="CLAIMCHECK_LEASE_SECONDS"
    )
    sweep_seconds: float = Field(
        60, ge=0, le=86_400, allow_inf_nan=False, validation_alias="CLAIMCHECK_SWEEP_SECONDS"
    )
    offer_grace_seconds: float = Field(
        10, ge=0.1, le=600, allow_inf_nan=False, validation_alias="CLAIMCHECK_OFFER_GRACE_SECONDS"
    )
    idempotency_hours: float = Field(
        24, gt=0, le=87_600, allow_inf_nan=False, validation_alias="CLAIMCHECK_IDEMPOTENCY_HOURS"
    )
    shutdown_seconds: float = Field(
        30, ge=0, le=86_400, allow_inf_nan=False, validation_alias="CLAIMCHECK_SHUTDOWN_SECONDS"
    )
    retention_days: float = Field(
        90, ge=0, le=36_500, allow_inf_nan=False, validation_alias="CLAIMCHECK_RETENTION_DAYS"
    )
    handlers: Annotated[tuple[str, ...], NoDecode] = Field(
        (), validation_alias="CLAIMCHECK_HANDLERS"
    )
    slot_runs: int = Field(100, ge=1, le=1_000_000, validation_alias="CLAIMCHECK_SLOT_RUNS")
    """How many runs one executor takes one after another before it goes back to Celery (R-C1)."""
    embedded_idle_seconds: float | None = Field(
        None,
        ge=1,
        le=31_536_000,
        allow_inf_nan=False,
        validation_alias="CLAIMCHECK_EMBEDDED_IDLE_SECONDS",
    )
    """How long the embedded servers stay up once nobody uses them; unset: as others ask, or 300."""
    require_services: bool | None = Field(None, validation_alias="CLAIMCHECK_REQUIRE_SERVICES")
    """Whether an unset DATABASE_URL or REDIS_URL is an error; unset: only inside Kubernetes."""

    @field_validator("database_url", "database_direct_url")
    @classmethod
    def _check_database_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            urls.conninfo_of(value.get_secret_value())
        return value

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            urls.check_redis_url(value.get_secret_value())
        return value

    @field_validator("handlers", mode="before")
    @classmethod
    def _split_handlers(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(
                    f"{name!r} is not a module's name; give modules as Python imports them, "
                    "separated by commas, such as 'shop.reports,shop.exports'"
                )
        return names

    @field_validator("home", "keyring_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        # Fixed once: a process that later changes its folder still means the same files.
        return None if value is None else Path(os.path.abspath(value.expanduser()))

    @property
    def uses_embedded_database(self) -> bool:
        return self.database_url is None

    @property
    def uses_embedded_redis(self) -> bool:
        return self.redis_url is None

    @property
    def keyring_may_be_created(self) -> bool:
        """A keyring is made on first use only beside the embedded database, never for a given one.

        A new keyring next to an existing database could open none of its envelopes.
        """
        return self.keyring_file is None and self.uses_embedded_database

    def keyring_path(self) -> Path:
        """Where the keyring is. Raises `SettingsError` where it has to be named and is not."""
        if self.keyring_file is not None:
            return self.keyring_file
        if self.uses_embedded_database:
            return self.home / embedded.KEYRING
        raise SettingsError(
            "CLAIMCHECK_KEYRING_FILE is not set, and DATABASE_URL is: with a database of your own "
            "the keyring must be named. Where datasources are stored already, copy the file from a "
            "host that has it. To begin anew, create one with "
            "`CLAIMCHECK_KEYRING_FILE=/path/keyring.json celery -A tasks keyring init`, keep a "
            "copy of it apart from the database, and set the variable for every process."
        )


VARIABLES: dict[str, str] = {
    str(info.validation_alias): name for name, info in Settings.model_fields.items()
}
"""Environment variable -> field of `Settings`."""

_PREFIX = "CLAIMCHECK_"
_OTHERS = ("CLAIMCHECK_TEST_", "CLAIMCHECK_BENCH_")
"""Variables of the tests and benchmarks, which are no settings."""

NOTICED = "_CLAIMCHECK_NOTICED"
"""In the environment of a process whose user has been told which servers are embedded."""

_KINDS = {
    "float_parsing": "is not a number",
    "int_parsing": "is not a whole number",
    "int_parsing_size": "is not a whole number of a size that counts",
    "int_from_float": "is not a whole number",
    "bool_parsing": "is neither 1 nor 0",
    "finite_number": "is not a finite number",
}


def load() -> Settings:
    """Read and check the environment. Raises `SettingsError`, which lists every mistake."""
    _warn_of_unknown_names()
    try:
        found = Settings()  # type: ignore[call-arg]  # every value comes from the environment
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors(include_url=False)]
    else:
        lines = _contradictions(found) + _missing_services(found)
        if not lines:
            return found
    # Raised outside the handler, so that no traceback carries the rejected values along.
    raise SettingsError("\n".join(lines))


def _explain(details: Any) -> str:
    name = str(details["loc"][0])
    context = details.get("ctx", {})
    if details["type"] == "value_error":
        return f"{name}: {context['error']}"
    info = Settings.model_fields[VARIABLES[name]]
    if "ge" in context:
        problem = f"must be {context['ge']} or more"
    elif "gt" in context:
        problem = f"must be more than {context['gt']}"
    elif "le" in context:
        problem = f"must be {context['le']} or less"
    else:
        problem = _KINDS.get(details["type"], str(details["msg"]).lower())
    value = os.environ.get(name, "")
    shown = f"{name}={value!r}" if len(value) <= 40 else name
    default = "" if info.default is None else f"; leave it unset for {info.default}"
    return f"{shown} {problem}{default}."


def _contradictions(found: Settings) -> list[str]:
    if found.database_direct_url is None or found.database_url is not None:
        return []
    return [
        "DATABASE_DIRECT_URL is set and DATABASE_URL is not: it only names another way to the "
        "database of DATABASE_URL. Set both, or neither."
    ]


def _missing_services(found: Settings) -> list[str]:
    required, reason = found.require_services, "CLAIMCHECK_REQUIRE_SERVICES is on"
    if required is None:
        required, reason = "KUBERNETES_SERVICE_HOST" in os.environ, "this is a Kubernetes pod"
    if not required:
        return []
    missing = []
    if found.database_url is None:
        missing.append(("DATABASE_URL", "postgresql://user:password@host/database"))
    if found.redis_url is None:
        missing.append(("REDIS_URL", "redis://host:6379/0"))
    return [
        f"{name} is not set, and {reason}: an embedded server would end with this container. "
        f"Set {name}, such as {example}."
        for name, example in missing
    ]


def _warn_of_unknown_names() -> None:
    for name in sorted(os.environ):
        if not name.startswith(_PREFIX) or name.startswith(_OTHERS):
            continue
        if name not in VARIABLES:
            # Without the prefix, which alone would make any two names alike.
            known = [one.removeprefix(_PREFIX) for one in VARIABLES if one.startswith(_PREFIX)]
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.7)
            hint = f"; did you mean {_PREFIX}{close[0]}?" if close else "."
            logger.warning("%s is not a setting of Claimcheck and does nothing%s", name, hint)


@dataclass(frozen=True, slots=True)
class Database:
    """The control database in force. Both strings may hold passwords, so `repr` leaves them out."""

    conninfo: str = field(repr=False)
    """libpq conninfo, for psycopg."""
    direct_conninfo: str = field(repr=False)
    """libpq conninfo for LISTEN and other session state; never a transaction pooler."""
    is_embedded: bool
    home: Path

    def revive(self) -> None:
        """Bring an embedded database back that a crash took down; call it, then connect again.

        Cheap while it runs, and nothing for a given one. One that was stopped by command stays so.
        Raises `EmbeddedError`.
        """
        if self.is_embedded:
            embedded.revive(self.home, redis=False)

    def keep(self) -> None:
        """After connecting: count as a user of an embedded database, where it was started anew.

        Cheap, starts nothing and raises nothing; nothing at all for a given one.
        """
        if self.is_embedded:
            embedded.keep(self.home, redis=False)


@dataclass(frozen=True, slots=True)
class Services:
    """The endpoints in force. The three strings may hold passwords, so `repr` leaves them out."""

    database_conninfo: str = field(repr=False)
    """As `Database.conninfo`."""
    direct_conninfo: str = field(repr=False)
    redis_url: str = field(repr=False)
    """As Celery's `broker_url` takes it."""
    embedded_database: bool
    embedded_redis: bool
    home: Path

    def revive_redis(self) -> None:
        """As `Database.revive`, for the broker; may take minutes where that cannot be started."""
        if self.embedded_redis:
            embedded.revive(self.home, database=False)

    def keep_redis(self) -> None:
        """As `Database.keep`, for the broker."""
        if self.embedded_redis:
            embedded.keep(self.home, database=False)


class _Cache:
    """What this process has settled. Forked children inherit it, and the notice given with it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.noticed: set[str] = set()
        self.forget()

    def forget(self) -> None:
        self.settings: Settings | None = None
        self.database: Database | None = None
        self.services: Services | None = None


_cache = _Cache()
os.register_at_fork(after_in_child=lambda: setattr(_cache, "lock", threading.RLock()))


def settings() -> Settings:
    """This process's settings, read once. Raises `SettingsError`."""
    with _cache.lock:
        if _cache.settings is None:
            _cache.settings = load()
        return _cache.settings


def reset() -> None:
    """Read the environment anew at the next use (tests)."""
    with _cache.lock:
        _cache.forget()


def services() -> Services:
    """The endpoints in force, settled once; starts embedded servers where a URL is unset.

    The first call that uses an embedded server says so on standard error, once a process.
    Raises `SettingsError`, or `EmbeddedError` where an embedded server cannot be started.
    """
    with _cache.lock:
        if _cache.services is None:
            _cache.services = _settle(settings())
        return _cache.services


def database() -> Database:
    """The control database, settled once; a given one whatever becomes of an embedded broker.

    Raises as `services`, which it calls where the database is embedded.
    """
    with _cache.lock:
        if _cache.database is None:
            found = settings()
            _cache.database = _given_database(found) or _embedded_database(services())
        return _cache.database


def _given_database(found: Settings) -> Database | None:
    if found.database_url is None:
        return None
    conninfo = direct = _conninfo(found.database_url, "DATABASE_URL")
    if found.database_direct_url is not None:
        direct = _conninfo(found.database_direct_url, "DATABASE_DIRECT_URL")
    return Database(conninfo, direct, False, found.home)


def _embedded_database(found: Services) -> Database:
    return Database(found.database_conninfo, found.direct_conninfo, True, found.home)


def _settle(found: Settings) -> Services:
    given = _given_database(found)
    database = None if given is None else given.conninfo
    redis = None if found.redis_url is None else found.redis_url.get_secret_value().strip()
    if database is None or redis is None:
        endpoints = embedded.ensure(
            found.home,
            database=database is None,
            redis=redis is None,
            idle_seconds=found.embedded_idle_seconds,
        )
        _notice(found)
        database = endpoints.database_conninfo if database is None else database
        redis = endpoints.redis_url if redis is None else redis
    return Services(
        database_conninfo=database,
        direct_conninfo=database if given is None else given.direct_conninfo,
        redis_url=redis,
        embedded_database=found.uses_embedded_database,
        embedded_redis=found.uses_embedded_redis,
        home=found.home,
    )


def _conninfo(url: SecretStr, name: str) -> str:
    return parse_database_url(name, url.get_secret_value())


def _notice(found: Settings) -> None:
    used = []
    if found.uses_embedded_database:
        used.append(("PostgreSQL", "DATABASE_URL"))
    if found.uses_embedded_redis:
        used.append(("Valkey", "REDIS_URL"))
    servers = " and ".join(server for server, _ in used)
    names = " and ".join(name for _, name in used)
    text = (
        f"claimcheck: using the embedded {servers} in {found.home} "
        f"({names} {'are' if len(used) > 1 else 'is'} not set)"
    )
    if text not in _cache.noticed and NOTICED not in os.environ:
        _cache.noticed.add(text)
        print(text, file=sys.stderr, flush=True)
