"""What a tool's training file says, as fields of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from merak.cli.recipe.source import Keys

Read = Callable[[Any], Any]
"""Makes a recipe's value of a tool's; `NOTHING` for one that a recipe cannot have."""

NOTHING = object()
"""Stands for no value."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool whose training files are read.

    Args:
        name: of the tool.
        sign: fields that only its files have at the top.
        fields: where each of its fields goes, and what makes the value.
        refused: fields whose value trains something else than a recipe can, with what says why
            (None for a value that does not).
        dropped: fields of transformers' arguments that say how its own ranks share the work.
        whole: makes the fields that several of its fields, or another file, make up.
    """

    name: str
    sign: tuple[str, ...]
    fields: Mapping[str, tuple[Keys, Read]]
    refused: Mapping[str, Callable[[Any], str | None]]
    dropped: frozenset[str]
    whole: Callable[[Mapping[str, Any]], Whole]


@dataclass(slots=True)
class Whole:
    """Fields that are made up of several.

    Args:
        found: a value and the tool's field that it comes from, by the recipe's field.
        read: the tool's fields that have been looked at.
        left: what was not taken of them, as people write it.
        problems: sentences, by the tool's field.
    """

    found: dict[Keys, tuple[Any, str]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def as_it_is(value: Any) -> Any:
    """Give the value."""
    return value


def only(*values: Any) -> Read:
    """Take these values as they are, and no others.

    Args:
        *values: what is taken.
    """
    return lambda value: value if value in values else NOTHING


def mapped(values: Mapping[Any, Any]) -> Read:
    """Take the values that are in a table.

    Args:
        values: a recipe's by the tool's.
    """
    return lambda value: values.get(value, NOTHING)


def fraction(value: Any) -> Any:
    """Take a fraction of the samples, and no number of them."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= 0.5 else NOTHING


def to_argument(name: str, read: Read = as_it_is) -> tuple[Keys, Read]:
    """Field of `arguments`.

    Args:
        name: of the field.
        read: makes its value.
    """
    return ("arguments", name), read


def chat_template(value: Any) -> Any:
    """The one template that has a name here; any other is the tokenizer's own."""
    return value if value == "chatml" else NOTHING


OTHER_TRAININGS = (
    "write a recipe for pairs of answers (merak recipes dpo), or take merak.trl's trainers of "
    "preferences and rewards."
)
"""What there is for training that is not on the next token, of which no tool's file is read."""

COMMON: Mapping[str, tuple[Keys, Read]] = {
    "trust_remote_code": (("model", "trust_remote_code"), as_it_is),
    "warmup_ratio": to_argument("warmup_steps"),
    "gradient_checkpointing": to_argument("recompute", mapped({True: "full"})),
}
"""Fields that both tools have."""
