"""Loops over experts: each expert's rows are picked, multiplied by its weights, and added up.

Which experts such a loop visits, and how many rows each has, depends on values. But every expert
does the same with its rows, so the whole is a few operators on all rows, sorted by expert, with a
grouped product in the place of every product. Its weights can be split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from merak.graph.trace.opaque.experts.around import TOTAL, Around, Program, call_again
from merak.graph.trace.opaque.experts.follow import Follower
from merak.graph.trace.opaque.experts.grouped_linear import GROUPED_LINEAR, GROUPED_VALUES
from merak.graph.trace.opaque.experts.separate import separate_weights
from merak.graph.trace.opaque.experts.steps import (
    Choices,
    NotALoopError,
    OfChoices,
    OfTokens,
    Product,
    Result,
    Step,
    Template,
    Weight,
)
from merak.graph.trace.opaque.operator import OpaqueCall
from merak.graph.trace.opaque.probe import undisturbed
from merak.graph.trace.opaque.run import attributes, invoke, set_attributes


@dataclass(frozen=True, slots=True)
class Kind:
    """Experts that compute alike.

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
    """What a module computes that loops over experts.

    Args:
        program: what it does around the loop.
        is_mask: whether the choices are a mask with a place for every expert, not their numbers.
        num_experts: the number of experts; one more where a choice may be of none.
        is_complete: whether every choice is of these experts.
        skips_idle: whether an expert that no token chooses is not called.
        kinds: of experts; those of none give nothing.
    """

    program: Program
    is_mask: bool
    num_experts: int
    is_complete: bool
    skips_idle: bool
    kinds: tuple[Kind, ...]


def expert_loop_of(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], has_mask: bool
) -> ExpertLoop | None:
    """The loop over experts that a module computes; None if it computes anything else.

    The module is called on tensors without values and a few tokens, whose experts are known, and
    all that it does with each expert's rows must be the same for a row as for many.

    Args:
        call: the call.
        tensors: its tensors; the module's own first.
        has_mask: whether its input of three dims is a mask of choices, each of one expert or none.
    """
    inputs = tensors[len(call.states) :]
    chosen = [i for i, t in enumerate(inputs) if not t.is_floating_point()]
    hooks, _ = call.module._get_backward_hooks()
    if len(chosen) > 1 or call.scalars or hooks or call.module._get_backward_pre_hooks():
        return None
    if chosen and inputs[chosen[0]].dtype is not torch.int64:
        return None
    if chosen and inputs[chosen[0]].ndim not in ((1, 2, 3) if has_mask else (1, 2)):
        return None
    parameters = tensors[: call.parameters]
    if not chosen and not _possible_stacks(call, parameters):
        return None
    # A thread of its own: the modes that record a trace belong to the thread that traces.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_found, _Module(call, tensors, *chosen)).result()


@dataclass(frozen=True, slots=True)
class _Module:
    """A call, on tensors that have no values.

    Args:
        call: the call.
        tensors: its tensors; the module's own first.
        place: of the choices among its inputs; None where it makes them itself.
    """

    call: OpaqueCall
    tensors: Sequence[torch.Tensor]
    place: int | None = None

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """What it is called with."""
        return self.tensors[len(self.call.states) :]

    @property
    def choices(self) -> torch.Tensor | None:
        """The choices, where it is called with them."""
        return None if self.place is None else self.inputs[self.place]

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        if self.choices is not None:
            return self.choices.shape[0]
        shape = self.inputs[0].shape
        return math.prod(shape[:2]) if len(shape) > 2 else shape[0]


def _found(module: _Module) -> ExpertLoop | None:
    call, program, num_experts = module.call, None, 0
    with undisturbed(call), torch.enable_grad():
        before = attributes(call.module)
        num_classes = _num_classes(module)
        for num_experts in _possible_numbers(module, num_classes):
            program = _program(module, num_experts)
            if program is not None:
                break
        skips_idle = None if program is None else _skips_idle(module, program, num_experts)
        after = attributes(call.module)
        is_changed = before.keys() != after.keys() or any(before[k] is not after[k] for k in before)
        if is_changed:
            set_attributes(list(call.module.modules()), before)
    if program is None or skips_idle is None or is_changed:
        return None  # what it keeps, others may read
    numbered = groupby(range(num_experts), key=program.templates.get)
    spans = [(steps, list(experts)) for steps, experts in numbered if steps is not None]
    kinds = tuple(Kind(own[0], own[-1] + 1, steps) for steps, own in spans)
    have_products = [k for k in kinds if any(isinstance(step, Product) for step in k.steps)]
    if len(have_products) != 1 or have_products[0].first or len(kinds) > 2:
        return None
    is_mask = module.choices is not None and module.choices.ndim == 3
    is_complete = num_experts == num_classes
    loop = ExpertLoop(program, is_mask, num_experts, is_complete, skips_idle, kinds)
    return loop if _has_operators(loop, module) else None


