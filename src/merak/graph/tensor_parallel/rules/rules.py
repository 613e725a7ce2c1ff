"""What becomes of the ATen operators whose operands are split: one rule per family of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.graph.ir.mutation import is_mutating, mutated_arguments
from merak.graph.tensor_parallel.placement import (
    AXIS,
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Partial,
    PartlySharded,
    Placement,
    Rule,
    Shard,
    family,
    is_opaque,
    listed_parts,
    local_meta,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules import gemm, views, vocabulary
from merak.graph.tensor_parallel.rules.partly_sharded import decide_partly_sharded
from merak.graph.trace.modes.size_invariance import is_size_invariant
from merak.ops.sharded_dropout import dropout_sharded

aten = torch.ops.aten

_WHOLE = Decision(REPLICATE)


def decide(op: Operator) -> Decision:
    """What becomes of one operator.

    Args:
        op: the operator and how its operands lie.

    Returns:
        The decision; operators without split operands stay as they are.

    Raises:
        ShardError: no rule says how the operator works on operands that are split so.
    """
    operands = op.node.all_input_nodes
    if _is_whole(op, operands):
        return _WHOLE
    if family(op.node.target) == "getitem":
        return _getitem(op)
    if any(isinstance(op.raw(n), PartlySharded) for n in operands):
        return decide_partly_sharded(op)
    if any(isinstance(op.raw(n), Partial) for n in operands) and _carries_sums(op):
        return Decision(PARTIAL)
    if not op.sharded():
        return _inside(op)
    rule = _rule_of(op.node.target)
    if vocabulary.reads_padding(op):
        return vocabulary.decide_padded(op, rule)
    if rule is None:
        raise op.error("has no rule for operands that are split over the ranks")
    return rule(op)


def _rule_of(target: Any) -> Rule | None:
    """The rule for an operator on split operands: by name, or as torch's own that is pointwise."""
    tags = getattr(target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    fallback = elementwise if pointwise and not is_opaque(target) else None
    return RULES.get(family(target), fallback)


def _is_whole(op: Operator, operands: Sequence[fx.Node]) -> bool:
    """Whether nothing is split here, as nearly everywhere while one weight's split is followed."""
    are_whole = all(op.placements[n] is REPLICATE for n in operands)
    return are_whole and not op.in_split_work and not is_mutating(op.node)


def _inside(op: Operator) -> Decision:
    """An operator on whole values: what reads a copied one is done by every rank for its own."""
    if is_mutating(op.node):
        return _write(op)
    if is_opaque(op.node.target):
        return Decision(REPLICATE, dict.fromkeys(op.node.all_input_nodes, REPLICATE))
    copied = op.in_split_work or any(
        op.raw(n) == REPLICATE_PARTIAL_GRAD for n in op.node.all_input_nodes
    )
    return Decision(REPLICATE_PARTIAL_GRAD if copied else REPLICATE)


def _write(op: Operator) -> Decision:
    """A write into whole values: all that lies in the memory has its gradient in one way."""
    written = mutated_arguments(op.node)
    placed = {op.placements[n] for n in written}
    placed = placed.union(*(op.by_storage.get(n.meta.get("storage"), ()) for n in written))
    if placed == {REPLICATE_PARTIAL_GRAD} and not is_opaque(op.node.target):
        return Decision(REPLICATE_PARTIAL_GRAD)
    if REPLICATE_PARTIAL_GRAD in placed:
        raise op.error("writes into a value that lies in two ways")
    return Decision(REPLICATE)


def _carries_sums(op: Operator) -> bool:
    """Whether the operator is linear in its partial sums, so that they can be reduced after it."""
    name, raw = family(op.node.target), [op.raw(n) for n in op.node.all_input_nodes]
    if not all(isinstance(placed, Partial) for placed in raw):
        return False
    numbers = [a for a in op.node.args if isinstance(a, (int, float))]
    if name in ("add", "sub", "add_", "sub_"):
        return not numbers
    if name in ("mul", "div"):
        return len(raw) == 1 and len(numbers) == 1 and "rounding_mode" not in op.node.kwargs
    return name in _LINEAR_VIEWS


def _getitem(op: Operator) -> Decision:
    source, index = op.node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    placed = op.placements[source]
    return Decision(placed[index] if isinstance(placed, tuple) else placed)


def elementwise(op: Operator) -> Decision:
    """Every element by itself, with broadcasting: all operands are split alike or broadcast."""
    num_dims = len(shape_of(op.node))
    split = op.sharded()
    aligned = {n: p.dim + num_dims - len(shape_of(n)) for n, p in split.items()}
    lead, placed = next(iter(split.items()))
    dim = aligned[lead]
    if any(aligned[n] != dim or p.parts != placed.parts for n, p in split.items()):
        raise op.error("combines operands that are split along different dims or fused parts")
    needs: dict[fx.Node, Placement] = {}
    for node in op.node.all_input_nodes:
        own = dim - (num_dims - len(shape_of(node)))
        if node not in split and own >= 0 and shape_of(node)[own] != 1:
            needs[node] = Shard(own, placed.parts, placed.origin)
    written = op.node.args[0] if getattr(op.node.target, "_schema").is_mutable else None  # noqa: B009
    if isinstance(written, fx.Node) and written not in split:
        raise op.error("writes split values into a whole one")
    return Decision(Shard(dim, placed.parts, placed.origin), needs)


def first_operand(op: Operator) -> Decision:
    """Type conversions and copies: the result lies as the first operand, others only say how."""
    placed = op.placement(op.node.args[0])
    if isinstance(placed, Shard):
        return Decision(placed)
    return Decision(REPLICATE)


def shape_given(op: Operator) -> Decision:
    """new_zeros and the like: the operand only gives type and device."""
    return Decision(REPLICATE)


def along_dim(op: Operator) -> Decision:
    """softmax, cumsum, …: runs along one dim or some, which must be whole."""
    (operand, placed), *_ = op.sharded().items()
    asked = op.arg("dim", -1)
    dims = asked if isinstance(asked, (list, tuple)) else [asked]
    if placed.dim in {positive(dim, len(shape_of(operand))) for dim in dims}:
        if family(op.node.target) == "log_softmax":
            return vocabulary.log_softmax(op)
        raise op.error(f"runs along dim {placed.dim}, which is split")
    return Decision(placed)


def gather(op: Operator) -> Decision:
    """gather: along the split dim by a whole index; else the index is split like the values."""
    operand, index = op.arg("self"), op.arg("index")
    lead = next(iter(op.sharded().values()))
    if positive(op.arg("dim"), len(shape_of(operand))) == lead.dim:
        return vocabulary.gather(op)
    sizes = {shape_of(n)[lead.dim] for n in (operand, index)}
    if len(sizes) > 1 or any(op.placement(n) not in (REPLICATE, lead) for n in (operand, index)):
        raise op.error("picks by an index that is not split like the values")
    return Decision(lead, {operand: lead, index: lead})


def index_select(op: Operator) -> Decision:
    """index_select: picks along one dim, which must be whole, by a whole index."""
    operand = op.arg("self")
    placed = op.placement(operand)
    dim = positive(op.arg("dim"), len(shape_of(operand)))
    if not isinstance(placed, Shard) or dim == placed.dim:
        raise op.error(f"picks along dim {dim}, which is split, or by a split index")
    return Decision(placed)


def index(op: Operator) -> Decision:
    """index: neighbouring whole dims are replaced by those of whole index tensors."""
    operand: Any = op.node.args[0]
    indices: Any = op.node.args[1]
    placed = op.placement(operand)
    found = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in found]
    neighbours = found == list(range(found[0], found[0] + len(found)))
    whole = all(op.placement(t) == REPLICATE for t in tensors)
    if not isinstance(placed, Shard) or placed.dim in found or not neighbours or not whole:
        raise op.error("picks elements along a dim that is split, or by a split index")
    if any(t.meta["tensor"].dtype == torch.bool for t in tensors):
        raise op.error("picks elements of a split value by a mask")
    grown = max(len(shape_of(t)) for t in tensors) - len(found)
    dim = placed.dim if placed.dim < found[0] else placed.dim + grown
    return Decision(Shard(dim, placed.parts, placed.origin))


