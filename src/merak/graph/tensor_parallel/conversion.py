"""Conversions of placements: the table from (placement, need) to a function of a value's shards.

What each function does, its adjoint, and what both send stands with the function, in `merak.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.placement import (
    AXIS,
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Degree,
    ExpertRows,
    Partial,
    PartlySharded,
    Placement,
    ResultPlacement,
    Shard,
)
from merak.ops.collectives import (
    copy_parts_to,
    copy_shared_to,
    copy_to,
    gather_from,
    gather_parts,
    gather_shared,
    gather_with_partial_grad,
    leave_partial_grad,
    local_slice,
    own_share,
    reduce_from,
    reduce_scatter_to,
    replicate_to_partial,
    slice_to,
)
from merak.ops.context_parallel import exchange_shards
from merak.ops.expert_rows import enter_experts, leave_experts


@dataclass(frozen=True, slots=True)
class Step:
    """Last step of a conversion.

    Args:
        source: placement that the value is converted to before it.
        target: the function.
        args: its arguments behind the value, in terms of the old graph's nodes.
    """

    source: Placement
    target: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Ways:
    """Conversions of a value that a rewriting may use.

    Args:
        axis: the mesh axis of the ranks.
        scatters: whether values become shards, and shards values, without an all-reduce.
        exchanges: whether shards along one dim become shards along another by an all-to-all.
    """

    axis: str = AXIS
    scatters: bool = False
    exchanges: bool = False


def last_step(placed: Placement, need: Placement, ways: Ways) -> Step:
    """Last step of the conversion of a value; those before it are of the conversion to its source.

    Args:
        placed: placement that the value has.
        need: another one, that it is to have.
        ways: which conversions may be used.

    Raises:
        ShardError: there is no conversion.
    """
    axis = ways.axis
    match placed, need:
        case _, ExpertRows():
            return Step(REPLICATE_PARTIAL_GRAD, enter_experts, (need.offsets, axis))
        case ExpertRows(), Partial():
            return Step(placed, leave_experts, (placed.offsets, axis))
        case Shard(copies=1), Shard(copies=1) if ways.exchanges:
            sides = (placed.dim, placed.parts), (need.dim, need.parts)
            return Step(placed, exchange_shards, (*sides, axis))
        case _, Shard():
            return _to_shard(placed, need, ways)
        case _, Partial():
            return Step(REPLICATE, replicate_to_partial, (axis,))
        case Shard(copies=1), _ if need == REPLICATE_PARTIAL_GRAD and ways.scatters:
            layout = (placed.dim, placed.parts, axis)
            return Step(placed, gather_with_partial_grad, layout)
    if need == REPLICATE_PARTIAL_GRAD:
        return Step(REPLICATE, copy_to, (axis,))
    assert need == REPLICATE, "every other placement is above"
    return _to_whole(placed, axis)


def _to_shard(placed: Placement, need: Shard, ways: Ways) -> Step:
    """Last step to a shard; of a shard along another dim there is one by way of the whole."""
    layout = (need.dim, need.parts, ways.axis)
    if isinstance(placed, Shard) and placed.copies > 1:
        if need != replace(placed, copies=need.copies):
            raise ShardError("it is split in two ways.")
        shards = (placed.dim, placed.parts, placed.copies, need.copies)
        return Step(placed, own_share, (*shards, ways.axis))
    if need.copies > 1:
        return Step(REPLICATE_PARTIAL_GRAD, local_slice, (*layout, need.copies))
    if ways.scatters and isinstance(placed, Partial):
        return Step(placed, reduce_scatter_to, layout)
    if placed == REPLICATE_PARTIAL_GRAD or (ways.scatters and isinstance(placed, Shard)):
        return Step(REPLICATE_PARTIAL_GRAD, local_slice, layout)
    if isinstance(placed, Shard):
        raise ShardError("it is split along two dims.")
    return Step(REPLICATE, slice_to, layout)


def _to_whole(placed: Placement, axis: str) -> Step:
    match placed:
        case ExpertRows():
            return Step(PARTIAL, reduce_from, (axis,))
        case Partial():
            return Step(placed, reduce_from, (axis,))
        case Shard(copies=1):
            return Step(placed, gather_from, (placed.dim, placed.parts, axis))
        case Shard():
            return Step(placed, gather_shared, (placed.dim, placed.parts, placed.copies, axis))
        case PartlySharded():
            layout = (placed.dim, placed.parts, tuple(sorted(placed.whole)))
            return Step(placed, gather_parts, (*layout, axis))
    return Step(placed, leave_partial_grad, (axis,))


def steps(placed: Placement, need: Placement, ways: Ways) -> Iterator[Step]:
    """All steps of the conversion of a value; arguments and errors are those of `last_step`."""
    if placed != need:
        last = last_step(placed, need, ways)
        yield from steps(placed, last.source, ways)
        yield last


def entering(placed: ResultPlacement, degree: Degree, axis: str) -> Step | None:
    """Step after which a placeholder's gradient is what all ranks together give it.

    Args:
        placed: placement of the placeholder.
        degree: the number of ranks.
        axis: the mesh axis that they lie along.
    """
    match placed:
        case PartlySharded():
            sizes = enumerate(placed.parts)
            local = tuple(n if i in placed.whole else n // degree for i, n in sizes)
            layout = (placed.dim, local, tuple(sorted(placed.whole)), axis)
            return Step(placed, copy_parts_to, layout)
        case Shard() if placed.copies > 1:
            return Step(placed, copy_shared_to, (placed.copies, axis))
    return Step(REPLICATE, copy_to, (axis,)) if placed == REPLICATE_PARTIAL_GRAD else None
