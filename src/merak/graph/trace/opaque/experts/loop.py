"""Loops over experts: each expert's rows are picked, multiplied by its weights, and added up.

Which experts such a loop visits, and how many rows each has, depends on values. But every expert
does the same with its rows, so the whole is a few operators on all rows, sorted by expert, with a
grouped product in the place of every product. Its weights can be split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch.nn import functional

from merak.graph.trace.opaque.experts.around import Around
from merak.graph.trace.opaque.experts.follow.follower import Follower
from merak.graph.trace.opaque.experts.program import Program
from merak.graph.trace.opaque.experts.rows import ExpertLoop, Kind, ends_of_rows, grouped_experts
from merak.graph.trace.opaque.experts.separate import separate_weights
from merak.graph.trace.opaque.experts.steps import (
    Choices,
    NotALoopError,
    OfRows,
    Product,
    Ranges,
    Scatter,
    Template,
)
from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.trace.opaque.operator import OpaqueCall
from merak.graph.trace.opaque.probe import called, undisturbed
from merak.graph.trace.opaque.run import autocast_of
from merak.graph.trace.state.snapshot import Snapshot

_MOST_BEFORE = 3
"""Integers that a router may make of scores before its choices, such as of groups of experts."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A call, on tensors that have no values.

    Args:
        call: the call.
        tensors: its tensors; the module's own first.
        place: of the choices among its inputs; None where it makes them itself.
        num_before: how many integers it then makes of scores before the choices.
        counts: places among its inputs of how many rows every expert has, all in one tensor or one
            in each; none where it is not called with that.
    """

    call: OpaqueCall
    tensors: Sequence[torch.Tensor]
    place: int | None = None
    num_before: int = 0
    counts: tuple[int, ...] = ()

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
        if self.counts:
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
    hooks, _ = call.module._get_backward_hooks()
    if hooks or call.module._get_backward_pre_hooks():
        return None
    found = (in_own_thread(_found, subject) for subject in _subjects(call, tensors, has_mask))
    return next((loop for loop in found if loop is not None), None)


def _subjects(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], has_mask: bool
) -> Iterator[Subject]:
    """What the module may be called with: choices, how many rows every expert has, or neither."""
    inputs = tensors[len(call.states) :]
    numbers = _possible_stacks(call, tensors[: call.parameters])
    if call.scalars:  # that the host has read
        if len(call.scalars) in numbers and any(t.ndim == 2 for t in inputs):
            yield Subject(call, tensors, counts=tuple(sorted(call.scalars)))
        return
    chosen = [i for i, t in enumerate(inputs) if not t.is_floating_point()]
    if not chosen and inputs and inputs[0].ndim > 1 and numbers:
        yield Subject(call, tensors)
    has_choices = len(chosen) == 1 and inputs[chosen[0]].dtype is torch.int64
    if has_choices and inputs[chosen[0]].ndim in ((1, 2, 3) if has_mask else (1, 2)):
        yield Subject(call, tensors, chosen[0])
    counts = [i for i, t in enumerate(inputs) if tuple(t.shape) in {(n,) for n in numbers}]
    if len(counts) == 1 and chosen in ([], counts) and any(t.ndim == 2 for t in inputs):
        yield Subject(call, tensors, counts=(counts[0],))


def _found(module: Subject) -> ExpertLoop | None:
    call, found, num_experts = module.call, None, 0
    with undisturbed(call), torch.enable_grad():
        before = Snapshot.take(call.module)
        makes_choices = module.place is None and not module.counts
        for num_before in range(_MOST_BEFORE + 1 if makes_choices else 1):
            module = replace(module, num_before=num_before)
            num_classes = _num_classes(module)
            for num_experts in _possible_numbers(module, num_classes):
                found = _programs(module, num_experts)
                if found is not None:
                    break
            if found is not None and not num_classes and _has_others(module, num_experts):
                found = None
                break
            if found is not None or not num_classes:
                break  # no integers were left
        is_changed = bool(before.changes())
        before.restore()
    if found is None or is_changed:
        return None  # what it keeps, others may read
    program, idle = found
    skips_idle = _skips_idle(program, idle)
    if skips_idle is None:
        return None
    numbered = groupby(range(num_experts), key=program.templates.get)
    spans = [(steps, list(experts)) for steps, experts in numbered if steps is not None]
    kinds = tuple(Kind(own[0], own[-1] + 1, steps) for steps, own in spans)
    have_products = [kind for kind in kinds if _has_products(kind.steps)]
    if len(have_products) != 1 or have_products[0].first or len(kinds) > 2:
        return None
    by_rows = program.in_rows or isinstance(kinds[0].steps[-1], Scatter)
    if (by_rows and len(kinds) > 1) or (not skips_idle and _has_unread(have_products[0])):
        return None
    is_mask = module.choices is not None and module.choices.ndim == 3
    is_complete = num_experts == num_classes and (not module.counts or _keeps_zeros(kinds))
    counts = tuple(len(call.states) + place for place in module.counts)
    if counts and not by_rows:
        return None
    loop = ExpertLoop(program, is_mask, counts, num_experts, is_complete, skips_idle, kinds)
    return loop if _has_operators(loop, module) else None


def _has_products(steps: Template) -> bool:
    return any(isinstance(step, Product) for step in steps)


def _keeps_zeros(kinds: Sequence[Kind]) -> bool:
    """Whether rows behind those of all experts give zeros, as they do in a grouped product."""
    steps = [step for kind in kinds for step in kind.steps]
    products = [step for step in steps if isinstance(step, Product) and step.bias is None]
    return len(products) + sum(isinstance(step, OfRows) for step in steps) == len(steps)


def _has_unread(kind: Kind) -> bool:
    """Whether there are parameters like the experts' that none of them reads."""
    numbers = [len(step.weight.numbers) for step in kind.steps if isinstance(step, Product)]
    return max(numbers) > max(kind.stop, 1)


