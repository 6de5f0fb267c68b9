"""What the pages tell a reader to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.commands import page as commands_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_IMPORT = re.compile(r"^from tasks import .*$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_a_page_work(page: Path) -> None:
    for line in _IMPORT.findall(page.read_text()):
        exec(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for file, heading in _LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, (target.name, heading)


def test_page_of_commands_is_what_they_say_of_themselves() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert text == commands_page.page(), "python -m tasks.commands.page > docs/commands.md"


def test_every_error_code_is_explained() -> None:
    schema = (ROOT / "alembic" / "versions" / "0001_runs.py").read_text()
    (known,) = re.findall(r"error_code in \(([^)]*)\)", schema)
    text = (ROOT / "docs" / "operations.md").read_text()
    explained = re.findall(r"^\| (`.*?`) \|", text.partition("## Error codes")[2], re.MULTILINE)
    assert set(re.findall(r"'(\w+)'", known)) <= set(re.findall(r"`(\w+)`", " ".join(explained)))


def anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_command_takes_json() -> None:
    silent = [
        " ".join(words)
        for words, command in commands_page.commands()
        if "as_json" not in {parameter.name for parameter in command.params}
    ]
    assert silent == []