def _skips_idle(module: _Module, program: Program, num_experts: int) -> bool | None:
    """Whether an expert that no token chooses is not called; None where it cannot be told.

    Parameters of an expert that is called without rows have gradients, which are zeros.
    """
    last = max(program.templates)
    num_idle = num_experts - last
    try:
        found = _followed(module, num_experts, 2 * num_experts + 1, idle=num_idle)
    except Exception:  # as in `_program`
        return None
    return last not in found.templates


def _has_operators(loop: ExpertLoop, module: _Module) -> bool:
    """Whether operators on all rows give what the module returns, as far as sizes and types."""
    given = [_without_values(tuple(t.shape), t.dtype) for t in module.tensors]
    try:
        made = grouped_experts(loop, module.call, given)
    except Exception:  # of functions that are called again
        return False
    return [(tuple(t.shape), t.dtype) for t in made] == list(loop.program.kinds)


def _program(module: _Module, num_experts: int) -> Program | None:
    """What the module does, which is the same for any number of tokens, whatever they choose."""
    try:
        sizes = 2 * num_experts + 1, 2 * num_experts + 3  # torch treats a single row otherwise
        first, other = (_followed(module, num_experts, size) for size in sizes)
        # A number that its code has read from the choices would differ.
        others = (_followed(module, num_experts, size, 1) for size in sizes)
        own = _followed(module, num_experts, module.num_tokens)
    except Exception:  # whatever the module's code does with tensors that have no values
        return None
    if (first, other) != tuple(others) or first.templates != other.templates:
        return None
    if not own.templates.items() <= first.templates.items():
        return None
    return replace(own, templates=first.templates)


def _possible_numbers(module: _Module, num_classes: int) -> Iterator[int]:
    """How many experts there may be, or one more where a choice may be of none."""
    if num_classes:
        yield num_classes
        if _fails(module, num_classes):  # a mask may have room for one more, which nobody chooses
            yield num_classes - 1
        return
    yield from _possible_stacks(module.call, module.tensors[: module.call.parameters])


def _possible_stacks(call: OpaqueCall, parameters: Sequence[torch.Tensor]) -> list[int]:
    """How many experts there may be, by weights that could be theirs."""
    counts = {len(own) for _, own in separate_weights(call, parameters).values()}
    return sorted(counts | {len(stack) for stack in parameters if stack.ndim == 3})


def _fails(module: _Module, num_experts: int) -> bool:
    """Whether the module's own code fails where tokens choose among so many experts."""
    try:
        _followed(module, num_experts, 2 * num_experts + 1)
    except Exception as error:
        return not isinstance(error, NotALoopError)
    return False


def _num_classes(module: _Module) -> int:
    """How many different choices there are, by a mask or by scores; 0 if they do not tell."""
    if module.choices is not None and module.choices.ndim == 3:
        return module.choices.shape[-1] + 1
    try:
        around, inputs = _prepared(module, 1, 1, 0, 0)
    except NotALoopError:
        return 0
    with suppress(Exception), around.follower, around:  # only for the mask, which comes first
        invoke(module.call, inputs)
    return around.num_classes


def _followed(
    module: _Module, num_experts: int, num_tokens: int, shift: int = 0, idle: int = 0
) -> Program:
    """What the module does with some tokens."""
    around, given = _prepared(module, num_experts, num_tokens, shift, idle)
    with around.follower, around:
        result = invoke(module.call, given)
    around.follower.finish()
    if any(tensor._version for tensor in given):
        raise NotALoopError  # it writes into what it is given
    return around.program(result)


