"""Computation of a loop over experts, by operators on the rows of all experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merak.graph.trace.opaque.experts.grouped_linear import GROUPED_LINEAR, GROUPED_VALUES
from merak.graph.trace.opaque.experts.program import TOTAL, Program, call_again
from merak.graph.trace.opaque.experts.steps import (
    OfChoices,
    OfRows,
    OfTokens,
    Pick,
    Product,
    Result,
    Scatter,
    Step,
    Template,
    Weight,
)
from merak.graph.trace.opaque.operator import OpaqueCall
from merak.ops.grouped_product import grouped_mm_fallback


@dataclass(frozen=True, slots=True)
class Kind:
    """Group of experts that run the same steps on their rows.

    Args:
        first: the first of them.
        stop: the one behind the last.
        steps: what each does with its rows.
    """

    first: int
    stop: int
    steps: Template


@dataclass(frozen=True, slots=True)
class ExpertLoop:
    """Loop over experts of a module, as steps on rows.

    Args:
        program: what it does around the loop.
        is_mask: whether the choices are a mask with a place for every expert, not their numbers.
        counts: numbers of the tensors that say how many rows every expert has, of rows that lie by
            expert: all in one or one in each; none where tokens choose.
        num_experts: the number of experts; one more where a choice may be of none.
        is_complete: whether every choice is of these experts.
        skips_idle: whether an expert that no token chooses is not called.
        kinds: of experts; those of none give nothing.
    """

    program: Program
    is_mask: bool
    counts: tuple[int, ...]
    num_experts: int
    is_complete: bool
    skips_idle: bool
    kinds: tuple[Kind, ...]


def ends_of_rows(counts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The row after the last one of every expert.

    Args:
        counts: how many each has, all in one tensor or one in each.
    """
    return (counts[0] if counts[0].ndim else torch.stack([*counts])).cumsum(0, dtype=torch.int32)


