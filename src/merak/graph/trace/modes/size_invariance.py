"""Elementwise autograd functions, which compute the same on a shard as on the full tensor.

A function's Python code may read the size of its operands (`gradient / math.sqrt(x.numel())`), and
on a shard it would read the shard's. So a function's forward and backward are recorded on meta
tensors of the full size and of the shard's: where both recordings are equal, and hold elementwise
operators alone, the function computes on a shard what it computes there on the full tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.operators import (
    FILLS_LIKE,
    FILLS_NEW,
    FILLS_SHAPE,
    aten_family,
    draws,
    is_pointwise,
)
from merak.graph.trace.modes.autograd_functions import call_function, named_function

aten = torch.ops.aten
Shape = tuple[int, ...]
Recording = tuple[Any, ...]

_ELEMENTWISE = FILLS_LIKE | frozenset(
    "detach alias clone _to_copy lift_fresh scalar_tensor".split()
)
"""Work on every element by itself, though torch does not tag them so."""

_OF_A_SHAPE = FILLS_SHAPE | FILLS_NEW | {"view", "_unsafe_view", "expand"}
"""Operators that take a shape, allowed where it is that of the operands."""


def is_size_invariant(
    tensors: Sequence[TensorMeta], local: Shape, function: str, arguments: str
) -> bool:
    """Whether an autograd function computes on a shard what it computes there on full tensors.

    Args:
        tensors: its operands, of one shape.
        local: the shape of a shard of each.
        function: its name, as of `merak::autograd_function`.
        arguments: its arguments, as of `merak::autograd_function`.
    """
    # The class is part of the key: a notebook may redefine a function under its name.
    return _is_invariant(named_function(function), tuple(tensors), local, function, arguments)


@lru_cache(maxsize=256)
def _is_invariant(
    cls: type, tensors: tuple[TensorMeta, ...], local: Shape, function: str, arguments: str
) -> bool:
    whole = tensors[0].shape
    if any(meta.shape != whole for meta in tensors):
        return False
    # A function may read needs_input_grad: try the trace's own, and all.
    answers = {
        tuple(meta.requires_grad for meta in tensors),
        tuple(meta.dtype.is_floating_point for meta in tensors),
    }
    dtypes = tuple(meta.dtype for meta in tensors)
    for wanted in sorted(answers):
        # The full size again, which reveals a function with a state.
        recordings = [
            _recording(dtypes, wanted, shape, function, arguments)
            for shape in (whole, local, whole)
        ]
        first, *others = recordings
        if first is None or any(other != first for other in others):
            return False
    return True


def _recording(
    dtypes: Sequence[torch.dtype],
    wanted: Sequence[bool],
    shape: Shape,
    function: str,
    arguments: str,
) -> Recording | None:
    """The operators of a function, without sizes; None if it is not elementwise.

    The backward is recorded with gradients of all results, and of each alone.
    """
    found: list[Any] = []
    only: int | None = None
    while True:
        operands = [
            torch.empty(shape, dtype=dtype, device="meta").requires_grad_(needed)
            for dtype, needed in zip(dtypes, wanted, strict=True)
        ]
        recorder = _Recorder(shape, operands)
        try:
            num_live = _run(recorder, operands, only, function, arguments)
        except Exception:  # whatever a function may do on meta tensors
            return None
        if not recorder.is_elementwise:
            return None
        found.append((num_live, tuple(recorder.lines)))
        only = 0 if only is None else only + 1
        if num_live < 2 or only == num_live:
            return tuple(found)


def _run(
    recorder: _Recorder,
    operands: Sequence[torch.Tensor],
    only: int | None,
    function: str,
    arguments: str,
) -> int:
    """Record the forward, and the backward of some results; return how many have a gradient."""
    with torch.enable_grad():
        with recorder:
            results = call_function(operands, function, arguments)
        recorder.note("results", results)
        recorder.note("shapes", [], *(tuple(r.shape) == recorder.shape for r in results))
        live = [result for result in results if result.requires_grad]
        read = live if only is None else live[only : only + 1]
        recorder.note("read", read)
        if read:
            gradients = [torch.empty_like(result) for result in read]
            recorder.know(gradients)
            leaves = [operand for operand in operands if operand.requires_grad]
            with recorder:
                made = torch.autograd.grad(read, leaves, gradients, allow_unused=True)
            recorder.note("gradients", [g for g in made if g is not None])
            recorder.note("unused", [], *(g is None for g in made))
            recorder.is_elementwise &= all(g is None or g.shape == recorder.shape for g in made)
    recorder.is_elementwise &= all(r.shape == recorder.shape for r in results)
    return len(live)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that notes operators, with tensors numbered in the order in which they appear.

    Args:
        shape: of the operands, which all tensors but scalars must have.
        operands: tensors that are known from the start.
    """

    def __init__(self, shape: Shape, operands: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.is_elementwise = True
        self.lines: list[Any] = []
        self._places: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # else another tensor might get its storage's address
        self.know(operands)

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Number tensors; those that share a storage have one number."""
        for tensor in tensors:
            self._alive.append(tensor)
            self._places.setdefault(tensor.untyped_storage()._cdata, len(self._places))

    def note(self, what: Any, values: Any, *more: Any) -> None:
        """Write down values: tensors by number, the operands' shape as such."""
        self.lines.append((what, *map(self._written, _leaves(values, self.shape)), *more))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = is_pointwise(func) or aten_family(func) in _ELEMENTWISE
        known |= aten_family(func) in _OF_A_SHAPE
        self.is_elementwise &= known and not draws(func)
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func._schema.is_mutable and any(not tensor.is_meta for tensor in read):
            self.is_elementwise = False
            raise RuntimeError("the trial would change a tensor of the model")
        self.note(func, (args, kwargs))
        result = func(*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.is_elementwise &= all(t.shape in (self.shape, ()) for t in (*read, *made))
        self.know(tensor for tensor in made if tensor.is_meta)
        self.note("makes", made)
        return result

    def _written(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return type(value), repr(value)
        if not value.is_meta and value.dim() == 0:
            return "number", value.dtype, repr(value.item())
        place = self._places.get(value.untyped_storage()._cdata)
        # A tensor that no operator made may hold a size, such as `x.new_tensor(x.numel())`.
        self.is_elementwise &= place is not None
        return "tensor", value.dtype, place


class _Shape:
    """Stands for the operands' shape among an operator's arguments."""

    def __repr__(self) -> str:
        return "shape"


def _leaves(values: Any, shape: Shape) -> list[Any]:
    def is_shape(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and bool(value) and _same(value, shape)

    leaves = tree_leaves(values, is_leaf=is_shape)
    return [_Shape() if is_shape(leaf) else leaf for leaf in leaves]


def _same(value: Sequence[Any], shape: Shape) -> bool:
    return all(type(size) is int for size in value) and tuple(value) == shape
