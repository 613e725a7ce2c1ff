"""Griffe extension that shows `Source:` lines as paragraphs, with arXiv numbers as links.

Without it, the parser of Google-style docstrings takes such a line for the title of an admonition.
"""

import re
from typing import Any

import griffe

SOURCE = re.compile(r"^Source: (.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")


class Sources(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = SOURCE.sub(paragraph, obj.docstring.value)


def paragraph(match: re.Match[str]) -> str:
    """One line of Markdown for a `Source:` entry of one or more lines."""
    text = " ".join(match[1].split())
    return "*Source:* " + ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
