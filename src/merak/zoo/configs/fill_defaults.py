"""Fields that a config leaves open and its model needs all the same.

A default config may be no model's: a field is None that the model computes with, or a switch is off
that its class asks for. Such fields are filled by what their names say, from the fields beside them
or from other parts of the config. That is done only where the config as it is does not train.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import Fields, inner_configs, inside, is_count, merged

BASE_KIND = "full_attention"
"""The kind of layer that a model with several kinds knows in any case."""

ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
"""Rotary positions as the paper that introduced them has them, arXiv:2104.09864."""

BUDGET = 32
RATIO = 4
STAGES = 4
"""From so many layers feature pyramids are made, arXiv:1612.03144."""

CHANNELS = (16, 16)
"""Of two convolutions after each other, where a config says nothing of them."""

PREDICTED = 8
"""Moments that a forecast has."""

CLIP = 8
"""Far from what small weights make of normal numbers."""

_SHARED_EXPERTS = re.compile(r"^(n|num)_shared_experts$")
_BUDGET = re.compile(r"_budget$")
_CHANNELS = re.compile(r"(_out_channels|_hidden_sizes)$")
_CLIP = re.compile(r"^clip_")
_PREDICTED = re.compile(r"^prediction_length$")
_RATIO = re.compile(r"_compress_ratio$")
_MAIN_KV_HEADS = ("num_key_value_heads", "num_kv_heads")

Fill = Callable[[PreTrainedConfig], Fields]


def completions(config: PreTrainedConfig) -> Iterator[Fields]:
    """Yield fields to set in a config that does not train, none first, then few before many.

    Args:
        config: the config as it is.
    """
    found: list[Fields] = []
    for fills in ((), (_without_cache,), (_filled,), (_filled, _without_cache), _ALL):
        fields: Fields = {}
        for fill in fills:
            fields = merged(fields, _everywhere(config, fill))
        if fields not in found:
            found.append(fields)
            yield fields


def missing_field(error: BaseException | None, config: PreTrainedConfig) -> Fields:
    """Find a field that the model reads in one nested config and that only others have.

    Args:
        error: raised by the model; its causes are searched too.
        config: the config that it was built from.

    Returns:
        The field; nothing if the error speaks of no such thing.
    """
    while error is not None:
        if isinstance(error, AttributeError) and isinstance(error.obj, PreTrainedConfig):
            name = str(error.name)
            known = list(_values(config, name))
            return _placed(config, error.obj, {name: known[0]}) if known else {}
        error = error.__cause__
    return {}


def _placed(config: PreTrainedConfig, owner: PreTrainedConfig, fields: Fields) -> Fields:
    """Make changes for one of the nested configs, found by its class: models copy configs."""
    if type(config) is type(owner):
        return fields
    for name, inner in inner_configs(config):
        if found := _placed(inner, owner, fields):
            return {name: inside(inner, found)}
    return {}


def _values(config: PreTrainedConfig, name: str) -> Iterator[Any]:
    """Yield the values of a field in all nested configs, objects that are its fields included."""
    for owner in (vars(config), *(v for v in vars(config).values() if isinstance(v, dict))):
        if owner.get(name) is not None:
            yield owner[name]
    for _, inner in inner_configs(config):
        yield from _values(inner, name)


def _everywhere(config: PreTrainedConfig, fill: Fill) -> Fields:
    fields = fill(config)
    for name, inner in inner_configs(config):
        if found := _everywhere(inner, fill):
            fields[name] = inside(inner, found)
    return fields


def _without_cache(config: PreTrainedConfig) -> Fields:
    """Switch off the cache of keys and values, which training does not use."""
    return {"use_cache": False} if vars(config).get("use_cache") else {}


def _as_decoder(config: PreTrainedConfig) -> Fields:
    """Switch on causal attention, which some classes that predict the next word require."""
    return {"is_decoder": True} if vars(config).get("is_decoder") is False else {}


def _filled(config: PreTrainedConfig) -> Fields:
    """Fill in values for fields that are None."""
    fields = vars(config)
    found = {n: _value(n, config) for n, v in fields.items() if v is None and n[0] != "_"}
    filled = {n: v for n, v in found.items() if v is not None}
    kinds = filled.get("layer_types") or fields.get("layer_types")
    if kinds and not fields.get("rope_parameters", kinds):
        filled["rope_parameters"] = {kind: dict(ROPE) for kind in dict.fromkeys(kinds)}
    return filled | _staged(config)


def _staged(config: PreTrainedConfig) -> Fields:
    """Spread layers evenly, for models that combine the outputs of several."""
    layers = next((v for n, v in vars(config).items() if names.LAYERS.match(n) and is_count(v)), 0)
    is_open = "_out_indices" in vars(config) and len(config.out_indices) == 1
    if not is_open or layers < STAGES:
        return {}
    return {"out_indices": [layers * number // STAGES for number in range(1, STAGES + 1)]}


def _value(name: str, config: PreTrainedConfig) -> Any:
    """Guess a field's value from its name; None where it does not say."""
    numbers = {n: v for n, v in vars(config).items() if is_count(v)}
    heads = next((numbers[n] for n in names.MAIN_HEADS if n in numbers), None)
    if name.startswith("default_"):
        choices = vars(config).get(f"{name.removeprefix('default_')}s")
        return choices[0] if choices else None
    if names.KV_HEADS.search(name):
        return heads if name in _MAIN_KV_HEADS else 1
    if names.HEADS.search(name):
        return heads
    if names.HEAD_SIZES.search(name):
        width = next((numbers[n] for n in names.MAIN_WIDTHS if n in numbers), None)
        return numbers.get("head_dim") or (width // heads if width and heads else None)
    if names.KINDS.search(name):
        layers = next((v for n, v in numbers.items() if names.LAYERS.match(n)), 0)
        return [BASE_KIND] * layers or None
    if _CHANNELS.search(name):
        return list(CHANNELS)
    return next((value for rule, value in _SIZES if rule.search(name)), None)


_ALL: tuple[Fill, ...] = (_filled, _without_cache, _as_decoder)

_SIZES: tuple[tuple[re.Pattern[str], int], ...] = (
    (names.EXPERT_COUNTS, names.EXPERTS),
    (names.CHOSEN, names.CHOSEN_EXPERTS),
    (_SHARED_EXPERTS, 1),
    (names.VOCABULARIES, names.VOCABULARY),
    (_BUDGET, BUDGET),
    (_RATIO, RATIO),
    (_CLIP, CLIP),
    (_PREDICTED, PREDICTED),
)
"""Numbers that do not depend on others, by the name of the field."""