def grouped_experts(
    loop: ExpertLoop,
    call: OpaqueCall,
    tensors: Sequence[torch.Tensor],
    ends: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The tensors that the module returns, by operators on all rows.

    Args:
        loop: what the module computes.
        call: the call.
        tensors: its tensors; the module's own first.
        ends: of the rows of every expert, where the module is called with their numbers; else None.
    """
    program, values = loop.program, dict(enumerate(tensors))
    call_again(program.before, values)
    rows, states = _Rows.of(loop, values, ends), tensors[: len(call.states)]
    parts = [_combined(kind, loop, rows, states) for kind in loop.kinds]
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if program.start is not None:
        start = values[program.start]
        total = total.to(start.dtype).view(start.shape)
    values[TOTAL] = total
    call_again(program.after, values)
    return [values[number] for number in program.outputs]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A row for each token and each of its experts, sorted by expert.

    Args:
        values: whole tensors, by number.
        num_tokens: number of tokens.
        num_choices: experts of each.
        experts: (rows,), each row's expert, ascending.
        order: (rows,), which of the tokens' choices each row is.
        back: (rows,), the row of each choice.
        ends: (experts,), where every expert's rows end; None where only `experts` says it.
    """

    values: Mapping[int, torch.Tensor]
    num_tokens: int
    num_choices: int
    experts: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor
    ends: torch.Tensor | None = None

    @staticmethod
    def of(
        loop: ExpertLoop, values: Mapping[int, torch.Tensor], ends: torch.Tensor | None
    ) -> _Rows:
        if ends is not None:
            steps = loop.kinds[0].steps
            rows = next(values[step.place] for step in steps if isinstance(step, OfRows))
            number = torch.arange(rows.shape[0], dtype=ends.dtype, device=ends.device)
            experts = torch.searchsorted(ends, number, right=True)
            return _Rows(values, rows.shape[0], 1, experts, number, number, ends)
        chosen = values[loop.program.choices]
        if loop.is_mask:
            size = chosen.shape[-1]
            number = torch.arange(size, device=chosen.device)
            chosen = ((chosen != 0) * (number - size)).sum(-1) + size  # `size` for none
        experts, order = torch.sort(chosen.reshape(-1))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        num_choices = chosen.shape[1] if chosen.ndim == 2 else 1
        return _Rows(values, chosen.shape[0], num_choices, experts, order, back)

    def of_tokens(self, place: int, tail: tuple[int, ...]) -> torch.Tensor:
        """The token of every row."""
        tokens = self.values[place].reshape(self.num_tokens, *tail)
        return tokens[self.order // self.num_choices]

    def of_choices(self, place: int, tail: tuple[int, ...]) -> torch.Tensor:
        """The value of every row's choice, such as its weight."""
        return self.values[place].reshape(-1, *tail)[self.order]

    def only(self, values: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Values of rows, which are zeros for rows of other experts than some."""
        is_own = (self.experts >= first) & (self.experts < stop)
        return values * is_own.to(values.dtype).view(-1, *(1,) * (values.ndim - 1))

    def offsets(self, num_experts: int) -> torch.Tensor:
        """The row after the last one of every expert."""
        if self.ends is not None:
            return self.ends if num_experts == len(self.ends) else self.ends[:num_experts]
        counted = self.experts.float() if self.experts.device.type == "cpu" else self.experts.int()
        per_expert = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
        return per_expert.cumsum(0, dtype=torch.int32)


def _combined(
    kind: Kind, loop: ExpertLoop, rows: _Rows, states: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The sum over every token's experts of one kind, (tokens, …), or their rows by themselves."""
    made: list[Any] = []
    offsets = rows.offsets(kind.stop) if any(isinstance(s, Product) for s in kind.steps) else None
    is_all = loop.is_complete and kind.stop - kind.first == loop.num_experts
    skips = loop.skips_idle
    start = None if loop.program.start is None else rows.values[loop.program.start]
    for step in kind.steps:
        own = _Made(made, rows, states, offsets, kind.stop, is_all, skips, start)
        made.append(_run(step, own))
    last: torch.Tensor = made[-1]
    if isinstance(kind.steps[-1], Scatter):
        return last
    if not is_all:
        last = rows.only(last, kind.first, kind.stop)
    if loop.program.in_rows:
        return last
    per_choice = last[rows.back].view(rows.num_tokens, rows.num_choices, *last.shape[1:])
    return per_choice.sum(1)


@dataclass(frozen=True, slots=True)
class _Made:
    """What steps read.

    Args:
        results: of the steps before.
        rows: all rows.
        states: the module's parameters and buffers.
        offsets: where every expert's rows end; None where nothing is multiplied.
        num_experts: of the kind, whose first is the first of all where there are products.
        is_all: whether every row is of these.
        skips_idle: as of the loop.
        start: what rows are added to, or put into, by their numbers.
    """

    results: Sequence[Any]
    rows: _Rows
    states: Sequence[torch.Tensor]
    offsets: torch.Tensor | None
    num_experts: int
    is_all: bool
    skips_idle: bool
    start: torch.Tensor | None

    def result(self, found: Result) -> torch.Tensor:
        """What an earlier step gave."""
        made = self.results[found.step]
        one: torch.Tensor = made if found.item is None else made[found.item]
        return one

    def stack(self, weight: Weight) -> torch.Tensor:
        """Every expert's weight, (experts, …)."""
        (number,) = weight.numbers
        stack = self.states[number]
        if tuple(stack.shape) != weight.shape:
            stack = stack.view(weight.shape)
        return stack.transpose(-2, -1) if weight.is_transposed else stack

    def ends(self, weight: Weight) -> torch.Tensor:
        """The row after the last one of every expert that has such a weight."""
        offsets = self.offsets
        assert offsets is not None
        num_more = weight.shape[0] - self.num_experts  # that no expert of the loop reads
        return torch.cat((offsets, offsets[-1:].expand(num_more))) if num_more else offsets

    def of_rows(self, weight: Weight) -> torch.Tensor:
        """The weight of every row's expert, such as a bias; of rows without one, any."""
        experts = self.rows.experts
        if len(weight.numbers) > 1:
            values = [self.states[number] for number in weight.numbers]
            own: torch.Tensor = GROUPED_VALUES(experts, values, self.ends(weight), self.skips_idle)
            return own
        stack = self.stack(weight)
        return stack[experts if self.is_all else experts.clamp(max=self.num_experts - 1)]


def _run(step: Step, made: _Made) -> Any:
    """What a step gives for all rows."""
    if isinstance(step, OfTokens):
        return made.rows.of_tokens(step.place, step.tail)
    if isinstance(step, OfChoices):
        return made.rows.of_choices(step.place, step.tail)
    if isinstance(step, OfRows):
        return made.rows.values[step.place]
    if isinstance(step, Pick):
        return made.rows.values[step.place][tuple(map(made.result, step.indices))]
    if isinstance(step, Product):
        return _product(step, made)
    if isinstance(step, Scatter):
        return _scattered(step, made)

    def operand(argument: Any) -> Any:
        if isinstance(argument, Result):
            return made.result(argument)
        return made.of_rows(argument) if isinstance(argument, Weight) else argument

    return step.target(*map(operand, step.args), **dict(step.kwargs))


def _scattered(step: Scatter, made: _Made) -> torch.Tensor:
    """What rows are added to, or put into, behind that."""
    start, index, rows = made.start, made.result(step.index), made.result(step.rows)
    assert start is not None
    if not made.is_all:
        rows = made.rows.only(rows, 0, made.num_experts)
    total: torch.Tensor
    if step.target is torch.index_put:
        total = start.index_put((index,), rows)
    else:
        total = step.target(start, 0, index, rows)
    return total


def _product(step: Product, made: _Made) -> torch.Tensor:
    """Rows times their experts' weights; zeros, or biases, for rows without an expert."""
    rows, weight = made.result(step.rows), step.weight
    bias = None if step.bias is None else made.of_rows(step.bias)
    dtype = rows.dtype if step.dtype is None else step.dtype
    offsets = made.ends(weight)
    found: torch.Tensor
    if len(weight.numbers) > 1:
        weights = [made.states[number].to(dtype) for number in weight.numbers]
        found = GROUPED_LINEAR(
            rows.to(dtype), weights, offsets, made.skips_idle, weight.is_transposed
        )
    else:
        stack = made.stack(weight).to(dtype)
        found = grouped_mm_fallback()(rows.to(dtype), stack, offsets)
    return found if bias is None else found + bias.to(dtype)
