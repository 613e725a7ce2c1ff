"""Changes of a config's fields, those of nested configs included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

Fields = dict[str, Any]

_POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")
"""Fields with the number of positions, a decoder's own where it reads what an encoder heard."""

BY_LAYER = "per_layer_config"
"""The field with what layers have of their own, by their numbers."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a field's value is an integer, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def are_counts(value: Any) -> TypeGuard[Sequence[int]]:
    """Whether a field's value is a list of integers that is not empty."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_count, value))


def merged(changes: Mapping[str, Any], given: Mapping[str, Any]) -> Fields:
    """Merge changes of a config from two sources, nested configs included; the second one wins.

    What layers have of their own is one value, as lists with one value for each layer are.
    """
    fields = dict(changes)
    for name, value in given.items():
        old = fields.get(name)
        both = name != BY_LAYER and isinstance(value, Mapping) and isinstance(old, Mapping)
        fields[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return fields


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a model's text; the whole config where several have none as main one."""
    try:
        found: PreTrainedConfig = config.get_text_config()
    except ValueError:
        return config
    return found


def most_positions(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Return how many tokens a model's text has positions for, with the config's name of that.

    None where the config sets no limit.
    """
    text = text_part(config)
    for name in _POSITIONS:
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return name, limit
    return None


def inner_configs(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the nested configs of a config, each with the name of its field."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig) and not name.startswith("_"):
            yield name, value


def inside(inner: PreTrainedConfig, fields: Fields) -> Fields:
    """Make the changes of a nested config of the same class as before."""
    return {"model_type": inner.model_type, **fields} if fields else {}


def flat(fields: Mapping[str, Any], within: str = "") -> Fields:
    """Flatten changes to names such as `text_config.use_cache`, without the classes of configs."""
    found: Fields = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and "model_type" in value:
            found |= flat(value, f"{within}{name}.")
        elif name != "model_type":
            found[f"{within}{name}"] = value
    return found
