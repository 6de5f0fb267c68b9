"""What both servers have in common: start, stop, and the end of an orphan.

A server's processes inherit a locked file. As long as the lock is held something of that server
lives, wherever its processes are; once it is free nothing does, and every file that speaks of a
running server is stale. So a killed supervisor leaves nothing that has to be guessed at.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from db.embedded.place import EmbeddedError, Place, open_lock, take_lock

logger = logging.getLogger("claimcheck.embedded")

_READY_SECONDS = 120.0
_STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


class Server:
    """One server process. Not safe for threads: the supervisor has one."""

    name: str
    stop_signal: signal.Signals
    hard_stop_signal: signal.Signals

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None
        self.log_start = 0

    @property
    def socket_path(self) -> Path:
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def listens(self) -> bool:
        """Whether it runs and its socket takes connections, as a dying process's does not."""
        return self.running and peer_pid(self.socket_path) is not None

    def start(self) -> None:
        """Start and wait until it answers. Raises `EmbeddedError`."""
        handle = open_lock(self.place.data / f"{self.name}.lock")
        try:
            if not take_lock(handle, 0):
                self._end_orphan(handle)
            self._sweep()
            self._prepare()
            self.process = self._launch(handle)
        finally:
            # Only the server's own processes keep the lock.
            os.close(handle)
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop cleanly, or hard after half a minute; returns when it has ended."""
        process, self.process = self.process, None
        if process is None:
            return
        for number, seconds in (
            (self.stop_signal, _STOP_SECONDS),
            (self.hard_stop_signal, 5.0),
            (signal.SIGKILL, 5.0),
        ):
            if process.poll() is not None:
                return
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end after %s", self.name, number.name)
            else:
                return

    def answers(self) -> bool:
        """Whether it answers a client at this moment."""
        raise NotImplementedError

    def connections(self) -> int:
        """How many clients it has, not counting this question."""
        raise NotImplementedError

    def _sweep(self) -> None:
        """Remove what a dead server left. Only under the lock."""
        raise NotImplementedError

    def _prepare(self) -> None:
        pass

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _input(self) -> bytes:
        return b""

    def _orphan_pid(self) -> int | None:
        """The process number of a server whose lock is held, from its own end of a connection."""
        # 0 is a process that this one cannot name, as in another container; it is never signalled.
        return peer_pid(self.socket_path) or None

    def _launch(self, lock: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        stop_signal = int(self.stop_signal)

        def before_exec() -> None:
            # Linux ends the server with its supervisor, cleanly. It has to be asked for after the
            # change of account, which clears it, and the parent may have died before.
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, stop_signal)
                if os.getppid() != parent:
                    os._exit(1)

        try:
            self.log_start = self.log.stat().st_size
            process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                cwd=self.place.data,
                env=server_environment(),
                pass_fds=(lock,),
                start_new_session=True,
                preexec_fn=before_exec,
                **as_account(self.place),
            )
        except OSError as error:
            raise EmbeddedError(
                f"the embedded {self.name} cannot be started: {error.strerror}"
            ) from None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._input())
        return process

    def _await_ready(self) -> None:
        until = time.monotonic() + _READY_SECONDS
        while not self.answers():
            if not self.running:
                raise EmbeddedError(
                    f"the embedded {self.name} ended at its start: {self._last_words()} "
                    f"({self.log})"
                )
            if time.monotonic() > until:
                raise EmbeddedError(
                    f"the embedded {self.name} did not answer within {_READY_SECONDS:.0f} s: "
                    f"{self._last_words()} ({self.log})"
                )
            time.sleep(0.02)

    @property
    def log(self) -> Path:
        return self.place.home / "embedded.log"

    def _last_words(self) -> str:
        """What the log says of a failed start: its last fatal line, else its last line."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read(100_000).decode(errors="replace").splitlines()
        fatal = [line for line in lines if "FATAL" in line or "PANIC" in line]
        return (fatal or lines or ["no reason given"])[-1]

    def _end_orphan(self, lock: int) -> None:
        """Stop a server that outlived its supervisor; returns with the lock taken."""
        logger.warning("a %s of an earlier supervisor still runs; stopping it", self.name)
        for number, seconds in (
            (self.stop_signal, _STOP_SECONDS),
            (self.hard_stop_signal, 10.0),
        ):
            pid = self._orphan_pid()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            # Without a process to signal its last children may be ending by themselves.
            if take_lock(lock, seconds if pid is not None else 5.0):
                return
        raise EmbeddedError(
            f"an earlier embedded {self.name} still holds {self.place.data / f'{self.name}.lock'} "
            "and cannot be reached from here, perhaps because it runs in another container on the "
            "same volume. End it there, or set CLAIMCHECK_HOME to another folder."
        )


def peer_pid(path: Path) -> int | None:
    """The process that listens on a Unix socket; None where nobody does.

    On macOS the kernel is asked in another way, and a 0 means that only the liveness is known.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(str(path))
            if sys.platform == "linux":
                raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                return int(struct.unpack("3i", raw)[0])
            local_peer_pid = 2
            return int(connection.getsockopt(0, local_peer_pid))
    except OSError:
        return None


def as_account(place: Place) -> dict[str, Any]:
    """The arguments of `subprocess` that run a program under the servers' account."""
    if place.account is None:
        return {}
    return {"user": place.account.uid, "group": place.account.gid, "extra_groups": ()}


def server_environment() -> dict[str, str]:
    """Nothing of the caller's: its environment may hold secrets that servers would keep."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
