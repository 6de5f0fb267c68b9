"""Taking credentials and row data out of texts before they are stored, logged or shown (R-X2).

Two nets, because neither is enough alone: the shapes in which drivers print credentials, and
the exact secrets of the datasources in use, in each encoding that a driver may print them in.

The time grows with the length of the text and no faster, whatever it holds: a pattern runs with
the interpreter locked, so that a slow one would keep a run from renewing its lease. No pattern
may search to the end of the text from each place where it could begin.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import string
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

MASK = "***"
LONGEST_LINE = 256 * 1024
"""Characters of one log record; looking through megabytes would hold up the run's heartbeat."""

_SECRET_NAME = (
    r"(?:passwords?|passwd|pwd|passphrase|passfile|secret|token|credentials?"
    r"|(?:api|access|account|private|shared|encryption)[_-]?key)"
)
# What is not closed goes to the end of the text, so that this always matches once it has begun.
_QUOTED = (
    r"'[^'\\]*(?:(?:\\.|'')[^'\\]*)*(?:'|\\?\Z)"
    r"|\"[^\"\\]*(?:(?:\\.|\"\")[^\"\\]*)*(?:\"|\\?\Z)"
)

_WORD = re.compile(r"\S+")
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
# The marks of scheme://user:PASSWORD@host, plain, and percent-encoded inside another URL.
_URL_MARKS = (
    ("://", re.compile(r"[:/?#]"), "@"),
    ("%3a%2f%2f", re.compile(r"%3a|%2f|%3f|%23"), "%40"),
)
# ?password=..., &sslpassword=...
_QUERY_PASSWORD = re.compile(rf"(?i)([?&][\w.-]{{0,40}}{_SECRET_NAME}[\w.-]{{0,40}}=)[^&#\s'\"]*")
# password=..., password = '...', "password": "...", password: ...; but not MySQL's word on whether
# there was one.
_NAMED_SECRET = re.compile(
    r"(?is)(?<![?&])(?!(?<=\(using )(?-i:password: (?:YES|NO)\))(?![^\s.,;]))"
    rf"({_SECRET_NAME}[\w-]{{0,40}}\\?[\"']?\s{{0,4}}[=:]\s{{0,4}})"
    rf"({_QUOTED}|(?:\\.|[^\s\\]|\\\Z)+)"
)
# ALTER ROLE ... PASSWORD '...', IDENTIFIED BY '...'
_SQL_PASSWORD = re.compile(rf"(?is)\b((?:password|identified\s+by)\s+e?)({_QUOTED})")

# A field's text, to the line that begins the next one or to the end.
_FIELD = (
    r"[^\n]*(?:\n(?!(?:DETAIL|CONTEXT|HINT|ERROR|FATAL|PANIC|WARNING|NOTICE|QUERY|STATEMENT"
    r"|LOCATION|LINE \d+|SCHEMA NAME|TABLE NAME|COLUMN NAME|CONSTRAINT NAME):"
    r"|\[SQL: |\[parameters: |\(Background on this error"
    r"|\n(?:The above exception|During handling)|Traceback \(most recent)[^\n]*)*"
)
_DETAIL = re.compile(rf"\b(DETAIL|CONTEXT|QUERY|STATEMENT):(\s*)({_FIELD})")
_PARAMETERS = re.compile(rf"(\[parameters: )({_FIELD})")
# What says where a fault is without quoting what stands there.
_SAFE_DETAIL = re.compile(
    r"COPY [^\n:]{1,200}?, line \d+(?:, column [^\n:]{1,200})?"
    r"|Process \d+ waits for [^\n]*(?:\nProcess \d+ waits for [^\n]*)*"
    r"|(?:while )?(?:updating|locking|deleting|inserting index) tuple \(\d+,\d+\) in relation "
    r"[^\n]*"
)
# A quoted value's beginning, its quote last, and its end: see _mask_values.
_QUOTED_VALUE = re.compile(
    r"((?:invalid input (?:syntax|value) for [^\n:]{1,200}|malformed (?:array|range|record)"
    r" literal|(?:date/time|timestamp|interval)[^\n:]{0,60} out of range): )\""
)
_QUOTED_VALUE_END = re.compile(r"\"(?=\n|\Z)")
_MYSQL_VALUE = re.compile(r"(?i)\b((?:duplicate entry|incorrect [\w ]{1,40} value:) )'")
_MYSQL_VALUE_END = re.compile(r"(?i)'(?= for (?:key|column))")
# Those that do not end: to the end of the line.
_OPEN_VALUES = tuple(
    re.compile(opening.pattern + r"[^\n]*") for opening in (_QUOTED_VALUE, _MYSQL_VALUE)
)

