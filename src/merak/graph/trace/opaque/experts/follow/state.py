"""State of following a module that loops over experts: tensors, steps, and the sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from merak.graph.trace.opaque.experts.follow.meanings import (
    Input,
    Meaning,
    Own,
    Row,
    Stack,
    Sum,
    is_same_memory,
)
from merak.graph.trace.opaque.experts.separate import Separate
from merak.graph.trace.opaque.experts.steps import (
    Choices,
    NotALoopError,
    Pairs,
    Product,
    Ranges,
    Result,
    Scatter,
    Step,
    Template,
    Weight,
    read_steps,
)


class Loop:
    """A loop over experts, as far as it has been followed.

    Args:
        choices: the experts of the tokens; None before the module has made them.
        num_tokens: the number of tokens.
        weights: the module's parameters, without values.
        separate: of parameters that every expert has one of, the expert, and which they are.
        autocast: that the module runs in, (device type, dtype).

    Attributes:
        ranges: where rows of experts lie in tensors that have them sorted; None before the choices.
        start: the zeros that rows are added to, or what they are put into; None for neither.
        total: what they have become.
        is_read: whether something has read it.
        in_rows: whether the total has the rows of all experts, one expert's behind the other's.
    """

    def __init__(
        self,
        choices: Choices | None,
        num_tokens: int,
        weights: Sequence[torch.Tensor],
        separate: Separate,
        autocast: tuple[str, torch.dtype] | None,
    ) -> None:
        super().__init__()
        self.choices, self.num_tokens, self.autocast = choices, num_tokens, autocast
        self.ranges: Ranges | None = None
        self.start: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.is_read = self.in_rows = self.is_paused = False
        self.steps: dict[int, list[Step]] = {}
        self.order: dict[int, Pairs] = {}
        self.ends: dict[int, Result] = {}
        self._blank: list[torch.Tensor] = []
        self._unfilled: list[torch.Tensor] = []
        self._filled: list[int] = []
        self._same_tokens: set[int] = set()
        self._known: dict[int, tuple[torch.Tensor, Meaning]] = {}
        self._whole: dict[int, tuple[torch.Tensor, int]] = {}
        for number, weight in enumerate(weights):
            shape = tuple(weight.shape)
            if number in separate:
                expert, numbers = separate[number]
                self.note(weight, Own(expert, Weight(numbers, (len(numbers), *shape))))
            else:
                self.note(weight, Stack(number, shape))

    @property
    def num_choices(self) -> int:
        """Number of experts that a token is routed to; 0 before the routing is known."""
        return 0 if self.choices is None else self.choices.index.shape[1]

    @property
    def templates(self) -> dict[int, Template]:
        """Steps of each expert on its rows; experts that add nothing are left out."""
        return {expert: tuple(self.steps[expert]) for expert in self.ends}

    @contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """Context in which operators on whole tensors run and are not recorded."""
        self.is_paused = is_paused
        try:
            yield
        finally:
            self.is_paused = False

    def meaning(self, value: Any) -> Meaning | None:
        """Meaning of a value in the loop over experts; None for one that is not followed."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    def note(self, made: Any, meaning: Meaning) -> Any:
        """Record the meaning of a tensor."""
        self._known[id(made)] = made, meaning
        return made

    def forget(self, made: torch.Tensor) -> Meaning:
        """Forget the meaning of a tensor that nothing reads."""
        _, meaning = self._known.pop(id(made))
        return meaning

    def ran(self, func: Any, args: Any, kwargs: Any, meaning: Meaning) -> Any:
        """An operator's result, with a meaning."""
        return self.note(func(*without_values(args), **without_values(kwargs)), meaning)

    def step(self, expert: int, step: Step) -> Result:
        """Add a step to those of an expert."""
        own = self.steps.setdefault(expert, [])
        own.append(step)
        return Result(len(own) - 1)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        return isinstance(self.meaning(tensor), (Stack, Own))

    def is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor that is known shows the memory of a tensor."""
        others = [t for t, _ in (*self._known.values(), *self._whole.values()) if t is not tensor]
        return any(t.is_meta == tensor.is_meta and is_same_memory(t, tensor) for t in others)

    def choose(self, choices: Choices) -> None:
        """Record the routing of the module; where it is one row, each choice is a token."""
        self.choices, self.ranges = choices, choices.ranges
        if (size := choices.index.shape[0]) != self.num_tokens:
            self.num_tokens = size
            is_input = {i for i, (_, one) in self._known.items() if isinstance(one, Input)}
            self._known = {i: one for i, one in self._known.items() if i not in is_input}

    def note_whole(self, tensor: torch.Tensor, number: int) -> None:
        """Record a whole tensor, which rows may be indexed from."""
        self._whole[id(tensor)] = tensor, number
        if not tensor.is_meta or self.meaning(tensor) is not None:
            return
        if any(is_same_memory(tensor, zeros) for zeros in self._blank):
            self.note(tensor, Sum())
            return
        shape = tuple(tensor.shape)
        is_led = shape[:2] == (1, self.num_tokens) and self.num_tokens > 1
        if is_led or shape[:1] == (self.num_tokens,):
            self.note(tensor, Input(number, shape[2 if is_led else 1 :], is_led))

    def whole(self, tensor: Any) -> int:
        """The number of a whole tensor."""
        if id(tensor) not in self._whole:
            raise NotALoopError
        return self._whole[id(tensor)][1]

    def expert_of(self, tokens: torch.Tensor) -> int:
        """The expert that some tokens belong to.

        Where all tokens choose the same experts, it is taken for the first that has not ended: the
        weights that its rows are multiplied by must then be its own.
        """
        if self.choices is None:
            raise NotALoopError
        found = self.choices.experts_of(tokens)
        if len(found) > 1:
            found = {expert: order for expert, order in found.items() if expert not in self.ends}
            self._same_tokens |= found.keys()
        if not found:
            raise NotALoopError
        expert = min(found)
        if self.order.setdefault(expert, found[expert]) != found[expert]:
            raise NotALoopError
        return expert

    def blank(self, made: torch.Tensor, *, is_filled: bool) -> torch.Tensor:
        """Record a new tensor that rows may be added to, or written into if uninitialised."""
        self._blank.append(self.note(made, Sum()))
        self._unfilled += [] if is_filled else [made]
        return made

    @property
    def has_unfilled(self) -> bool:
        """Whether there is an uninitialised tensor that rows may be put into."""
        return bool(self._unfilled)

    def is_unfilled(self, total: torch.Tensor) -> bool:
        """Whether a tensor was uninitialised before rows were put into it."""
        return any(is_same_memory(total, one) for one in self._unfilled)

    def end(self, expert: int, result: Result, before: torch.Tensor, after: torch.Tensor) -> Any:
        """The sum behind an expert; there is one, which nobody reads before it is complete."""
        is_other = self.total is not None and not is_same_memory(before, self.total)
        if self.is_read or is_other or expert in self.ends:
            raise NotALoopError
        if self.start is None:
            self.start = before
        self.ends[expert] = result
        self.total = after
        return self.note(after, Sum())

    def fill(self, places: Sequence[int]) -> None:
        """Record rows of the sum that an expert's rows were written into.

        Raises:
            NotALoopError: one of them is another row's already.
        """
        self._filled += places
        if len({*self._filled}) < len(self._filled):
            raise NotALoopError

    def finish(self) -> None:
        """Check that each expert's last value, and nothing else, is added to the sum."""
        ends = {expert: len(steps) - 1 for expert, steps in self.steps.items()}
        # What is computed without gradients would have some as operators of the graph.
        read = {expert: read_steps(steps) for expert, steps in self.steps.items()}
        rows = [(t, one) for t, one in self._known.values() if isinstance(one, Row)]
        rows = [(t, one) for t, one in rows if one.result.step in read[one.expert]]
        results = [tensor for tensor, _ in rows if tensor.is_floating_point()]
        if self.total is None or not all(t.requires_grad for t in (*results, self.total)):
            raise NotALoopError
        if ends != {e: r.step for e, r in self.ends.items() if r.item is None}:
            raise NotALoopError
        last = {type(self.steps[expert][-1]) for expert in self.ends}
        if Scatter in last and (len(last) > 1 or self.in_rows):
            raise NotALoopError
        for expert in self._same_tokens & self.ends.keys():
            if not any(isinstance(step, Product) for step in self.steps[expert]):
                raise NotALoopError
        if self.is_unfilled(self.total) and not self._is_full(self.total):
            raise NotALoopError  # some rows stay what is in memory

    def _is_full(self, total: torch.Tensor) -> bool:
        if self.in_rows or self._filled:
            return len(self._filled) == total.shape[0]
        chosen = set() if self.choices is None else {*self.choices.index.flatten().tolist()}
        return chosen <= self.ends.keys()


def without_values(values: Any) -> Any:
    """Nested values, with tensors without values in place of those that have some."""
    return tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to("meta"), values)
