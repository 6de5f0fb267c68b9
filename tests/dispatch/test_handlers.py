"""The registry of functions that do a run's work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dispatch import handlers


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handlers, "_handlers", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("team_"):
            del sys.modules[name]


def one(run: Any) -> None: ...


def two(run: Any) -> None: ...


def test_a_handler_is_known_by_its_name() -> None:
    handlers.register("b", one)
    handlers.register("a", two)
    assert handlers.known() == ["a", "b"]
    assert handlers.get("b") is one
    assert handlers.get("c") is None


def test_two_functions_cannot_have_one_name() -> None:
    handlers.register("a", one)
    handlers.register("a", one)
    with pytest.raises(handlers.DuplicateHandler, match=r"'a' is taken by .*\.one"):
        handlers.register("a", two)
    assert handlers.get("a") is one


def test_modules_register_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "team_reports.py").write_text(
        "from dispatch import handlers\nhandlers.register('report', lambda run: None)\n"
    )
    handlers.load(["team_reports"])
    assert "report" in handlers.known()


@pytest.mark.parametrize("text", ["raise ValueError('a fault of its own')", "import no_such_thing"])
def test_a_module_that_cannot_be_imported_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "team_broken.py").write_text(text)
    with pytest.raises(handlers.HandlerNotLoaded, match=r"CLAIMCHECK_HANDLERS: .*'team_broken'"):
        handlers.load(["team_broken"])


def test_entry_points_register_functions_and_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("plain", f"{__name__}:one", handlers.ENTRY_POINTS),
        metadata.EntryPoint("module", "json", handlers.ENTRY_POINTS),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    handlers.load([])
    assert handlers.known() == ["plain"]


def test_a_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("bad", "no_such_module:x", handlers.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.raises(handlers.HandlerNotLoaded, match="'bad'"):
        handlers.load([])