def last_two_dims(op: Operator) -> Decision:
    """tril, triu: the last two dims must be whole."""
    (operand, placed), *_ = op.sharded().items()
    if placed.dim >= len(shape_of(operand)) - 2:
        raise op.error(f"looks at positions along dim {placed.dim}, which is split")
    return Decision(placed)


def normalise(op: Operator) -> Decision:
    """layer_norm, rms_norm: the dims that are normalised must be whole."""
    operand = op.node.args[0]
    placed, num_normal = op.placement(operand), len(op.arg("normalized_shape"))
    if not isinstance(placed, Shard):
        raise op.error("has split weights")
    if placed.dim >= len(shape_of(operand)) - num_normal:
        raise op.error(f"normalises over dim {placed.dim}, which is split")
    return Decision(placed)


def reduce(op: Operator) -> Decision:
    """sum, mean, amax, …: sums over the split dim become partial sums, other kinds must not be."""
    if op.arg("other") is not None:  # max and min of two tensors
        return elementwise(op)
    (operand, placed), *_ = op.sharded().items()
    num_dims = len(shape_of(operand))
    asked = op.arg("dim")
    asked = [asked] if isinstance(asked, int) else asked
    dims = {positive(d, num_dims) for d in asked or range(num_dims)}
    if placed.dim in dims:
        return _reduce_split(op)
    shift = 0 if op.arg("keepdim", False) else sum(d < placed.dim for d in dims)
    after = Shard(placed.dim - shift, placed.parts, placed.origin)
    results = op.node.meta["tensor"]
    return Decision((after,) * len(results) if isinstance(results, tuple) else after)


