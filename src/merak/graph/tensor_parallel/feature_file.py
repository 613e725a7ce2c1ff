"""Feature dicts in JSON, or as Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.features import (
    Attribute,
    Column,
    Features,
    Replicate,
    Row,
    Vocabulary,
)

_KINDS: Mapping[str, type[Column | Row | Vocabulary | Replicate]] = {
    "column": Column,
    "row": Row,
    "vocabulary": Vocabulary,
    "replicate": Replicate,
}


def parse_features(written: Mapping[str, Any]) -> Features:
    """Read a feature dict whose attributes may be written in JSON.

    Args:
        written: patterns → `Column(…)`, "column", or {"column": [1, 1, 1]} with relative sizes of
            fused parts; likewise row, and "vocabulary" and "replicate".

    Raises:
        ShardError: an attribute that is none of these.
    """
    return {pattern: _attribute(pattern, value) for pattern, value in written.items()}


def _attribute(pattern: str, value: Any) -> Attribute:
    if isinstance(value, Attribute):
        return value
    if isinstance(value, str) and value in _KINDS:
        return _KINDS[value]()
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, parts),) = value.items()
        if kind in ("column", "row") and _is_parts(parts):
            return (Column if kind == "column" else Row)(parts=tuple(parts))
    raise ShardError(
        f"the feature dict gives {pattern!r} the attribute {value!r}; write 'column', 'row', "
        "'vocabulary', 'replicate', or {'column': [1, 1, 1]} for three fused parts of equal size."
    )


def _is_parts(parts: Any) -> bool:
    return (
        isinstance(parts, list | tuple)
        and len(parts) > 0
        and all(isinstance(part, int) and part > 0 for part in parts)
    )
