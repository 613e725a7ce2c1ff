"""The page about what is the same as in transformers is made of the table of overrides."""

from __future__ import annotations

from pathlib import Path

from merak.trainer.subclass.page import render

PAGE = Path(__file__).parents[4] / "docs" / "transformers.md"


def test_the_page_is_made_of_the_table() -> None:
    found = PAGE.read_text(encoding="utf-8")
    assert found == render(), "run python -m merak.trainer.subclass.page > docs/transformers.md"
