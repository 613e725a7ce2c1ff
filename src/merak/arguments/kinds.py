"""Types of arguments, checked against their annotations.

One mechanism for all fields, those of a newer transformers included: `max_steps: three` is refused
by name before anything compares it with a number.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.rules import UNKNOWN, Layout, Policy
from merak.arguments.table import RULES
from merak.core.errors import did_you_mean

PATHS = frozenset(
    (
        "output_dir",
        "resume_from_checkpoint",
        "segment_times",
        "feature_dict",
        "trace_cache",
        "plan",
        "cluster",
    )
)
"""Fields of text that name a file or folder, which Python also has path objects for."""

ALSO: Mapping[str, tuple[Any, ...]] = {
    "resume_from_checkpoint": (bool,),
    "bf16": (None,),
    "fp16": (None,),
    "recompute": (float, list[Any]),
    "offload_activations": (float, list[Any]),
    "bucket_bytes": (int,),
    "memory_budget": (int,),
    "host_bytes_per_s": (int, float),
    "per_device_train_batch_size": (int, typing.Literal["auto"]),
}
"""Kinds that a field takes beside those of its annotation."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
}
"""Of fields of text that do not say their choices themselves."""


def is_accepted(name: str, choice: object) -> bool:
    """Whether some job can have a choice of a field: suggestions name no others.

    Args:
        name: of the field.
        choice: one of its values.
    """
    if name == "optim":
        rule = OPTIMIZERS.get(str(choice), UNKNOWN)
        return rule.policy is not Policy.REFUSED or rule.layout is not Layout.ANY
    if name not in RULES:
        return True  # an own one
    rule = RULES[name]
    return rule.policy is not Policy.REFUSED or choice in rule.accepted


OWN_CHECKS = frozenset(("accelerator_config", "parallelism_config", "debug", "fsdp_config"))
"""Fields that transformers turns into objects of its own, and checks itself."""


def kind_problems(arguments: object, cls: type) -> Iterator[str]:
    """Yield a sentence for every field whose value has another type than its annotation.

    Args:
        arguments: a dataclass instance.
        cls: the dataclass whose fields are looked at, of which `arguments` may be a subclass.
    """
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in OWN_CHECKS or not field.init:
            continue
        value = getattr(arguments, field.name)
        if value is field.default:
            continue
        options = (*_options(hints[field.name]), *ALSO.get(field.name, ()))
        if field.name in PATHS and isinstance(value, os.PathLike):
            continue
        if not any(_fits(value, option) for option in options):
            yield f"{field.name}={_shown(value)} should be {_named(options)}."
        else:
            yield from _choice_problem(field, value, options)


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; the one type of any other annotation."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return (hint,)


def _fits(value: object, option: Any) -> bool:
    if option is Any:
        return True
    if option is None or option is type(None):
        return value is None
    if typing.get_origin(option) is typing.Literal:
        return any(value is choice or value == choice for choice in typing.get_args(option))
    kind = typing.get_origin(option) or option
    is_boolean = isinstance(value, bool)
    if kind is bool:
        return is_boolean or (isinstance(value, Integral) and value in (0, 1))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not is_boolean
    if kind is list:
        return isinstance(value, list | tuple) and _each_fits(value, typing.get_args(option))
    return isinstance(value, Mapping if kind is dict else kind)


def _each_fits(values: list[Any] | tuple[Any, ...], kinds: tuple[Any, ...]) -> bool:
    return all(any(_fits(v, o) for o in _options(kinds[0])) for v in values) if kinds else True


def _choice_problem(
    field: dataclasses.Field[Any], value: object, options: tuple[Any, ...]
) -> Iterator[str]:
    """Yield the sentence that refuses a value of the right type that is no choice."""
    choices = tuple(field.metadata.get("choices") or CHOICES.get(field.name, ()))
    for option in options:
        if isinstance(option, type) and issubclass(option, Enum):
            choices = tuple(member.value for member in option)
    plain = value.value if isinstance(value, Enum) else value
    choices = tuple(own for own in choices if own == plain or is_accepted(field.name, own))
    if not choices or plain is None or isinstance(plain, bool) or plain in choices:
        return
    named = " or ".join(repr(choice) for choice in choices)
    suggestion = did_you_mean(str(plain), [str(choice) for choice in choices])
    how = suggestion if suggestion != "." and len(choices) > 4 else f"; use {named}."
    yield f"{field.name}={_shown(plain)} is not a choice{how}"


_NAMES: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a dictionary",
}


def _named(options: tuple[Any, ...]) -> str:
    names: dict[str, None] = {}
    for option in options:
        if option is None or option is type(None):
            continue  # comes last
        kind = typing.get_origin(option) or option
        if kind is list and typing.get_args(option):
            inner = _NAMES.get(_options(typing.get_args(option)[0])[0], "values")
            names[f"a list of {inner.removeprefix('a ')}s"] = None
        elif kind in _NAMES:
            names[_NAMES[kind]] = None
        elif kind is typing.Literal:
            names |= dict.fromkeys(repr(choice) for choice in typing.get_args(option))
    if None in options or type(None) in options:
        names["None"] = None
    return " or ".join(names)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
