"""Sharding rule of opaque loops: the same Python code, called on shards of heads or channels.

A long loop over the tokens of a sequence is one operator. Its code, run on a short sequence, shows
the operators of its first passes, and those are all alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.tensor_parallel.placement import (
    Decision,
    Operator,
    Placement,
    Shard,
    is_padded,
    local_meta,
    shape_of,
)
from merak.graph.tensor_parallel.rules.loop_body import (
    Decide,
    Unshardable,
    check_local,
    place_body,
)
from merak.graph.trace.loop_operators import Body, NoBody, body_of, instructions
from merak.graph.trace.opaque.dry_run import dry_run
from merak.graph.trace.opaque.extrapolate import resized
from merak.graph.trace.opaque.functions import FunctionModule
from merak.graph.trace.opaque.operator import CallCost, OpaqueCall, operands
from merak.graph.trace.opaque.probe import CannotBeOpaque
from merak.graph.trace.opaque.record import likeness

SHORT_LENGTHS = ((16, 32), (64, 128), (256, 512))
"""Pairs of lengths that stand for a long sequence; the later ones for loops over chunks."""

MOST_LOOKED_AT = 20_000
"""Operators of a loop for which its instructions are looked at; of a longer one, the first ones."""

_OTHERWISE = "does something else in a longer loop"

FEW_KERNELS = 400
"""A loop of no more operators is written out at its own length."""

MOST_KERNELS = 2_000
"""So is one of no more than these, where no shorter length stands for its own."""


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Sharding of an opaque call.

    Args:
        operands: placements of its tensors.
        results: placements of what it returns.
        cost: of the call on a rank's shards.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    cost: CallCost


@dataclass(frozen=True, slots=True)
class _Written:
    """An opaque call's operators, written out.

    Args:
        call: the call; held, so that no other gets its identity.
        length: the size that is the sequence's length; None where no other length stands for it.
        bodies: its operators, by the length.
        local: the operators on shards of some sizes, as they are asked for.
        costs: of the call on shards of some sizes, as they are asked for.
    """

    call: OpaqueCall
    length: int | None
    bodies: Mapping[int, Body]
    local: dict[tuple[TensorMeta, ...], Body] = field(default_factory=dict)
    costs: dict[tuple[TensorMeta, ...], CallCost] = field(default_factory=dict)


_written: dict[Any, _Written | str] = {}
"""Calls written out, or why they are not, by their code and operands: those of one block are those
of all."""

_shardings: dict[Any, _Sharding | str] = {}
"""Shardings, or why there is none, by the same key, placements and the number of ranks."""


def loop(op: Operator, decide: Decide) -> Decision:
    """opaque_call: a loop that no other rank is needed for, with its own code on shards.

    Args:
        op: the operator.
        decide: the rule of all operators.
    """
    call: OpaqueCall | None = op.node.meta.get("opaque")
    if call is None or call.cost.loop is None or call.ref.module is None:
        raise op.error("calls Python code, which must see the whole")
    if not isinstance(op.degree, int):
        raise op.error("calls Python code on shards that are not equal")
    tensors = operands(op.node)
    entering = tuple(_entering(op, node) for node in tensors)
    origin = next(placed.origin for placed in entering if placed is not None)
    own = (_identity(call), tuple(node.meta["tensor"] for node in tensors))
    key = (own, entering, op.degree, op.axis)
    if key not in _shardings:
        try:
            _shardings[key] = _sharded(op, decide, _written_out(own, call, tensors), entering)
        except (Unshardable, NoBody, CannotBeOpaque) as error:
            _shardings[key] = str(error)
    found = _shardings[key]
    if isinstance(found, str):
        raise op.error(f"calls Python code, which must see the whole: it {found}")
    pairs = zip(tensors, found.operands, strict=True)
    needs = {n: replace(p, origin=origin) for n, p in pairs if isinstance(p, Shard)}
    results = (replace(p, origin=origin) if isinstance(p, Shard) else p for p in found.results)
    return Decision(tuple(results), needs, args=(*op.node.args[:2], found.cost.to_json()))


def _entering(op: Operator, node: fx.Node) -> Shard | None:
    placed = op.raw(node)
    if not isinstance(placed, Shard):
        return None
    if is_padded(placed, op.degree) or placed.owner is not None or placed.copies > 1:
        raise op.error("calls Python code on shards that are not equal, or not each rank's own")
    return placed


def _identity(call: OpaqueCall) -> Any:
    """A key that is equal for calls of the same code."""
    module = call.module
    return (
        module.function.__code__ if isinstance(module, FunctionModule) else likeness(module, {}),
        call.states,
        repr(call.arguments),
        (call.modes, call.autocast, call.grad, call.device),
    )


def _written_out(key: Any, call: OpaqueCall, tensors: Sequence[fx.Node]) -> _Written:
    if key not in _written:
        try:
            _written[key] = _write_out(call, [node.meta["tensor"] for node in tensors])
        except (Unshardable, NoBody) as error:
            _written[key] = str(error)
    found = _written[key]
    if isinstance(found, str):
        raise Unshardable(found)
    return found


def _write_out(call: OpaqueCall, metas: Sequence[TensorMeta]) -> _Written:
    """Write a call's operators out: at its own length, or at shorter ones that stand for it."""
    assert call.cost.loop is not None
    if call.written or call.scalars:
        raise Unshardable("writes into its operands, or reads numbers of tensors")
    if call.cost.loop.kernels[0] <= FEW_KERNELS:
        return _Written(call, None, {0: body_of(call, metas)})
    sizes = sorted({size for meta in metas for size in meta.shape})
    for shorts in SHORT_LENGTHS:
        for length in (size for size in sizes if size > 2 * shorts[-1]):
            bodies = _bodies(call, metas, length, shorts)
            counts = [len(body.graph.nodes) for body in bodies.values()]
            if len(counts) == len(shorts) and counts[-1] > counts[0]:
                _check_long(call, metas, length, shorts)
                return _Written(call, length, bodies)
    if call.cost.loop.kernels[0] <= MOST_KERNELS:
        return _Written(call, None, {0: body_of(call, metas)})
    raise Unshardable("makes many operators at any length")


