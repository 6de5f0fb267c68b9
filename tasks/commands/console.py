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
from typing import Any, NoReturn, TextIO

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispatch.redaction import RedactingFilter, redact
from tasks.commands import tables
from tasks.commands.tables import plain

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

    def table(
        self,
        headings: Sequence[str],
        rows: Sequence[Sequence[Any]],
        empty: str,
        less: Sequence[str] = (),
    ) -> None:
        """A table for people; ``empty`` is said where it has no rows.

        ``less`` are the headings that a narrow terminal does without, the first one first.
        """
        if rows:
            self._print(tables.table(headings, rows, self.results.width, less))
        else:
            self.messages.print(Text(empty, "dim"), soft_wrap=True)

    def one_line(self, text: Text) -> None:
        """A line of the results, cut off where the terminal ends."""
        self.results.print(text, no_wrap=True, overflow="ellipsis", crop=True)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Names and values below each other, for people; None and empty ones are left out."""
        self._print(tables.facts(facts))

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


def usage(text: str) -> NoReturn:
    """Wrong usage: exit status 2."""
    raise click.UsageError(text)


@contextmanager
def _told(output: Output) -> Iterator[None]:
    """Errors become one message and status 1; an unforeseen one keeps its traceback, redacted."""
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
        # What it knows of errors takes a while to load, and most commands end well.
        from tasks.commands.failures import explain

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
