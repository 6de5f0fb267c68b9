"""The entry points of ``celery -A tasks NOUN``: each imports its module when it is called.

Celery loads every command's entry point whenever it starts, be it a worker, and most of what the
commands need is needed by nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

import click


class Noun(click.Command):
    """A command that stands for ``MODULE:ATTRIBUTE`` until it is called."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name, help=help)
        self._target = target

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        # Click goes on with the context's own command, which is the real one.
        return self.load().make_context(*arguments, **options)

    def load(self) -> click.Command:
        """The real command."""
        module, _, attribute = self._target.partition(":")
        found = getattr(importlib.import_module(f"tasks.commands.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found


db = Noun("db", "db:db", "Control database: upgrade, status, bump-fence.")
audit = Noun("audit", "audit:audit", "Who did what, when: list.")
datasource = Noun("datasource", "datasource:datasource", "Where jobs read and write: add, test...")
job = Noun("job", "job:job", "What can be run: add, edit, show, disable...")
run = Noun("run", "run:run", "Runs: trigger, list, show, watch, logs, cancel, retry.")
schedule = Noun("schedule", "schedule:schedule", "When jobs fire: add, list, next...")
keyring = Noun("keyring", "keyring:keyring", "Keys that seal secrets: init, status, reencrypt...")
apply = Noun("apply", "apply:apply", "Bring jobs and datasources to what FILE says.")
export = Noun("export", "apply:export", "Write jobs and datasources as a file.")
doctor = Noun("doctor", "doctor:doctor", "Check what runs need, and how to mend it.")
demo = Noun("demo", "demo:demo", "Replicate real flights and show it.")
prune = Noun("prune", "prune:prune", "Remove finished runs past retention.")
