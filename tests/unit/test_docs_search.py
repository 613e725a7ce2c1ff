"""The search of the docs shows users' pages before those for developers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs import hooks
from tests.snippets.blocks import ROOT


def boost(path: str, **meta: object) -> object:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta=dict(meta))
    assert hooks.on_page_markdown("text", page=page, config=None, files=None) == "text"
    return page.meta.get("search", {}).get("boost", 1)


@pytest.mark.parametrize(
    ("path", "is_behind"),
    [
        ("how-to/first-run.md", False),
        ("arguments.md", False),
        ("reference/merak.md", False),  # the public names
        ("reference/command.md", False),
        ("reference/merak.engine.md", True),
        ("architecture.md", True),
        ("zoo.md", True),
    ],
)
def test_pages_for_developers_come_later(path: str, is_behind: bool) -> None:
    assert boost(path) == (hooks.BEHIND if is_behind else 1)
    assert boost(path, search={"boost": 2}) == 2  # a page's own wish


def test_the_pages_are_there() -> None:
    for path in hooks.FOR_DEVELOPERS:
        assert path == "reference/" or (ROOT / "docs" / path).is_file(), path
