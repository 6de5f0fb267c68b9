"""What is said about a name that nothing has. It loads fast, as every trigger loads it."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint to put behind a message about an unknown word; empty where nothing is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """That no job, datasource or schedule has this name, and how to list those there are."""
    hint = did_you_mean(name, known) or "."
    return f"no {kind} is named {name[:100]!r}{hint} List them with: celery -A tasks {kind} list"
