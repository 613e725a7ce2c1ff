"""Operators that give every row from the same row of their operands, and dropout of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from merak.graph.ir.operators import (
    CONVERSIONS,
    COPIES,
    EXPANDS,
    RESHAPES,
    SPLITS,
    aten_family,
    is_pointwise,
)
from merak.graph.trace.opaque.experts.follow.meanings import Noise, Own, Row, Sum
from merak.graph.trace.opaque.experts.follow.state import Loop
from merak.graph.trace.opaque.experts.steps import NotALoopError, PerRow, Result

aten = torch.ops.aten

_UNDER_AUTOCAST = CONVERSIONS | RESHAPES | SPLITS | frozenset((
    "add", "clamp", "clamp_max", "clamp_min", "div", "gelu", "maximum", "minimum", "mul", "neg",
    "relu", "sigmoid", "silu", "slice", "sub", "tanh", "unsqueeze",
))  # fmt: skip
"""Operators beside products that an autocast leaves in the types of their operands."""


def per_row(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that treats every row by itself."""
    name, tensors = aten_family(func), [a for a in tree_leaves((args, kwargs)) if _is(a)]
    found = [loop.meaning(tensor) for tensor in tensors]
    if name in CONVERSIONS and all(isinstance(one, Sum) for one in found):
        return loop.ran(func, args, kwargs, Sum())
    rows = [one for one in found if isinstance(one, Row)]
    if not rows or any(one.is_led for one in rows):
        raise NotALoopError
    expert = rows[0].expert
    if any(not isinstance(one, (Row, Own)) or one.expert != expert for one in found):
        raise NotALoopError
    if func._schema.is_mutable:
        return _in_place(loop, func, args, kwargs)
    made = func(*args, **kwargs)
    is_cast = loop.autocast is not None and any(t.is_floating_point() for t in tree_leaves(made))
    if is_cast and name not in _UNDER_AUTOCAST:
        raise NotALoopError
    _check_rows(loop, func, args, tensors, made)
    step = loop.step(expert, _step(loop, func, args, kwargs))
    if isinstance(made, (tuple, list)):
        for item, one in enumerate(made):
            loop.note(one, Row(expert, Result(step.step, item)))
        return made
    return loop.note(made, Row(expert, step))


def _in_place(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that writes into rows, as the one that makes new rows."""
    written, name = args[0], aten_family(func)
    own = loop.meaning(written)
    new = getattr(getattr(aten, name.removesuffix("_"), None), func._overloadname, None)
    if new is None or not isinstance(own, Row) or loop.is_seen(written) or "out" in kwargs:
        raise NotALoopError
    made = per_row(loop, new, args, kwargs)
    if (made.shape, made.dtype) != (written.shape, written.dtype):
        raise NotALoopError
    return loop.note(func(*args, **kwargs), loop.forget(made))


def _step(loop: Loop, func: Any, args: Any, kwargs: Any) -> PerRow:
    if aten_family(func) in EXPANDS:
        args = (args[0], [-1, *args[1][1:]], *args[2:])
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "dim", "approximate")}
    operands = tuple(_reference(loop, a) for a in args)
    return PerRow(func, operands, tuple(sorted(options.items())))


def _reference(loop: Loop, argument: Any) -> Any:
    found = loop.meaning(argument)
    if isinstance(found, Row):
        return found.result
    if isinstance(found, Own):
        return found.weight
    return tuple(argument) if isinstance(argument, list) else argument


def _check_rows(loop: Loop, func: Any, args: Any, tensors: Sequence[Any], made: Any) -> None:
    """Check that an operator gives every row from the same row of its operands."""
    name, results = aten_family(func), tree_leaves(made)
    rows = [t for t in tensors if isinstance(loop.meaning(t), Row)]
    owns = [t for t in tensors if isinstance(loop.meaning(t), Own)]
    num_rows, ndim = rows[0].shape[0], results[0].ndim
    if any(one.shape[0] != num_rows for one in (*rows, *results)):
        raise NotALoopError
    if name in SPLITS | {"slice", "select", "unsqueeze"}:
        place = 2 if name in SPLITS else 1
        dim = args[place] if len(args) > place else 0
        grown = rows[0].ndim + (name == "unsqueeze")
        if not dim % grown > 0 or owns:
            raise NotALoopError
    elif is_pointwise(func) or name == "floor_divide":
        same = all(one.ndim == ndim for one in rows)
        if not same or any(one.ndim != ndim - 1 for one in owns):
            raise NotALoopError
    elif name in EXPANDS | {"repeat"}:
        if ndim != rows[0].ndim or (name == "repeat" and args[1][0] != 1):
            raise NotALoopError
    elif name not in CONVERSIONS | COPIES or owns:
        raise NotALoopError


def noise(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """empty_like of rows: what dropout fills."""
    found = loop.meaning(args[0])
    return loop.ran(func, args, kwargs, Noise(found)) if isinstance(found, Row) else None


def drawn(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """bernoulli: the rows' elements that dropout keeps."""
    found = loop.meaning(args[0])
    if not isinstance(found, Noise) or found.kept is not None:
        raise NotALoopError
    return loop.note(args[0], replace(found, kept=args[1]))


def scaled(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """div, by the fraction that dropout keeps."""
    found = loop.meaning(args[0])
    if not isinstance(found, Noise):
        return None
    if args[1] != found.kept:
        raise NotALoopError
    return args[0]


def dropped(loop: Loop, func: Any, args: Any, kwargs: Any) -> Any:
    """mul: of rows, and what dropout multiplies them by."""
    row, drawn = map(loop.meaning, args)
    if not isinstance(drawn, Noise):
        return None
    if row != drawn.row or not isinstance(row, Row) or drawn.kept is None:
        raise NotALoopError
    step = PerRow(aten.dropout.default, (row.result, 1 - drawn.kept, True), ())
    return loop.ran(func, args, kwargs, Row(row.expert, loop.step(row.expert, step)))


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