# In a configuration's own texts: the user's part of a URL, ?password=..., password='...'
_USERINFO = re.compile(r"://[^\s:/?#]*:")
_CONFIGURED_QUERY_PASSWORD = re.compile(
    rf"(?i)[?&](?:(?!{_SECRET_NAME})[\w.-])*{_SECRET_NAME}[\w.-]*=([^&#]*)"
)
_CONFIGURED_PASSWORD = re.compile(
    rf"(?is)(?<![\w-])(?:(?!{_SECRET_NAME})[\w-])*{_SECRET_NAME}[\w-]*\s*=\s*"
    r"(?:'((?:[^'\\]|\\.)*)'|((?:\\.|[^\s\\'])+))"
)

# Read beyond a limit, so that the answer reaches it although masks are shorter than secrets.
_MARGIN = 4096


def redact(text: str, secrets: Iterable[str] = (), *, limit: int | None = None) -> str:
    """``text`` without passwords, the given secrets, and the row data that PostgreSQL quotes.

    ``secrets`` are plain values; each is also found URL-encoded, JSON-escaped and quoted. Those
    of ``secrets_known`` blocks that are open in this process are always taken out.

    With ``limit``, the answer has at most that many characters, and a long text costs no more
    than a short one: little beyond the limit is read. What may be a secret's first part there
    is taken out as the whole would have been.
    """
    end = len(text) if limit is None else min(len(text), limit + _MARGIN)
    cut = end < len(text)
    known = frozenset(secrets) | _known.current()
    text = _mask_known(text, known, end)
    text = _PARAMETERS.sub(_mask_parameters, text)
    text = _DETAIL.sub(_shorten_detail, text)
    text = _mask_values(text, _QUOTED_VALUE, _QUOTED_VALUE_END, cut=cut)
    text = _mask_values(text, _MYSQL_VALUE, _MYSQL_VALUE_END, cut=cut)
    if "://" in text or "%2F%2F" in text.upper():
        text = _WORD.sub(functools.partial(_mask_userinfo, cut=cut), text)
    text = _QUERY_PASSWORD.sub(rf"\g<1>{MASK}", text)
    text = _NAMED_SECRET.sub(_mask_value, text)
    text = _SQL_PASSWORD.sub(_mask_value, text)
    # Last, because the end of a line may stand within a password that the others know whole.
    for pattern in _OPEN_VALUES:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text[:limit]


def secrets_of(config: Mapping[str, Any]) -> frozenset[str]:
    """The secrets of a datasource's configuration: passwords in its URLs and connection strings,
    and every value whose name says that it is one, at any depth.
    """
    return frozenset(secret for secret in _walk(config) if secret)


def _walk(value: Any, *, secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            named_so = re.search(_SECRET_NAME, str(name), re.IGNORECASE) is not None
            yield from _walk(item, secret=secret or named_so)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item, secret=secret)
    elif isinstance(value, str):
        if secret:
            yield value
        yield from _in_connection_string(value)
    elif secret and isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


_MARKS = re.compile(r"[@/?#:]")


def _in_connection_string(value: str) -> Iterator[str]:
    found = []
    if "://" in value:
        # Both readings of an unencoded "@" or "/": libraries disagree about where a password ends.
        for word in _WORD.findall(value):
            last = word.rfind("@")
            if last >= 0 and (opening := _USERINFO.search(word, 0, last)):
                whole = word[opening.end() : last]
                found.append(whole)
                # A library that ends the password at another mark prints the rest as a host.
                found += [part for part in _MARKS.split(whole) if len(part) > 3]
            at = 0
            while opening := _USERINFO.search(word, at):
                at = word.find("@", opening.end())
                if at < 0:
                    break
                found.append(word[opening.end() : at])
        found += _CONFIGURED_QUERY_PASSWORD.findall(value)
    else:
        for quoted, plain in _CONFIGURED_PASSWORD.findall(value):
            found.append(re.sub(r"(?s)\\(.)", r"\1", quoted or plain))
    for secret in found:
        yield from (secret, unquote(secret), unquote_plus(secret))


@contextlib.contextmanager
def secrets_known(secrets: Iterable[str]) -> Iterator[None]:
    """While the block runs, every ``redact`` in this process takes these secrets out too."""
    added = frozenset(secrets)
    _known.add(added)
    try:
        yield
    finally:
        _known.remove(added)


