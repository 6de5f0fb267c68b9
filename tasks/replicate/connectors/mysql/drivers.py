"""The two drivers, made alike: mysqlclient where it is installed, else PyMySQL.

Both speak the text protocol, and both are told to hand out what the server wrote: numbers as
numbers, bytes as bytes, and everything else as text, because their own dates and decimals lose
what Python's cannot hold.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tasks.replicate.connectors import urls

CONNECT_SECONDS = 10
_FORM = "write mysql://USER:PASSWORD@HOST:PORT/DATABASE (percent-encode special characters)"
_SSL = ("disabled", "required", "verify")
_OPTIONS = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket")


def missing() -> str | None:
    """The module to install where neither driver is there."""
    found = any(importlib.util.find_spec(name) for name in ("MySQLdb", "pymysql"))
    return None if found else "pymysql"


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """What to connect with. Raises UnusableURL without echoing the URL."""
    url = str(config.get("url") or "")
    if not url:
        raise urls.UnusableURL(f"is missing; {_FORM}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise urls.UnusableURL(f"is no MySQL URL; {_FORM}") from None
    if parts.scheme.partition("+")[0] not in ("mysql", "mariadb") or not parts.hostname:
        raise urls.UnusableURL(f"is no MySQL URL; {_FORM}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port is not None:
        urls.check_port(str(port))
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise urls.UnusableURL(f"names no database; {_FORM}")
    found: dict[str, Any] = {
        "host": parts.hostname,
        "port": port or 3306,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": database,
    }
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key == "charset":
            continue  # always utf8mb4
        if key not in _OPTIONS:
            raise urls.UnusableURL(f"has the parameter {key}; known are {', '.join(_OPTIONS)}")
        if key == "ssl" and value not in _SSL:
            raise urls.UnusableURL(f"ssl must be one of {', '.join(_SSL)}")
        found[key] = value
    return found


def driver_of(config: Mapping[str, Any]) -> str:
    """``MySQLdb`` or ``pymysql``; ``mysql+pymysql://`` and ``mysql+mysqldb://`` choose one."""
    wanted = str(config.get("url") or "").partition("://")[0].partition("+")[2].lower()
    if wanted == "pymysql":
        return "pymysql"
    fast = importlib.util.find_spec("MySQLdb") is not None
    return "MySQLdb" if fast else "pymysql"


def connect(
    config: Mapping[str, Any],
    *,
    name: str,
    loads: bool = False,
    seconds: float = CONNECT_SECONDS,
    short: bool = False,
) -> Any:
    """Open a connection as the server sets it up, in UTF-8; the driver's errors pass.

    ``seconds`` bound the connecting and, where ``short``, each statement as well.
    ``loads`` allows LOAD DATA LOCAL. While it is on, a server may ask for any file that this
    process can read: a sink is trusted as far as that, and a source is never told of it.
    """
    options = parameters(config)
    options["local_infile"] = loads
    if driver_of(config) == "MySQLdb":
        return _mysqlclient(options, seconds, short)
    return _pymysql(options, name, seconds, short)


def _pymysql(options: dict[str, Any], name: str, seconds: float, short: bool) -> Any:
    import pymysql
    from pymysql.constants import FIELD_TYPE

    ssl = options.pop("ssl", None)
    if ssl == "disabled":
        options["ssl_disabled"] = True
    elif ssl is not None and not any(key.startswith("ssl_") for key in options):
        options["ssl"] = {"verify_mode": ssl == "verify", "check_hostname": ssl == "verify"}
    elif ssl == "verify":
        options |= {"ssl_verify_cert": True, "ssl_verify_identity": True}
    connection = pymysql.connect(
        **options,
        charset="utf8mb4",
        autocommit=None,
        connect_timeout=seconds,
        # PyMySQL's connect_timeout ends with TCP's handshake; a frozen server comes after that.
        read_timeout=seconds,
        program_name=name or "claimcheck",
        conv=_conversions(FIELD_TYPE, texts=False),
    )
    if not short:
        connection._read_timeout = None  # type: ignore[attr-defined]
    return connection


def _mysqlclient(options: dict[str, Any], seconds: float, short: bool) -> Any:
    import MySQLdb
    from MySQLdb.constants import FIELD_TYPE

    ssl = options.pop("ssl", None)
    modes = {"disabled": "DISABLED", "required": "REQUIRED", "verify": "VERIFY_IDENTITY"}
    files = {
        key.partition("_")[2]: options.pop(key)
        for key in ("ssl_ca", "ssl_cert", "ssl_key")
        if key in options
    }
    if files:
        options["ssl"] = files
    if ssl is not None:
        options["ssl_mode"] = modes[ssl]
    if short:
        options["read_timeout"] = max(1, round(seconds))
    return MySQLdb.connect(
        **options,
        charset="utf8mb4",
        autocommit=None,
        connect_timeout=max(1, round(seconds)),
        multi_statements=False,
        conv=_conversions(FIELD_TYPE, texts=True),
    )


def _conversions(types: Any, *, texts: bool) -> dict[Any, Any]:
    """Which field types become what; mysqlclient has to be told of text as well."""
    whole = ("TINY", "SHORT", "INT24", "LONG", "LONGLONG", "YEAR")
    found: dict[Any, Any] = {getattr(types, name): int for name in whole}
    found |= {types.FLOAT: float, types.DOUBLE: float}
    if texts:
        plain = ("DECIMAL", "NEWDECIMAL", "DATE", "TIME", "DATETIME", "TIMESTAMP")
        found |= {getattr(types, name): str for name in plain}
    return found


def streaming_cursor(connection: Any) -> Any:
    """A cursor that does not hold the whole result in memory."""
    if type(connection).__module__.startswith("pymysql"):
        from pymysql.cursors import SSCursor

        return connection.cursor(SSCursor)
    from MySQLdb.cursors import SSCursor as Streaming

    return connection.cursor(Streaming)


def flags(cursor: Any) -> list[int]:
    """The protocol's flags of each column of a result (unsigned, binary, enum, set)."""
    known = getattr(cursor, "description_flags", None)
    if known is not None:
        return list(known)
    return [field.flags for field in cursor._result.fields]


def wire(connection: Any) -> socket.socket:
    """The connection's socket once more, by which another thread can break it.

    Taken while the connection is idle: mysqlclient tells its number to nobody while it is not.
    """
    own = getattr(connection, "_sock", None)
    return socket.socket(fileno=os.dup(connection.fileno() if own is None else own.fileno()))


def forget(cursor: Any) -> None:
    """Let go of a result that was not read to its end, after the socket was shut down.

    PyMySQL would else read the rest of it when the cursor is collected.
    """
    result: Any = getattr(cursor, "_result", None)
    if hasattr(result, "unbuffered_active"):
        result.unbuffered_active = False
        result.connection = None
