"""Placements of values on the tensor parallel ranks, and a sharding rule's decision."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.shards import shard_size
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, custom_operator
from merak.graph.ir.operators import family, is_known
from merak.ops.linear import sent_inside

AXIS = "tp"
"""The mesh axis that tensor parallelism splits over."""

Degree = int | Fraction
"""How many times a shard fits in the whole: the number of ranks, or a fraction of unequal parts."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Placement of a partial sum: every rank holds a summand."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement of a replicated value: the same on every rank.

    Args:
        grad: placement of its gradient where that differs: `Partial` once the value has entered
            split work, in which each rank computes a summand of the gradient.
    """

    grad: Partial | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement of a sharded value: every rank holds its shard of each fused part, in order.

    One part that the degree does not divide, a vocabulary, is filled up with padding: what the
    values there are means nothing, and their gradients are zero.

    Args:
        dim: the dim that is split, counted from the front.
        parts: sizes along `dim` of the fused parts in the whole value, (n,) when not fused.
        origin: the parameter whose attribute split it, for messages.
        owner: the rank that has all of a parameter of which the others have nothing, as of an
            expert with parameters of its own; None for a shard on every rank.
        copies: how many consecutive ranks hold the same shard, as of the keys of fewer heads than
            ranks; each makes a part of its gradient.
    """

    dim: int
    parts: tuple[int, ...]
    origin: str = field(default="", compare=False)
    owner: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True)
