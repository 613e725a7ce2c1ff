"""Small versions of a transformers config that respect the relations of its fields.

Fields are told apart by their names and scaled by rules that keep their relations: all sizes of a
head are divided by one number, heads by another, and every width by the product of both, so that
heads × head size stays the width and fused sizes stay sums of their parts. A model's own code has
the last word on what fits: `attempts` lists versions, the most wanted one first and the config as
it is last, and the first that trains is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from merak.zoo.configs import field_names as names
from merak.zoo.configs.field_rules import Group, Sizes, fewer_layers, small
from merak.zoo.configs.fields import BY_LAYER, Fields, are_counts, inside, is_count
from merak.zoo.configs.layers import fewer_stages, num_layers, own_fields, shares
from merak.zoo.configs.relations import (
    agreeing,
    by_channel,
    equally_wide,
    parts,
    rotary_sections,
    without_derived,
)


class Style(Enum):
    """Style of a version, for configs whose relations the plain one breaks."""

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

_RELATIONS: Mapping[Style, Callable[[PreTrainedConfig, Fields], Fields]] = MappingProxyType(
    {Style.AGREEING: agreeing, Style.EQUAL: equally_wide, Style.DERIVED: without_derived}
)
"""What is done to all changes of a config at last, where a style asks for it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Requirements of a small version.

    Args:
        layers: so many, if the model has them.
        heads_divisor: heads must be a multiple of this if, and only if, the model's own are.
    """

    layers: int = 2
    heads_divisor: int = 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """Version of a config.

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
        """Whether any batch is fast, with images and sound of the model."""
        return {Group.LAYERS, Group.LENGTHS, Group.WIDTHS} <= set(self.groups)

    @property
    def is_small(self) -> bool:
        """Whether its size does not grow with the model's."""
        return {Group.LAYERS, Group.VOCABULARY, Group.WIDTHS} <= set(self.groups)


def attempts(
    config: PreTrainedConfig, given: Mapping[str, Any], wanted: Wanted = Wanted()
) -> Iterator[Attempt]:
    """Yield small versions of a config, the most wanted one first, and at last the config as it is.

    Args:
        config: the config as it is.
        given: fields that the user has set, which stay as they are.
        wanted: what the small versions still have to have.
    """
    seen: list[Fields] = []
    for style, groups in VERSIONS:
        fields = _Shrinker(given, frozenset(groups), style, wanted, {}).fields(config)
        if style in _RELATIONS:
            fields = _RELATIONS[style](config, fields)
        if fields not in seen:
            seen.append(fields)
            yield Attempt(fields, groups)


def few_layers(
    config: PreTrainedConfig, given: Mapping[str, Any], wanted: Wanted = Wanted()
) -> Iterator[Fields]:
    """Yield changes that leave a config all but its layers, and at last none."""
    groups = frozenset((Group.LAYERS,))
    for style in (Style.PLAIN, Style.TWICE):
        yield _Shrinker(given, groups, style, wanted, {}).fields(config)
    yield {}


@dataclass(frozen=True, slots=True)
class _Shrinker:
    """Maker of one version.

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
        """Return the changes of a config and, nested, of those inside it."""
        sizes = self.sizes(config)
        changes: Fields = {}
        for name, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                inner = self.given.get(name)
                within = replace(self, given=inner if isinstance(inner, Mapping) else {})
                changes[name] = inside(value, within.fields(value))
            elif not name.startswith("_") and name not in self.given:
                changes[name] = small(name, self.token(name, value), sizes)
        old = vars(config)
        changes = {n: v for n, v in changes.items() if v != old.get(n) and v != {}}
        return changes | self.bound(config, changes, sizes)

    def bound(self, config: PreTrainedConfig, changes: Fields, sizes: Sizes) -> Fields:
        """Return changes of fields that other fields bind beyond their own names."""
        found: Fields = {}
        if Group.LAYERS in self.groups and sizes.old_layers > sizes.layers:
            found |= fewer_stages(config, self.given, sizes.old_layers, sizes.layers)
        if Group.WIDTHS in sizes.groups:
            found |= by_channel(config, changes) | parts(config, changes, self.part)
            found |= rotary_sections(config, changes)
        if own := own_fields(config, sizes.old_layers):
            unchanged = fewer_layers(BY_LAYER, own, sizes) if Group.LAYERS in self.groups else own
            new = [{n: small(n, v, sizes) for n, v in fields.items()} for fields in unchanged]
            found[BY_LAYER] = {str(number): fields for number, fields in enumerate(new) if fields}
        return {n: v for n, v in found.items() if n not in self.given}

    def part(self, width: int, heads: int) -> tuple[int, int]:
        """Return the width and heads of a submodule, small as the model's main ones are."""
        fewer, per_head = self.heads(heads), width // heads
        return fewer * per_head // _head_divisor([per_head]), fewer

    def token(self, name: str, value: Any) -> Any:
        """Return a special token within the smaller vocabulary; different ones stay so."""
        if Group.VOCABULARY not in self.groups or not names.TOKEN.search(name):
            return value
        if isinstance(value, (list, tuple)):
            return [self.token(name, one) for one in value]
        if not is_count(value) or value < names.VOCABULARY:
            return value
        return self.tokens.setdefault(value, names.VOCABULARY - 1 - len(self.tokens))

    def sizes(self, config: PreTrainedConfig) -> Sizes:
        """Return the sizes that a config's own fields are scaled to."""
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
        return Sizes(groups, layers, old_layers, heads, per_head, total, *how)

    @property
    def each(self) -> int:
        """Return the least number of layers of each kind."""
        return 2 if self.style is Style.TWICE else 1

    def width(self, numbers: Mapping[str, int]) -> tuple[tuple[int, int], int, Fraction]:
        """Return new and old heads, and the divisors of the sizes of heads and widths."""
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
        """Return the number of layers: the user's, or one at which several kinds occur."""
        named = [n for n in vars(config) if names.LAYERS.match(n) and n in self.given]
        if named:
            return int(self.given[named[0]])
        return num_layers(config, old, self.wanted.layers, self.each)

    def heads(self, old: int) -> int:
        """Return the number of heads."""
        divisor = self.wanted.heads_divisor
        if old % divisor:
            return next(n for n in range(min(names.NUM_HEADS, old), old + 1) if n % divisor)
        # Twice the degree, so that every rank may have two heads for one key-value head.
        return min(old, divisor * max(2, math.ceil(names.NUM_HEADS / divisor)))


def _first_width(config: PreTrainedConfig) -> dict[str, int]:
    """Return the width of the first stage of a hierarchy, as if it were the model's main one."""
    main, known = names.MAIN_WIDTHS[0], vars(config)
    for name in names.MAIN_STAGE_WIDTHS:
        widths = known.get(name)
        if are_counts(widths):
            return {main: widths[0]}
    factors = [v for n, v in known.items() if n in names.WIDTH_FACTORS and isinstance(v, float)]
    return {main: int(names.SMALLEST_WIDTH * max(factors) / names.WIDTH_FACTOR)} if factors else {}


def _head_divisor(sizes: Collection[int]) -> int:
    common = math.gcd(*sizes)
    return common // names.HEAD_SIZE if common % names.HEAD_SIZE == 0 and common else 1
