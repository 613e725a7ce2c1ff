"""Findings of trials of optimizers: what they need of parameters of which ranks have shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import Enum


class Needs(Enum):
    """What an optimizer needs of parameters of which ranks have shards."""

    SHARDS = "shards"
    """It steps shards as they are."""

    REDUCTIONS = "reductions"
    """It steps shards, given norms and other full reductions of the whole parameters."""

    WHOLE = "whole parameters"
    """It steps whole parameters, each on one of the ranks."""


@dataclass(frozen=True, slots=True)
class Reductions:
    """Full reductions of whole parameters in a step over shards.

    Args:
        num: of a parameter, at most.
        exchanges: of ranks' parts, one after another: in a step, or for each parameter.
        is_each: whether they are for each parameter, whose numbers the optimizer's code reads.
    """

    num: int
    exchanges: int
    is_each: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a trial of an optimizer on small tensors.

    Args:
        across: whether a tensor is stepped otherwise without the others.
        cut: a tensor whose shards are stepped otherwise, in words; "" for none.
        draws: whether it draws random numbers.
        unknown: why it cannot be judged; "" where it can.
        closure: whether its step wants a closure that computes the loss.
        reductions: of whole parameters, with which it steps shards as whole tensors; None where it
            does not.
    """

    across: bool = False
    cut: str = ""
    draws: bool = False
    unknown: str = ""
    closure: bool = False
    reductions: Reductions | None = None

    @property
    def needs(self) -> Needs:
        """What it needs of parameters that are cut."""
        if not self.cut:
            return Needs.SHARDS
        return Needs.REDUCTIONS if self.reductions is not None else Needs.WHOLE


def merged_findings(found: Iterable[Findings]) -> Findings:
    """The worst of the findings on the ranks of a job, or its stages.

    Args:
        found: of each.
    """
    every = list(found)
    reduced = [one.reductions for one in every if one.cut]
    return Findings(
        any(one.across for one in every),
        next((one.cut for one in every if one.cut), ""),
        any(one.draws for one in every),
        next((one.unknown for one in every if one.unknown), ""),
        any(one.closure for one in every),
        max((one for one in reduced if one), key=astuple) if all(reduced) and reduced else None,
    )
