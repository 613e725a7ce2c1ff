"""Description of a model: what must be the same for a checkpoint of it to fit.

Shapes alone do not tell: attention with other heads of the same total size trains another model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str, type(None))

NOT_OF_THE_MODEL = frozenset(
    "architectures transformers_version dtype torch_dtype use_cache return_dict output_attentions "
    "output_hidden_states id2label label2id name_or_path gradient_checkpointing training".split()
)
"""Fields of a config, and attributes of modules, that leave what is computed as it is."""

FILLED_IN = frozenset({"problem_type", "num_buckets"})
"""Fields of a config that transformers' forward sets where they are None."""

OF_THE_TRAINING = "drop"
"""Part of the names of rates (dropout, layerdrop) that may change when a training goes on."""


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Describe a model as JSON: its class and configs, or the plain attributes of its modules.

    Args:
        model: with or without weights.
    """
    described: dict[str, Any] = {"class": type(model).__name__}
    config = _dict_of(getattr(model, "config", None))
    if config is not None:
        described["config"] = _plain(config)
    else:
        described["modules"] = {
            name: {"class": type(module).__name__} | _attributes(module)
            for name, module in model.named_modules()
        }
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping):
        described["adapters"] = {str(n): _plain(one.to_dict()) for n, one in adapters.items()}
    return described


def _dict_of(config: Any) -> Any:
    """A config as transformers' gives itself; None for a config of any other class."""
    try:
        return config.to_dict()
    except Exception:  # whatever the config is, its attributes may be code
        return None


def first_difference(
    saved: Mapping[str, Any], now: Mapping[str, Any], where: str = "the checkpoint"
) -> str | None:
    """Find the first difference between the descriptions of two models.

    Args:
        saved: of the checkpoint.
        now: of the model at hand.
        where: what the first one is called.

    Returns:
        A clause such as "n_head is 4 in the checkpoint and 8 in the model", or None.
    """
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    for place in [*after, *(place for place in before if place not in after)]:
        is_set = before.get(place) is not None and after.get(place) is not None
        if place in FILLED_IN and not is_set:
            continue
        if before.get(place) != after.get(place):
            return (
                f"{place} is {_shown(before, place)} in {where} and "
                f"{_shown(after, place)} in the model"
            )
    return None


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what counts, each with its place."""
    if not isinstance(value, Mapping):
        yield place, value
        return
    for name, inner in value.items():
        is_rate = OF_THE_TRAINING in name and isinstance(inner, int | float)
        is_token = name.endswith("token_id")  # which trainers align with the tokenizer's
        if name.startswith("_") or name in NOT_OF_THE_MODEL or is_rate or is_token:
            continue
        # "config.n_head" is n_head to everyone; the name of a module says where it is.
        above = "" if place in ("config", "modules") else place
        yield from _leaves(inner, f"{above}.{name}" if above else name)


def _attributes(module: nn.Module) -> dict[str, Any]:
    if "Dropout" in type(module).__name__:  # whose only number is a rate
        return {}
    return {
        name: _plain(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, (*PLAIN, list, tuple))
    }


def _plain(value: Any) -> Any:
    """The value as JSON has it; a type's name for what it has not."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, PLAIN):
        return value
    return f"<{type(value).__name__}>"


def _shown(leaves: Mapping[str, Any], place: str) -> str:
    return repr(leaves[place]) if place in leaves else "absent"