class RedactingFilter(logging.Filter):
    """Redacts each record that passes: message, traceback and stack.

    It belongs on handlers; a logger's own filter does not see what its children log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:
            # A faulty logging call: its arguments would otherwise be printed by logging itself.
            message = f"{record.msg!s} [its arguments do not fit]"
        record.msg = redact(message, limit=LONGEST_LINE)
        record.args = None
        if record.exc_info and not record.exc_text:
            # Formatters print exc_text, where it is set, instead of formatting exc_info again.
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if record.exc_text:
            record.exc_text = redact(record.exc_text, limit=LONGEST_LINE)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


class _KnownSecrets:
    """The secrets of the runs that this process has open, counted: two runs may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._current: frozenset[str] = frozenset()

    def add(self, secrets: frozenset[str]) -> None:
        with self._lock:
            self._counts.update(secrets)
            self._current = frozenset(self._counts)

    def remove(self, secrets: frozenset[str]) -> None:
        with self._lock:
            self._counts.subtract(secrets)
            self._counts = +self._counts
            self._current = frozenset(self._counts)

    def current(self) -> frozenset[str]:
        return self._current


_known = _KnownSecrets()


@functools.lru_cache(maxsize=64)
def _pattern(secrets: frozenset[str]) -> tuple[re.Pattern[str], int] | None:
    """What finds the secrets in each form, and the length of the longest form."""
    forms = {form for secret in secrets for form in _encoded(secret) if form.strip()}
    if not forms:
        return None
    # The longest first, so that no shorter secret leaves the rest of a longer one standing.
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(_as_pattern, longest_first))), len(longest_first[0])


def _as_pattern(form: str) -> str:
    escaped = re.sub(r"%[0-9A-Fa-f]{2}", lambda found: f"(?i:{found.group()})", re.escape(form))
    # A very short secret occurs in ordinary words, and taking those apart hides nothing.
    return rf"(?<!\w){escaped}(?!\w)" if len(form) < 4 else escaped


def _encoded(secret: str) -> Iterator[str]:
    yield secret
    yield quote(secret, safe="")
    yield quote(secret)
    yield quote(secret, safe=" !$&'()*+,;=:~")
    yield quote_plus(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield secret.replace("\\", "\\\\").replace("'", "\\'")
    yield secret.replace("'", "''")


def _mask_known(text: str, secrets: frozenset[str], end: int) -> str:
    """``text[:end]`` with each secret that begins there masked, also one that ends beyond it."""
    if not secrets or (found := _pattern(secrets)) is None:
        return text[:end]
    pattern, longest = found
    parts: list[str] = []
    at = 0
    for secret in pattern.finditer(text, 0, end + longest):
        if secret.start() >= end:
            break
        parts += text[at : secret.start()], MASK
        at = secret.end()
    return "".join((*parts, text[at:end]))


def _mask_values(
    text: str, opening: re.Pattern[str], closing: re.Pattern[str], *, cut: bool
) -> str:
    """Mask the values that begin where ``opening`` ends, at its quote, and go to ``closing``.

    The first that has no end is the last that is looked at: no later one has an end either.
    It is masked only where the text was cut, and its end may have been cut off.
    """
    parts: list[str] = []
    at = 0
    while found := opening.search(text, at):
        end = closing.search(text, found.end())
        if end is None and not cut:
            break
        parts += text[at : found.end(1)], MASK
        at = end.end() if end else len(text)
    return "".join((*parts, text[at:]))


def _mask_parameters(field: re.Match[str]) -> str:
    label, content = field.groups()
    return f"{label}{MASK}]" if content.endswith("]") else f"{label}{MASK}"


def _mask_userinfo(word: re.Match[str], *, cut: bool) -> str:
    """Mask from the user's colon to the last "@" of the word: a password may hold "@" or "/".

    Where the text was cut within the word, that "@" may have been cut off: mask to the end.
    """
    text = word.group()
    open_end = cut and word.end() == len(word.string)
    for opening, delimiter, end in _URL_MARKS:
        # Not lower(): that changes the length of some letters, and so every position after them.
        lower = text.translate(_LOWER)
        last = len(text) if open_end else lower.rfind(end)
        start = lower.find(opening)
        while 0 <= start < last:
            found = delimiter.search(lower, start + len(opening), last)
            if found and found.group() in (":", "%3a"):
                text = text[: found.end()] + MASK + text[last:]
                break
            start = lower.find(opening, start + 1)
    return text


def _mask_value(named: re.Match[str]) -> str:
    name, value = named.groups()
    quote_mark = value[0] if value[0] in "'\"" else ""
    return f"{name}{quote_mark}{MASK}{quote_mark}"


def _shorten_detail(field: re.Match[str]) -> str:
    label, space, content = field.groups()
    safe = _SAFE_DETAIL.match(content)
    if safe is None:
        return f"{label}:{space}{MASK}"
    rest = content[safe.end() :]
    return f"{label}:{space}{safe.group()}" + (f": {MASK}" if rest.strip() else "")