def _reduce_split(op: Operator) -> Decision:
    name = family(op.node.target)
    if name == "logsumexp":
        return vocabulary.logsumexp(op)
    if name == "sum":
        return Decision(PARTIAL)
    if name == "mean":
        return Decision(PARTIAL, then=((aten.div.Scalar, (op.degree,)),))
    raise op.error(f"takes {name} over a dim that is split")


def dropout(op: Operator) -> Decision:
    """dropout: the own slice of the whole pattern."""
    (operand, placed), *_ = op.sharded().items()
    p, train, rows = op.arg("p"), op.arg("train"), op.arg("rows")
    if not train or p == 0:
        return Decision(placed)
    args = (operand, p, train, (placed.dim, placed.parts, AXIS))
    return Decision(placed, target=dropout_sharded, args=args, kwargs={"rows": rows})


def split(op: Operator) -> Decision:
    """split, split_with_sizes, chunk, unbind, …: along the split dim only between fused parts."""
    (operand, placed), *_ = op.sharded().items()
    results = op.node.meta["tensor"]
    dim = positive(op.arg("dim", 0), len(shape_of(operand)))
    if family(op.node.target) == "unbind":
        if dim == placed.dim:
            raise op.error(f"takes dim {dim} apart, which is split")
        after = Shard(placed.dim - (dim < placed.dim), placed.parts, placed.origin)
        return Decision((after,) * len(results))
    if dim != placed.dim:
        return Decision((placed,) * len(results))
    sizes = [result.shape[dim] for result in results]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    outputs = tuple(
        Shard(dim, _parts_between(op, placed, a, a + n), placed.origin)
        for a, n in zip(starts, sizes, strict=True)
    )
    args = (operand, [op.local(size) for size in sizes], dim)
    return Decision(outputs, target=aten.split_with_sizes.default, args=args, kwargs={})


def narrow(op: Operator) -> Decision:
    """slice, narrow: along the split dim only between fused parts."""
    (operand, placed), *_ = op.sharded().items()
    dim = positive(op.arg("dim", 0), len(shape_of(operand)))
    if dim != placed.dim:
        return Decision(placed)
    size = shape_of(operand)[dim]
    start = _clamp(op.arg("start") or 0, size)
    if family(op.node.target) == "narrow":
        stop = start + op.arg("length")
    else:
        stop = _clamp(size if op.arg("end") is None else op.arg("end"), size)
    if op.arg("step", 1) != 1:
        raise op.error(f"takes every {op.arg('step')}th element of a dim that is split")
    parts = _parts_between(op, placed, start, stop)
    args = (operand, dim, op.local(start), op.local(stop, placed))
    after = Shard(dim, parts, placed.origin)
    return Decision(after, target=aten.slice.Tensor, args=args, kwargs={})


def _clamp(index: int, size: int) -> int:
    return max(0, min(positive(index, size), size))


def _parts_between(op: Operator, placed: Shard, start: int, stop: int) -> tuple[int, ...]:
    """The fused parts from `start` to `stop`, which must be where parts begin or end."""
    edges = [sum(placed.parts[:i]) for i in range(len(placed.parts) + 1)]
    if start not in edges or stop not in edges:
        layer = placed.origin.rpartition(".")[0] or "the layer before it"
        raise op.error(
            f"takes {start} … {stop} of a dim split in parts of {listed_parts(placed)}",
            f"if {layer} is a fused layer, say Column(parts=…) with the relative sizes of what is "
            "fused; otherwise give it Replicate()",
        )
    return placed.parts[edges.index(start) : edges.index(stop)]


def select(op: Operator) -> Decision:
    """select.int: one index of a whole dim."""
    (operand, placed), *_ = op.sharded().items()
    dim = positive(op.arg("dim"), len(shape_of(operand)))
    if dim == placed.dim:
        raise op.error(f"takes one index of dim {dim}, which is split")
    return Decision(Shard(placed.dim - (dim < placed.dim), placed.parts, placed.origin))


