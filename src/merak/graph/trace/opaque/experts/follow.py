"""What a module that loops over experts does with every expert's rows, one operator after another.

The module runs on tensors without values, and on a few tokens whose experts are known. So it is
known which expert's rows each of its operators takes, and from what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from merak.graph.ir.operators import CONVERSIONS, COPIES, RESHAPES, SPLITS, aten_family
from merak.graph.trace.opaque.experts.separate import Separate
from merak.graph.trace.opaque.experts.steps import (
    Choices,
    NotALoopError,
    OfChoices,
    OfTokens,
    Pairs,
    PerRow,
    Product,
    Result,
    Step,
    Template,
    Weight,
)

aten = torch.ops.aten

_UNDER_AUTOCAST = CONVERSIONS | RESHAPES | SPLITS | frozenset((
    "add", "clamp", "clamp_max", "clamp_min", "div", "gelu", "maximum", "minimum", "mul", "neg",
    "relu", "sigmoid", "silu", "slice", "sub", "tanh", "unsqueeze",
))  # fmt: skip
"""Operators beside products that an autocast leaves in the types of their operands."""


@dataclass(frozen=True, slots=True)
class _Input:
    """A whole tensor, (tokens, *tail); with a dim of one in front where `is_led`."""

    place: int
    tail: tuple[int, ...]
    is_led: bool = False


@dataclass(frozen=True, slots=True)
class _Stack:
    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Own:
    expert: int
    weight: Weight


@dataclass(frozen=True, slots=True)
class _Row:
    expert: int
    result: Result
    is_led: bool = False


@dataclass(frozen=True, slots=True)
class _Noise:
    """What dropout multiplies rows by.

    Args:
        row: the rows.
        kept: the fraction that it keeps; None before it is drawn.
    """

    row: _Row
    kept: float | None = None


@dataclass(frozen=True, slots=True)
class _Sum:
    """The tensor that rows are added to, (tokens, …)."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The sum's rows of an expert's tokens; with the expert's own rows once these are added."""

    expert: int
    row: _Row | None = None


_Meaning = _Input | _Stack | _Own | _Row | _Noise | _Sum | _Part


