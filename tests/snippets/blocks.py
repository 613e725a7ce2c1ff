"""Fenced blocks of README and docs, with the comment above each that says how it is checked.

A block needs no comment if it runs as it stands. Otherwise the line above its fence is one of

    <!-- ci: ranks=2 with=model,train -->    names of `tests/snippets/names.py`, and ranks
    <!-- ci: KIND -->                        a file or an output: see `KINDS`
    <!-- not run: REASON -->                 parsed, but not run

and, where both hold, the first two in one comment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"( *)(`{3,})(\w*).*")
COMMENT = re.compile(r"\s*<!-- (ci|not run): (.+) -->\s*")

COMMANDS = frozenset({"console", "bash"})
KINDS = frozenset({"output", "recipe", "cluster", "times", "schedule", "fragment"})
"""What a block may be, if it is neither commands nor a program.

output: of the command before it, to the letter; recipe, cluster, times, schedule: a file that
Merak reads; fragment: lines of a class of the reader's own, which only have to compile.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: path from the root of the repository.
        line: of its fence.
        language: behind the fence; "" if there is none.
        text: what stands between the fences.
        kind: one of `KINDS`; None for commands and programs.
        ranks: how many ranks run a program, None if the comment does not say.
        names: what a program finds there without having made it.
        reason: why it is not run; None if it is.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str | None = None
    ranks: int | None = None
    names: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


class CommentError(ValueError):
    """A comment above a block says what nobody understands."""


@cache
def blocks() -> tuple[Block, ...]:
    """The blocks of all pages, in their order."""
    return tuple(
        block
        for page in PAGES
        for block in blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    )


def blocks_of(text: str, page: str) -> list[Block]:
    """The fenced blocks of one page."""
    found: list[Block] = []
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        fence = FENCE.fullmatch(lines[start])
        if fence is None:
            start += 1
            continue
        indent, marks, language = fence.groups()
        end = next(n for n in range(start + 1, len(lines)) if lines[n].strip() == marks)
        inside = "\n".join(line.removeprefix(indent) for line in lines[start + 1 : end])
        comment = COMMENT.fullmatch(lines[start - 1]) if start else None
        said = _said(comment, f"{page}:{start + 1}")
        found.append(Block(page, start + 1, language, inside, **said))
        start = end + 1
    return found


def _said(comment: re.Match[str] | None, place: str) -> dict[str, object]:
    """The fields of a block that its comment gives."""
    if comment is None:
        return {}
    if comment[1] == "not run":
        return {"reason": comment[2]}
    said: dict[str, object] = {}
    for word in comment[2].split():
        key, _, value = word.partition("=")
        if word in KINDS:
            said["kind"] = word
        elif key == "ranks":
            said["ranks"] = int(value)
        elif key == "with":
            said["names"] = tuple(value.split(","))
        else:
            raise CommentError(f"{place}: the comment above the block has {word!r}.")
    return said
