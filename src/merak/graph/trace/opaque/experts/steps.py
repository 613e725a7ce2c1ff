"""Steps of a loop over experts, as operators on the rows of all experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class NotALoopError(Exception):
    """A module that computes something else than a loop over experts."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an earlier step, or one of its several results."""

    step: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """The expert's own part of a stack of weights, or its own one of several alike.

    Args:
        numbers: of the stack among the module's tensors; of several, in the order of experts.
        shape: that the stack is seen in; the first dim is that of the experts.
        is_transposed: whether the part is transposed.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class OfTokens:
    """Step: the token of every row, (rows, *tail), of the whole tensor of that number."""

    place: int
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfChoices:
    """Step: the value of every row's choice, (rows, *tail), such as its routing weight."""

    place: int
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """Step: rows times the expert's weight, and its bias; in a dtype, under an autocast."""

    rows: Result
    weight: Weight
    bias: Weight | None
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class PerRow:
    """Step: an operator that gives every row from the same row of its operands."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class OfRows:
    """Step: the rows of the whole tensor of that number, one expert's behind the other's."""

    place: int


@dataclass(frozen=True, slots=True)
class Pick:
    """Step: elements of the whole tensor of that number, by integers of every row."""

    place: int
    indices: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Scatter:
    """Step, the last one: every row is added to a row of the sum, or put in its place.

    Args:
        target: `index_add`, `scatter_add` or `index_put`, of torch.
        index: numbers of the sum's rows; for `scatter_add` one for each element of a row.
        rows: what is added.
    """

    target: Any
    index: Result
    rows: Result


Step = OfTokens | OfChoices | OfRows | Pick | Product | PerRow | Scatter
Template = tuple[Step, ...]


def read_steps(steps: Sequence[Step]) -> set[int]:
    """Steps that the last one depends on, itself among them."""
    found = {len(steps) - 1}
    for number in reversed(range(len(steps))):
        if number in found:
            values = [getattr(steps[number], field.name) for field in fields(steps[number])]
            found |= {one.step for one in tree_leaves(values) if isinstance(one, Result)}
    return found


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Row ranges of the experts, contiguous and in the experts' order.

    Args:
        num_rows: the number of rows.
        experts: by where rows begin and end, the expert that they belong to.
    """

    num_rows: int
    experts: Mapping[tuple[int, int], int]

    @staticmethod
    def of(counts: Sequence[int]) -> Ranges:
        """Ranges of experts that have so many rows; of experts without rows, those of one alone."""
        found: dict[tuple[int, int], list[int]] = {}
        for expert, ends in enumerate(pairwise(accumulate(counts, initial=0))):
            found.setdefault(ends, []).append(expert)
        return Ranges(sum(counts), {ends: own[0] for ends, own in found.items() if len(own) == 1})


@dataclass(frozen=True, slots=True)
class Choices:
    """Tokens, the experts that each has chosen, and the other way round.

    Args:
        index: (tokens, choices) int64.
        experts: by some tokens in order, the experts that have chosen them, each with the (token,
            choice) pairs that it has, in the orders in which a mask may give them.
        ranges: where the rows of every expert lie among those of all choices, sorted by expert.
    """

    index: torch.Tensor
    experts: Mapping[tuple[int, ...], frozenset[tuple[int, Pairs]]]
    ranges: Ranges

    @staticmethod
    def of(index: torch.Tensor, num_experts: int) -> Choices:
        """Choices of some tokens, (tokens, choices), among so many experts."""
        found: dict[tuple[int, ...], frozenset[tuple[int, Pairs]]] = {}
        for expert in range(num_experts):
            by_token = [(int(t), int(c)) for t, c in (index == expert).nonzero()]
            by_choice = sorted(by_token, key=lambda pair: (pair[1], pair[0]))
            for pairs in (tuple(by_token), tuple(by_choice)):
                tokens = tuple(token for token, _ in pairs)
                found[tokens] = found.get(tokens, frozenset()) | {(expert, pairs)}
        counts = torch.bincount(index.flatten(), minlength=num_experts).tolist()
        return Choices(index, found, Ranges.of(counts))

    def experts_of(self, tokens: torch.Tensor) -> Mapping[int, Pairs]:
        """The experts that some tokens have chosen, each with the choices in their order."""
        return dict(self.experts.get(tuple(tokens.tolist()), frozenset()))
