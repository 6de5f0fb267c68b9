"""`make bench`: run the benchmarks one after another, each writing benchmarks/results/NAME.json.

`python -m benchmarks core` runs one; `--quick` runs it on little data, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if "def measure(" in path.read_text() and path.stem != "__main__"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument(
        "--quick", action="store_true", help="little data; the figures mean nothing"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in arguments.names or NAMES:
        importlib.import_module(f"benchmarks.{name}").measure(quick=arguments.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
