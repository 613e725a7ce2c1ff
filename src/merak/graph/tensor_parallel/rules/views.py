"""Sharding rules of views: the sharded dim after reshaping, and local sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Decision,
    Degree,
    Operator,
    Shard,
    listed_parts,
    positive,
    shape_of,
)

aten = torch.ops.aten


def reshaped(old: Sequence[int], new: Sequence[int], placed: Shard, degree: Degree) -> Shard | None:
    """Placement of a sharded value after a reshape.

    Dims are merged and split in groups of equal size. Inside its group, a split dim with `left`
    elements before it and `right` after it is the group's flat dim with `left` times its parts,
    each `right` times as large; a new dim must cut the same flat parts.

    Args:
        old: the whole shape before.
        new: the whole shape after.
        placed: the placement before.
        degree: the number of ranks.

    Returns:
        The placement after; None if no dim of the new shape is split so.
    """
    for olds, news in _groups(old, new):
        if placed.dim not in olds:
            continue
        if len(olds) == len(news) == 1:
            return Shard(news[0], placed.parts, placed.origin)
        left = math.prod(old[d] for d in olds if d < placed.dim)
        right = math.prod(old[d] for d in olds if d > placed.dim)
        flat = tuple(size * right for size in placed.parts) * left
        for dim in reversed(news):
            left = math.prod(new[d] for d in news if d < dim)
            right = math.prod(new[d] for d in news if d > dim)
            parts = _unflatten(flat, left, right, degree)
            if parts is not None and sum(parts) == new[dim]:
                return Shard(dim, parts, placed.origin)
    return None


def split_dims(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Old dim that each new dim of a reshape is a part of; None where some are merged."""
    if math.prod(old) == 0 or 1 in new:
        return None
    found: list[int] = []
    for olds, news in _groups(old, new):
        if len(olds) > 1:
            return None
        found += olds * len(news)
    return tuple(found)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring dims of both shapes that hold the same elements; dims of size 1 left out."""
    olds = [d for d, size in enumerate(old) if size != 1]
    news = [d for d, size in enumerate(new) if size != 1]
    while olds and news:
        a, b = [olds.pop(0)], [news.pop(0)]
        while (p := math.prod(old[d] for d in a)) != (q := math.prod(new[d] for d in b)):
            if p < q:
                a.append(olds.pop(0))
            else:
                b.append(news.pop(0))
        yield a, b


def _unflatten(
    flat: tuple[int, ...], left: int, right: int, degree: Degree
) -> tuple[int, ...] | None:
    if len(flat) % left:
        return None
    head = flat[: len(flat) // left]
    if head * left != flat or any(size % right or size // right % degree for size in head):
        return None
    return tuple(size // right for size in head)


def view(op: Operator) -> Decision:
    """view, reshape, flatten, view_as, …: rewritten to reshape with local sizes."""
    operand, new = op.node.args[0], shape_of(op.node)
    placed = op.placement(operand)
    if not isinstance(placed, Shard):  # view_as: only the shape comes from a split value
        return Decision(
            REPLICATE, target=aten.reshape.default, args=(operand, list(new)), kwargs={}
        )
    after = reshaped(shape_of(operand), new, placed, op.degree)
    if after is None:
        raise op.error(
            f"reshapes {list(shape_of(operand))}, split over dim {placed.dim} in parts of "
            f"{listed_parts(placed)}, to {list(new)}, where no dim is split so"
        )
    given = op.arg("size", op.arg("shape"))
    sizes = list(given) if given is not None and op.arg("dim") is None else list(new)
    if sizes[after.dim] != -1:
        sizes[after.dim] = op.local(new[after.dim], after)
    return Decision(after, target=aten.reshape.default, args=(operand, sizes), kwargs={})


def transpose(op: Operator) -> Decision:
    """permute, transpose, mT, movedim, …, unsqueeze: dims in another order, or a new one of size 1.

    The operator itself tells where the sharded dim goes.
    """
    (operand, placed), *_ = op.sharded().items()
    node, num_dims = op.node, len(shape_of(operand))
    kwargs = tuple(node.kwargs.items())
    moved = _moved(node.target, node.args[1:], kwargs, placed.dim, num_dims)
    return Decision(Shard(moved, placed.parts, placed.origin))


@lru_cache(maxsize=4096)  # a search asks for each of its many assignments
def _moved(target: Any, args: Any, kwargs: Any, dim: int, num_dims: int) -> int:
    """Where an operator puts a dim of its operand."""
    marked = torch.empty([1 + (d == dim) for d in range(num_dims)])
    shape: torch.Size = target(marked, *args, **dict(kwargs)).shape
    return shape.index(2)


def pairs(op: Operator) -> Decision:
    """view_as_complex, view_as_real: the last dim, of two numbers, goes or comes."""
    placed = next(iter(op.sharded().values()))
    if placed.dim == len(shape_of(op.node)):
        raise op.error(f"makes complex numbers of dim {placed.dim}, which is split")
    return Decision(placed)


def move_along(op: Operator) -> Decision:
    """flip, roll: elements move along some dims, none of which may be sharded."""
    (operand, placed), *_ = op.sharded().items()
    moved = [positive(d, len(shape_of(operand))) for d in op.arg("dims") or ()]
    if not moved or placed.dim in moved:
        raise op.error(f"moves elements along dim {placed.dim}, which is split")
    return Decision(placed)


def squeeze(op: Operator) -> Decision:
    """squeeze: dims of size 1 go; a dim whose local size is 1 stays."""
    (operand, placed), *_ = op.sharded().items()
    old = shape_of(operand)
    given: Any = op.arg("dim")
    given = range(len(old)) if given is None else [given] if isinstance(given, int) else given
    gone = sorted(d for d in (positive(d, len(old)) for d in given) if old[d] == 1)
    if placed.dim in gone:
        raise op.error(f"takes dim {placed.dim} away, which is split")
    dim = placed.dim - sum(d < placed.dim for d in gone)
    after = Shard(dim, placed.parts, placed.origin)
    return Decision(after, target=aten.squeeze.dims, args=(operand, gone), kwargs={})


def expand(op: Operator) -> Decision:
    """expand, expand_as, broadcast_to: rewritten to expand with local sizes."""
    operand = op.node.args[0]
    placed = op.placement(operand)
    new = list(shape_of(op.node))
    if not isinstance(placed, Shard):  # expand_as: only the shape comes from a split value
        return Decision(REPLICATE, target=aten.expand.default, args=(operand, new), kwargs={})
    dim = placed.dim + len(new) - len(shape_of(operand))
    sizes = list(op.arg("size", new))
    if sizes[dim] != -1:
        sizes[dim] = op.local(new[dim])
    after = Shard(dim, placed.parts, placed.origin)
    return Decision(after, target=aten.expand.default, args=(operand, sizes), kwargs={})


def repeat(op: Operator) -> Decision:
    """repeat: copies of the whole along a dim become fused parts."""
    (operand, placed), *_ = op.sharded().items()
    repeats = op.arg("repeats")
    dim = placed.dim + len(repeats) - len(shape_of(operand))
    return Decision(Shard(dim, placed.parts * repeats[dim], placed.origin))


def repeat_interleave(op: Operator) -> Decision:
    """repeat_interleave by a number: every element several times in a row."""
    (operand, placed), *_ = op.sharded().items()
    times, dim = op.arg("repeats"), op.arg("dim")
    if not isinstance(times, int) or dim is None:
        raise op.error("repeats elements of a split value unevenly or flattens it")
    same = positive(dim, len(shape_of(operand))) != placed.dim
    parts = placed.parts if same else tuple(size * times for size in placed.parts)
    kept = {k: v for k, v in op.node.kwargs.items() if k != "output_size"}
    return Decision(Shard(placed.dim, parts, placed.origin), kwargs=kept)
