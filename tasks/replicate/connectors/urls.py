"""What the URLs of database servers have in common: where a password ends, what a port is.

No message here holds a part of a URL: what was meant as its host may belong to its password.
"""

from __future__ import annotations

import re

from tasks.replicate.connector import Problem

HIGHEST_PORT = 65_535
RAW = (
    "a raw @, /, # or ? in its user, password or database ends that part too early; "
    "percent-encode it (@ as %40, / as %2F, # as %23, ? as %3F)"
)
PORT = (
    f"its port is not a number from 1 to {HIGHEST_PORT} (a raw / in the password would also "
    "make it look so; write it as %2F)"
)


class UnusableURL(ValueError):
    """A URL that no connection can be opened with; the message holds nothing of it."""

    def __init__(self, message: str) -> None:
        self.problem = Problem("url", message)
        super().__init__(str(self.problem))


def check_userinfo(url: str) -> None:
    """Raises UnusableURL for an ``@`` that stands where none can: drivers disagree about such
    URLs, and take a part of the password for the host, the port or the database, which they show.
    """
    _, separator, rest = url.partition("://")
    if not separator:
        return
    end = re.search(r"[/?#]", rest)
    authority = rest[: end.start()] if end else rest
    behind = rest[end.start() :] if end else ""
    path, _, query = behind.partition("?")
    # The value of a parameter may hold an @; its name may not.
    named = any("@" in pair.partition("=")[0] for pair in query.split("&"))
    early = not path and "@" not in authority and "@" in query
    if authority.count("@") > 1 or "@" in path or "@" in behind.partition("#")[2] or named or early:
        raise UnusableURL(RAW)


def check_port(port: str) -> None:
    """Raises UnusableURL where a stated port is no number that a server can listen on."""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
        raise UnusableURL(PORT)
