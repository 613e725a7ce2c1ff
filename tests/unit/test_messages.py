"""The messages that docs/how-to/troubleshooting.md explains are those that Merak gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a file, with "…" for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_given(message: str, known: list[str]) -> bool:
    """Whether one text has the fixed parts of a message, in their order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in known)


def test_every_message_of_the_page_is_given() -> None:
    page = PAGE.read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)
    files = (ROOT / "src").rglob("*.py")
    known = [own for file in files for own in texts(ast.parse(file.read_text(encoding="utf-8")))]
    assert [own for own in messages if not is_given(own, known)] == []
    assert len(messages) > 20


def test_what_counts_as_given() -> None:
    known = list(texts(ast.parse("f'the rank {rank} waits for {other}'")))
    assert is_given("the rank … waits", known)
    assert not is_given("waits … the rank", known) and not is_given("the ranks", known)
