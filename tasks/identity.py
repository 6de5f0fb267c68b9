"""Who executes a run: ``host:parent-pid:nonce:child``, unique also where process ids return (R-L5).

The nonce is drawn once by the worker's parent process. It travels to the children in the
environment, so that it reaches those that are spawned as well as those that are forked; each
process remembers what it found, whatever a handler then does to the environment.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading

_VARIABLE = "_CLAIMCHECK_WORKER"
_found: tuple[int, str] | None = None


def be_parent() -> None:
    """Make this process the parent of a worker; its children inherit what is drawn here."""
    global _found
    _found = os.getpid(), secrets.token_hex(4)
    os.environ[_VARIABLE] = f"{_found[0]}:{_found[1]}"


def is_child() -> bool:
    """Whether this is a process of a prefork pool."""
    return _parent()[0] == os.getppid()


def executor() -> str:
    """The identity of the caller: its prefork child, or its thread of any other process."""
    pid, nonce = _parent()
    if pid == os.getppid():
        return _named(pid, nonce, str(os.getpid()))
    if pid != os.getpid():
        be_parent()
        pid, nonce = _parent()
    thread = threading.current_thread()
    child = "main" if thread is threading.main_thread() else f"thread-{thread.ident}"
    return _named(pid, nonce, child)


def executor_of_child(pid: int) -> str:
    """The identity of this parent's child with that process id."""
    parent, nonce = _parent()
    return _named(parent, nonce, str(pid))


def _named(parent: int, nonce: str, child: str) -> str:
    return f"{socket.gethostname()}:{parent}:{nonce}:{child}"


def _parent() -> tuple[int, str]:
    global _found
    if _found is None:
        pid, _, nonce = os.environ.get(_VARIABLE, "").partition(":")
        _found = (int(pid), nonce) if pid.isdigit() else None
    return _found or (0, "")
