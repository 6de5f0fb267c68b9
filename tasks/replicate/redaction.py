"""Keeps a datasource's secrets out of every message that leaves an end (R-X2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"


def secrets_of(config: Mapping[str, Any]) -> list[str]:
    """Texts of a configuration that must not be shown, the longest first."""
    found: set[str] = set()
    for key, value in config.items():
        if not isinstance(value, str) or not value:
            continue
        if any(word in key.lower() for word in ("password", "secret", "token")):
            found.add(value)
        if "://" in value or "password" in value.lower():
            found.add(value)
            found.update(_of_url(value))
    return sorted((text for text in found if len(text) > 2), key=len, reverse=True)


def _of_url(value: str) -> set[str]:
    found: set[str] = set()
    try:
        password = urlsplit(value).password
    except ValueError:
        password = None
    # Up to the last @, and in parts: a driver that ends it earlier prints the rest as a host.
    whole = value.partition("://")[2].rpartition("@")[0].partition(":")[2]
    for part in (
        password,
        whole,
        *(part for part in re.split(r"[@/?#:]", whole) if len(part) > 3),
        *(
            w.partition("=")[2]
            for w in value.replace("?", " ").replace("&", " ").split()
            if "password" in w.lower()
        ),
    ):
        if part:
            plain = unquote(part.strip("'\""))
            found |= {part, plain, quote(plain, safe="")}
    return found


def redact(message: str, config: Mapping[str, Any]) -> str:
    """The message without any secret of the configuration."""
    for secret in secrets_of(config):
        message = message.replace(secret, HIDDEN)
    return message