def _prepared(
    module: _Module, num_experts: int, num_tokens: int, shift: int, idle: int
) -> tuple[Around, list[torch.Tensor]]:
    """What follows the module, and what the module is called with.

    Args:
        module: the module.
        num_experts: the number of experts.
        num_tokens: the number of tokens.
        shift: how far the choices are from those of shift 0.
        idle: how many of the last experts nobody chooses.
    """
    call, place, choices = module.call, module.place, module.choices
    parameters = module.tensors[: call.parameters]
    separate = separate_weights(call, parameters, num_experts)
    given = [_without_values(tuple(t.shape), t.dtype) for t in module.tensors[: len(call.states)]]
    follower = Follower(None, num_tokens, given[: call.parameters], separate, call.autocast)

    def choose(shape: tuple[int, ...]) -> torch.Tensor:
        if shape[:1] != (num_tokens,) or len(shape) > 3:
            raise NotALoopError
        num_choices = shape[1] if len(shape) > 1 else 1
        follower.choices = Choices.spread(num_tokens, num_choices, num_experts, shift, idle)
        index = follower.choices.index if len(shape) > 1 else follower.choices.index[:, 0]
        # A mask has no place for the last, which is none.
        is_mask = len(shape) == 3
        return functional.one_hot(index, num_experts)[..., :-1].clone() if is_mask else index

    chosen = None if choices is None else choose((num_tokens, *choices.shape[1:]))
    before = module.num_tokens
    for i, tensor in enumerate(module.inputs):
        is_chosen = i == place and chosen is not None
        given.append(chosen if is_chosen else _of_tokens(tensor, before, num_tokens))  # type: ignore[arg-type]
    for number in range(len(call.states), len(given)):
        follower.note_whole(given[number], number)
    around = Around(follower, given, None if place is None else len(call.states) + place, choose)
    return around, given


def _of_tokens(tensor: torch.Tensor, before: int, num_tokens: int) -> torch.Tensor:
    """An input of another number of tokens, without values."""
    shape = tuple(tensor.shape)
    if num_tokens == before:
        made = shape
    elif shape[0] == before:
        made = (num_tokens, *shape[1:])
    elif len(shape) > 2 and shape[0] * shape[1] == before:
        made = (1, num_tokens, *shape[2:])
    else:
        raise NotALoopError
    return _without_values(made, tensor.dtype)


def _without_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.requires_grad_() if dtype.is_floating_point else made


def grouped_experts(
    loop: ExpertLoop, call: OpaqueCall, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors that the module returns, by operators on all rows.

    Args:
        loop: what the module computes.
        call: the call.
        tensors: its tensors; the module's own first.
    """
    program, values = loop.program, dict(enumerate(tensors))
    call_again(program.before, values)
    rows, states = _Rows.of(loop, values), tensors[: len(call.states)]
    parts = [_combined(kind, loop, rows, states) for kind in loop.kinds]
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    start = values[program.start]
    values[TOTAL] = total.to(start.dtype).view(start.shape)
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
    """

    values: Mapping[int, torch.Tensor]
    num_tokens: int
    num_choices: int
    experts: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor

    @staticmethod
    def of(loop: ExpertLoop, values: Mapping[int, torch.Tensor]) -> _Rows:
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

    def offsets(self, num_experts: int) -> torch.Tensor:
        """The row after the last one of every expert."""
        counted = self.experts.float() if self.experts.device.type == "cpu" else self.experts.int()
        per_expert = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
        return per_expert.cumsum(0, dtype=torch.int32)


def _combined(
    kind: Kind, loop: ExpertLoop, rows: _Rows, states: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The sum over every token's experts of one kind, (tokens, …)."""
    import transformers.integrations.moe  # noqa: F401  # registers the grouped product

    made: list[torch.Tensor] = []
    offsets = rows.offsets(kind.stop) if any(isinstance(s, Product) for s in kind.steps) else None
    is_all = loop.is_complete and kind.stop - kind.first == loop.num_experts
    skips = loop.skips_idle
    for step in kind.steps:
        made.append(_run(step, _Made(made, rows, states, offsets, kind.stop, is_all, skips)))
    last = made[-1]
    if not is_all:
        is_own = (rows.experts >= kind.first) & (rows.experts < kind.stop)
        last = last * is_own.to(last.dtype).view(-1, *(1,) * (last.ndim - 1))
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
    """

    results: Sequence[Any]
    rows: _Rows
    states: Sequence[torch.Tensor]
    offsets: torch.Tensor | None
    num_experts: int
    is_all: bool
    skips_idle: bool

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
    if isinstance(step, Product):
        return _product(step, made)

    def operand(argument: Any) -> Any:
        if isinstance(argument, Result):
            return made.result(argument)
        return made.of_rows(argument) if isinstance(argument, Weight) else argument

    return step.target(*map(operand, step.args), **dict(step.kwargs))


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
        found = torch.ops.transformers.grouped_mm_fallback(rows.to(dtype), stack, offsets)
    return found if bias is None else found + bias.to(dtype)
