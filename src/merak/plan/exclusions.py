"""Choices of a job that exclude each other, by how gradients are reduced and parameters sharded.

Each rule is told once, as a sentence: jobs are refused with it, and searches leave layouts out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class ReducedSchedule(Protocol):
    """What the rules ask of a schedule, or of the traits of one that is not built."""

    @property
    def is_synchronous(self) -> bool:
        """Whether there is one version of the weights."""

    @property
    def splits_backwards(self) -> bool:
        """Whether weight gradients have actions of their own."""

    @property
    def num_copies(self) -> int:
        """Copies of the model on the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """Choices of a job by which its replicas reduce gradients.

    Args:
        name: of the schedule.
        schedule: what it does.
        zero: the ZeRO stage.
        compression: of gradients; "off" for none.
        local_steps: between two averages of Local SGD; 0 for none.
        ep: replicas that have the experts of a layer between them; 1 where each has all.
        sub_pipelined: whether microbatches run as sub-microbatches.
        drops_layers: whether a step may leave parameters without a gradient.
    """

    name: str
    schedule: ReducedSchedule
    zero: int = 0
    compression: str = "off"
    local_steps: int = 0
    ep: int = 1
    sub_pipelined: bool = False
    drops_layers: bool = False


def problem_of(own: Reductions) -> str | None:
    """The sentence of the first rule that the choices break; None where they may be together."""
    return next((why for rule in _RULES if (why := rule(own)) is not None), None)


def _copies_with_zero(own: Reductions) -> str | None:
    if own.zero and (not own.schedule.is_synchronous or own.schedule.num_copies > 1):
        return (
            f"zero={own.zero} shards the optimizer over the replicas of a stage, but "
            f"schedule={own.name!r} keeps several copies or versions of its weights; use "
            "zero=0, or a schedule such as '1f1b'."
        )
    return None


def _split_backwards_with_zero_3(own: Reductions) -> str | None:
    if own.zero == 3 and own.schedule.splits_backwards:
        return (
            f"zero=3 frees a segment's parameters when its backward ends, but schedule="
            f"{own.name!r} computes gradients of weights later; use zero=2, or a schedule "
            "such as '1f1b'."
        )
    return None


def _sub_microbatches_with_zero_3(own: Reductions) -> str | None:
    return sub_pipelining_problem(own.zero) if own.sub_pipelined else None


def _dropped_layers_with_zero_3(own: Reductions) -> str | None:
    if own.zero == 3 and own.drops_layers:
        return (
            "zero=3 reduces the gradients of a segment on all replicas, but the model drops "
            "layers at random, or has experts or modules that use their parameters for some values "
            "alone, each replica its own; use zero=2, or switch the dropping off: layer_keep=1, or "
            "the model's config."
        )
    return None


def _compression(own: Reductions) -> str | None:
    named = f"gradient_compression={own.compression!r}"
    if own.compression == "off":
        return None
    if own.zero:
        return (
            f"{named} compresses all-reduces of whole gradients, but zero={own.zero} "
            "reduce-scatters them, which torch's compressors do not; use zero=0, or "
            "gradient_compression='off'."
        )
    if own.ep > 1:
        return (
            f"{named} compresses what all replicas reduce together, but they hold different "
            f"experts with ep={own.ep}; use ep=1, or gradient_compression='off'."
        )
    if not own.schedule.is_synchronous:
        return (
            f"{named} compresses gradients that replicas reduce once a step, but "
            f"schedule={own.name!r} updates weights inside a step; use a synchronous "
            "schedule such as '1f1b', or gradient_compression='off'."
        )
    return None


def _local_steps(own: Reductions) -> str | None:
    named = f"local_steps={own.local_steps}"
    if not own.local_steps:
        return None
    if not own.schedule.is_synchronous:
        return (
            f"{named} counts optimizer steps, but schedule={own.name!r} updates "
            "weights several times inside one; use local_steps=0, or a synchronous schedule such "
            "as '1f1b'."
        )
    if own.zero:
        return (
            f"{named} has every replica step all parameters on its own, but "
            f"zero={own.zero} shards them over the replicas; use zero=0 with a larger tp or "
            "pp, or local_steps=0."
        )
    if own.compression != "off":
        return (
            f"{named} leaves out the reductions that gradient_compression="
            f"{own.compression!r} compresses; use one of the two."
        )
    if own.ep > 1:
        return (
            f"{named} has every replica step on its own, but with ep={own.ep} they "
            "have the experts of a layer between them; use ep=1, or experts over tp."
        )
    return None


_RULES: tuple[Callable[[Reductions], str | None], ...] = (
    _copies_with_zero,
    _split_backwards_with_zero_3,
    _sub_microbatches_with_zero_3,
    _dropped_layers_with_zero_3,
    _compression,
    _local_steps,
)


def low_sums_problem(zero: int, what: str) -> str | None:
    """Why ZeRO 3 cannot reduce gradients of a lower precision that no float32 master is stepped by.

    Args:
        zero: the ZeRO stage.
        what: the parameters, with their verb and type, such as "'weight' is of torch.bfloat16".
    """
    if zero != 3:
        return None
    return (
        f"zero=3 reduces gradients in the optimizer's type, and {what}; set master_weights=True "
        "and leave gradient_sums='float32', or use zero=2."
    )


def sub_pipelining_problem(zero: int) -> str | None:
    """Why sub-microbatches cannot be run with a ZeRO stage.

    Args:
        zero: the ZeRO stage.
    """
    if zero != 3:
        return None
    return (
        "zero=3 gathers the parameters of one segment at a time, but sub_pipelining='on' runs "
        "sub-microbatches of several; use zero=2, or sub_pipelining='off'."
    )
