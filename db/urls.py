"""Reading `DATABASE_URL` and `REDIS_URL`: what users write, and what the drivers take.

No function here puts a URL, or a part that could be a password, into an error.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from psycopg import ProgrammingError, conninfo
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

REDIS_SCHEMES = ("redis", "rediss", "sentinel", "redis+socket")


_UNREADABLE = (
    "it is not a URL that can be read; write postgresql://user:password@host:5432/database and "
    "percent-encode special characters of the password (@ as %40, / as %2F, # as %23)"
)


class SettingsError(Exception):
    """A setting is missing or cannot be used. The message names it and the way out."""


def conninfo_of(value: str) -> str:
    """Returns the libpq conninfo for any accepted spelling. Raises `ValueError`.

    Accepted: `postgresql://` and `postgres://` (libpq's, SQLAlchemy's with or without a driver,
    as in `postgresql+psycopg://`) and libpq's `key=value` form.
    """
    value = value.strip()
    scheme, separator, _ = value.partition("://")
    if not separator:
        options = _conninfo_options(value)
        _check_port(options)
        return conninfo.make_conninfo("", **options)
    dialect = scheme.partition("+")[0].lower()
    if dialect not in ("postgresql", "postgres"):
        raise ValueError(
            f"the scheme {scheme!r} is not PostgreSQL's; the control database is a PostgreSQL "
            "one (14 or later), such as postgresql://user:password@host:5432/database"
        )
    options = _libpq_options(value, scheme)
    _check_port(options)
    return conninfo.make_conninfo("", **options)


def _check_port(options: dict[str, str]) -> None:
    for port in options.get("port", "").split(","):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ValueError(
                "its port is not a number from 1 to 65535; write "
                "postgresql://user:password@host:5432/database"
            )


def _libpq_options(value: str, scheme: str) -> dict[str, str]:
    plain = f"postgresql://{value.partition('://')[2]}"
    if "+" in scheme:
        options = _sqlalchemy_options(plain)
    else:
        try:
            read = conninfo.conninfo_to_dict(plain)
        except ProgrammingError:
            options = _sqlalchemy_options(plain)
        else:
            options = {name: str(item) for name, item in read.items() if item is not None}
    # A bare @ in a password moves its rest into the host.
    if "@" in options.get("host", ""):
        raise ValueError(_UNREADABLE)
    return options


def _sqlalchemy_options(plain: str) -> dict[str, str]:
    try:
        url = make_url(plain)
    except (ArgumentError, ValueError):
        raise ValueError(_UNREADABLE) from None
    options = _from_sqlalchemy(url)
    for name in options:
        try:
            conninfo.make_conninfo("", **{name: "1"})
        except ProgrammingError:
            raise ValueError(
                f"{name!r} is not a connection option of PostgreSQL; see 'Parameter Key Words' "
                "of the libpq documentation"
            ) from None
    return options


def _from_sqlalchemy(url: URL) -> dict[str, str]:
    parts = {
        "user": url.username,
        "password": url.password,
        "host": url.host,
        "port": url.port,
        "dbname": url.database,
    }
    options = {name: str(part) for name, part in parts.items() if part not in (None, "")}
    for name, item in url.query.items():
        if name == "host" and (not isinstance(item, str) or ":" in item):
            # SQLAlchemy's spelling of several hosts: ?host=one:5432&host=two:5433
            pairs = [
                entry.partition(":") for entry in (item if isinstance(item, tuple) else (item,))
            ]
            options["host"] = ",".join(host for host, _, _ in pairs)
            if any(port for _, _, port in pairs):
                options["port"] = ",".join(port for _, _, port in pairs)
        else:
            options[name] = item if isinstance(item, str) else ",".join(item)
    return options


def _conninfo_options(value: str) -> dict[str, str]:
    try:
        read = conninfo.conninfo_to_dict(value)
    except ProgrammingError:
        read = {}
    if not read:
        raise ValueError(
            "it is neither a URL nor a libpq connection string; write "
            "postgresql://user:password@host:5432/database or 'host=... dbname=... user=...'"
        )
    return {name: str(item) for name, item in read.items() if item is not None}


def parse_database_url(name: str, value: str) -> str:
    """libpq conninfo of the URL that the variable `name` holds. Raises `SettingsError`."""
    try:
        return conninfo_of(value)
    except ValueError as error:
        message = f"{name}: {error}"
    raise SettingsError(message)


def check_redis_url(value: str) -> None:
    """Accepts what Celery's Redis transport does. Raises `ValueError`.

    Several addresses, as Sentinel takes them, are separated by semicolons.
    """
    for address in value.strip().split(";"):
        try:
            parts = urlsplit(address.strip())
            _ = parts.port
        except ValueError:
            raise ValueError(
                "its host or port cannot be read; write redis://:password@host:6379/0"
            ) from None
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(
                f"its scheme must be one of {', '.join(f'{one}://' for one in REDIS_SCHEMES)}; "
                "write redis://:password@host:6379/0"
            )
        if parts.scheme == "redis+socket":
            if parts.netloc or not parts.path.strip("/"):
                raise ValueError(
                    "a Unix socket is given by its whole path, with three slashes: "
                    "redis+socket:///run/redis/redis.sock"
                )
        elif not parts.hostname:
            raise ValueError("it names no host; write redis://:password@host:6379/0")
