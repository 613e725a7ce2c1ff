"""Rows of an expert, and its own weights: how they are picked, viewed and multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from merak.graph.trace.opaque.experts.follow.meanings import (
    Input,
    Own,
    Part,
    Row,
    Stack,
    Sum,
    without_mask,
)
from merak.graph.trace.opaque.experts.follow.state import Loop
from merak.graph.trace.opaque.experts.steps import (
    NotALoopError,
    OfChoices,
    OfRows,
    OfTokens,
    PerRow,
    Pick,
    Product,
    Step,
    Weight,
)

aten = torch.ops.aten


def in_range(loop: Loop, tensor: torch.Tensor, number: int, ends: tuple[int, int]) -> torch.Tensor:
    """Slice of one expert's rows from a whole tensor that has all experts' rows in order.

    Args:
        loop: as it has been followed.
        tensor: the whole tensor.
        number: its number.
        ends: where the expert's rows begin and end.
    """
    assert loop.ranges is not None
    expert = loop.ranges.experts[ends]
    with loop.paused():
        rows = tensor[slice(*ends)]
    step = loop.step(expert, OfRows(number))
    loop.note(rows, Row(expert, step))
    return rows


def picked(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """index: rows of an expert's tokens, their choices' values, or an expert's own weight."""
    found, indices = loop.meaning(args[0]), [without_mask(index) for index in args[1]]
    args = (args[0], indices)
    if indices and all(isinstance(loop.meaning(index), Row) for index in indices):
        return _by_numbers(loop, func, args[0], indices)
    if isinstance(found, Stack) and len(indices) == 1 and indices[0].ndim == 0:
        return _own(loop, func, args, found, int(indices[0]))
    if isinstance(found, Sum) and len(indices) == 1:
        return loop.ran(func, args, kwargs, Part(loop.expert_of(indices[0])))
    if not isinstance(found, Input) or (found.is_led and indices[0] is not None):
        raise NotALoopError
    first, *others = indices[1:] if found.is_led else indices
    expert = loop.expert_of(first)
    order = loop.order[expert]
    if len(others) > 1:
        raise NotALoopError
    step: Step = OfTokens(found.place, found.tail)
    if others:
        if others[0].tolist() != [choice for _, choice in order]:
            raise NotALoopError
        if found.is_led or found.tail[:1] != (loop.num_choices,):
            raise NotALoopError
        step = OfChoices(found.place, found.tail[1:])
    result = loop.step(expert, step)
    return loop.ran(func, args, kwargs, Row(expert, result, found.is_led))


def picked_along(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """index_select: along the first dim."""
    source, dim, index = args
    if dim != 0 or index.ndim != 1 or kwargs:
        raise NotALoopError
    return picked(loop, aten.index.Tensor, (source, [index]), {})


def _by_numbers(loop: Loop, func: Any, source: Any, indices: Sequence[Any]) -> Any:
    """Elements of a whole tensor by integers of an expert's rows, or rows of the sum."""
    numbers = [one for one in map(loop.meaning, indices) if isinstance(one, Row)]
    expert, results = numbers[0].expert, tuple(one.result for one in numbers)
    is_plain = all(index.ndim == 1 and not index.is_floating_point() for index in indices)
    if any(one.expert != expert for one in numbers) or not is_plain:
        raise NotALoopError
    if isinstance(loop.meaning(source), Sum) and source.is_meta:
        if len(results) > 1:
            raise NotALoopError
        return loop.ran(func, (source, indices), {}, Part(expert, results[0]))
    step = loop.step(expert, Pick(loop.whole(source), results))
    if source.is_meta:
        return loop.ran(func, (source, indices), {}, Row(expert, step))
    return loop.note(func(source, indices), Row(expert, step))


def selected(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """select: an expert's own weight."""
    found = loop.meaning(args[0])
    if not isinstance(found, Stack) or args[1] != 0:
        return None
    return _own(loop, func, args, found, args[2])


def _own(loop: Loop, func: Any, args: Any, found: Stack, expert: int) -> Any:
    own = Weight((found.number,), found.shape)
    return loop.ran(func, args, {}, Own(expert, own))


def unbound(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """unbind: every expert's own weight."""
    found = loop.meaning(args[0])
    if not isinstance(found, Stack) or args[1:] not in ((), (0,)) or kwargs:
        return None
    own = Weight((found.number,), found.shape)
    return [loop.note(made, Own(expert, own)) for expert, made in enumerate(func(*args))]


def viewed(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of views: of inputs, stacks and the sum, and of rows that stay rows."""
    found, made = loop.meaning(args[0]), func(*args, **kwargs)
    shape, num_tokens = tuple(made.shape), loop.num_tokens
    if isinstance(found, Stack):
        return loop.note(made, Stack(found.number, shape))
    if isinstance(found, Sum):
        return loop.note(made, found)
    if isinstance(found, Input):
        is_led = shape[:2] == (1, num_tokens) and num_tokens > 1
        if not is_led and shape[:1] != (num_tokens,):
            raise NotALoopError
        return loop.note(made, Input(found.place, shape[2 if is_led else 1 :], is_led))
    is_single = args[0].shape[:1] == (1,) and shape == args[0].shape[1:]
    if is_single and (isinstance(found, Part) or (isinstance(found, Row) and not found.is_led)):
        return loop.note(made, found)  # as torch puts a single row
    if not isinstance(found, Row):
        raise NotALoopError
    num_rows = args[0].shape[1 if found.is_led else 0]
    if shape[:1] != (num_rows,):
        raise NotALoopError
    view = PerRow(aten.reshape.default, (found.result, (-1, *shape[1:])), ())
    return loop.note(made, Row(found.expert, loop.step(found.expert, view)))


def unsqueezed(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """unsqueeze, of anything but rows."""
    is_row = isinstance(loop.meaning(args[0]), Row)
    return None if is_row else viewed(loop, func, args, kwargs)


def flipped(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """A transposed weight."""
    found = loop.meaning(args[0])
    if not isinstance(found, Own) or args[0].ndim != 2:
        raise NotALoopError
    made = func(*args, **kwargs)
    weight = found.weight
    is_turned = made.stride() == args[0].stride()[::-1]
    flipped = replace(weight, is_transposed=weight.is_transposed ^ is_turned)
    return loop.note(made, Own(found.expert, flipped))


def multiplied(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of mm and addmm: rows times the expert's own weight."""
    *bias, x, weight = map(loop.meaning, args)
    if not isinstance(x, Row) or not isinstance(weight, Own) or x.is_led or kwargs:
        raise NotALoopError
    added = None
    if bias:
        if not isinstance(bias[0], Own) or bias[0].expert != x.expert or args[0].ndim != 1:
            raise NotALoopError
        added = bias[0].weight
    if weight.expert != x.expert:
        raise NotALoopError
    dtype = None if loop.autocast is None else loop.autocast[1]
    step = Product(x.result, weight.weight, added, dtype)
    typed = [a if dtype is None else a.to(dtype) for a in args]
    return loop.ran(func, typed, {}, Row(x.expert, loop.step(x.expert, step)))
