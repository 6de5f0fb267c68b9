"""Errors that callers of the Python API meet; each docstring is its message to the operator."""

from __future__ import annotations


class ClaimcheckError(Exception):
    """The base of all errors that Claimcheck raises on purpose."""


class UnknownJob(ClaimcheckError):
    """No job has this name. List them with: celery -A tasks job list"""


class UnknownRun(ClaimcheckError):
    """No run has this id. List them with: celery -A tasks run list"""


class JobDisabled(ClaimcheckError):
    """The job or a binding of it is disabled. Enable it: celery -A tasks job enable NAME

    ``reason`` says what is disabled, ``command`` enables it.
    """

    def __init__(self, reason: str, command: str) -> None:
        super().__init__(reason, command)
        self.reason = reason
        self.command = command

    def __str__(self) -> str:
        return f"{self.reason}. Enable it with: {self.command}"


class TriggerBusy(ClaimcheckError):
    """Another open transaction holds this job or key; nothing was stored. Try again later."""


class UnknownDatasource(ClaimcheckError):
    """No datasource has this name. List them with: celery -A tasks datasource list"""


class UnknownSchedule(ClaimcheckError):
    """No schedule has this name. List them with: celery -A tasks schedule list"""


class NameTaken(ClaimcheckError):
    """Something of this kind has this name already."""


class InUse(ClaimcheckError):
    """It cannot be removed while something needs it."""


class UnreadableKept(ClaimcheckError):
    """Stored credentials cannot be opened with this keyring, and are not replaced unasked."""


class CatalogBusy(ClaimcheckError):
    """Another change of jobs or datasources is under way; nothing was changed. Try again."""


class DatabaseUnavailable(ClaimcheckError):
    """The control database (DATABASE_URL) cannot be reached or does not answer in time."""


class InvalidParameters(ClaimcheckError):
    """The parameters or options cannot be stored with the run."""


class OverlapRefused(ClaimcheckError):
    """The job's overlap policy allows no second active run. Wait for that run or cancel it."""


class NotCancellable(ClaimcheckError):
    """The run has already ended as SUCCEEDED or FAILED; there is nothing to cancel."""


class NotRetryable(ClaimcheckError):
    """Only a FAILED run can be retried by hand."""


class RunFailed(ClaimcheckError):
    """The run ended as FAILED; ``error_code`` is one of the contract's codes.

    It is ``chain_broken`` where there is no run: a step of a chain that could not be created.
    """

    def __init__(self, error_code: str, message: str) -> None:
        super().__init__(error_code, message)
        self.error_code = error_code
        self.message = message

    def __str__(self) -> str:
        return f"{self.error_code}: {self.message}"
