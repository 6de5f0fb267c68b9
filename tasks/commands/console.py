"""What the commands share: output for people and for programs, and errors without a traceback.

With ``--json`` standard output holds one JSON document and nothing else; what people are told
goes to standard error. A failure's document is ``{"error": MESSAGE}``. Exit status 0 is done,
1 the command failed, 2 wrong usage.
"""

from __future__ import annotations

import functools
import getpass
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, NoReturn, TextIO
from uuid import UUID

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from db.redaction import RedactingFilter, redact

PIPE_WIDTH = 10_000
"""Columns of a table that is not shown on a terminal, so that programs read whole lines."""


class Output:
    """Where a command's results and messages go."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.results = _console(sys.stdout)
        self.messages = _console(sys.stderr)
        self._written = False

    def document(self, content: Any) -> None:
        """The command's one JSON document."""
        assert not self._written, "a command writes one document"
        self._written = True
        click.echo(json.dumps(content, default=plain, indent=2, ensure_ascii=False))

    def line(self, content: Any) -> None:
        """One line of a command that writes JSON lines (``run logs -f``)."""
        self._written = True
        click.echo(json.dumps(content, default=plain, ensure_ascii=False))

    def say(self, text: str, style: str = "") -> None:
        """Tell a person what was done; with ``--json`` on standard error."""
        where = self.messages if self.as_json else self.results
        where.print(Text(redact(text), style), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.messages.print(Text(redact(text), "yellow"), soft_wrap=True)

    def fail(self, text: str) -> None:
        """Tell what went wrong; the command still has to end with status 1."""
        text = redact(text)
        self.messages.print(Text.assemble(("Error: ", "bold red"), text), soft_wrap=True)
        if self.as_json and not self._written:
            self.document({"error": text})

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
        """A table for people; ``empty`` is said where it has no rows."""
        if not rows:
            self.messages.print(Text(empty, "dim"), soft_wrap=True)
            return
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row))
        self._print(table)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Names and values below each other, for people; None and empty ones are left out."""
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            if value is not None and value not in ("", {}, []):
                table.add_row(name, value if isinstance(value, Text) else Text(shown(value)))
        self._print(table)

    def _print(self, table: Table) -> None:
        if self.results.is_terminal:
            self.results.print(table)
            return
        with self.results.capture() as printed:
            self.results.print(table)
        # Tables are filled up with blanks, which a program that reads lines has no use for.
        click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json`` and an ``Output``, and turn every error into a message.

    The function's return value, where it is a number, is the exit status.
    """

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool, **options: Any) -> None:
        output = Output(as_json)
        with _redacted_logs(), _told(output):
            status = function(output, *arguments, **options)
        if status:
            sys.exit(status)

    return run


def actor() -> str:
    """Who gives the command, as the audit names them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"cli:{user}@{socket.gethostname()}"


def plain(value: Any) -> Any:
    """A value of the database as JSON: times as ISO 8601 with offset."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID | date):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def shown(value: Any) -> str:
    """A value as people read it: times in the reader's zone, to the second."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=plain, ensure_ascii=False)
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def usage(text: str) -> NoReturn:
    """Wrong usage: exit status 2."""
    raise click.UsageError(text)


@contextmanager
def _told(output: Output) -> Iterator[None]:
    """Errors become one message and status 1; an unforeseen one keeps its traceback, redacted."""
    from tasks.commands.failures import explain

    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
        raise
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        output.messages.print("interrupted", style="yellow")
        sys.exit(130)
    except Exception as error:
        message = explain(error)
        if message is None:
            click.echo(redact("".join(traceback.format_exception(error))), err=True)
            message = f"{type(error).__name__}; this is a fault of Claimcheck, please report it"
        output.fail(message)
        sys.exit(1)


@contextmanager
def _redacted_logs() -> Iterator[None]:
    """Warnings of the code go to standard error, without credentials (R-X2)."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(RedactingFilter())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False)
