"""As much of Docker's Python client as pytest-celery uses, with local processes for containers.

With it the plugin's own broker and worker components run where no Docker is. A "container" keeps
its port and its log over a restart, as a real one does.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.errors import NotFound

from support import processes
from support.processes import Running


class LocalDocker:
    """Stands for ``docker.DockerClient``."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cc-docker-"))
        self.containers = Containers(self.folder)
        self.images = Images()
        self.networks = Named()
        self.volumes = Named()

    def close(self) -> None:
        for container in self.containers.list(all=True):
            container.remove(force=True)
        shutil.rmtree(self.folder)


class Thing:
    """A network, a volume or an image: a name, and nothing behind it."""

    def __init__(self, name: str) -> None:
        self.id = self.name = name
        self.attrs: dict[str, Any] = {"Labels": {}}

    def remove(self, *_: Any, **__: Any) -> None:
        return None


class Named:
    def create(self, name: str, **_: Any) -> Thing:
        return Thing(name)


class Images:
    def build(self, **given: Any) -> tuple[Thing, list[Any]]:
        return Thing(str(given.get("tag", "image"))), []


class Containers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: dict[str, Container] = {}

    def create(self, image: str, **given: Any) -> Container:
        container = Container(self._folder, **given)
        self._all[container.id] = container
        return container

    def run(self, image: str, **given: Any) -> Container:
        container = self.create(image, **given)
        container.start()
        return container

    def get(self, name: str) -> Container:
        for container in self._all.values():
            if name in (container.id, container.name):
                return container
        raise NotFound(name)

    def list(self, all: bool = False, **_: Any) -> Sequence[Container]:
        return [one for one in self._all.values() if all or one.status == "running"]


class Container:
    """One process, with the attributes by which pytest-docker-tools reads a container."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] | str = (),
        environment: Mapping[str, Any] | None = None,
        ports: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name or f"local-{self.id[:12]}"
        self.labels = dict(labels or {})
        self._folder = folder / self.id
        self._folder.mkdir()
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        self._environment = {key: str(value) for key, value in (environment or {}).items()}
        # The port inside -> the one of this machine, the same for the container's whole life.
        self._ports = {inside: processes.free_port() for inside in ports or {}}
        self._running: Running | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        [port] = list(self._ports.values()) or [None]
        return {
            "Config": {
                "Hostname": self.id[:12] if port is None else f"127.0.0.1:{port}",
                "Env": [f"{key}={value}" for key, value in self._environment.items()],
                "Labels": self.labels,
            },
            "NetworkSettings": {
                "Networks": {"local": {"IPAddress": "127.0.0.1"}},
                "Ports": {
                    inside: [{"HostIp": "127.0.0.1", "HostPort": str(outside)}]
                    for inside, outside in self._ports.items()
                },
            },
            "HostConfig": {"PortBindings": dict.fromkeys(self._ports)},
            "Mounts": [],
        }

    @property
    def status(self) -> str:
        if self._running is None:
            return "created"
        return "running" if self._running.process.poll() is None else "exited"

    def start(self) -> None:
        command = list(self._command)
        if command[0] == "redis-server":
            [port] = self._ports.values()
            command += ["--port", str(port), "--dir", str(self._folder)]
            command[0] = processes.redis_program()
        elif command[0] == "celery":
            command[:1] = [sys.executable, "-m", "celery"]
        command = [re.sub("%h$", self.id[:12], word) for word in command]
        self._running = processes.start(command, self._folder / "log", **self._environment)

    def kill(self, signal: str | int | None = None) -> None:
        assert self._running is not None
        os.kill(self._running.pid, number(signal or "SIGKILL"))

    def stop(self, timeout: float = 10) -> None:
        if self._running is not None and self.status == "running":
            self._running.process.terminate()
            try:
                self._running.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._running.process.kill()
                self._running.process.wait(10)

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        # What a restarted container prints comes after what it printed before; only the new part
        # may say that it is ready.
        log = self._folder / "log"
        log.rename(self._folder / f"log-{uuid.uuid4().hex}")
        self.start()

    def remove(self, force: bool = False, **_: Any) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        return {
            "StatusCode": 0 if self._running is None else self._running.await_end(timeout or 30)
        }

    def reload(self) -> None:
        return None

    def logs(self, **_: Any) -> bytes:
        earlier = sorted(self._folder.glob("log-*"), key=lambda path: path.stat().st_mtime)
        return b"".join(path.read_bytes() for path in [*earlier, self._folder / "log"])

    def exec_run(self, command: str, **_: Any) -> tuple[int, bytes]:
        """Answers which ports inside are open; everything else is run as it is."""
        if not command.startswith("cat /proc/net/"):
            done = subprocess.run(
                shlex.split(command), capture_output=True, timeout=30, check=False
            )
            return done.returncode, done.stdout
        lines = [
            f"0: 00000000:{int(inside.split('/')[0]):04X} 00000000:0000 0A"
            for inside, outside in self._ports.items()
            if processes.is_open(outside)
        ]
        return 0, "\n".join(lines).encode()

    def put_archive(self, path: str, data: Any) -> bool:
        return True


def number(name: str | int) -> int:
    return name if isinstance(name, int) else int(getattr(signal, name))
