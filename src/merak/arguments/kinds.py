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
from numbers import Integral
from typing import Any

from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.rules import UNKNOWN, Layout, Policy
from merak.arguments.table import RULES
from merak.core.errors import did_you_mean
from merak.core.kinds import fits, kind_names

PATHS = frozenset(
    (
        "output_dir",
        "resume_from_checkpoint",
        "segment_times",
        "feature_dict",
        "trace_cache",
        "plan",
        "cluster",
        "offload_optimizer",
    )
)
"""Fields of text that name a file or folder, which Python also has path objects for."""

ALSO: Mapping[str, Any] = {
    "resume_from_checkpoint": bool,
    "profile_steps": int,
    "bf16": None,
    "fp16": None,
    "recompute": float | list[Any],
    "offload_activations": float | list[Any],
    "bucket_bytes": int,
    "memory_budget": int,
    "host_bytes_per_s": float,
    "per_device_train_batch_size": int | typing.Literal["auto"],
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
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        if field.name in OWN_CHECKS or not field.init:
            continue
        value = getattr(arguments, field.name)
        if value is field.default:
            continue
        hint = hints[field.name]
        if field.name in PATHS and isinstance(value, os.PathLike):
            continue
        is_bit = isinstance(value, Integral) and value in (0, 1)
        if not fits(value, hint) and not (is_bit and fits(bool(value), hint)):
            named = kind_names(typing.Union[*filter(_is_named, _parts(hint))], _WORDS)
            yield f"{field.name}={_shown(value)} should be {' or '.join(named)}."
        else:
            yield from _choice_problem(field, value, hint)


@lru_cache
def hints_of(cls: type) -> dict[str, Any]:
    """What the fields of arguments take: their annotations, and the kinds beside them.

    Args:
        cls: the dataclass.
    """
    return {
        name: hint | ALSO[name] if name in ALSO else hint
        for name, hint in typing.get_type_hints(cls).items()
    }


def choices_of(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, ...]:
    """The values that a field may have besides None, True and False; empty for any of its type.

    Args:
        field: of arguments.
        hint: as of `hints_of`.
    """
    choices = tuple(field.metadata.get("choices") or CHOICES.get(field.name, ()))
    for option in _parts(hint):
        if isinstance(option, type) and issubclass(option, Enum):
            choices = tuple(member.value for member in option)
    return choices


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types of a union; the one type of any other annotation."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )


def _is_named(kind: Any) -> bool:
    """Whether messages name a type: not those that transformers makes of texts."""
    return (typing.get_origin(kind) or kind) in (*_WORDS, list, typing.Literal)


def _choice_problem(field: dataclasses.Field[Any], value: object, hint: Any) -> Iterator[str]:
    """Yield the sentence that refuses a value of the right type that is no choice."""
    plain = value.value if isinstance(value, Enum) else value
    known = choices_of(field, hint)
    choices = tuple(own for own in known if own == plain or is_accepted(field.name, own))
    if not choices or plain is None or isinstance(plain, bool) or plain in choices:
        return
    named = " or ".join(repr(choice) for choice in choices)
    suggestion = did_you_mean(str(plain), [str(choice) for choice in choices])
    how = suggestion if suggestion != "." and len(choices) > 4 else f"; use {named}."
    yield f"{field.name}={_shown(plain)} is not a choice{how}"


_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a dictionary",
    type(None): "None",
}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
