"""What only some tests need: skipped where it is missing, and a failure where CI installs it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip(what: str) -> NoReturn:
    """Skip the test for want of `what`; under CI=true, which has it installed, fail instead."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}: the CI machine must have it, or nobody runs this test")
    pytest.skip(what)