class Follower(TorchDispatchMode):
    """Follows what a module's operators make of tokens and weights.

    Args:
        choices: the experts of the tokens; None before the module has made them.
        num_tokens: the number of tokens.
        weights: the module's parameters, without values.
        separate: of parameters that every expert has one of, the expert, and which they are.
        autocast: that the module runs in, (device type, dtype).
    """

    def __init__(
        self,
        choices: Choices | None,
        num_tokens: int,
        weights: Sequence[torch.Tensor],
        separate: Separate,
        autocast: tuple[str, torch.dtype] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices, self.num_tokens, self.autocast = choices, num_tokens, autocast
        self._blank: list[torch.Tensor] = []
        self._unfilled: list[torch.Tensor] = []
        self.start: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.is_read = False
        self._is_paused = False
        self.known: dict[int, tuple[torch.Tensor, _Meaning]] = {}
        self.steps: dict[int, list[Step]] = {}
        self.order: dict[int, Pairs] = {}
        self.ends: dict[int, Result] = {}
        for number, weight in enumerate(weights):
            shape = tuple(weight.shape)
            if number in separate:
                expert, numbers = separate[number]
                self._note(weight, _Own(expert, Weight(numbers, (len(numbers), *shape))))
            else:
                self._note(weight, _Stack(number, shape))

    @property
    def num_choices(self) -> int:
        """How many experts a token chooses; 0 before it has."""
        return 0 if self.choices is None else self.choices.index.shape[1]

    @property
    def templates(self) -> dict[int, Template]:
        """What each expert does with its rows; experts that add nothing are left out."""
        return {expert: tuple(self.steps[expert]) for expert in self.ends}

    @contextmanager
    def paused(self, is_paused: bool) -> Iterator[None]:
        """Let operators on whole tensors run."""
        self._is_paused = is_paused
        try:
            yield
        finally:
            self._is_paused = False

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        return isinstance(self.meaning(tensor), (_Stack, _Own))

    def choose(self, choices: Choices) -> None:
        """Note the choices that the module has made; where they are in one row, each is a token."""
        self.choices = choices
        if (size := choices.index.shape[0]) != self.num_tokens:
            self.num_tokens = size
            is_input = {i for i, (_, one) in self.known.items() if isinstance(one, _Input)}
            self.known = {i: one for i, one in self.known.items() if i not in is_input}

    def note_whole(self, tensor: torch.Tensor, number: int) -> None:
        """Note a whole tensor of all tokens, which rows may be picked from."""
        if not tensor.is_meta or self.meaning(tensor) is not None:
            return
        if any(is_same_memory(tensor, zeros) for zeros in self._blank):
            self._note(tensor, _Sum())
            return
        shape = tuple(tensor.shape)
        is_led = shape[:2] == (1, self.num_tokens) and self.num_tokens > 1
        if is_led or shape[:1] == (self.num_tokens,):
            self._note(tensor, _Input(number, shape[2 if is_led else 1 :], is_led))

    def finish(self) -> None:
        """Check that each expert's last value, and nothing else, is added to the sum."""
        ends = {expert: len(steps) - 1 for expert, steps in self.steps.items()}
        # What is computed without gradients would have some as operators of the graph.
        rows = [tensor for tensor, one in self.known.values() if isinstance(one, _Row)]
        if self.total is None or not all(t.requires_grad for t in (*rows, self.total)):
            raise NotALoopError
        if ends != {e: r.step for e, r in self.ends.items() if r.item is None}:
            raise NotALoopError
        chosen = set() if self.choices is None else {*self.choices.index.flatten().tolist()}
        if self._is_unfilled(self.total) and not chosen <= self.ends.keys():
            raise NotALoopError  # some rows stay what is in memory

    def meaning(self, value: Any) -> _Meaning | None:
        """What a value is; None for anything that is not followed."""
        known = self.known.get(id(value))
        return None if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what its result is."""
        kwargs, name = kwargs or {}, aten_family(func)
        if self._is_paused:
            return func(*args, **kwargs)
        if not any(self.meaning(value) for value in tree_leaves((args, kwargs))):
            made = func(*args, **kwargs)
            if name in ("zeros", "empty") and made.is_meta:
                self._blank.append(self._note(made, _Sum()))
                self._unfilled += [made] if name == "empty" else []
            return made
        rule = _RULES.get(name)
        made = None if rule is None else rule(self, func, args, kwargs)
        return self.per_row(func, args, kwargs) if made is None else made

    def ran(self, func: Any, args: Any, kwargs: Any, meaning: _Meaning) -> Any:
        """An operator's result, with a meaning."""
        made = func(*_meta(args), **_meta(kwargs))
        return self._note(made, meaning)

    def step(self, expert: int, step: Step) -> Result:
        """Add a step to those of an expert."""
        own = self.steps.setdefault(expert, [])
        own.append(step)
        return Result(len(own) - 1)

    def _note(self, made: Any, meaning: _Meaning) -> Any:
        self.known[id(made)] = made, meaning
        return made

    def picked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """index: rows of an expert's tokens, their choices' values, or an expert's own weight."""
        found, indices = self.meaning(args[0]), [_rows(index) for index in args[1]]
        args = (args[0], indices)
        if isinstance(found, _Stack) and len(indices) == 1 and indices[0].ndim == 0:
            return self._own(func, args, found, int(indices[0]))
        if isinstance(found, _Sum) and len(indices) == 1:
            return self.ran(func, args, kwargs, _Part(self._expert_of(indices[0])))
        if not isinstance(found, _Input) or (found.is_led and indices[0] is not None):
            raise NotALoopError
        first, *others = indices[1:] if found.is_led else indices
        expert = self._expert_of(first)
        order = self.order[expert]
        if len(others) > 1:
            raise NotALoopError
        step: Step = OfTokens(found.place, found.tail)
        if others:
            if others[0].tolist() != [choice for _, choice in order]:
                raise NotALoopError
            if found.is_led or found.tail[:1] != (self.num_choices,):
                raise NotALoopError
            step = OfChoices(found.place, found.tail[1:])
        result = self.step(expert, step)
        return self.ran(func, args, kwargs, _Row(expert, result, found.is_led))

    def _expert_of(self, tokens: torch.Tensor) -> int:
        """The expert that some tokens, or a mask of them, belong to."""
        if self.choices is None:
            raise NotALoopError
        expert, order = self.choices.expert_of(tokens)
        if self.order.setdefault(expert, order) != order:
            raise NotALoopError
        return expert

    def selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """select: an expert's own weight."""
        found = self.meaning(args[0])
        if not isinstance(found, _Stack) or args[1] != 0:
            return None
        return self._own(func, args, found, args[2])

    def _own(self, func: Any, args: Any, found: _Stack, expert: int) -> Any:
        own = Weight((found.number,), found.shape)
        return self.ran(func, args, {}, _Own(expert, own))

    def viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views of inputs, of stacks and of the sum; of rows, where they stay."""
        found, made = self.meaning(args[0]), func(*args, **kwargs)
        shape, num_tokens = tuple(made.shape), self.num_tokens
        if isinstance(found, _Stack):
            return self._note(made, _Stack(found.number, shape))
        if isinstance(found, _Sum):
            return self._note(made, found)
        if isinstance(found, _Input):
            is_led = shape[:2] == (1, num_tokens) and num_tokens > 1
            if not is_led and shape[:1] != (num_tokens,):
                raise NotALoopError
            return self._note(made, _Input(found.place, shape[2 if is_led else 1 :], is_led))
        if not isinstance(found, _Row):
            raise NotALoopError
        num_rows = args[0].shape[1 if found.is_led else 0]
        if shape[:1] != (num_rows,):
            raise NotALoopError
        view = PerRow(aten.reshape.default, (found.result, (-1, *shape[1:])), ())
        return self._note(made, _Row(found.expert, self.step(found.expert, view)))

    def flipped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A transposed weight."""
        found = self.meaning(args[0])
        if not isinstance(found, _Own) or args[0].ndim != 2:
            raise NotALoopError
        made = func(*args, **kwargs)
        weight = found.weight
        is_turned = made.stride() == args[0].stride()[::-1]
        flipped = replace(weight, is_transposed=weight.is_transposed ^ is_turned)
        return self._note(made, _Own(found.expert, flipped))

    def multiplied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mm and addmm: rows times the expert's own weight."""
        *bias, x, weight = map(self.meaning, args)
        if not isinstance(x, _Row) or not isinstance(weight, _Own) or x.is_led or kwargs:
            raise NotALoopError
        added = None
        if bias:
            if not isinstance(bias[0], _Own) or bias[0].expert != x.expert or args[0].ndim != 1:
                raise NotALoopError
            added = bias[0].weight
        if weight.expert != x.expert:
            raise NotALoopError
        dtype = None if self.autocast is None else self.autocast[1]
        step = Product(x.result, weight.weight, added, dtype)
        typed = [a if dtype is None else a.to(dtype) for a in args]
        return self.ran(func, typed, {}, _Row(x.expert, self.step(x.expert, step)))

    def added(self, func: Any, args: Any, kwargs: Any) -> Any:
        """index_add: an expert's last rows to the sum."""
        total, dim, tokens, rows = args
        row = self.meaning(rows)
        if not isinstance(self.meaning(total), _Sum) or dim != 0 or kwargs:
            raise NotALoopError
        if not isinstance(row, _Row) or row.is_led or row.expert in self.ends:
            raise NotALoopError
        if self._is_unfilled(total):
            raise NotALoopError
        if tokens.tolist() != [token for token, _ in self.order[row.expert]]:
            raise NotALoopError
        made = func(*_meta(args))
        return self._sum(row, total, args[0] if aten_family(func).endswith("_") else made)

    def added_to_part(self, func: Any, args: Any, kwargs: Any) -> Any:
        """add: an expert's last rows to the sum's rows of its tokens."""
        part, row = map(self.meaning, args)
        if not isinstance(part, _Part):
            return None
        if self._unfilled:
            raise NotALoopError
        if not isinstance(row, _Row) or row.is_led or row.expert != part.expert:
            raise NotALoopError
        if part.row is not None or kwargs:
            raise NotALoopError
        made = func(*args)
        return self._note(made, replace(part, row=row))

    def put(self, func: Any, args: Any, kwargs: Any) -> Any:
        """index_put: the sum's rows of an expert's tokens, to which its own are added.

        Where every token has one expert, its rows may come in the place of zeros.
        """
        total, indices, value, *accumulate = args
        indices = [_rows(index) for index in indices]
        found = self.meaning(value)
        if self.num_choices == 1 and isinstance(found, _Row):
            found = _Part(found.expert, found)
        if not isinstance(found, _Part) or found.row is None or len(indices) != 1:
            raise NotALoopError
        is_sum = isinstance(self.meaning(total), _Sum) and not any(accumulate) and not kwargs
        if not is_sum or found.expert in self.ends or self._expert_of(indices[0]) != found.expert:
            raise NotALoopError
        made = func(*_meta((total, indices, value)))
        return self._sum(found.row, total, total if aten_family(func).endswith("_") else made)

    def _sum(self, row: _Row, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The sum behind an expert; there is one, which nobody reads before it is complete."""
        is_other = self.total is not None and not is_same_memory(before, self.total)
        if self.is_read or is_other:
            raise NotALoopError
        if self.start is None:
            self.start = before
        self.ends[row.expert] = row.result
        self.total = after
        self._note(after, _Sum())
        return after

    def apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """detach: rows from which nothing may be computed; autograd detaches what it saves."""
        is_sum = isinstance(self.meaning(args[0]), _Sum)
        return self.zeros(func, args, kwargs) if is_sum else func(*args, **kwargs)

    def zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        """zeros_like and new_zeros: the tensor that rows are added to."""
        made = self.ran(func, args, kwargs, _Sum())
        self._blank.append(made)
        return made

    def unfilled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """empty_like and new_empty: what dropout fills, or the tensor that rows are put into."""
        found = self.meaning(args[0])
        if isinstance(found, _Row):
            return self.ran(func, args, kwargs, _Noise(found))
        made = self.zeros(func, args, kwargs)
        self._unfilled.append(made)
        return made

    def _is_unfilled(self, total: torch.Tensor) -> bool:
        return any(is_same_memory(total, one) for one in self._unfilled)

    def drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """bernoulli: the rows' elements that dropout keeps."""
        found = self.meaning(args[0])
        if not isinstance(found, _Noise) or found.kept is not None:
            raise NotALoopError
        return self._note(args[0], _Noise(found.row, args[1]))

    def scaled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """div, by the fraction that dropout keeps."""
        found = self.meaning(args[0])
        if not isinstance(found, _Noise) or args[1] != found.kept:
            raise NotALoopError
        return args[0]

    def dropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mul: of rows, and what dropout multiplies them by."""
        row, noise = map(self.meaning, args)
        if not isinstance(noise, _Noise):
            return None
        if row != noise.row or not isinstance(row, _Row) or noise.kept is None:
            raise NotALoopError
        step = PerRow(aten.dropout.default, (row.result, 1 - noise.kept, True), ())
        return self.ran(func, args, kwargs, _Row(row.expert, self.step(row.expert, step)))

    def per_row(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that treats every row by itself."""
        name, tensors = aten_family(func), [a for a in tree_leaves((args, kwargs)) if _is(a)]
        found = [self.meaning(tensor) for tensor in tensors]
        if name in CONVERSIONS and all(isinstance(one, _Sum) for one in found):
            return self.ran(func, args, kwargs, _Sum())
        rows = [one for one in found if isinstance(one, _Row)]
        if not rows or any(one.is_led for one in rows) or func._schema.is_mutable:
            raise NotALoopError
        expert = rows[0].expert
        if any(not isinstance(one, (_Row, _Own)) or one.expert != expert for one in found):
            raise NotALoopError
        if self.autocast is not None and name not in _UNDER_AUTOCAST:
            raise NotALoopError
        made = func(*args, **kwargs)
        self._check_rows(func, args, tensors, made)
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "dim", "approximate")}
        operands = tuple(self._reference(a) for a in args)
        step = self.step(expert, PerRow(func, operands, tuple(sorted(options.items()))))
        if isinstance(made, (tuple, list)):
            for item, one in enumerate(made):
                self._note(one, _Row(expert, Result(step.step, item)))
            return made
        return self._note(made, _Row(expert, step))

    def _reference(self, argument: Any) -> Any:
        found = self.meaning(argument)
        if isinstance(found, _Row):
            return found.result
        if isinstance(found, _Own):
            return found.weight
        return tuple(argument) if isinstance(argument, list) else argument

    def _check_rows(self, func: Any, args: Any, tensors: Sequence[Any], made: Any) -> None:
        """Check that an operator gives every row from the same row of its operands."""
        name, results = aten_family(func), tree_leaves(made)
        rows = [t for t in tensors if isinstance(self.meaning(t), _Row)]
        owns = [t for t in tensors if isinstance(self.meaning(t), _Own)]
        num_rows, ndim = rows[0].shape[0], results[0].ndim
        if any(one.shape[0] != num_rows for one in (*rows, *results)):
            raise NotALoopError
        if name in SPLITS | {"slice", "select", "unsqueeze"}:
            dim = (
                args[2 if name in SPLITS else 1] if len(args) > (2 if name in SPLITS else 1) else 0
            )
            grown = rows[0].ndim + (name == "unsqueeze")
            if not dim % grown > 0 or owns:
                raise NotALoopError
        elif torch.Tag.pointwise in func.tags:
            same = all(one.ndim == ndim for one in rows)
            if not same or any(one.ndim != ndim - 1 for one in owns):
                raise NotALoopError
        elif name not in CONVERSIONS | COPIES or owns:
            raise NotALoopError


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, which may have no values, are views of the same memory."""
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _rows(index: Any) -> Any:
    """An index as it is, but for a mask of tokens, in whose place come their numbers."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.ndim == 1
    return index.nonzero()[:, 0] if is_mask else index


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _meta(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to("meta"), values)


_RULES: dict[str, Callable[[Follower, Any, Any, Any], Any]] = {
    "index": Follower.picked,
    "select": Follower.selected,
    "view": Follower.viewed,
    "_unsafe_view": Follower.viewed,
    "unsqueeze": lambda f, func, args, kw: (
        None if isinstance(f.meaning(args[0]), _Row) else f.viewed(func, args, kw)
    ),
    "t": Follower.flipped,
    "transpose": Follower.flipped,
    "permute": Follower.flipped,
    "mm": Follower.multiplied,
    "addmm": Follower.multiplied,
    "add": Follower.added_to_part,
    "add_": Follower.added_to_part,
    "index_put": Follower.put,
    "index_put_": Follower.put,
    "index_add": Follower.added,
    "index_add_": Follower.added,
    "detach": Follower.apart,
    "empty_like": Follower.unfilled,
    "new_empty": Follower.unfilled,
    "bernoulli_": Follower.drawn,
    "div_": Follower.scaled,
    "mul": Follower.dropped,
    "zeros_like": Follower.zeros,
    "new_zeros": Follower.zeros,
}
"""What operators make of what is followed, by name; all others treat every row by itself."""
