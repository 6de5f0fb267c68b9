"""The built-in job: replication between databases and files.

It sees the run only through ``dispatch.context``. ``spec`` reads a job's definition, ``registry``
knows the connectors, ``planner`` decides how each column travels, ``modes`` brings it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.context import Outcome, RunContext


def run(context: RunContext) -> Outcome:
    """The handler of replication jobs; see :func:`tasks.replicate.modes.run`."""
    from tasks.replicate import modes

    return modes.run(context)
