"""Words of a command as a line of a shell script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def line(words: Iterable[str], expressions: Iterable[str] = ()) -> str:
    """Return a command as the shell reads it.

    Args:
        words: of the command.
        expressions: words that the shell expands; all others are quoted.
    """
    expanded = set(expressions)
    return " ".join(f'"{word}"' if word in expanded else shlex.quote(word) for word in words)
