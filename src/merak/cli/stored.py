"""Configs as they are stored: read, and put into the names that today's transformers has."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from merak.check.fields import inner_configs
from merak.cli.errors import CommandError

FLOAT = "__float__"


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        CommandError: the file is missing, or holds something else.
    """
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"), object_hook=_with_floats)
    except (OSError, ValueError) as cause:
        raise CommandError(f"{file} cannot be read as JSON: {cause}.") from cause
    if not isinstance(parsed, dict):
        raise CommandError(f"{file} holds a {type(parsed).__name__}, not a JSON object.")
    return parsed


def in_todays_names(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Stored fields without those that a config's class turns into others when it reads them.

    A change of the others would be lost beside them. What the class concludes from fields that it
    keeps is left to it, so that it follows a change of those.

    Args:
        config: what the class made of the fields.
        stored: the fields.
    """
    today = config.to_dict()
    kept = {name: value for name, value in stored.items() if name in today}
    for name, inner in inner_configs(config):
        if isinstance(kept.get(name), Mapping):
            kept[name] = in_todays_names(inner, kept[name])
    try:
        concluded = type(config)(**copy.deepcopy(kept)).to_dict()
    except Exception:  # no config without the old names
        return today
    return kept | {n: v for n, v in today.items() if n not in concluded or concluded[n] != v}


def _with_floats(read: dict[str, Any]) -> Any:
    """An object of a config, or the number that transformers writes so: JSON has no infinity."""
    return float(read[FLOAT]) if read.keys() == {FLOAT} else read
