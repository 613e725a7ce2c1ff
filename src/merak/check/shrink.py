"""Small versions of a transformers config, in keeping with what binds its fields together.

Fields are told apart by their names and scaled by rules that keep their relations: all sizes of a
head are divided by one number, heads by another, and every width by the product of both, so that
heads × head size stays the width and fused sizes stay sums of their parts. A model's own code has
the last word on what fits: `attempts` lists versions, the most wanted one first and the config as
it is last, and the first that trains is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

from merak.check import names
from merak.check.fields import BY_LAYER, Fields, inside, is_count
from merak.check.layers import (
    fewer_stages,
    first_stages,
    in_turns,
    num_layers,
    of_each_kind,
    own_fields,
    shares,
)
from merak.check.relations import agreeing, by_channel, equally_wide, parts, without_derived


class Group(Enum):
    """Rules that go together; a version may leave a group out."""

    LAYERS = "fewer layers"
    VOCABULARY = "a smaller vocabulary"
    LENGTHS = "shorter sequences and smaller images"
    EXPERTS = "fewer experts"
    WIDTHS = "narrower layers of fewer heads"


class Style(Enum):
    """Ways to make a version that hold where the plain one breaks what binds a config's fields."""

    STAGES = "the stages of a hierarchy narrower as well"
    PLAIN = "every field by its own name"
    AGREEING = "widths named after another config follow that one"
    EQUAL = "configs inside that are equally wide stay so"
    DERIVED = "fields that the config derives from others are left to it"
    TWICE = "two layers of each kind"
    NARROWEST = "the first stage of a hierarchy a few numbers wide"


ALL = tuple(Group)
VERSIONS: tuple[tuple[Style, tuple[Group, ...]], ...] = (
    *((style, ALL) for style in Style),
    *((Style.PLAIN, tuple(g for g in ALL if g is not out)) for out in reversed(ALL[1:])),
    *((style, ALL[1:]) for style in (Style.STAGES, Style.PLAIN)),
    *((Style.PLAIN, ALL[:count]) for count in (3, 2, 1, 0)),
)
"""How each version is made, and its groups of rules, the most wanted version first."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the fields of one config, its nested ones aside, are scaled to.

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
        heads_divisor: as of `Wanted`.
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a small version still has to have.

    Args:
        layers: so many, if the model has them.
        heads_divisor: heads must be a multiple of this if, and only if, the model's own are.
    """

    layers: int = 2
    heads_divisor: int = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """A version of a config.

    Args:
        fields: what to change; nothing for the config as it is.
        groups: the rules that were applied.
        filled: those of the fields that the config leaves open and that are filled by a guess.
    """

    fields: Fields
    groups: tuple[Group, ...]
    filled: Fields = field(default_factory=dict)

    @property
    def has_small_inputs(self) -> bool:
        """Whether any batch is soon gone through, images and sound of the model's included."""
        return {Group.LAYERS, Group.LENGTHS, Group.WIDTHS} <= set(self.groups)

    @property
    def is_small(self) -> bool:
        """Whether its size does not grow with the model's."""
        return {Group.LAYERS, Group.VOCABULARY, Group.WIDTHS} <= set(self.groups)


def attempts(
    config: PreTrainedConfig, given: Mapping[str, Any], wanted: Wanted = Wanted()
) -> Iterator[Attempt]:
    """Ways to make a config small, the most wanted one first, and at last the config as it is.

    Args:
        config: the config as it is.
        given: fields that the user has set, which stay as they are.
        wanted: what the small versions still have to have.
    """
    seen: list[Fields] = []
    for style, groups in VERSIONS:
        fields = _Shrinker(given, frozenset(groups), style, wanted, {}).fields(config)
        if style is Style.AGREEING:
            fields = agreeing(config, fields)
        if style is Style.EQUAL:
            fields = equally_wide(config, fields)
        if style is Style.DERIVED:
            fields = without_derived(config, fields)
        if fields not in seen:
            seen.append(fields)
            yield Attempt(fields, groups)


