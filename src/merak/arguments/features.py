"""Feature dicts as JSON values, for arguments that are saved as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merak.graph.tensor_parallel.features import Attribute


def write_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a feature dict to the form of a JSON file.

    Args:
        features: patterns → attributes, as objects or written already.
    """
    return {pattern: _written(value) for pattern, value in features.items()}


def _written(value: Any) -> Any:
    if not isinstance(value, Attribute):
        return value
    kind = type(value).__name__.lower()
    parts = getattr(value, "parts", (1,))
    return kind if parts == (1,) else {kind: list(parts)}