def _bodies(
    call: OpaqueCall, metas: Sequence[TensorMeta], length: int, shorts: Sequence[int]
) -> dict[int, Body]:
    found = {}
    for short in shorts:
        try:
            found[short] = body_of(call, [resized(meta, length, short) for meta in metas])
        except NoBody:  # the size is another one
            break
    return found


def _sharded(
    op: Operator, decide: Decide, written: _Written, entering: Sequence[Shard | None]
) -> _Sharding:
    """The sharding of a call, given that of some operands.

    Raises:
        Unshardable: there is none.
        NoBody: its code fails on shards.
        CannotBeOpaque: it is not alike on shards.
    """
    call, degree = written.call, int(op.degree)
    metas = [node.meta["tensor"] for node in operands(op.node)]
    found = set()
    for whole in written.bodies.values():
        nodes = whole.graph.find_nodes(op="placeholder")
        pairs = zip(entering, nodes, strict=True)
        given = [p and _scaled(p, shape_of(n)[p.dim], degree) for p, n in pairs]
        placed = place_body(whole.graph, given, op, decide)
        own = placed.operands(whole.graph)
        shards = _local((node.meta["tensor"] for node in nodes), own, degree)
        if shards not in written.local:
            written.local[shards] = body_of(call, shards)
        check_local(whole, placed, written.local[shards], degree)
        results = placed.results(whole.graph)
        found.add((_at(own, metas, degree), _at(results, call.cost.outputs, degree)))
    if len(found) > 1:
        raise Unshardable(_OTHERWISE)
    ((of_operands, of_results),) = found
    local = _local(metas, of_operands, degree)
    if local not in written.costs:
        device = torch.device(call.device)
        written.costs[local] = dry_run(call, local, device, written.length).cost
    cost = written.costs[local]
    expected = _local(call.cost.outputs, of_results, degree)
    if [(m.shape, m.dtype) for m in cost.outputs] != [(m.shape, m.dtype) for m in expected]:
        raise Unshardable(_OTHERWISE)
    return _Sharding(of_operands, of_results, cost)


def _scaled(placed: Placement, size: int, degree: int) -> Any:
    """A placement along a dim of another size."""
    if not isinstance(placed, Shard) or sum(placed.parts) == size:
        return placed
    whole = sum(placed.parts)
    if any(part * size % (whole * degree) for part in placed.parts):
        raise Unshardable(f"has a dim of {size} in a shorter loop, not equal on all ranks")
    return replace(placed, parts=tuple(part * size // whole for part in placed.parts))


def _at(
    placed: Sequence[Placement], metas: Sequence[TensorMeta], degree: int
) -> tuple[Placement, ...]:
    """Placements of values at their own sizes."""
    pairs = zip(placed, metas, strict=True)
    return tuple(
        _scaled(p, m.shape[p.dim], degree) if isinstance(p, Shard) else p for p, m in pairs
    )


def _local(
    metas: Iterable[TensorMeta], placed: Sequence[Placement], degree: int
) -> tuple[TensorMeta, ...]:
    return tuple(local_meta(m, p, degree) for m, p in zip(metas, placed, strict=True))


def _check_long(
    call: OpaqueCall, metas: Sequence[TensorMeta], length: int, shorts: Sequence[int]
) -> None:
    """Check that a long loop runs no instructions but those that it runs where it is short.

    Raises:
        Unshardable: it does.
    """
    assert call.cost.loop is not None
    looked_at = min(length, max(shorts[-1], length * MOST_LOOKED_AT // call.cost.loop.kernels[0]))
    sizes = (*shorts, looked_at)
    *known, long = instructions(call, [[resized(m, length, size) for m in metas] for size in sizes])
    if not long <= set().union(*known):
        raise Unshardable(_OTHERWISE)
