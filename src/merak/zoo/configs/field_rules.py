"""Rules for the fields of a config in a small version, by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import are_counts, is_count
from merak.zoo.configs.layers import first_stages, interleaved, of_each_kind


class Group(Enum):
    """Group of rules; a version may leave one out."""

    LAYERS = "fewer layers"
    VOCABULARY = "a smaller vocabulary"
    LENGTHS = "shorter sequences and smaller images"
    EXPERTS = "fewer experts"
    WIDTHS = "narrower layers of fewer heads"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the fields of one config, its nested ones aside, are scaled to.

    Args:
        groups: the rules that apply.
        layers: how many layers.
        old_layers: how many there were; 0 if the config does not say.
        heads: (new, old) number of heads.
        head_divisor: what sizes of heads are divided by.
        width_divisor: what widths are divided by.
        each: how many layers of each kind there are at least, where there is room.
        shares: whether the later half of the layers use what layers of their kind before them made.
        by_stages: whether the widths of stages, and what multiplies widths, are divided too.
        heads_divisor: heads are a multiple of this where they were one.
    """

    groups: frozenset[Group]
    layers: int
    old_layers: int
    heads: tuple[int, int]
    head_divisor: int
    width_divisor: Fraction
    each: int
    shares: bool
    by_stages: bool
    heads_divisor: int


def small(name: str, value: Any, sizes: Sizes) -> Any:
    """Apply all rules to a field.

    Args:
        name: the field's.
        value: what it is.
        sizes: what the config's fields are scaled to.
    """
    for group, rule in _RULES.items():
        if group in sizes.groups:
            value = rule(name, value, sizes)
    return value


