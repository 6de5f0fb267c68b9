"""Reading `DATABASE_URL` and `REDIS_URL`: what users write, and what the drivers take.

No function here puts a URL, or a part that could be a password, into an error.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from psycopg import ProgrammingError, conninfo
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

REDIS_SCHEMES = ("redis", "rediss", "sentinel", "redis+socket")


class SettingsError(Exception):
    """A setting is missing or cannot be used. The message names it and the way out."""


def check_database_url(value: str) -> str:
    """Returns the libpq conninfo for any accepted spelling. Raises `ValueError`.

    Accepted: `postgresql://` and `postgres://` (libpq's, SQLAlchemy's with or without a driver,
    as in `postgresql+psycopg://`) and libpq's `key=value` form.
    """
    value = value.strip()
    scheme, separator, _ = value.partition("://")
    if not separator:
        return _from_conninfo(value)
    dialect = scheme.partition("+")[0].lower()
    if dialect not in ("postgresql", "postgres"):
        raise ValueError(
            f"the scheme {scheme!r} is not PostgreSQL's; the control database is a PostgreSQL "
            "one (14 or later), such as postgresql://user:password@host:5432/database"
        )
    return conninfo.make_conninfo("", **_libpq_options(value, scheme))


def _libpq_options(value: str, scheme: str) -> dict[str, str]:
    plain = f"postgresql://{value.partition('://')[2]}"
    if "+" not in scheme:
        try:
            read = conninfo.conninfo_to_dict(plain)
        except ProgrammingError:
            read = {}
        # libpq splits at the first @, SQLAlchemy at the last: only the latter reads a password
        # that holds a bare @.
        if read and "@" not in str(read.get("host", "")):
            return {name: str(item) for name, item in read.items() if item is not None}
    try:
        url = make_url(plain)
    except (ArgumentError, ValueError):
        raise ValueError(
            "it is not a URL that can be read; write postgresql://user:password@host:5432/database "
            "and percent-encode special characters of the password (@ as %40, / as %2F, # as %23)"
        ) from None
    options = _from_sqlalchemy(url)
    _check_options(options)
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


def _from_conninfo(value: str) -> str:
    try:
        options = conninfo.conninfo_to_dict(value)
    except ProgrammingError:
        options = {}
    if not options:
        raise ValueError(
            "it is neither a URL nor a libpq connection string; write "
            "postgresql://user:password@host:5432/database or 'host=... dbname=... user=...'"
        )
    return conninfo.make_conninfo("", **options)


def _check_options(options: dict[str, str]) -> None:
    for name in options:
        try:
            conninfo.make_conninfo("", **{name: "1"})
        except ProgrammingError:
            raise ValueError(
                f"{name!r} is not a connection option of PostgreSQL; see 'Parameter Key Words' "
                "of the libpq documentation"
            ) from None


def parse_database_url(name: str, value: str) -> str:
    """libpq conninfo of the URL that the variable `name` holds. Raises `SettingsError`."""
    try:
        return check_database_url(value)
    except ValueError as error:
        message = f"{name}: {error}"
    raise SettingsError(message)


def sqlalchemy_url(database_conninfo: str) -> str:
    """The URL of SQLAlchemy's psycopg dialect for a libpq conninfo. It may hold a password."""
    options = {
        name: str(item)
        for name, item in conninfo.conninfo_to_dict(database_conninfo).items()
        if item is not None
    }
    user = options.pop("user", None)
    password = options.pop("password", None)
    database = options.pop("dbname", None)
    hosts = options.pop("host", "").split(",")
    ports = options.pop("port", "").split(",")
    host: str | None = None
    port: int | None = None
    query: dict[str, str | tuple[str, ...]] = dict(options)
    if len(hosts) > 1:
        ports = ports * len(hosts) if len(ports) == 1 else ports
        query["host"] = tuple(
            f"{one}:{its_port}" if its_port else one
            for one, its_port in zip(hosts, ports, strict=False)
        )
    elif hosts[0].startswith(("/", "@")):
        query["host"] = hosts[0]
        if ports[0]:
            query["port"] = ports[0]
    else:
        host, port = hosts[0] or None, int(ports[0]) if ports[0] else None
    return URL.create(
        "postgresql+psycopg", user, password, host, port, database, query
    ).render_as_string(hide_password=False)


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
