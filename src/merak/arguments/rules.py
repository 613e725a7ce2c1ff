"""Rules for training arguments, as data: honoured, without effect, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from merak.core.errors import ArgumentsError, raise_all
from merak.core.mesh import Mesh


class Policy(Enum):
    """Policy for an argument's value."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Layout(Enum):
    """Jobs in which a value is refused."""

    ANY = "in every job"
    DATA_PARALLEL = "with dp > 1"
    TENSOR_PARALLEL = "with tp > 1"
    SEVERAL_RANKS = "with more than one rank"
    NOT_CPU = "unless `merak.init` chose the CPU"

    def holds(self, mesh: Mesh) -> bool:
        """Whether this job is one of them."""
        return {
            Layout.ANY: True,
            Layout.DATA_PARALLEL: mesh.dp > 1,
            Layout.TENSOR_PARALLEL: mesh.tp > 1,
            Layout.SEVERAL_RANKS: mesh.world_size > 1,
            Layout.NOT_CPU: mesh.device.type != "cpu",
        }[self]


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for one argument.

    Args:
        policy: what becomes of a value that is not the default.
        sentence: how it is honoured, why it has no effect, or why it is refused and what to use.
        accepted: values that a refused argument may have besides its default.
        layout: the jobs in which it is refused; elsewhere it is honoured.
        by_rank: whether each rank may have a value of its own; else a difference is refused.
    """

    policy: Policy
    sentence: str
    accepted: tuple[object, ...] = ()
    layout: Layout = Layout.ANY
    by_rank: bool = False


def honoured(sentence: str, *, by_rank: bool = False) -> Rule:
    """Make the rule of an argument that keeps its meaning.

    Args:
        sentence: how it is honoured.
        by_rank: whether each rank may have a value of its own.
    """
    return Rule(Policy.HONOURED, sentence, by_rank=by_rank)


def no_effect(sentence: str) -> Rule:
    """Make the rule of an argument that rightly changes nothing."""
    return Rule(Policy.NO_EFFECT, sentence, by_rank=True)


def refused(sentence: str, *accepted: object, layout: Layout = Layout.ANY) -> Rule:
    """Make the rule of an argument that cannot be honoured; the sentence says why."""
    return Rule(Policy.REFUSED, sentence, accepted, layout)


UNKNOWN = refused("this version of Merak does not know what it means; leave it at its default")
"""The rule for fields of a transformers version that the table does not know."""


def problems(
    arguments: object, rules: Mapping[str, Rule], own: frozenset[str], mesh: Mesh
) -> Iterator[str]:
    """Yield a sentence for every argument that this job cannot honour.

    Args:
        arguments: a dataclass instance of training arguments.
        rules: the decisions, by field name.
        own: fields that are Merak's own, which no rule governs.
        mesh: the ranks of the job.
    """
    theirs = Seq2SeqTrainingArguments if isinstance(arguments, TrainingArguments) else arguments
    known = {field.name for field in dataclasses.fields(theirs)}  # type: ignore[arg-type]
    for field in dataclasses.fields(arguments):  # type: ignore[arg-type]
        if field.name in own or not field.init or field.name not in known:
            continue  # fields of a user's own class are that class's matter
        rule = rules.get(field.name, UNKNOWN)
        value = getattr(arguments, field.name)
        if rule.policy is not Policy.REFUSED or _accepted(value, field, rule):
            continue
        if rule.layout.holds(mesh):
            yield refusal(field.name, value, rule)


def shared_values(
    arguments: object, rules: Mapping[str, Rule], own: frozenset[str]
) -> dict[str, object]:
    """The arguments whose values must be the same on every rank, by name.

    Args:
        arguments: a dataclass instance of training arguments.
        rules: the decisions, by field name.
        own: fields that are Merak's own, which no rule governs.
    """
    found: dict[str, object] = {}
    for name in (field.name for field in dataclasses.fields(arguments)):  # type: ignore[arg-type]
        is_shared = name in rules and not rules[name].by_rank
        if is_shared or name in own:
            found[name] = getattr(arguments, name)
    return found


def refusal(name: str, value: object, rule: Rule) -> str:
    """Format the sentence that refuses a value: the argument, its value, why, and what to use."""
    shown = value.value if isinstance(value, Enum) else value
    where = "" if rule.layout is Layout.ANY else f" {rule.layout.value}"
    return f"{name}={shown!r} cannot be honoured{where}: {rule.sentence}."


def _accepted(value: object, field: dataclasses.Field[Any], rule: Rule) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return any(
        value == option and isinstance(value, bool) == isinstance(option, bool)
        for option in (default, *rule.accepted)
    )


def raise_sentences(sentences: Iterable[str]) -> None:
    """Raise sentences as one error; of those about the same argument the first.

    Raises:
        ArgumentsError: there is a sentence.
    """
    by_name: dict[str, str] = {}
    for sentence in sentences:
        by_name.setdefault(sentence.partition("=")[0], sentence)
    raise_all([ArgumentsError(sentence) for sentence in by_name.values()])