def _has_operators(loop: ExpertLoop, module: Subject) -> bool:
    """Whether operators on all rows give what the module returns, as far as sizes and types."""
    given = [_without_values(tuple(t.shape), t.dtype) for t in module.tensors]
    ends = ends_of_rows([given[number] for number in loop.counts]) if loop.counts else None
    try:
        made = grouped_experts(loop, module.call, given, ends)
    except Exception:  # of functions that are called again
        return False
    return [(tuple(t.shape), t.dtype) for t in made] == list(loop.program.kinds)


def _programs(module: Subject, num_experts: int) -> tuple[Program, Program | None] | None:
    """What the module does, which is the same for any number of tokens, whatever they choose.

    And what it does where the last expert that multiplies is idle; None where that cannot be told.
    """
    sizes = _few_tokens(num_experts), _few_tokens(num_experts) + 2
    try:
        first, other = (_followed(module, Routing(num_experts, size)) for size in sizes)
        # A number that its code has read from the choices would differ.
        skewed = _followed(module, Routing(num_experts, sizes[0], is_skewed=True))
        own = _followed(module, Routing(num_experts, module.num_tokens))
    except Exception:  # whatever the module's code does with tensors that have no values
        return None
    if skewed != first or other.templates != first.templates:
        return None
    if not own.templates.items() <= first.templates.items():
        return None
    last = _last_product(first)
    try:
        idle = _followed(module, Routing(num_experts, sizes[0], is_skewed=True, idle=last))
    except Exception:  # there may be no expert that every token leaves out
        return replace(own, templates=first.templates), None
    if replace(idle, templates=first.templates) != first:
        return None
    try:  # a single row may be treated otherwise than many
        lone = _followed(module, Routing(num_experts, sizes[0], is_skewed=True, lone=last))
    except Exception:
        return None
    return (replace(own, templates=first.templates), idle) if lone == first else None


def _few_tokens(num_experts: int) -> int:
    """Tokens of which every expert gets two or more: torch treats a single row otherwise.

    And so many that a skewed routing gives one expert more than a limit for each would let it have.
    """
    return 5 * num_experts + 1


def _last_product(program: Program) -> int | None:
    """The last expert that multiplies."""
    return max((e for e, steps in program.templates.items() if _has_products(steps)), default=None)


def _skips_idle(program: Program, idle: Program | None) -> bool | None:
    """Whether an expert that no token chooses is not called; None where it cannot be told.

    Parameters of its own have no gradient then, and a gradient of zeros where it is called without
    rows. A stack of all experts' weights has one in any case.
    """
    steps = [step for own in program.templates.values() for step in own]
    if not any(isinstance(step, Product) and len(step.weight.numbers) > 1 for step in steps):
        return False
    return None if idle is None else _last_product(program) not in idle.templates


