"""Fixtures of the tests of runs."""

from run_support import heard, recorder, rows

__all__ = ["heard", "recorder", "rows"]
