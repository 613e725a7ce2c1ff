"""Words that are nearly right: what a sentence about an unknown name ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: "; did you mean …?" where something similar is known, else "."."""
    lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), lower, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(lower[match] for match in matches)}?" if matches else "."