class PartlySharded:
    """Placement of a fused value of which some parts are sharded and others replicated.

    Each rank makes a part of the whole parts' gradient.

    Args:
        dim: the dim along which the parts lie, counted from the front.
        parts: sizes along `dim` of the fused parts in the whole value.
        whole: which of them every rank holds, by position.
        origin: the parameter that is split so, for messages.
    """

    dim: int
    parts: tuple[int, ...]
    whole: frozenset[int]
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Placement of rows sorted by expert: every rank holds its experts' rows, in front.

    The rows behind them are zero or another rank's; what they give is left out of the result.

    Args:
        groups: the operator that sorted the rows; the offsets where none has.
        offsets: where every expert's rows end in the whole value.
    """

    groups: fx.Node
    offsets: fx.Node = field(compare=False)


Placement = Replicate | Partial | Shard | PartlySharded | ExpertRows
ResultPlacement = Placement | tuple[Placement, ...]

PARTIAL = Partial()
REPLICATE, REPLICATE_PARTIAL_GRAD = Replicate(), Replicate(grad=PARTIAL)


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a sharding rule about an operator.

    Args:
        output: placement of its result; a tuple for several results.
        needs: placements that operands must have. Operands not named: sharded ones stay as they
            are, replicated
            ones enter the split work (`REPLICATE_PARTIAL_GRAD`), partial sums too unless the result
            is one.
        target: the operator in its place; None keeps it.
        args: its arguments, in terms of the old graph's nodes; None keeps them.
        kwargs: its keyword arguments; None keeps them.
        then: operators applied to the reduced result one after another, each with further
            arguments; the result is a partial sum before, and replicated after.
        becomes: placement that the result gets at once; None for `output`.
    """

    output: ResultPlacement
    needs: Mapping[fx.Node, Placement] = field(default_factory=dict)
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    then: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = ()
    becomes: Placement | None = None

    @property
    def sums(self) -> tuple[int, ...]:
        """How many numbers of float32 each collective inside the operator sums."""
        return tuple(size // 4 for _, size, _ in sent_inside(self.target, self.args))

    @property
    def result(self) -> ResultPlacement:
        """Placement of the result once the steps behind the operator have run."""
        if self.becomes is not None:
            return self.becomes
        return REPLICATE if self.then else self.output


def need_of(
    node: fx.Node, decision: Decision, placements: Mapping[fx.Node, ResultPlacement]
) -> Placement | None:
    """Placement that a decision asks of an operand; None for the one it has."""
    if node in decision.needs:
        return decision.needs[node]
    placed = placements[node]
    if isinstance(placed, (tuple, Shard, PartlySharded)):
        return None
    if isinstance(placed, Partial) and isinstance(decision.output, Partial):
        return None
    return REPLICATE if decision.output == REPLICATE else REPLICATE_PARTIAL_GRAD


def operands_of(node: fx.Node, decision: Decision) -> list[fx.Node]:
    """Operands of a node's operator, in the order of its arguments."""
    args = node.args if decision.args is None else decision.args
    kwargs = node.kwargs if decision.kwargs is None else decision.kwargs
    found: dict[fx.Node, None] = {}
    fx.map_arg((args, kwargs), lambda n: found.setdefault(n))
    return list(found)


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of the traced graph with its operands' placements, for a sharding rule.

    Args:
        node: the operator's node, in the graph before rewriting.
        placements: how the results of all nodes before it lie.
        degree: the tensor parallel degree; or the full size ÷ one shard, where shards are unequal.
        in_split_work: whether to count it to the work that is split, though its operands are whole.
        by_storage: how the results before it lie that are in some memory, by its number; may be
            left out where none is copied.
        reduced: partial sums that are reduced for all of their readers.
        axis: the mesh axis of the ranks.
        copies: how many consecutive ranks hold the same shard of every sharded operand.
    """

    node: fx.Node
    placements: Mapping[fx.Node, ResultPlacement]
    degree: Degree
    in_split_work: bool = False
    by_storage: Mapping[int | None, Collection[ResultPlacement]] = field(default_factory=dict)
    reduced: Collection[fx.Node] = frozenset()
    axis: str = AXIS
    copies: int = 1

    def placed_as(self, placements: Mapping[fx.Node, ResultPlacement]) -> Operator:
        """The operator with other placements of some operands."""
        return replace(self, placements=ChainMap(dict(placements), dict(self.placements)))

    def placement(self, operand: Any) -> Placement:
        """Placement of an operand; a partial sum counts as replicated, as it is reduced first.

        So do the rows of experts, and a copied value, which is what split work asks of a
        replicated one.
        """
        placed = self.raw(operand)
        return REPLICATE if isinstance(placed, (Partial, Replicate, ExpertRows)) else placed

    def raw(self, operand: Any) -> Placement:
        """Placement of an operand, partial sums as such."""
        placed = self.placements[operand] if isinstance(operand, fx.Node) else REPLICATE
        if isinstance(placed, tuple):
            raise self.error("reads the tuple of a split operator as a whole")
        return placed

    def sharded(self) -> dict[fx.Node, Shard]:
        """Sharded operands, in the order of the arguments."""
        placed = {n: self.placement(n) for n in self.node.all_input_nodes}
        return {n: p for n, p in placed.items() if isinstance(p, Shard)}

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the operator's schema, or in a function's signature."""
        return argument(self.node, name, default)

    def replace(self, **values: Any) -> dict[str, Any]:
        """`args` and `kwargs` of a decision: the operator's own with some arguments replaced."""
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        for i, argument in enumerate(schema):
            if argument.name in values and i < len(args):
                args[i] = values[argument.name]
            elif argument.name in values:
                kwargs[argument.name] = values[argument.name]
        return {"args": tuple(args), "kwargs": kwargs}

    def layout(self, placed: Shard) -> tuple[int, tuple[int, ...], str, int]:
        """A sharded operand as operators that draw random numbers are told of it."""
        return placed.dim, placed.parts, self.axis, self.copies

    def local(self, size: int, placed: Shard | None = None) -> int:
        """Local size of a sharded size, with padding where it is all of a padded value."""
        if placed is not None and placed.parts == (size,) and is_padded(placed, self.degree):
            return shard_size(size, int(self.degree))
        if size % self.degree:
            raise self.error(
                f"splits a size of {size}, which {self.axis}={self.degree} does not divide"
            )
        return size // self.degree

    def ranks(self) -> str:
        """The axis of the ranks, for an operator that must exchange numbers over it.

        Raises:
            ShardError: they are none, but parts of a microbatch.
        """
        if not isinstance(self.degree, int):
            raise self.error("must see all samples of a microbatch")
        return self.axis

    def error(self, what: str, fix: str = "") -> ShardError:
        """A sentence that names the operator, the user's line, and what to do."""
        if self.axis != AXIS:
            fix = fix or f"use {self.axis}=1"
        origins = {p.origin for p in self.sharded().values() if p.origin} if not fix else set()
        layers = " and ".join(sorted(o.rpartition(".")[0] or o for o in origins))
        fix = fix or (
            f"give {layers or 'the layers before it'} another attribute in the feature dict, "
            "Replicate() for instance"
        )
        kind = "tensor" if self.axis == AXIS else "context"
        return ShardError(
            f"{kind} parallelism cannot go on at {self.node.name} ({where(self.node)}): "
            f"it {what}; {fix}."
        )


@cache
def _argument_names(target: Any) -> tuple[str, ...]:
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    return tuple(inspect.signature(target).parameters)


def where(node: fx.Node) -> str:
    """Operator, module and source line of a node, for messages."""
    module, source = node.meta.get("module"), node.meta.get("source")
    target = node.target
    is_function = callable(target) and not isinstance(target, torch._ops.OpOverload)
    places = (
        family(target) if is_function else str(target),
        module and f"in {module}",
        source or "unknown line",
    )
    return ", ".join(place for place in places if place)


def shape_of(node: Any) -> tuple[int, ...]:
    """Full shape of a node's value; () for numbers."""
    meta = node.meta["tensor"] if isinstance(node, fx.Node) else None
    return meta.shape if isinstance(meta, TensorMeta) else ()


def is_sparse(node: fx.Node) -> bool:
    """Whether a node's value is a tensor that cannot be sliced."""
    meta = node.meta["tensor"]
    return isinstance(meta, TensorMeta) and meta.is_sparse


def listed_parts(placed: Shard) -> str:
    """The sizes of the fused parts, for messages."""
    return " + ".join(str(size) for size in placed.parts)


def positive(dim: int, num_dims: int) -> int:
    """A dim counted from the front."""
    return dim + num_dims if dim < 0 else dim


def is_padded(placed: ResultPlacement, degree: Degree) -> bool:
    """Whether some rank's shard has padding; sub-microbatches never have."""
    if not isinstance(degree, int) or not isinstance(placed, Shard):
        return False
    if placed.owner is not None or placed.copies > 1:
        return False
    return any(size % degree for size in placed.parts)


def local_meta(meta: Any, placed: ResultPlacement, degree: Degree) -> Any:
    """Local shape and dtype of a value of some placement; on the first rank, where ranks differ."""
    if isinstance(meta, tuple):
        each = placed if isinstance(placed, tuple) else (placed,) * len(meta)
        return tuple(local_meta(m, p, degree) for m, p in zip(meta, each, strict=True))
    if not isinstance(meta, TensorMeta) or not isinstance(placed, (Shard, PartlySharded)):
        return meta
    shape = list(meta.shape)
    if isinstance(placed, Shard) and placed.owner is not None:
        shape[placed.dim] *= placed.owner == 0
        return TensorMeta(tuple(shape), meta.dtype, meta.requires_grad)
    if is_padded(placed, degree):
        shape[placed.dim] = shard_size(shape[placed.dim], int(degree))
        return TensorMeta(tuple(shape), meta.dtype, meta.requires_grad)
    if isinstance(placed, Shard):
        shape[placed.dim] *= placed.copies
    whole = sum(placed.parts[i] for i in placed.whole) if isinstance(placed, PartlySharded) else 0
    shape[placed.dim] = (shape[placed.dim] - whole) // degree + whole
    return TensorMeta(tuple(shape), meta.dtype, meta.requires_grad)


_OPAQUE = (Role.OPAQUE_CALL, Role.AUTOGRAD_FUNCTION)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An operator's argument by its name in the schema, or in a function's signature."""
    names = _argument_names(node.target)
    if name not in names:
        return default
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


@cache
def is_opaque(target: Any) -> bool:
    """Whether an operator's backward is not torch's own: it may not be linear.

    What such a backward gives for each rank's part of a gradient need not sum up to what it gives
    for the whole gradient.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    own = custom_operator(target)
    return not is_known(target) or (own is not None and own.role in _OPAQUE)


Rule = Callable[[Operator], Decision]
