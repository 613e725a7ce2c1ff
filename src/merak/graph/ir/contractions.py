"""Products of tensors as einsum writes them, with a label for every dim: what all else reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.operators import (
    CONVOLUTIONS,
    GEMM_OPERANDS,
    GROUPED_GEMMS,
    SEPARATE_GEMMS,
    TRANSPOSED_CONVOLUTIONS,
    family,
)

Labels = tuple[str | None, ...]
"""A label for every dim; None for one of size 1 that broadcasts."""

Operand = tuple[fx.Node, Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product of tensors: dims of one label are as long, and those not in the result are summed.

    Args:
        factors: what is multiplied, and its labels; a parameter of each group counts as one.
        result: the labels of the result.
        summand: what is added to the product, and its labels; None where nothing is.
    """

    factors: tuple[Operand, ...]
    result: Labels
    summand: Operand | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The factors, and the summand behind them."""
        return self.factors if self.summand is None else (*self.factors, self.summand)


def contraction(node: fx.Node) -> Contraction | None:
    """The product that an operator computes.

    Returns:
        The product; None for other operators, and for an einsum with a letter twice in an operand,
        which takes a diagonal.
    """
    name, args = family(node.target), cast(Any, node.args)
    if name == "einsum":
        return _einsum(node)
    if name in SEPARATE_GEMMS:
        sides = ("out", "in") if args[4] else ("in", "out")
        return _product((args[0], ("row", "in")), *((n, sides) for n in args[1]))
    places = GEMM_OPERANDS.get(name)
    if places is None or name == "convolution":
        return None
    x, weight, place = args[places.x], args[places.weight], places.bias
    bias: Any = None if place is None else node.kwargs.get("bias")
    if place is not None and len(args) > place:
        bias = args[place]
    if name in CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS:
        pixels = [f"pixel{dim}" for dim in range(len(_shape(weight)) - 2)]
        rows = ("row",) * (len(_shape(x)) - len(pixels) - 1)  # none where there is one sample alone
        sides = ("in", "out") if name in TRANSPOSED_CONVOLUTIONS else ("out", "in")
        kernel = [f"kernel of {pixel}" for pixel in pixels]
        factors = (x, (*rows, "in", *pixels)), (weight, (*sides, *kernel))
        return Contraction(factors, (*rows, "out", *pixels), bias and (bias, ("out",)))
    if name in GROUPED_GEMMS:
        return _product((x, ("row", "in")), (weight, ("group", "in", "out")))
    order = -1 if name == "linear" else 1
    of_x, of_weight, result = matmul_labels(_shape(x), _shape(weight)[::order])
    summand = bias and (bias, _broadcast(bias, result))
    return Contraction(((x, of_x), (weight, of_weight[::order])), result, summand)


def _product(*factors: Any) -> Contraction:
    return Contraction(factors, ("row", "out"))


def _einsum(node: fx.Node) -> Contraction | None:
    """Dims of an ellipsis get labels of their own, counted from behind, as they broadcast."""
    equation, tensors = cast(Any, node.args[:2])
    left, arrow, right = equation.replace(" ", "").partition("->")
    sizes = [len(_shape(tensor)) for tensor in tensors]
    terms = [_labels(term, size) for term, size in zip(left.split(","), sizes, strict=True)]
    if any(len(set(labels)) < len(labels) for labels in terms):
        return None
    num_hidden = max(sum(len(label) > 1 for label in labels) for labels in terms)
    result = _labels(right, num_hidden + len(right.replace("...", "")))
    if not arrow:
        every = [label for labels in terms for label in labels]
        once = sorted(c for c in every if every.count(c) == 1 and len(c) == 1)
        result = (*_labels("...", num_hidden), *once)
    aligned = _aligned([_shape(tensor) for tensor in tensors], terms)
    return Contraction(tuple(zip(tensors, aligned, strict=True)), result)


def _labels(term: str, num_dims: int) -> tuple[str, ...]:
    """Labels of so many dims, of which those that no letter stands for are in an ellipsis."""
    before, ellipsis, after = term.partition("...")
    num_hidden = num_dims - len(before) - len(after) if ellipsis else 0
    return (*before, *(f"...{place}" for place in range(num_hidden, 0, -1)), *after)


def matmul_labels(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Labels, Labels, Labels]:
    """Labels of the dims of two matrices, or stacks of them, and of their product."""
    batch = [f"batch{i}" for i in range(max(len(a), len(b)) - 2)]
    lead_a, lead_b = (batch[len(batch) + 2 - len(shape) :] for shape in (a, b))
    labels_a = (*lead_a, "row", "in") if len(a) > 1 else ("in",)
    labels_b = (*lead_b, "in", "out") if len(b) > 1 else ("in",)
    result = (*batch, *labels_a[-2:-1], *(labels_b[-1:] if len(b) > 1 else ()))
    of_a, of_b = _aligned((a, b), (labels_a, labels_b))
    return of_a, of_b, result


def _aligned(shapes: Sequence[Sequence[int]], labels: Sequence[Sequence[str]]) -> list[Labels]:
    """Labels of factors, without those of dims of size 1 that broadcast to another's dim."""
    sizes: dict[str, int] = {}
    for shape, own in zip(shapes, labels, strict=True):
        for size, label in zip(shape, own, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return [
        tuple(None if size == 1 < sizes[label] else label for size, label in zip(shape, own))
        for shape, own in zip(shapes, labels, strict=True)
    ]


def _broadcast(node: Any, result: Sequence[str | None]) -> Labels:
    """The last labels of `result` for an operand; None for dims of size 1, which broadcast."""
    shape = _shape(node)
    labels = tuple(result)[len(result) - len(shape) :]
    return tuple(None if size == 1 else label for size, label in zip(shape, labels, strict=True))


def _shape(node: Any) -> tuple[int, ...]:
    meta = node.meta["tensor"]
    assert isinstance(meta, TensorMeta)
    return meta.shape
