"""Relations between a config's fields beyond their own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedConfig

from merak.zoo.configs import field_names as names
from merak.zoo.configs.fields import Fields, inner_configs, inside, is_count


@dataclass(frozen=True, slots=True)
class _Width:
    """Main width of one config.

    Args:
        path: names of the fields that lead to the config.
        old: the width.
        new: what it becomes.
    """

    path: tuple[str, ...]
    old: int
    new: int


def agreeing(config: PreTrainedConfig, changes: Fields) -> Fields:
    """Equalise widths of a config whose names say that they are another config's.

    A config may say how wide the vectors are that another one's model hands it: a field such as
    `audio_hidden_size`, equal to the main width of some other config.

    Args:
        config: the config as it is.
        changes: its fields' new values.
    """
    return _agreeing(config, changes, (), list(_main_widths(config, changes, ())))


def equally_wide(config: PreTrainedConfig, changes: Fields) -> Fields:
    """Equalise the widths of nested configs: one's model may add to another's vectors.

    Args:
        config: the config as it is.
        changes: its fields' new values.
    """
    widths = list(_main_widths(config, changes, ()))
    widest = {w.old: max(other.new for other in widths if other.old == w.old) for w in widths}
    return _equally_wide(config, changes, widest)


def _equally_wide(
    config: PreTrainedConfig, changes: Mapping[str, Any], widest: Mapping[int, int]
) -> Fields:
    found = dict(changes)
    main = _main_width(config)
    if main in found:
        found[main] = widest[vars(config)[main]]
    for name, inner in inner_configs(config):
        found[name] = inside(inner, _equally_wide(inner, changes.get(name, {}), widest))
    return {n: v for n, v in found.items() if v != {}}


def _main_width(config: PreTrainedConfig) -> str | None:
    return next((n for n in names.MAIN_WIDTHS if is_count(vars(config).get(n))), None)


def _main_widths(
    config: PreTrainedConfig, changes: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[_Width]:
    main = _main_width(config)
    if main is not None:
        old = vars(config)[main]
        yield _Width(path, old, changes.get(main, old))
    for name, inner in inner_configs(config):
        yield from _main_widths(inner, changes.get(name, {}), (*path, name))


def _agreeing(
    config: PreTrainedConfig, changes: Fields, path: tuple[str, ...], widths: list[_Width]
) -> Fields:
    found = dict(changes)
    for name, value in vars(config).items():
        if not is_count(value) or name in names.MAIN_WIDTHS or not names.OTHERS_WIDTH.search(name):
            continue
        others = [w for w in widths if w.old == value and w.path != path]
        if others:
            found[name] = min(others, key=lambda w: _strangeness(name, w, path)).new
    for name, inner in inner_configs(config):
        fields = _agreeing(inner, changes.get(name, {}), (*path, name), widths)
        found[name] = inside(inner, fields)
    old = vars(config)
    return {n: v for n, v in found.items() if (n not in old or v != old[n]) and v != {}}


def _strangeness(name: str, width: _Width, path: tuple[str, ...]) -> tuple[bool, int]:
    """Rank how unlikely a field refers to a config, by their names."""
    words = {word for part in width.path for word in part.split("_")}
    shared = sum(a == b for a, b in zip(path, width.path, strict=False))
    return not words & set(name.split("_")[:-2]), -shared


def without_derived(config: PreTrainedConfig, changes: Fields) -> Fields:
    """Leave out fields that the config itself derives from others.

    Args:
        config: the config as it is; of its class's fields, those that are None unless they are set
            are its own conclusions.
        changes: its fields' new values.
    """
    known = {f.name: f.default for f in dataclasses.fields(type(config))}
    inner = dict(inner_configs(config))
    found: Fields = {}
    for name, value in changes.items():
        if name in inner:
            found[name] = without_derived(inner[name], value)
        elif name == "model_type" or known.get(name) is not None:
            found[name] = value
    return {n: v for n, v in found.items() if v != {}}


def by_channel(config: PreTrainedConfig, changes: Fields) -> Fields:
    """Set groups of a convolution to the config's width where there is one for every channel.

    Args:
        config: the config as it is.
        changes: its fields' new values.
    """
    known = vars(config)
    main = _main_width(config)
    if main is None or main not in changes:
        return {}
    groups = (n for n, v in known.items() if names.GROUPS.search(n) and is_count(v))
    return {n: changes[main] for n in groups if known[n] == known[main]}


def parts(
    config: PreTrainedConfig, changes: Fields, small: Callable[[int, int], tuple[int, int]]
) -> Fields:
    """Correct widths and heads of submodules where new heads no longer divide the width.

    A part has fields of its own, which begin with the same words: `decoder_hidden_size` and
    `decoder_num_attention_heads`.

    Args:
        config: the config as it is.
        changes: its fields' new values.
        small: gives a part's new width and heads for its old ones.
    """
    known = vars(config)
    new = known | changes
    found: Fields = {}
    for width, heads in _pairs(known):
        fitted = known[heads] > 0 and known[width] % known[heads] == 0
        if fitted and new[width] % new[heads]:
            found[width], found[heads] = small(known[width], known[heads])
    return found


def _pairs(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of submodules of a config, a width and its heads each."""
    for name in known:
        heads = next((h for h in names.MAIN_HEADS if name.endswith(f"_{h}")), None)
        for width in names.MAIN_WIDTHS if heads else ():
            other = f"{name.removesuffix(str(heads))}{width}"
            if is_count(known[name]) and is_count(known.get(other)):
                yield other, name


def rotary_sections(config: PreTrainedConfig, changes: Fields) -> Fields:
    """Set the sections of rotary positions that a config's class knows and leaves to the model.

    Its code has sections for its usual heads, of a quarter and twice three eighths.

    Args:
        config: the config as it is.
        changes: its fields' new values.
    """
    known = vars(config) | changes
    rope, name = known.get("rope_parameters"), names.ROTARY_SECTIONS
    knows = name in (getattr(type(config), "ignore_keys_at_rope_validation", None) or ())
    if not knows or not isinstance(rope, dict) or "rope_type" not in rope or name in rope:
        return {}
    heads = next((known[n] for n in names.MAIN_HEADS if is_count(known.get(n))), 1)
    head = known.get("head_dim") or known.get(names.MAIN_WIDTHS[0], heads) // heads
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    ends = (0, pairs // 4, 5 * pairs // 8, pairs)
    sections = [end - start for start, end in pairwise(ends)]
    return {"rope_parameters": rope | {name: sections}}
