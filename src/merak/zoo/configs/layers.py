"""Layers of a small version: some of every kind that the model has."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import BY_LAYER, is_count

MOST_LAYERS = 8
"""No more for the sake of a kind of layer that comes late."""

_BY_NAME: Mapping[str, str] = MappingProxyType({"out_indices": "out_features"})
"""Fields with numbers of layers, and those that may hold the names of the same ones."""


def num_layers(config: PreTrainedConfig, old: int, least: int, each: int) -> int:
    """Return a number of layers at which each kind occurs.

    Args:
        config: the config.
        old: how many layers it has.
        least: at least so many, if it has them.
        each: so many of each kind.
    """
    lists = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple))}
    by_layer = (v for n, v in lists.items() if len(v) == old and not names.LAYER_NUMBERS.search(n))
    kinds = max((len(set(map(str, v))) for v in (*by_layer, own_fields(config, old))), default=1)
    # Kinds that take rounds: so many layers until each has had one.
    rounds = [len(v) for n, v in lists.items() if names.KINDS.search(n) and len(v) < old]
    # One more than there are kinds, so that a kind has layers on both of two stages.
    several = max(kinds + 1, kinds * (2 if shares(config) else each))
    stages = max((len(indices) for indices in taken_stages(config).values()), default=0)
    layers = min(old, max(least, several, stages, *rounds))
    return _until_all_kinds(config, old, layers)


def own_fields(config: PreTrainedConfig, layers: int) -> list[dict[str, Any]]:
    """Return the fields that each layer has of its own; none in a config of equal layers."""
    by_number = config.to_dict().get(BY_LAYER) or {}
    own = {int(number): fields for number, fields in by_number.items()}
    return [own.get(number, {}) for number in range(layers)] if own else []


def shares(config: PreTrainedConfig) -> bool:
    """Whether later layers use results of earlier ones of their kind."""
    return any(vars(config).get(name) for name in names.PART_OF_LAYERS)


def taken_stages(config: PreTrainedConfig) -> dict[str, list[int]]:
    """Return the fields with the numbers of layers whose outputs a model for images combines."""
    if any(isinstance(vars(config).get(name), (list, tuple)) for name in names.DEPTHS):
        return {}  # stages of several layers each, none of which is left out
    lists = {n: v for n, v in vars(config).items() if n[0] != "_" and names.STAGES.search(n)}
    if "_out_indices" in vars(config):
        lists["out_indices"] = config.out_indices
    return {n: list(v) for n, v in lists.items() if isinstance(v, (list, tuple)) and v}


def fewer_stages(
    config: PreTrainedConfig, given: Collection[str], old: int, new: int
) -> dict[str, Any]:
    """Change a config so that as many layers' outputs are combined as before.

    Args:
        config: the config.
        given: fields that stay as they are.
        old: how many layers it has.
        new: how many of them stay.
    """
    found: dict[str, Any] = {}
    for name, numbers in taken_stages(config).items():
        names_them = _BY_NAME.get(name)
        if not {name, names_them} & set(given):
            found[name] = nearer(numbers, old, new)
        if name in found and names_them and vars(config).get(f"_{names_them}") is not None:
            found[names_them] = None  # the same layers by their old names: the config renames them
    return found


def nearer(numbers: Sequence[int], old: int, new: int) -> list[int]:
    """Scale numbers of layers to a model of fewer layers: as many, in proportion, all different."""
    found: list[int] = []
    for number in sorted(numbers):
        place = number * new // old
        found.append(max(place, found[-1] + 1) if found else place)
    # Layers near the end leave too few numbers behind them.
    return [min(place, new - left) for left, place in enumerate(reversed(found))][::-1]


def _until_all_kinds(config: PreTrainedConfig, old: int, layers: int) -> int:
    """Add layers, where a pattern that the config's class computes has kinds that come later."""
    for field, value in tuple(vars(config).items()):  # some configs record what is read
        if names.LAYERS.match(field) and value == old:
            for name in _computed(config):
                layers = max(layers, _first_with_all(config, field, name, layers))
            return min(old, layers)
    return layers


def _first_with_all(config: PreTrainedConfig, field: str, name: str, layers: int) -> int:
    old = _pattern(config, name)
    if len(old) != getattr(config, field):
        return layers
    short = copy.copy(config)
    for count in range(layers, min(MOST_LAYERS, len(old)) + 1):
        setattr(short, field, count)
        if set(map(str, _pattern(short, name))) == set(map(str, old)):
            return count
    return layers


def _computed(config: PreTrainedConfig) -> Iterator[str]:
    """Return names of the properties of a config's own class."""
    for owner in type(config).__mro__:
        if owner is PreTrainedConfig:
            return
        # Configs put things into their classes while they are read.
        yield from (n for n, v in tuple(vars(owner).items()) if isinstance(v, property))


def _pattern(config: PreTrainedConfig, name: str) -> Sequence[Any]:
    try:
        value = getattr(config, name)
    except Exception:  # a property that this config has no answer for
        return ()
    return value if isinstance(value, (list, tuple)) else ()


def of_each_kind(values: Sequence[Any], length: int, each: int) -> list[Any]:
    """Return the first values of a list by layer, with every kind of layer among them.

    Args:
        values: one for each layer.
        length: how many to take.
        each: how many of each kind, where there is room.
    """
    first = [i for i, v in enumerate(values) if list(values[:i]).count(v) < each][:length]
    rest = [i for i in range(len(values)) if i not in first][: length - len(first)]
    return [values[i] for i in sorted((*first, *rest))]


def interleaved(values: Sequence[Any], length: int) -> list[Any]:
    """Return values in which the kinds alternate: in the first half as in the rest."""
    kinds = [v for i, v in enumerate(values) if v not in values[:i]]
    return [kinds[i % len(kinds)] for i in range(length)]


def first_stages(depths: Sequence[Any]) -> list[Any]:
    """Reduce the layers of every stage of a hierarchical model."""
    return [min(depth, names.STAGE_DEPTH) if is_count(depth) else depth for depth in depths]
