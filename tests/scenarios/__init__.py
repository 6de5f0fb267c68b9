"""Scenarios: whole fleets of real processes, broken on purpose, and judged by the rows they leave.

Each runs alone, ``python -m tests.scenarios.NAME``, and in a short form within pytest.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
