"""Sharding rules of reductions and norms, along a sharded dim or along others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from merak.graph.ir.operators import family
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Shard,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import vocabulary
from merak.graph.tensor_parallel.rules.elementwise import elementwise
from merak.ops.sharded_statistics import (
    sharded_layer_norm,
    sharded_rms_norm,
    sharded_std,
    sharded_var,
    sharded_weight_norm,
)

aten = torch.ops.aten


def normalize(op: Operator) -> Decision:
    """layer_norm, rms_norm: over a sharded dim if their weight is sharded, or they have none."""
    operand, weight, bias = op.node.args[0], op.arg("weight"), op.arg("bias")
    assert isinstance(operand, fx.Node)
    size, num_normal = len(shape_of(operand)), len(op.arg("normalized_shape"))
    own = {n: op.placement(n) for n in (weight, bias) if n is not None}
    placed, of_weight = op.placement(operand), next(iter(own.values()), REPLICATE)
    if isinstance(of_weight, Shard):
        # A gathered operand would do for a weight that is whole: the weight's placement decides.
        placed = replace(of_weight, dim=of_weight.dim + size - num_normal)
    elif not isinstance(placed, Shard):
        raise op.error("has a split bias")
    elif placed.dim < size - num_normal:
        return Decision(placed)
    elif own:
        raise op.error(f"normalises over dim {placed.dim}, which is split, by a whole weight")
    aligned = replace(placed, dim=placed.dim - size + num_normal)
    needs: dict[fx.Node, Placement] = {operand: placed, **dict.fromkeys(own, aligned)}
    if family(op.node.target) == "rms_norm":
        of_rms = (operand, weight, op.arg("eps"), num_normal, op.ranks())
        return Decision(placed, needs, sharded_rms_norm, of_rms, {})
    args = (operand, weight, bias, op.arg("eps", 1e-5), num_normal, op.ranks())
    return Decision(placed, needs, sharded_layer_norm, args, {})


def reduce(op: Operator) -> Decision:
    """sum, mean, var, amax, …: sums over the sharded dim become partial sums."""
    if op.arg("other") is not None:  # max and min of two tensors
        return elementwise(op)
    (operand, placed), *_ = op.sharded().items()
    num_dims = len(shape_of(operand))
    given = op.arg("dim")
    given = [given] if isinstance(given, int) else given
    dims = {positive(d, num_dims) for d in given or range(num_dims)}
    if placed.dim in dims:
        return _reduce_split(op, operand, sorted(dims))
    shift = 0 if op.arg("keepdim", False) else sum(d < placed.dim for d in dims)
    after = Shard(placed.dim - shift, placed.parts, placed.origin)
    results = op.node.meta["tensor"]
    return Decision((after,) * len(results) if isinstance(results, tuple) else after)


def _reduce_split(op: Operator, operand: fx.Node, dims: list[int]) -> Decision:
    name = family(op.node.target)
    if name == "logsumexp":
        return vocabulary.logsumexp(op)
    if name in ("sum", "mean") and vocabulary.reads_padding(op):
        return vocabulary.reduce_sum(op)
    if name == "sum":
        return Decision(PARTIAL)
    if name == "mean":
        return Decision(PARTIAL, then=((aten.div.Scalar, (op.degree,)),))
    if name in ("var", "std"):
        correction = op.arg("correction", op.arg("unbiased", True))
        correction = 1.0 if correction is None else float(correction)
        args = (operand, dims, correction, bool(op.arg("keepdim", False)), op.ranks())
        target = sharded_std if name == "std" else sharded_var
        return Decision(REPLICATE, {}, target, args, {})
    raise op.error(f"takes {name} over a dim that is split")


def weight_norm(op: Operator) -> Decision:
    """_weight_norm: a weight scaled to a norm for each index of one dim."""
    weight, norms, dim = op.arg("v"), op.arg("g"), op.arg("dim", 0)
    if dim == -1:
        raise op.error("scales a split weight to one norm")
    placed = op.placement(weight)
    if not isinstance(placed, Shard):
        placed = op.sharded()[norms]
    if placed.dim == dim:
        return Decision(placed, dict.fromkeys((weight, norms), placed))
    needs: dict[fx.Node, Placement] = {weight: placed, norms: REPLICATE_PARTIAL_GRAD}
    args = (weight, norms, dim, op.ranks())
    return Decision(placed, needs, sharded_weight_norm, args, {})
