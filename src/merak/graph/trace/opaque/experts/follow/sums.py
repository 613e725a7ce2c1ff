"""The sum over experts: their rows are added to it, put into it, or concatenated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from merak.graph.ir.operators import aten_family
from merak.graph.trace.opaque.experts.follow.meanings import Part, Row, Sum, without_mask
from merak.graph.trace.opaque.experts.follow.state import Loop, without_values
from merak.graph.trace.opaque.experts.steps import NotALoopError, Scatter


def added(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """index_add: an expert's last rows to the sum."""
    total, dim, tokens, rows = args
    row = _last(loop, total, rows)
    if dim != 0 or kwargs or loop.is_unfilled(total):
        raise NotALoopError
    at = loop.meaning(tokens)
    if isinstance(at, Row):
        step = Scatter(torch.index_add, at.result, row.result)
        return _scattered(loop, func, args, {at.expert, row.expert}, step)
    if tokens.tolist() != [token for token, _ in loop.order.get(row.expert, ())]:
        raise NotALoopError
    made = func(*without_values(args))
    return loop.end(row.expert, row.result, total, _after(func, total, made))


def scatter_added(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """scatter_add: an expert's last rows to the sum."""
    total, dim, index, rows = args
    row, at = _last(loop, total, rows), loop.meaning(index)
    if dim != 0 or kwargs or loop.is_unfilled(total) or not isinstance(at, Row):
        raise NotALoopError
    if index.shape != rows.shape:
        raise NotALoopError
    step = Scatter(torch.scatter_add, at.result, row.result)
    return _scattered(loop, func, args, {at.expert, row.expert}, step)


def added_to_part(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """add: an expert's last rows to the sum's rows of its tokens."""
    part, row = map(loop.meaning, args)
    if not isinstance(part, Part):
        return None
    if loop.has_unfilled:
        raise NotALoopError
    if not isinstance(row, Row) or row.is_led or row.expert != part.expert:
        raise NotALoopError
    if part.row is not None or kwargs:
        raise NotALoopError
    return loop.note(func(*args), replace(part, row=row))


def put(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """index_put: the sum's rows of an expert's tokens, to which its own are added.

    Where every token has one expert, its rows may come in the place of zeros.
    """
    total, indices, value, *accumulate = args
    indices = [without_mask(index) for index in indices]
    found = loop.meaning(value)
    is_sum = isinstance(loop.meaning(total), Sum) and not any(accumulate) and not kwargs
    if not is_sum or len(indices) != 1:
        raise NotALoopError
    at = loop.meaning(indices[0])
    if isinstance(at, Row):
        return _put_by_numbers(loop, func, (total, indices[0], value))
    if loop.num_choices == 1 and isinstance(found, Row):
        found = Part(found.expert, row=found)
    if not isinstance(found, Part) or found.row is None or found.at is not None:
        raise NotALoopError
    if loop.expert_of(indices[0]) != found.expert:
        raise NotALoopError
    made = func(*without_values((total, indices, value)))
    return loop.end(found.expert, found.row.result, total, _after(func, total, made))


def _put_by_numbers(loop: Loop, func: Any, args: tuple[Any, Any, Any]) -> Any:
    """index_put by numbers of rows of the sum: in their place, or what has been added to them."""
    total, index, value = args
    at, found = loop.meaning(index), loop.meaning(value)
    assert isinstance(at, Row)
    if isinstance(found, Part):
        is_added = found.at == at.result and index.unique().numel() == index.numel()
        if found.row is None or not is_added:
            raise NotALoopError
        step = Scatter(torch.index_add, at.result, found.row.result)
    else:
        found = _last(loop, total, value)
        if index.ndim != 1 or (index < 0).any():
            raise NotALoopError
        loop.fill(index.tolist())
        step = Scatter(torch.index_put, at.result, found.result)
    return _scattered(loop, func, (total, [index], value), {at.expert, found.expert}, step)


def concatenated(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """cat: the last rows of all experts, in their order."""
    found = [loop.meaning(one) for one in args[0]]
    rows = [one for one in found if isinstance(one, Row)]
    experts = [row.expert for row in rows]
    num_rows = sum(one.shape[0] for one in args[0])
    is_whole = loop.ranges is not None and num_rows == loop.ranges.num_rows
    if len(rows) < len(found) or experts != sorted({*experts}) or not is_whole:
        return None
    if args[1:] not in ((), (0,)) or any(row.is_led for row in rows) or loop.total is not None:
        raise NotALoopError
    made = func(*args, **kwargs)
    for row in rows:
        loop.ends[row.expert] = row.result
    loop.in_rows, loop.total = True, loop.note(made, Sum())
    return made


def put_in_range(loop: Loop, total: torch.Tensor, ends: tuple[int, int], value: Any) -> None:
    """Record that an expert's last rows are written at their place among all experts' rows."""
    row = _last(loop, total, value)
    assert loop.ranges is not None
    if loop.ranges.experts[ends] != row.expert or total.shape[0] != loop.ranges.num_rows:
        raise NotALoopError
    loop.in_rows = True
    loop.fill(range(*ends))
    loop.end(row.expert, row.result, total, total)


def apart(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """detach: rows from which nothing may be computed; autograd detaches what it saves."""
    is_sum = isinstance(loop.meaning(args[0]), Sum)
    return zeros(loop, func, args, kwargs) if is_sum else func(*args, **kwargs)


def zeros(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """zeros_like and new_zeros: the tensor that rows are added to."""
    made = func(*without_values(args), **without_values(kwargs))
    return loop.blank(made, is_filled=True)


def unfilled(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """empty_like and new_empty: the tensor that rows are put into."""
    made = func(*without_values(args), **without_values(kwargs))
    return loop.blank(made, is_filled=False)


def _last(loop: Loop, total: Any, rows: Any) -> Row:
    """What an expert's rows are that go into the sum."""
    row = loop.meaning(rows)
    if not isinstance(loop.meaning(total), Sum) or not isinstance(row, Row) or row.is_led:
        raise NotALoopError
    return row


def _scattered(loop: Loop, func: Any, args: Any, experts: set[int], step: Scatter) -> Any:
    """The sum behind a step that adds an expert's rows to it, or puts them into it."""
    (expert, *others), total = experts, args[0]
    if others:
        raise NotALoopError
    made = func(*without_values(args))
    return loop.end(expert, loop.step(expert, step), total, _after(func, total, made))


def _after(func: Any, total: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return total if aten_family(func).endswith("_") else made
