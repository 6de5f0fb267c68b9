"""Values on a command line: ``KEY=VALUE``, secrets that stay off it, and dotted keys."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import click
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks.commands.console import usage


def pair(text: str, option: str) -> tuple[str, str]:
    """Split ``KEY=VALUE``; wrong usage where there is no ``=``."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        usage(
            f"{option} takes KEY=VALUE, not {text!r}" if separator else f"{option} takes KEY=VALUE"
        )
    return key, value


def parameter(text: str) -> tuple[str, Any]:
    """``--param KEY=VALUE``: a value that reads as JSON is that value, anything else is text."""
    key, value = pair(text, "--param")
    try:
        return key, json.loads(value, parse_constant=_no_constant)
    except ValueError:
        return key, value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def typed(text: str) -> Any:
    """A value as YAML reads it: ``3``, ``true``, ``[a, b]``, or else the text itself."""
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return text
    # A date stays as it was written, as in the definition file.
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``[("retry.backoff", "5m")]`` as ``{"retry": {"backoff": "5m"}}``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        *parents, last = key.split(".")
        place = found
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                usage(f"{key} stands below {parent}, which is given as a value too")
            place = inner
        place[last] = value
    return found


def secret_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options by which a secret reaches a command: none of them holds it."""
    for option in (
        click.option(
            "--secret-env",
            multiple=True,
            metavar="KEY=VAR",
            help="Take the setting KEY from the environment variable VAR.",
        ),
        click.option("--url-stdin", is_flag=True, help="Read the url from standard input."),
        click.option("--url-env", metavar="VAR", help="Take the url from an environment variable."),
    ):
        function = option(function)
    return function


def secrets_given(
    url_env: str | None, url_stdin: bool, secret_env: Collection[str]
) -> dict[str, str]:
    """The secrets that the options of ``secret_options`` lead to."""
    if url_env and url_stdin:
        usage("give --url-env or --url-stdin, not both")
    found: dict[str, str] = {}
    if url_env:
        found["url"] = _variable(url_env, "--url-env")
    if url_stdin:
        found["url"] = _standard_input()
    for text in secret_env:
        key, name = pair(text, "--secret-env")
        found[key] = _variable(name, "--secret-env")
    return found


def settings_given(pairs: Iterable[str], secret: Collection[str]) -> dict[str, Any]:
    """The settings of ``--set KEY=VALUE``; one that may be secret is refused there."""
    found: dict[str, Any] = {}
    for text in pairs:
        key, value = pair(text, "--set")
        if key in secret:
            way = "--url-env VAR or --url-stdin" if key == "url" else f"--secret-env {key}=VAR"
            usage(
                f"{key} may hold a secret, and every user of the machine can read a command line: "
                f"use {way}"
            )
        found[key] = typed(value)
    return found


def _variable(name: str, option: str) -> str:
    value = os.environ.get(name)
    if value is None:
        usage(f"{option}: the environment variable {name} is not set")
    return value


def _standard_input() -> str:
    if sys.stdin.isatty():
        value = click.prompt("url", hide_input=True, err=True)
    else:
        value = sys.stdin.read(1_000_000)
    value = str(value).strip()
    if not value or "\n" in value:
        usage("--url-stdin: standard input must hold exactly one line, the url")
    return value
