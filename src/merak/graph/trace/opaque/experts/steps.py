"""What a loop over experts does with every expert's rows, as steps on the rows of all experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class NotALoopError(Exception):
    """A module that computes something else than a loop over experts."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an earlier step gives, or one of several values that it gives."""

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


Step = OfTokens | OfChoices | Product | PerRow
Template = tuple[Step, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """Tokens, the experts that each has chosen, and the other way round.

    Args:
        index: (tokens, choices) int64.
        experts: by some tokens in order, the experts that have chosen them, each with the (token,
            choice) pairs that it has, in the orders in which a mask may give them.
    """

    index: torch.Tensor
    experts: Mapping[tuple[int, ...], frozenset[tuple[int, Pairs]]]

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
        return Choices(index, found)

    def expert_of(self, tokens: torch.Tensor) -> tuple[int, Pairs]:
        """The expert that some tokens have chosen, and the choices in their order."""
        found = self.experts.get(tuple(tokens.tolist()), frozenset())
        if len(found) != 1:
            raise NotALoopError
        ((expert, pairs),) = found
        return expert, pairs
