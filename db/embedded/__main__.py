"""`python -m db.embedded status | stop | remove`; `serve` is how `ensure` starts the supervisor."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

from db.embedded.client import Status, status, stop
from db.embedded.place import EmbeddedError, prepare_home
from db.embedded.removal import Removed, remove
from db.embedded.supervisor import Supervisor

_LONGEST_LOG = 5_000_000


def main() -> int:
    """Returns the exit status: 0 done, 1 failed; argparse exits with 2 on wrong usage."""
    arguments = _parser().parse_args()
    home = Path(arguments.home)
    try:
        match arguments.command:
            case "serve":
                return serve(prepare_home(home))
            case "stop":
                print("stopped" if stop(home, force=arguments.force) else "none runs")
            case "remove":
                _tell(home, remove(home))
            case "status":
                _show(status(home), arguments.json)
    except EmbeddedError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m db.embedded", description="The embedded PostgreSQL and Valkey of a folder."
    )
    verbs = parser.add_subparsers(dest="command", required=True)
    helps = {
        "status": "show whether they run, where, and who uses them",
        "stop": "stop them",
        "remove": "stop them and delete their data, the keyring and the state folder",
        "serve": "run them (used by Claimcheck itself)",
    }
    made = {}
    for name, text in helps.items():
        made[name] = verbs.add_parser(name, help=text, description=text)
        made[name].add_argument(
            "--home",
            default=os.environ.get("CLAIMCHECK_HOME") or ".claimcheck",
            help="the state folder (default: CLAIMCHECK_HOME, or .claimcheck here)",
        )
    made["stop"].add_argument("--force", action="store_true", help="also while they are used")
    made["status"].add_argument("--json", action="store_true")
    return parser


def _show(found: Status, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    print(f"{'running' if found.running else 'not running'}: {found.home}")
    if found.running:
        print(f"servers: {', '.join(found.servers) or 'none yet'}")
        print(f"account: {found.account or 'your own'}")
        print(f"used by: {', '.join(map(str, found.used_by)) or 'nobody'}")
        print(f"ends after: {found.idle_seconds:g} s without use")
    if found.data is not None:
        print(f"data: {found.data}")
        print(f"sockets: {found.sockets}")


def _tell(home: Path, removed: Removed) -> None:
    print(f"removed the data {'and the keyring ' if removed.keyring else ''}of {home}")
    for path in removed.kept:
        print(f"kept, as it was not made here: {path}")


def serve(home: Path) -> int:
    """Put the supervisor into the background; returns once it can be asked.

    Its first words come through a pipe: nothing once it is ready, or why it is not.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os._exit(_supervise(home, writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as words:
        said = words.read().decode()
    if said == "ready":
        return 0
    log = home / "embedded.log"
    print(said or f"the embedded servers ended at their start; {log} may say why", file=sys.stderr)
    return 1


def _supervise(home: Path, writer: int) -> int:
    def say(words: str) -> None:
        os.write(writer, words.replace("\n", " ").encode())
        os.close(writer)

    said = False

    def ready() -> None:
        nonlocal said
        said = True
        say("ready")

    try:
        os.setsid()
        os.umask(0o077)
        os.chdir("/")
        _redirect(home / "embedded.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s")
        Supervisor(home).run(ready)
    except EmbeddedError as error:
        logging.error("%s", error)
        if not said:
            say(str(error))
        return 1
    except BaseException:
        logging.exception("the supervisor failed")
        return 1
    return 0


def _redirect(log: Path) -> None:
    if log.exists() and log.stat().st_size > _LONGEST_LOG:
        log.replace(log.with_suffix(".log.1"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    target = os.open(log, flags, 0o600)
    owner = log.parent.stat()
    if os.geteuid() == 0:
        os.fchown(target, owner.st_uid, owner.st_gid)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for handle, number in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(handle, number)
    os.close(target)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
