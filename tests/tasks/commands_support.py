"""The command line in this process: what it prints on each stream, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any
from uuid import UUID

import click
import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner

NOUNS = (
    "db", "audit", "datasource", "job", "run", "schedule", "keyring", "apply", "export", "doctor",
    "prune",
)  # fmt: skip


class Answer:
    """What a command printed, and how it ended. No secret of ``secrets`` may stand in it."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.stdout)

    def done(self) -> Answer:
        assert self.exit_code == 0, (self.exit_code, self.stdout, self.stderr)
        return self

    def failed(self, status: int = 1) -> Answer:
        assert self.exit_code == status, (self.exit_code, self.stdout, self.stderr)
        assert "Traceback" not in self.stdout + self.stderr
        return self


Cli = Callable[..., Answer]


@pytest.fixture
def cli(celery_app: Any) -> Cli:
    """``cli("job", "list", "--json")`` on the test's servers."""
    root = click.Group("celery")
    for entry in entry_points(group="celery.commands"):
        if entry.name in NOUNS:
            root.add_command(entry.load(), entry.name)
    assert set(root.commands) == set(NOUNS)

    def invoke(*words: str, stdin: str | None = None, **environ: str) -> Answer:
        context = CLIContext(app=celery_app, no_color=True, workdir=None)
        found = CliRunner().invoke(root, [str(word) for word in words], input=stdin, env=environ,
                                   obj=context)  # fmt: skip
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return Answer(found.exit_code, found.stdout, found.stderr)

    return invoke


def claim(rows: Callable[..., Any], run_id: str | UUID, executor: str = "host:1:n:2") -> None:
    """Make a waiting run RUNNING, as a claim does."""
    rows(
        "update job_run set status = 'RUNNING', lease_token = gen_random_uuid(), "
        "lease_until = clock_timestamp() + interval '1 minute', heartbeat_at = clock_timestamp(), "
        "executor = %s, fence = nextval('fence_seq'), started_at = clock_timestamp(), "
        "job_snapshot = jsonb_build_object('job', job_name, 'definition', '{}'::jsonb), "
        "datasources_resolved_at = clock_timestamp() where id = %s",
        executor,
        run_id,
    )


def end(rows: Callable[..., Any], run_id: str | UUID, status: str, **columns: Any) -> None:
    """Claim a waiting run where it is not yet, and end it."""
    claim_first = rows("select 1 from job_run where id = %s and status = 'PENDING'", run_id)
    if claim_first:
        claim(rows, run_id)
    if status == "FAILED":
        columns = {"error_code": "handler_error", "error_message": "no", **columns}
    if status == "CANCELLED":
        rows(
            "update job_run set status = 'CANCEL_REQUESTED', "
            "cancel_requested_at = clock_timestamp() where id = %s",
            run_id,
        )
    rows(
        "update job_run set status = %s, finished_at = clock_timestamp(), rows_processed = %s, "
        "error_code = %s, error_message = %s, result = %s::jsonb where id = %s",
        status,
        columns.get("rows_processed"),
        columns.get("error_code"),
        columns.get("error_message"),
        json.dumps(columns.get("result")),
        run_id,
    )
