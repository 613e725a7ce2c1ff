"""Calls of modules that may loop over experts, and the experts of the tokens that these get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from merak.graph.trace.opaque.experts.steps import Choices, NotALoopError
from merak.graph.trace.opaque.operator import OpaqueCall


@dataclass(frozen=True, slots=True)
class Subject:
    """A call, on tensors that have no values.

    Args:
        call: the call.
        tensors: its tensors; the module's own first.
        place: of the choices among its inputs; None where it makes them itself.
        num_before: how many integers it then makes of scores before the choices.
        counts: place among its inputs of how many rows every expert has; None where it is not
            called with that.
    """

    call: OpaqueCall
    tensors: Sequence[torch.Tensor]
    place: int | None = None
    num_before: int = 0
    counts: int | None = None

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """Arguments that the module is called with."""
        return self.tensors[len(self.call.states) :]

    @property
    def choices(self) -> torch.Tensor | None:
        """The choices, where it is called with them."""
        return None if self.place is None else self.inputs[self.place]

    @property
    def num_tokens(self) -> int:
        """The number of tokens; of rows, where it is called with how many every expert has."""
        if self.choices is not None:
            return self.choices.shape[0]
        if self.counts is not None:
            return next(t.shape[0] for t in self.inputs if t.ndim == 2)
        shape = self.inputs[0].shape
        return math.prod(shape[:2]) if len(shape) > 2 else shape[0]


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of tokens to neighbouring experts, each token's from the next expert on.

    Args:
        num_experts: the number of experts.
        num_tokens: the number of tokens.
        is_skewed: whether all tokens choose the first expert, and two begin with each other one,
            the remaining tokens with the last; where each chooses one, two choose the first, too.
        idle: an expert that no token chooses; None for none.
        lone: an expert that the first token alone chooses; None for none.
    """

    num_experts: int
    num_tokens: int
    is_skewed: bool = False
    idle: int | None = None
    lone: int | None = None

    def choices(self, num_choices: int) -> Choices:
        """The choices, so many for each token."""
        some = [e for e in range(self.num_experts) if e not in (self.idle, self.lone)]
        if num_choices > len(some) and len(some) < self.num_experts:
            raise NotALoopError
        experts = torch.tensor(some)
        is_crowded = self.is_skewed and num_choices > 1
        others = experts[1:] if is_crowded else experts
        first = torch.arange(self.num_tokens)
        if self.is_skewed:
            first = (first // 2).clamp(max=len(others) - 1)
        steps = torch.arange(num_choices - is_crowded)
        index = others[(first[:, None] + steps) % len(others)]
        if is_crowded:
            index = torch.cat((experts[:1].expand(self.num_tokens, 1), index), 1)
        if self.lone is not None:
            place = torch.tensor([0]), torch.tensor([num_choices - 1])
            index = index.index_put(place, torch.tensor(self.lone))
        return Choices.of(index, self.num_experts)

    def counts(self, num_rows: int) -> list[int]:
        """Rows of every expert if `num_rows` rows go to one expert each."""
        index = replace(self, num_tokens=num_rows).choices(1).index
        counts: list[int] = torch.bincount(index[:, 0], minlength=self.num_experts).tolist()
        return counts