def pad(op: Operator) -> Decision:
    """pad, constant_pad_nd: only whole dims."""
    (operand, placed), *_ = op.sharded().items()
    amounts: Sequence[int] = op.arg("pad")
    back = 2 * (len(shape_of(operand)) - 1 - placed.dim)
    if any(amounts[back : back + 2]):
        raise op.error(f"pads dim {placed.dim}, which is split")
    return Decision(placed)


def concatenate(op: Operator) -> Decision:
    """cat: along the split dim its operands become fused parts; along others all split alike."""
    tensors: Any = op.node.args[0]
    num_dims = len(shape_of(op.node))
    dim = positive(op.arg("dim", 0), num_dims)
    lead = next(iter(op.sharded().values()))
    placed = [op.placement(t) for t in tensors]
    if dim != lead.dim:
        return _alike(op, tensors, lead, lead)
    if not all(isinstance(p, Shard) and p.dim == dim for p in placed):
        raise op.error(f"joins split and whole operands along dim {dim}")
    parts = tuple(n for p in placed if isinstance(p, Shard) for n in p.parts)
    return Decision(Shard(dim, parts, lead.origin))


def stack(op: Operator) -> Decision:
    """stack: a new dim before or after the split one."""
    dim = positive(op.arg("dim", 0), len(shape_of(op.node)))
    lead = next(iter(op.sharded().values()))
    after = Shard(lead.dim + (dim <= lead.dim), lead.parts, lead.origin)
    return _alike(op, op.node.args[0], lead, after)


def custom(op: Operator) -> Decision:
    """A function with its own backward: where both do to a shard what they do to the whole."""
    args: Any = op.node.args
    tensors, function, arguments = args
    operand, lead = next(iter(op.sharded().items()))
    local = local_meta(operand.meta["tensor"], lead, op.degree).shape
    metas = [n.meta["tensor"] for n in tensors]
    if not is_size_invariant(metas, local, function, arguments):
        raise op.error("calls a function with a backward of its own, which must see the whole")
    results = op.node.meta["tensor"]
    return replace(_alike(op, tensors, lead, lead), output=(lead,) * len(results))


def _alike(op: Operator, tensors: Any, lead: Shard, after: Shard) -> Decision:
    placed = [op.placement(t) for t in tensors]
    if any(isinstance(p, Shard) and p != lead for p in placed):
        raise op.error("joins operands that are split along different dims or fused parts")
    whole = [t for t, p in zip(tensors, placed, strict=True) if p == REPLICATE]
    return Decision(after, dict.fromkeys(whole, lead))


_LINEAR_VIEWS = frozenset(
    "view reshape _unsafe_view flatten unflatten transpose permute t unsqueeze squeeze "
    "contiguous clone alias neg".split()
)

_FAMILIES: dict[Rule, str] = {
    gemm.linear: "linear",
    gemm.addmm: "addmm",
    gemm.matmul: "matmul mm bmm",
    gemm.baddbmm: "baddbmm",
    gemm.einsum: "einsum",
    gemm.grouped: "_grouped_mm grouped_mm_fallback",
    gemm.convolution: "conv1d conv2d conv3d",
    vocabulary.embedding: "embedding",
    vocabulary.cross_entropy: "cross_entropy_loss",
    vocabulary.nll: "nll_loss nll_loss_nd",
    gemm.attention: "scaled_dot_product_attention attend_sharded",
    views.view: "view reshape _unsafe_view flatten unflatten view_as reshape_as",
    views.transpose: "transpose swapaxes swapdims t",
    views.permute: "permute",
    views.reverse: "numpy_T",
    views.unsqueeze: "unsqueeze",
    views.squeeze: "squeeze",
    views.expand: "expand expand_as broadcast_to",
    views.repeat: "repeat",
    views.repeat_interleave: "repeat_interleave",
    # pointwise too, but not tagged so
    elementwise: "contiguous detach alias hardswish zeros_like ones_like full_like empty_like ",
    first_operand: "to _to_copy type_as",
    shape_given: "new_zeros new_ones new_full new_empty",
    along_dim: "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod glu",
    gather: "gather",
    index_select: "index_select",
    index: "index",
    last_two_dims: "tril triu",
    normalise: "layer_norm rms_norm",
    reduce: "sum mean amax amin max min var std all any logsumexp prod",
    dropout: "dropout dropout_sharded",
    split: "split split_with_sizes chunk tensor_split unbind",
    narrow: "slice narrow",
    select: "select",
    pad: "pad constant_pad_nd",
    concatenate: "cat concat",
    stack: "stack",
    custom: "autograd_function",
}

RULES: dict[str, Rule] = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}
"""Operator families to rules; what torch tags as pointwise needs no entry."""
