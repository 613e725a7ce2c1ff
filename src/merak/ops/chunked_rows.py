"""Functions of each row's logits, computed a chunk of rows at a time from what the head reads.

What a loss of single tokens reads of logits, such as a log-probability or an entropy, is a few
numbers of each row. The forward makes them of a chunk's logits and drops these; the backward makes
the logits of a chunk again, and their gradients of those of the numbers. What is done to the logits
is data: calls of torch's operators and of Merak's functions on shards of the classes, in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from merak.ops.chunked_loss import add_product, sum_like
from merak.ops.linear import Sent, operator_sends, sends
from merak.ops.recording import one_operator

Value = tuple[str, int]
"""Stands for a tensor among a call's arguments: `VALUE`, and its number."""

VALUE = "value"

Call = tuple[str, Any, Any, tuple[int, ...]]
"""Name of a function, its arguments, those by name as pairs, and the values that end with it."""


class RowFunction(NamedTuple):
    """What is computed of each row's logits.

    Values are numbered: the logits, the further tensors that calls read, and the results of calls.

    Attributes:
        dim: of what the head reads, that chunks are cut along.
        rows: indices of that dim in a chunk.
        cut: of every further tensor, the dim that is cut likewise; -1 for one that every chunk
            reads whole.
        calls: in order.
        results: numbers of the values that are wanted, and their dim that was cut.
        carries: whether a gradient may come back through each of them.
        num_passes: how often a forward reads or writes something as large as logits, after these.
        sent: collectives of a forward, of all chunks.
    """

    dim: int
    rows: int
    cut: tuple[int, ...]
    calls: tuple[Call, ...]
    results: tuple[tuple[int, int], ...]
    carries: tuple[bool, ...]
    num_passes: int
    sent: Sent

    @classmethod
    def first_of(cls, args: Any) -> RowFunction:
        """The function that the arguments of an operator begin with, field by field."""
        return cls(*args[: len(cls._fields)])

    def rows_of(self, shape: Sequence[int]) -> int:
        """Rows of a chunk.

        Args:
            shape: of what the head reads.
        """
        return math.prod(shape[:-1]) // shape[self.dim] * self.rows


def _sent(*args: Any) -> Sent:
    return RowFunction.first_of(args).sent


@sends(inside=_sent)
def chunked_rows(*args: Any) -> tuple[torch.Tensor, ...]:
    """What is computed of each row of `linear(hidden, weight, bias)`.

    Args:
        *args: the fields of a `RowFunction`; then `hidden`, (…, width), the head's weight,
            (classes, width), its bias or None, and the further tensors that calls read, which get
            no gradient.

    Returns:
        The results of the function, in order.
    """
    results: tuple[torch.Tensor, ...] = _ChunkedRows.apply(*args)  # type: ignore[no-untyped-call]
    return results


