"""Who executes a run, as the lease of a dead child is found by it (R-L5)."""

from __future__ import annotations

import subprocess
import sys

from support.processes import ROOT

CHILD = """
import os
from tasks import identity

identity.be_parent()
parent = identity.executor()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    before = identity.executor()
    os.environ.clear()
    os.write(writing, f"{before} {identity.executor()} {identity.is_child()}".encode())
    os._exit(0)
os.waitpid(child, 0)
before, after, is_child = os.read(reading, 1000).decode().split()
assert before == after == identity.executor_of_child(child), (before, after)
assert is_child == "True"
assert parent.split(":")[:3] == before.split(":")[:3]
"""


def test_a_handler_that_empties_the_environment_stays_its_parents_child__R_L5() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
