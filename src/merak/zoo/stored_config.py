"""Stored configs, read and prepared for changes of single fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from merak.core.errors import CommandError
from merak.core.files.json_file import UnreadableFile, read_json
from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import BY_LAYER, are_counts, inner_configs, is_count

FLOAT = "__float__"


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CommandError: the file is missing, or holds something else.
    """
    try:
        parsed = read_json(file, finite=False, convert=_with_floats)
    except UnreadableFile as cause:
        raise CommandError(f"{file} {cause}; give a config that save_pretrained wrote.") from cause
    if not isinstance(parsed, dict):
        raise CommandError(f"{file} holds a {type(parsed).__name__}, not a JSON object.")
    return parsed


def in_todays_names(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the stored fields that a config's class converts to others when it reads them.

    A change of the others would be lost beside them. What the class concludes from fields that it
    keeps is left to it, so that it follows a change of those.

    Args:
        config: what the class made of the fields.
        stored: the fields.
    """
    today = config.to_dict()
    current = {name: value for name, value in stored.items() if name in today}
    for name, inner in inner_configs(config):
        if isinstance(current.get(name), Mapping):
            current[name] = in_todays_names(inner, current[name])
    try:
        concluded = type(config)(**copy.deepcopy(current)).to_dict()
    except Exception:  # no config without the old names
        return today
    return current | {n: v for n, v in today.items() if n not in concluded or concluded[n] != v}


def with_fewer_layers(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten the fields of a config of which a change leaves the first layers.

    What the fields say of each layer is cut to those that stay, unless it is changed as well.

    Args:
        fields: the config's, with those of configs inside it.
        changes: by the same names.
    """
    found = dict(fields)
    for name, new in changes.items():
        old = fields.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and name != BY_LAYER:
            found[name] = with_fewer_layers(old, new)
        elif names.LAYERS.match(name) and is_count(old) and is_count(new) and new < old:
            cut = {n: _of_first(n, value, old, new) for n, value in found.items()}
            found |= {n: value for n, value in cut.items() if n not in changes}
    return found


def _of_first(name: str, value: Any, old: int, new: int) -> Any:
    """Shorten a field to the first layers of a model."""
    if name == BY_LAYER and isinstance(value, Mapping):
        return {number: own for number, own in value.items() if int(number) < new}
    if names.LAYER_NUMBERS.search(name) and are_counts(value):
        return [number for number in value if number < new]
    return value[:new] if isinstance(value, (list, tuple)) and len(value) == old else value


def _with_floats(read: dict[str, Any]) -> Any:
    """Convert an object of a config to the float that it stands for: JSON has no infinity."""
    return float(read[FLOAT]) if read.keys() == {FLOAT} else read