@dataclass(frozen=True, slots=True)
class _Shrinker:
    """Makes one version.

    Args:
        given: fields that stay.
        groups: the rules that apply.
        style: how they apply.
        wanted: what the version still has to have.
        tokens: special tokens beyond the smaller vocabulary, and what they become; grows.
    """

    given: Mapping[str, Any]
    groups: frozenset[Group]
    style: Style
    wanted: Wanted
    tokens: dict[int, int]

    def fields(self, config: PreTrainedConfig) -> Fields:
        """The changes of a config and, nested, of those inside it."""
        sizes = self.sizes(config)
        changes: Fields = {}
        for name, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                inner = self.given.get(name)
                within = replace(self, given=inner if isinstance(inner, Mapping) else {})
                changes[name] = inside(value, within.fields(value))
            elif not name.startswith("_") and name not in self.given:
                changes[name] = _small(name, self.token(name, value), sizes)
        old = vars(config)
        changes = {n: v for n, v in changes.items() if v != old.get(n) and v != {}}
        return changes | self.bound(config, changes, sizes)

    def bound(self, config: PreTrainedConfig, changes: Fields, sizes: _Sizes) -> Fields:
        """Changes of fields that other fields bind beyond their own names."""
        found: Fields = {}
        if Group.LAYERS in self.groups and sizes.old_layers > sizes.layers:
            found |= fewer_stages(config, self.given, sizes.old_layers, sizes.layers)
        if Group.WIDTHS in sizes.groups:
            found |= by_channel(config, changes) | parts(config, changes, self.part)
        if own := own_fields(config, sizes.old_layers):
            kept = _fewer_layers(BY_LAYER, own, sizes) if Group.LAYERS in self.groups else own
            small = [{n: _small(n, v, sizes) for n, v in fields.items()} for fields in kept]
            found[BY_LAYER] = {str(number): fields for number, fields in enumerate(small) if fields}
        return {n: v for n, v in found.items() if n not in self.given}

    def part(self, width: int, heads: int) -> tuple[int, int]:
        """The width and heads of a part with its own ones, small as the model's main ones are."""
        fewer, per_head = self.heads(heads), width // heads
        return fewer * per_head // _head_divisor([per_head]), fewer

    def token(self, name: str, value: Any) -> Any:
        """A special token's number within the smaller vocabulary; different ones stay different."""
        if Group.VOCABULARY not in self.groups or not names.TOKEN.search(name):
            return value
        if isinstance(value, (list, tuple)):
            return [self.token(name, one) for one in value]
        if not is_count(value) or value < names.VOCABULARY:
            return value
        return self.tokens.setdefault(value, names.VOCABULARY - 1 - len(self.tokens))

    def sizes(self, config: PreTrainedConfig) -> _Sizes:
        """What a config's own fields are scaled to."""
        numbers = {n: v for n, v in vars(config).items() if is_count(v)}
        binding = (names.WIDTH, names.HEADS, names.HEAD_SIZES)
        bound = any(rule.search(n) for n in self.given for rule in binding)
        # The user's widths bind all others.
        groups = self.groups - {Group.WIDTHS} if bound else self.groups
        old_layers = next((v for n, v in numbers.items() if names.LAYERS.match(n)), 0)
        if isinstance(getattr(type(config), "num_hidden_layers", None), property):
            old_layers = config.num_hidden_layers  # as many as a list of their kinds has
        layers = self.layers(config, old_layers)
        by_stages = self.style is Style.STAGES and not numbers.keys() & set(names.MAIN_WIDTHS)
        if by_stages:
            numbers |= _first_width(config)
        heads, per_head, total = self.width(numbers)
        how = (self.each, shares(config), by_stages, self.wanted.heads_divisor)
        return _Sizes(groups, layers, old_layers, heads, per_head, total, *how)

    @property
    def each(self) -> int:
        """How many layers there are of each kind at least."""
        return 2 if self.style is Style.TWICE else 1

    def width(self, numbers: Mapping[str, int]) -> tuple[tuple[int, int], int, Fraction]:
        """New and old heads, and what sizes of heads and widths are divided by."""
        old_heads = next((numbers[n] for n in names.MAIN_HEADS if n in numbers), 1)
        width = next((numbers[n] for n in names.MAIN_WIDTHS if n in numbers), names.SMALLEST_WIDTH)
        if old_heads == 1:
            narrowest = self.style is Style.NARROWEST
            smallest = names.NARROWEST_STAGE if narrowest else names.SMALLEST_WIDTH
            return (1, 1), 1, Fraction(max(1, width // smallest))
        heads = self.heads(old_heads)
        explicit = [v for n, v in numbers.items() if names.HEAD_SIZES.search(n)]
        per_head = _head_divisor(explicit or [width // old_heads])
        return (heads, old_heads), per_head, Fraction(old_heads * per_head, heads)

    def layers(self, config: PreTrainedConfig, old: int) -> int:
        """How many layers: as many as the user says, or so that several kinds have a place."""
        named = [n for n in vars(config) if names.LAYERS.match(n) and n in self.given]
        if named:
            return int(self.given[named[0]])
        return num_layers(config, old, self.wanted.layers, self.each)

    def heads(self, old: int) -> int:
        """How many heads."""
        divisor = self.wanted.heads_divisor
        if old % divisor:
            return next(n for n in range(min(names.NUM_HEADS, old), old + 1) if n % divisor)
        # Twice the degree, so that every rank may have two heads for one key-value head.
        return min(old, divisor * max(2, math.ceil(names.NUM_HEADS / divisor)))


def _first_width(config: PreTrainedConfig) -> dict[str, int]:
    """The width of the first stage of a hierarchy, as if it were the model's main one."""
    main, known = names.MAIN_WIDTHS[0], vars(config)
    for name in names.MAIN_STAGE_WIDTHS:
        widths = known.get(name)
        if _are_counts(widths):
            return {main: widths[0]}
    factors = [v for n, v in known.items() if n in names.WIDTH_FACTORS and isinstance(v, float)]
    return {main: int(names.SMALLEST_WIDTH * max(factors) / names.WIDTH_FACTOR)} if factors else {}


def _are_counts(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_count, value))


def _head_divisor(sizes: Collection[int]) -> int:
    common = math.gcd(*sizes)
    return common // names.HEAD_SIZE if common % names.HEAD_SIZE == 0 and common else 1


def _small(name: str, value: Any, sizes: _Sizes) -> Any:
    for group, rule in _RULES.items():
        if group in sizes.groups:
            value = rule(name, value, sizes)
    return value


def _fewer_layers(name: str, value: Any, sizes: _Sizes) -> Any:
    if isinstance(value, (list, tuple)):
        if name in names.DEPTHS and all(map(is_count, value)):
            return first_stages(value)
        if names.LAYER_NUMBERS.search(name) and all(map(is_count, value)):
            # The last layer of a small version is of the rarest kind.
            return [i for i in value if i < sizes.layers] or [sizes.layers - 1][: len(value)]
        if sizes.old_layers > sizes.layers and len(value) == sizes.old_layers:
            if sizes.shares:
                return in_turns(value, sizes.layers)
            return of_each_kind(value, sizes.layers, sizes.each)
        return value
    if name in names.DEPTH_FACTORS and isinstance(value, float):
        return min(value, 1.0)
    if not is_count(value):
        return value
    if names.LAYERS.match(name):
        return min(value, sizes.layers)
    return min(value, sizes.layers // 2) if name in names.PART_OF_LAYERS else value


def _smaller_vocabulary(name: str, value: Any, sizes: _Sizes) -> Any:
    if not is_count(value) or not names.VOCABULARIES.search(name):
        return value
    return min(value, names.VOCABULARY)


def _fewer_experts(name: str, value: Any, sizes: _Sizes) -> Any:
    if not is_count(value):
        return value
    if names.EXPERT_COUNTS.search(name):
        return min(value, names.EXPERTS)
    if names.CHOSEN.search(name):
        return min(value, names.CHOSEN_EXPERTS)
    return min(value, names.EXPERT_GROUPS.get(name, value))


def _shorter(name: str, value: Any, sizes: _Sizes) -> Any:
    if name in names.IMAGES:
        if isinstance(value, (list, tuple)):
            return [min(side, names.IMAGE) for side in value]
        return min(value, names.IMAGE) if is_count(value) else value
    if name == "axial_pos_shape":  # a grid of positions, which training fills
        return names.AXIAL
    if names.WINDOWS.search(name) and _are_counts(value):
        return [min(window, names.WINDOW) for window in value]
    if not is_count(value) or value <= 0:
        return value
    if names.POSITION_COUNTS.search(name):
        return min(value, names.POSITIONS)
    if names.WINDOWS.search(name):
        return min(value, names.WINDOW)
    return min(value, names.CONTEXT) if name in names.CONTEXTS else value


def _narrower(name: str, value: Any, sizes: _Sizes) -> Any:
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
    if names.HEADS.search(name) and _are_counts(value):
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


def _fewer_rotated(name: str, value: Any, sizes: _Sizes) -> Any:
    """What a config says of the pairs of numbers that rotary positions turn in a head."""
    if isinstance(value, dict):  # by kind of layer
        return {n: _fewer_rotated(n, part, sizes) for n, part in value.items()}
    if name == names.ROTARY_SECTIONS and _are_counts(value):
        ends = [end // sizes.head_divisor for end in accumulate(value, initial=0)]
        return [end - start for start, end in pairwise(ends)]
    if name in names.ROTARY_FACTORS and isinstance(value, (list, tuple)):
        return list(value[:: sizes.head_divisor])
    return value


def _fewer_by_stage(heads: Sequence[int], divisor: int) -> Sequence[int]:
    """Heads of each stage in the same proportions, multiples of the divisor where they were."""
    common = math.gcd(*heads)
    while (needed := math.gcd(common, divisor)) > 1:
        common //= needed
    return heads if common == 1 else [number // common for number in heads]


def _narrower_stages(value: Any, sizes: _Sizes) -> Any:
    if is_count(value):
        return _divided(value, sizes.width_divisor)
    if not _are_counts(value):
        return value
    # The first may be the channels of an image.
    divided = [_divided(v, sizes.width_divisor) if v >= 8 else v for v in value]
    return value if divided == list(value) else divided


def _is_width_by_layer(name: str, value: Any, sizes: _Sizes) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) not in (sizes.layers, sizes.old_layers):
        return False
    return all(map(is_count, value)) and names.WIDTH.search(name) is not None and name[-1] != "s"


def _divided(width: int, divisor: Fraction) -> int:
    """A width, a multiple of 8: some kernels take no others."""
    return 8 * math.ceil(width / divisor / 8)


_RULES: Mapping[Group, Callable[[str, Any, _Sizes], Any]] = MappingProxyType(
    {
        Group.LAYERS: _fewer_layers,
        Group.VOCABULARY: _smaller_vocabulary,
        Group.LENGTHS: _shorter,
        Group.EXPERTS: _fewer_experts,
        Group.WIDTHS: _narrower,
    }
)
