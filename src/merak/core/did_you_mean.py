"""Suggestions for unknown names: the end of the sentence that refuses one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" where a similar name is known, else "."."""
    lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(lower[match] for match in matches)}?" if matches else "."