class _ChunkedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        """Results of all rows; the backward needs none of them."""
        ctx.function, tensors = args[:_FIELDS], args[_FIELDS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        results: tuple[torch.Tensor, ...] = chunk_results(*args)
        carries = RowFunction(*ctx.function).carries
        ctx.mark_non_differentiable(*(r for r, carried in zip(results, carries) if not carried))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of what the head reads, and of its weight and bias."""
        wanted = ctx.needs_input_grad[_FIELDS : _FIELDS + 3]
        found: Iterator[torch.Tensor] = iter(())
        if any(gradient is not None for gradient in gradients):
            found = iter(
                chunk_results_gradients(*ctx.function, *ctx.saved_tensors, wanted, gradients)
            )
        made = (next(found, None) if is_wanted else None for is_wanted in wanted)
        return (*(None,) * _FIELDS, *made, *(None,) * (len(ctx.saved_tensors) - 3))


@one_operator
@operator_sends(inside=_sent)
def chunk_results(*args: Any) -> tuple[torch.Tensor, ...]:
    """Results of all rows.

    Args:
        *args: as of `chunked_rows`.
    """
    function, (hidden, weight, bias, *further) = RowFunction.first_of(args), args[_FIELDS:]
    made: list[tuple[torch.Tensor, ...]] = []
    for start, own in _chunks(function, hidden):
        parts = _cut(function, further, start)
        made.append(_results(function, functional.linear(own, weight, bias), parts))
    dims = [dim for _, dim in function.results]
    return tuple(torch.cat(parts, dim) for parts, dim in zip(zip(*made), dims, strict=True))


@one_operator
@operator_sends(inside=_sent)
def chunk_results_gradients(*args: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of what a head reads, its weight and its bias: of those that are wanted.

    Those of the weight and bias are as precise as they are summed over chunks, as are those of
    `merak.ops.chunked_loss.chunk_gradients`.

    Args:
        *args: as of `chunked_rows`; then which of the three are wanted, and the gradient of each
            result, None where there is none.
    """
    *args, wanted, given = args  # type: ignore[assignment]
    function, (hidden, weight, bias, *further) = RowFunction.first_of(args), args[_FIELDS:]
    of_hidden = torch.zeros_like(hidden) if wanted[0] else None
    of_weight = sum_like(weight) if wanted[1] else None
    of_bias = sum_like(bias) if bias is not None and wanted[2] else None
    for start, own in _chunks(function, hidden):
        size = own.shape[function.dim]
        tangents = [
            None if gradient is None else gradient.narrow(dim, start, size)
            for gradient, (_, dim) in zip(given, function.results, strict=True)
        ]
        rows = own.flatten(0, -2)
        logits = functional.linear(own, weight, bias)
        found = _of_logits(function, logits, _cut(function, further, start), tangents)
        del logits
        flat = found.flatten(0, -2).to(rows.dtype)
        del found
        if of_hidden is not None:
            of_hidden.narrow(function.dim, start, size).copy_((flat @ weight).view(own.shape))
        if of_weight is not None:
            add_product(of_weight, flat, rows)
        if of_bias is not None:
            of_bias += flat.sum(0, dtype=of_bias.dtype)
        del flat
    return tuple(one for one in (of_hidden, of_weight, of_bias) if one is not None)


_FIELDS = len(RowFunction._fields)


def _chunks(function: RowFunction, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """First index of each chunk, and what the head reads for it."""
    for start in range(0, hidden.shape[function.dim], function.rows):
        size = min(function.rows, hidden.shape[function.dim] - start)
        yield start, hidden.narrow(function.dim, start, size)


def _cut(function: RowFunction, further: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
    """Further tensors, of one chunk."""
    return [
        tensor
        if dim < 0
        else tensor.narrow(dim, start, min(function.rows, tensor.shape[dim] - start))
        for tensor, dim in zip(further, function.cut, strict=True)
    ]


def _results(
    function: RowFunction, logits: torch.Tensor, further: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Results of one chunk's logits; values are dropped behind their last use."""
    values = dict(enumerate((logits, *further)))
    del logits
    for number, (name, args, kwargs, ends) in enumerate(function.calls, 1 + len(further)):
        given = {key: _read(one, values) for key, one in kwargs}
        values[number] = _function(name)(*_read(args, values), **given)
        del given
        for ended in ends:
            del values[ended]
    return tuple(values[number] for number, _ in function.results)


def _read(argument: Any, values: Mapping[int, torch.Tensor]) -> Any:
    """An argument of a call, with the values that it names."""
    if not isinstance(argument, tuple | list):
        return argument
    if len(argument) == 2 and argument[0] == VALUE:
        return values[argument[1]]
    return [_read(one, values) for one in argument]


def _of_logits(
    function: RowFunction,
    logits: torch.Tensor,
    further: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Gradient of one chunk's logits."""
    with _autograd():
        leaf = logits.detach().requires_grad_()
        results = _results(function, leaf, further)
        pairs = [
            (result, tangent)
            for result, tangent in zip(results, tangents, strict=True)
            if tangent is not None and result.requires_grad
        ]
        if not pairs:
            return torch.zeros_like(logits)
        outputs, given = zip(*pairs)
        (found,) = torch.autograd.grad(outputs, leaf, given)
    return found


@contextmanager
def _autograd() -> Iterator[None]:
    """Context in which autograd records, also where generated code runs beneath it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@cache
def _function(name: str) -> Any:
    """A function by what `name_of` gives."""
    module, _, own = name.partition(":")
    if module != "torch.ops":
        return getattr(import_module(module), own)
    found: Any = torch.ops
    for part in own.split("."):
        found = getattr(found, part)
    return found


def name_of(function: Any) -> str:
    """Name by which a call finds an operator of torch, or a function of a module."""
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops:{function}"
    return f"{function.__module__}:{function.__name__}"
