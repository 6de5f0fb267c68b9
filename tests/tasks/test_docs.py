"""What the pages tell a reader to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