def fewer_layers(name: str, value: Any, sizes: Sizes) -> Any:
    """Shorten a field that counts layers, or has one value for each, as `small` does."""
    if isinstance(value, (list, tuple)):
        if name in names.DEPTHS and all(map(is_count, value)):
            return first_stages(value)
        if names.LAYER_NUMBERS.search(name) and all(map(is_count, value)):
            # The last layer of a small version is of the rarest kind.
            return [i for i in value if i < sizes.layers] or [sizes.layers - 1][: len(value)]
        if sizes.old_layers > sizes.layers and len(value) == sizes.old_layers:
            if sizes.shares:
                return interleaved(value, sizes.layers)
            return of_each_kind(value, sizes.layers, sizes.each)
        return value
    if name in names.DEPTH_FACTORS and isinstance(value, float):
        return min(value, 1.0)
    if not is_count(value):
        return value
    if names.LAYERS.match(name):
        return min(value, sizes.layers)
    if name in names.DENSE_LAYERS:
        return min(value, 1)
    return min(value, sizes.layers // 2) if name in names.PART_OF_LAYERS else value


def _smaller_vocabulary(name: str, value: Any, sizes: Sizes) -> Any:
    if not is_count(value) or not names.VOCABULARIES.search(name):
        return value
    return min(value, names.VOCABULARY)


def _fewer_experts(name: str, value: Any, sizes: Sizes) -> Any:
    if not is_count(value):
        return value
    if names.EXPERT_COUNTS.search(name):
        return min(value, names.EXPERTS)
    if names.CHOSEN.search(name):
        return min(value, names.CHOSEN_EXPERTS)
    return min(value, names.EXPERT_GROUPS.get(name, value))


def _shorter(name: str, value: Any, sizes: Sizes) -> Any:
    if name in names.IMAGES:
        if isinstance(value, (list, tuple)):
            return [min(side, names.IMAGE) for side in value]
        return min(value, names.IMAGE) if is_count(value) else value
    if name == "axial_pos_shape":  # a grid of positions, which training fills
        return names.AXIAL
    if names.WINDOWS.search(name) and are_counts(value):
        return [min(window, names.WINDOW) for window in value]
    if not is_count(value) or value <= 0:
        return value
    if names.POSITION_COUNTS.search(name):
        return min(value, names.POSITIONS)
    if names.WINDOWS.search(name):
        return min(value, names.WINDOW)
    if names.IMAGE_TOKENS.search(name):
        return min(value, names.NUM_IMAGE_TOKENS)
    return min(value, names.CONTEXT) if name in names.CONTEXTS else value


def _narrower(name: str, value: Any, sizes: Sizes) -> Any:
    if isinstance(value, dict):
        return {n: _fewer_rotated(n, part, sizes) for n, part in value.items()}
    if sizes.by_stages and name in names.WIDTH_FACTORS and isinstance(value, float):
        return min(value, names.WIDTH_FACTOR)
    if sizes.by_stages and name in names.STAGE_WIDTHS:
        return _narrower_stages(value, sizes)
    if name in names.WIDTH_LISTS:
        return _narrower_stages(value, sizes)
    if _is_width_by_layer(name, value, sizes):
        return [_divided(part, sizes.width_divisor) for part in value]
    if names.HEADS_BY_LAYER.search(name) and isinstance(value, (list, tuple)):
        return [_narrower(name.removesuffix("_per_layer"), part, sizes) for part in value]
    if names.HEADS.search(name) and are_counts(value):
        return _fewer_by_stage(value, sizes.heads_divisor)
    if not is_count(value) or value <= 0:
        return value
    new, old = sizes.heads
    if names.KV_HEADS.search(name):
        return new if value == old else min(value, max(1, new // 2))
    if names.HEAD_SIZES.search(name):
        return value // sizes.head_divisor
    if names.HEADS.search(name):
        return max(1, value * new // old)
    if names.WIDTH.search(name):
        return _divided(value, sizes.width_divisor)
    if sizes.by_stages and names.GROUPS.search(name):
        return max(1, int(value / sizes.width_divisor))
    if name in names.STATE_GROUPS:
        return min(value, max(1, new // 2))
    if name in names.FILTERS:
        return min(value, names.NUM_FILTERS)
    return min(value, names.STATE) if name in names.STATES else value


def _fewer_rotated(name: str, value: Any, sizes: Sizes) -> Any:
    """Shrink the pairs of values that rotary positions rotate in a head."""
    if isinstance(value, dict):  # by kind of layer
        return {n: _fewer_rotated(n, part, sizes) for n, part in value.items()}
    if name == names.ROTARY_SECTIONS and are_counts(value):
        ends = [end // sizes.head_divisor for end in accumulate(value, initial=0)]
        return [end - start for start, end in pairwise(ends)]
    if name in names.ROTARY_FACTORS and isinstance(value, (list, tuple)):
        return list(value[:: sizes.head_divisor])
    return value


def _fewer_by_stage(heads: Sequence[int], divisor: int) -> Sequence[int]:
    """Shrink the heads of each stage in proportion, multiples of the divisor where they were."""
    common = math.gcd(*heads)
    while (needed := math.gcd(common, divisor)) > 1:
        common //= needed
    return heads if common == 1 else [number // common for number in heads]


def _narrower_stages(value: Any, sizes: Sizes) -> Any:
    if is_count(value):
        return _divided(value, sizes.width_divisor)
    if not are_counts(value):
        return value
    # The first may be the channels of an image.
    divided = [_divided(v, sizes.width_divisor) if v >= 8 else v for v in value]
    return value if divided == list(value) else divided


def _is_width_by_layer(name: str, value: Any, sizes: Sizes) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) not in (sizes.layers, sizes.old_layers):
        return False
    return all(map(is_count, value)) and names.WIDTH.search(name) is not None and name[-1] != "s"


def _divided(width: int, divisor: Fraction) -> int:
    """Divide a width to a multiple of 8: some kernels take no others."""
    return 8 * math.ceil(width / divisor / 8)


_RULES: Mapping[Group, Callable[[str, Any, Sizes], Any]] = MappingProxyType(
    {
        Group.LAYERS: fewer_layers,
        Group.VOCABULARY: _smaller_vocabulary,
        Group.LENGTHS: _shorter,
        Group.EXPERTS: _fewer_experts,
        Group.WIDTHS: _narrower,
    }
)
