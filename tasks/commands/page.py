"""Prints ``docs/commands.md`` from what the commands say of themselves.

``python -m tasks.commands.page > docs/commands.md``
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from tasks.commands import nouns

HEAD = """# Commands

Printed by `python -m tasks.commands.page` from the commands themselves: \
`celery -A tasks NOUN VERB --help` says the same.

Every command takes `--json`: then standard output is one JSON document (`run logs -f`: \
JSON lines) and nothing else, and what people are told goes to standard error. Exit status 0 is \
done, 1 failed, 2 wrong usage; `run watch` and `run trigger --wait` end with 0, 1 or 3 for \
SUCCEEDED, FAILED or CANCELLED. `celery -A tasks worker`, `beat` and `flower` are Celery's own.
"""
_ON_EVERY_COMMAND = ("--json", "--help")
_EXAMPLE = "For example: "


def page() -> str:
    """The page as Markdown."""
    text = [HEAD]
    for noun in _nouns():
        if isinstance(noun, click.Group):
            text += [f"\n## {noun.name}\n", *_help(noun)]
        for words, command in _commands_of(noun):
            text += _command("#" * (len(words) + 1), " ".join(words), command)
    return "".join(text)


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that it is called by."""
    for noun in _nouns():
        yield from _commands_of(noun)


def _nouns() -> Iterator[click.Command]:
    return (noun.load() for noun in vars(nouns).values() if isinstance(noun, nouns.Noun))


def _commands_of(noun: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    name = noun.name or ""
    if isinstance(noun, click.Group):
        yield from (((name, verb), noun.commands[verb]) for verb in sorted(noun.commands))
    else:
        yield (name,), noun


def _command(level: str, words: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=words)
    parameters = command.get_params(context)
    arguments = [
        piece
        for parameter in parameters
        if isinstance(parameter, click.Argument)
        for piece in parameter.get_usage_pieces(context)
    ]
    yield f"\n{level} `{' '.join([words, *arguments])}`\n"
    yield from _help(command)
    records = [
        record
        for parameter in parameters
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
    ]
    shown = [record for record in records if not record[0].startswith(_ON_EVERY_COMMAND)]
    if shown:
        yield "\n"
    for option, text in shown:
        yield f"- `{option}`: {' '.join(text.split())}\n" if text else f"- `{option}`\n"


def _help(command: click.Command) -> Iterator[str]:
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        if text.startswith(_EXAMPLE):
            text = f"{_EXAMPLE}`{text.removeprefix(_EXAMPLE)}`"
        yield f"\n{text}\n"


if __name__ == "__main__":
    print(page(), end="")