def _possible_numbers(module: Subject, num_classes: int) -> Iterator[int]:
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


def _fails(module: Subject, num_experts: int) -> bool:
    """Whether the module's own code fails where tokens choose among so many experts."""
    try:
        _followed(module, Routing(num_experts, _few_tokens(num_experts)))
    except Exception as error:
        return not isinstance(error, NotALoopError)
    return False


def _has_others(module: Subject, num_experts: int) -> bool:
    """Whether the module does something for choices of no expert that has weights.

    Where it fails, there can be none.
    """
    more = Routing(num_experts + 1, _few_tokens(num_experts + 1))
    try:
        return num_experts in _followed(module, more).templates
    except Exception as error:
        return isinstance(error, NotALoopError)


def _num_classes(module: Subject) -> int:
    """How many different choices there are, by a mask or by scores; 0 if they do not tell."""
    if module.choices is not None and module.choices.ndim == 3:
        return module.choices.shape[-1] + 1
    if module.counts:
        first = module.inputs[module.counts[0]]
        return first.shape[0] if first.ndim else len(module.counts)
    try:
        around, given = _prepared(module, Routing(1, 1))
    except NotALoopError:
        return 0
    with suppress(Exception), around.follower, around:  # only for the mask, which comes first
        called(module.call, given)
    return around.num_classes


def _followed(module: Subject, routing: Routing) -> Program:
    """What the module does with some tokens."""
    around, given = _prepared(module, routing)
    with around.follower, around, around.functions():
        result = called(module.call, given)
    around.follower.finish()
    if any(tensor._version for tensor in given):
        raise NotALoopError  # it writes into what it is given
    return around.program(result)


def _prepared(module: Subject, routing: Routing) -> tuple[Around, list[torch.Tensor]]:
    """What follows the module, and what the module is called with."""
    call, num_tokens, num_experts = module.call, routing.num_tokens, routing.num_experts
    separate = separate_weights(call, module.tensors[: call.parameters], num_experts)
    states = [_without_values(tuple(t.shape), t.dtype) for t in module.tensors[: len(call.states)]]
    follower = Follower(None, num_tokens, states[: call.parameters], separate, call.autocast)

    def choose(shape: tuple[int, ...]) -> torch.Tensor:
        if shape[0] % num_tokens or len(shape) > (3 if shape[0] == num_tokens else 1):
            raise NotALoopError
        chosen = replace(routing, num_tokens=shape[0]) if len(shape) == 1 else routing
        follower.choose(chosen.choices(shape[1] if len(shape) > 1 else 1))
        assert follower.choices is not None
        index = follower.choices.index if len(shape) > 1 else follower.choices.index[:, 0]
        # A mask has no place for the last, which is none.
        is_mask = len(shape) == 3
        return functional.one_hot(index, num_experts)[..., :-1].clone() if is_mask else index

    def given(place: int, tensor: torch.Tensor) -> torch.Tensor:
        if place == module.place:
            return choose((num_tokens, *tensor.shape[1:]))
        if place in module.counts:
            own = counts if tensor.ndim else counts[module.counts.index(place)]
            return torch.tensor(own).to(tensor.dtype)
        return _of_tokens(tensor, module.num_tokens, num_tokens)

    counts = routing.counts(num_tokens)
    follower.ranges = Ranges.of(counts) if module.counts else None
    inputs = [given(place, tensor) for place, tensor in enumerate(module.inputs)]
    for number, tensor in enumerate(inputs, len(states)):
        follower.note_whole(tensor, number)
    place = next(iter(module.counts), module.place)
    choices = None if place is None else len(states) + place
    with autocast_of(call):
        around = Around(follower, [*states, *inputs], choices, choose, module.num_before)
    return around, [*states, *inputs]


def _of_tokens(tensor: torch.Tensor, before: int, num_tokens: int) -> torch.Tensor:
    """An input of another number of tokens, without values."""
    shape = tuple(tensor.shape)
    if num_tokens == before:
        made = shape
    elif shape and shape[0] == before:
        made = (num_tokens, *shape[1:])
    elif len(shape) > 2 and shape[0] * shape[1] == before:
        made = (1, num_tokens, *shape[2:])
    else:
        raise NotALoopError
    return _without_values(made, tensor.dtype)


def _without_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.requires_grad_() if dtype.is_floating_point else made
