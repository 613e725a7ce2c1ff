"""Operators of a module around its loop over experts: functions of whole tensors.

A router, shared experts, reshapes. They are recorded as the module calls them, and called again
where the loop becomes operators on all rows. Functions that cut a tensor along its first dim may
take the rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from merak.graph.trace.opaque.experts.follow.follower import Follower
from merak.graph.trace.opaque.experts.follow.meanings import Row, Sum, is_same_memory
from merak.graph.trace.opaque.experts.follow.operands import in_range
from merak.graph.trace.opaque.experts.follow.sums import put_in_range
from merak.graph.trace.opaque.experts.program import TOTAL, Applied, Call, Program
from merak.graph.trace.opaque.experts.steps import (
    NotALoopError,
    OfChoices,
    OfRows,
    OfTokens,
    Pick,
    Step,
)
from merak.graph.trace.opaque.pytree import NotPlain, fill, flatten

_OF_VALUES = frozenset((
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount",
))  # fmt: skip
"""Functions whose result has a size that depends on values."""

_MAKES_SUM = frozenset(("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"))
"""Functions whose result rows may be added to, or put into."""

_OF_WHOLE = (OfTokens, OfChoices, OfRows, Pick)
"""Steps that read a whole tensor."""

_VIEWS = frozenset(("T", "mT", "H", "mH"))
"""Properties that are tensors."""


class Around(TorchFunctionMode):
    """Function mode that records calls on whole tensors, and leaves all others to the loop.

    Args:
        follower: of the loop.
        given: the module's tensors, and its inputs; their numbers are their places.
        choices: number of the choices; None where the module makes them.
        choose: makes choices of a shape in place of those that the module's router would make.
        num_before: how many integers the router makes of scores before the choices, such as those
            of groups of experts.

    Attributes:
        num_classes: how many different choices there are, as far as a mask or scores tell; else 0.
    """

    def __init__(
        self,
        follower: Follower,
        given: Sequence[torch.Tensor],
        choices: int | None,
        choose: Callable[[tuple[int, ...]], torch.Tensor],
        num_before: int = 0,
    ) -> None:
        super().__init__()
        self.follower, self.choices, self._choose = follower, choices, choose
        self._num_before = num_before
        self._classes: dict[int, int] = {}  # of integers, by number, how many scores they come of
        self.num_classes = 0
        self._given = len(given)
        self._next = len(given)
        self._after = {TOTAL}
        self._calls: list[Call] = []
        self._autocast = _autocasts()
        self._known = {id(t): (t, number) for number, t in enumerate(given)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call on whole tensors; pass all others on."""
        kwargs = kwargs or {}
        if self._autocast != _autocasts():
            raise NotALoopError  # all is called again in the autocast that the module is called in
        if (rows := self._rows_of(func, args, kwargs)) is not None:
            return rows[0]
        tensors, arguments = flatten((args, kwargs))
        numbers = [self._number(tensor) for tensor in tensors]
        operands = tuple(number for number in numbers if number is not None)
        if len(operands) < len(numbers) or _is_of_values(func, args):
            return func(*args, **kwargs)
        return self._run(func, tensors, arguments, operands)

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Record calls of autograd functions on whole tensors, too."""
        original: Any = vars(Function)["apply"].__func__
        is_inside = False

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            try:
                tensors, arguments = flatten((args, kwargs))
            except NotPlain:
                return original(cls, *args, **kwargs)
            numbers = [self._number(tensor) for tensor in tensors]
            operands = tuple(number for number in numbers if number is not None)
            if is_inside or len(operands) < len(numbers):
                return original(cls, *args, **kwargs)
            is_inside = True
            try:
                with torch._C.DisableTorchFunction():
                    return self._run(Applied(cls), tensors, arguments, operands)
            finally:
                is_inside = False

        with mock.patch.object(Function, "apply", classmethod(apply)):
            yield

    def program(self, result: Any) -> Program:
        """Program of an experts' module, without results that nobody reads.

        Raises:
            NotALoopError: it returns something else, or the sum goes nowhere.
        """
        leaves, template = flatten(result)
        numbers = [self._number(leaf) for leaf in leaves]
        outputs = [number for number in numbers if number is not None]
        follower = self.follower
        if len(outputs) < len(numbers) or self.choices is None:
            raise NotALoopError
        start = None if follower.start is None else self._known[id(follower.start)][1]
        steps = [step for own in follower.templates.values() for step in own]
        places = [step.place for step in steps if isinstance(step, _OF_WHOLE)]
        starts = () if start is None else (start,)
        calls = _needed(self._calls, {*outputs, *places, self.choices, *starts})
        if TOTAL not in {*outputs, *(n for call in calls for n in call.operands)}:
            raise NotALoopError
        made = dict.fromkeys(number for call in calls for number in call.results)
        new = {number: number for number in (TOTAL, *range(self._given))}
        new |= {before: number for number, before in enumerate(made, self._given)}
        calls = [
            replace(
                call,
                operands=tuple(new[n] for n in call.operands),
                results=tuple(new[n] for n in call.results),
            )
            for call in calls
        ]
        return Program(
            before=tuple(call for call in calls if not call.is_after),
            after=tuple(call for call in calls if call.is_after),
            choices=new[self.choices],
            start=None if start is None else new[start],
            in_rows=follower.in_rows,
            outputs=tuple(new[n] for n in outputs),
            kinds=tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves),
            templates={
                expert: tuple(_renumbered(step, new) for step in own)
                for expert, own in follower.templates.items()
            },
            result=template,
        )

    def _rows_of(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Rows of experts that a function takes from a whole tensor that has those of all.

        Or nothing, for one that puts them there; None for another function.
        """
        follower, name = self.follower, _name(func)
        ranges, x = follower.ranges, args[0] if args else None
        _, number = self._known.get(id(x), (x, TOTAL))
        is_put = name == "__setitem__" and isinstance(follower.meaning(args[2]), Row)
        if ranges is None or not isinstance(x, torch.Tensor) or follower.is_weight(x):
            return None
        if x.shape[:1] != (ranges.num_rows,) or (number in self._after and not is_put):
            return None
        cut = cut_of(name, args, kwargs)
        if cut is None or not all(ends in ranges.experts for ends in cut.ends):
            return None
        if is_put:
            if cut.others or not isinstance(follower.meaning(x), Sum):
                raise NotALoopError
            with follower.paused():
                func(*args, **kwargs)
            put_in_range(follower, x, cut.ends[0], args[2])
            return (None,)
        if name == "__setitem__":
            return None
        rows = tuple(in_range(follower, x, number, ends) for ends in cut.ends)
        if cut.others:
            return (rows[0][(slice(None), *cut.others)],)
        return (rows[0] if cut.is_one else rows,)

    def _number(self, tensor: torch.Tensor) -> int | None:
        """The number of a whole tensor; None for rows, and for what depends on values."""
        total = self.follower.total
        if total is not None and tensor is total:
            return TOTAL
        known = self._known.get(id(tensor))
        is_before = known is None or known[1] not in self._after
        if is_before and total is not None and tensor.is_meta and is_same_memory(tensor, total):
            return self._reshaped(tensor)
        return None if known is None else known[1]

    def _reshaped(self, tensor: torch.Tensor) -> int:
        """The number of the sum in the shape of another view of it."""
        if tensor.numel() != self.follower.total.numel():  # type: ignore[union-attr]
            raise NotALoopError
        _, arguments = flatten(((tensor, tuple(tensor.shape)), {}))
        self._calls.append(
            Call(torch.reshape, arguments, (TOTAL,), (self._next,), writes=False, is_after=True)
        )
        self._after.add(self._next)
        self._next += 1
        return self._next - 1

    def _run(
        self, func: Any, tensors: Sequence[torch.Tensor], arguments: Any, operands: tuple[int, ...]
    ) -> Any:
        name = _name(func)
        is_meta = any(tensor.is_meta for tensor in tensors)
        values = [t.to("meta") if is_meta and not t.is_meta else t for t in tensors]
        args, kwargs = fill(arguments, values)
        is_weight = bool(tensors) and all(self.follower.is_weight(t) for t in tensors)
        versions = [value._version for value in values]
        with self.follower.paused(not is_weight and name not in _MAKES_SUM):
            result = func(*args, **kwargs)
        if func is functional.one_hot:
            self.num_classes = result.shape[-1]
        try:
            found, template = flatten(result)
        except NotPlain:
            return result  # such as an array of NumPy
        written = [v for v, old in zip(values, versions, strict=True) if v._version != old]
        if not written and (not found or any(result is tensor for tensor in tensors)):
            return result
        if _is_property(func) and name not in _VIEWS:
            raise NotALoopError
        if any(t.requires_grad for t in values) and not torch.is_grad_enabled():
            raise NotALoopError  # what is called again would have gradients
        numbers = tuple(range(self._next, self._next + len(found)))
        self._next += len(found)
        is_after = not self._after.isdisjoint(operands)
        if is_after:
            self._after |= {*numbers}
            self.follower.is_read = True
        self._check_written(written, tensors, is_after)
        self._calls.append(Call(func, arguments, operands, numbers, bool(written), is_after))
        if self.choices is None and is_meta:
            is_scores = values[0].is_floating_point() and values[0].ndim > 0
            scores = values[0].shape[-1] if is_scores else 0
            classes = [self._classes[n] for n in operands if n in self._classes] or [scores]
            self._make_choices(found, numbers, classes[0])
        return fill(template, [self._noted(*own) for own in zip(found, numbers, strict=True)])

    def _check_written(
        self, written: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], is_after: bool
    ) -> None:
        """Note that other views of what the sum goes into are read behind it, too."""
        for value in written:
            if not any(value is tensor for tensor in tensors):
                raise NotALoopError  # its values would not be those that the code reads
            for known, number in self._known.values() if is_after else ():
                if known.is_meta == value.is_meta and is_same_memory(known, value):
                    self._after.add(number)

    def _make_choices(
        self, found: list[torch.Tensor], numbers: Sequence[int], num_scores: int
    ) -> None:
        """Take integers that come of scores for the experts that tokens choose."""
        for i, tensor in enumerate(found):
            if tensor.is_meta and tensor.dtype is torch.int64:
                self._num_before -= 1
                if self._num_before >= 0:
                    self._classes[numbers[i]] = num_scores
                    continue
                self.num_classes = num_scores
                found[i], self.choices = self._choose(tuple(tensor.shape)), numbers[i]
                for known, number in list(self._known.values()):
                    self.follower.note_whole(known, number)
                return

    def _noted(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        self._known[id(tensor)] = tensor, number
        self.follower.note_whole(tensor, number)
        return tensor


def _autocasts() -> list[tuple[bool, torch.dtype]]:
    """The autocasts that are active: whether, and in which dtype, on each kind of device."""
    kinds = ("cpu", getattr(torch.accelerator.current_accelerator(), "type", "cuda"))
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _renumbered(step: Step, new: Mapping[int, int]) -> Step:
    if isinstance(step, _OF_WHOLE):
        return replace(step, place=new[step.place])
    return step


def _needed(calls: Sequence[Call], wanted: set[int]) -> list[Call]:
    """The calls that some values come from, and all that write."""
    found = []
    for call in reversed(calls):
        if call.writes or wanted & set(call.results):
            wanted |= set(call.operands)
            found.append(call)
    return found[::-1]


def _is_property(func: Any) -> bool:
    return bool(getattr(func, "__name__", "") == "__get__")


def _name(func: Any) -> str:
    if _is_property(func):
        return str(func.__self__.__name__)
    return str(getattr(func, "__name__", ""))


def _is_of_values(func: Any, args: Any) -> bool:
    name = _name(func)
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in index)
    return name in _OF_VALUES or (name == "where" and len(args) == 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts of a tensor's first dim that a function takes, and an index along the others.

    Args:
        ends: where each of its parts begins and ends.
        is_one: whether it returns the one part, not a tuple of parts.
        others: what it takes along the other dims, as an index.
    """

    ends: tuple[tuple[int, int], ...]
    is_one: bool = True
    others: tuple[Any, ...] = ()


def cut_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cut | None:
    """Part that a function, by its name, takes of its first argument; None for other functions."""
    x, *rest = args
    if name in ("__getitem__", "__setitem__"):
        return _indexed(x, rest[0])
    options = {**dict(zip(_NAMES.get(name, ()), rest, strict=False)), **kwargs}
    if not options or options.get("dim", 0) != 0:
        return None
    if name == "narrow":
        start = int(options["start"])
        return Cut(((start, start + int(options["length"])),))
    where = next((options[key] for key in _LISTS if key in options), None)
    if not isinstance(where, (list, tuple)):
        return None
    if name == "tensor_split":
        return Cut(tuple(pairwise((0, *map(int, where), x.shape[0]))), is_one=False)
    return Cut(tuple(pairwise(accumulate(map(int, where), initial=0))), is_one=False)


def _indexed(x: torch.Tensor, index: Any) -> Cut | None:
    first, *others = index if isinstance(index, tuple) else (index,)
    if not isinstance(first, slice) or not x.ndim:
        return None
    start, stop, step = first.indices(x.shape[0])
    return Cut(((start, stop),), others=tuple(others)) if step == 1 else None


_LISTS = ("split_size_or_sections", "split_size", "split_sizes", "indices_or_sections", "indices")
"""Names of the argument that says where a function cuts."""

_NAMES = {
    "narrow": ("dim", "start", "length"),
    "split": ("split_size_or_sections", "dim"),
    "split_with_sizes": ("split_sizes", "dim"),
    "tensor_split": ("indices_or_sections", "dim"),
}
"""Functions that cut, and the names of their arguments."""
