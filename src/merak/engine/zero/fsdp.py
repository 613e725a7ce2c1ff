"""FSDP parameters (ZeRO-3): sharded over the replicas, and gathered segment by segment.

Parameters that the same segments read are a group, which one collective gathers. They are gathered
for a segment's action and freed when it ends, and a backward's gradients are reduce-scattered
beside the segments that follow it, all in the order of `merak.engine.zero.unshard_order`.

Source: arXiv:1910.02054 (ZeRO), section 5.3; arXiv:2304.11277 (FSDP), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from merak.core.gradients import dense, is_low_precision
from merak.core.shards import RowShard
from merak.core.storages import resize_storage
from merak.engine.comm.replica_levels import ReplicaCollectives, Waitable
from merak.engine.comm.row_shards import (
    pack,
    pack_all,
    packed_length,
    rows_of,
    shard_rows,
    unpack,
    unpack_all,
)
from merak.engine.tensors_by_name import ParamLeaves
from merak.engine.zero.unshard_order import Unshard, UnshardOrder
from merak.graph.weights.absent import OF_REPLICAS, AbsentTensor, swap
from merak.plan.memory.unshards import SegmentUnshard


@dataclass(frozen=True, slots=True)
class _Open:
    """A collective that has begun.

    Args:
        work: tells when it is done.
        sent: what this rank gives, which must stay until then.
        received: what it gets.
    """

    work: Waitable
    sent: torch.Tensor
    received: torch.Tensor


class FsdpGroup:
    """Parameters that one all-gather unshards: of one type, and all trained or all frozen.

    Its leaves stay the same tensors, and have memory while they are gathered: what autograd has
    saved of a leaf is there again in the backward.

    Args:
        parameters: by name, unsharded.
        group: the replicas.
        masters: whether shards of parameters of low precision are float32 masters of them.
        collectives: of the replicas.
        is_tied: whether the gradients are collected from several segments.

    Attributes:
        shards: this replica's rows of the parameters, as precise as the optimizer steps them.
        leaves: the parameters, which have memory between `unshard` and `reshard`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        masters: bool,
        collectives: ReplicaCollectives,
        is_tied: bool,
    ) -> None:
        self.group, self.is_tied = group, is_tied
        self._collectives = collectives
        self._degree, self._index = dist.get_world_size(group), dist.get_rank(group)
        whole = list(parameters.values())
        self.trains, self._dtype = whole[0].requires_grad, whole[0].dtype
        is_low = masters and self.trains and is_low_precision(whole[0])
        self._reduce_dtype = torch.float32 if is_low else self._dtype
        self._flat = pack([p.detach() for p in whole], self._degree, self._index)
        self._flat = self._flat.to(self._reduce_dtype)
        self._length = packed_length(whole, self._degree)
        self.shards = dict(
            zip(parameters, unpack(self._flat, whole, self._degree, self._index), strict=True)
        )
        self.leaves = {
            name: torch.empty_like(p, requires_grad=self.trains) for name, p in parameters.items()
        }
        # Writes into these leave the leaves' versions alone, of which autograd has saved some.
        self._memory = [leaf.data for leaf in self.leaves.values()]
        self._num_bytes = [leaf.untyped_storage().nbytes() for leaf in self._memory]
        self._gather: _Open | None = None
        self._reduction: _Open | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self.reshard()

    def begin_gather(self) -> None:
        """Begin to gather the parameters."""
        own = self._flat.to(self._dtype)
        everything = make_buffer(self._degree * self._length, own)
        work = self._collectives.all_gather(everything, own, group=self.group, async_op=True)
        self._gather = _Open(work, own, everything)

    def unshard(self) -> None:
        """Wait for the gather that has begun, if any, and copy the parameters out of it."""
        if self._gather is None:
            return
        self._gather.work.wait()
        for tensor, num_bytes in zip(self._memory, self._num_bytes, strict=True):
            resize_storage(tensor, num_bytes)
        unpack_all(self._gather.received, self._memory, self._degree)
        self._gather = None

    def reshard(self) -> None:
        """Free the gathered parameters."""
        self._gather = None
        for tensor in self._memory:
            resize_storage(tensor, 0)

    def begin_reduction(self) -> None:
        """Begin to reduce the gradients of the leaves, which lose them; zeros where they have none.

        An earlier reduction ends first.
        """
        self.take_reduction()
        found = [
            leaf.new_zeros(()).expand(leaf.shape) if leaf.grad is None else dense(leaf.grad)
            for leaf in self.leaves.values()
        ]
        own = make_buffer(self._length, self._flat)
        everything = pack_all(found, self._degree, self._reduce_dtype)
        del found
        for leaf in self.leaves.values():
            leaf.grad = None
        work = self._collectives.reduce_scatter(own, everything, group=self.group, async_op=True)
        self._reduction = _Open(work, everything, own)

    def take_reduction(self) -> None:
        """Wait for the reduction that has begun, if any, and add it to the gradients' shards."""
        if self._reduction is None:
            return
        found, self._reduction = self._reduction, None
        found.work.wait()
        leaves = list(self.leaves.values())
        pieces = unpack(found.received, leaves, self._degree, self._index)
        made = dict(zip(self.leaves, pieces, strict=True))
        known = [name for name in made if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[n] for n in known], [made.pop(n) for n in known])
        self._sums.update(made)

    def join(self, is_reduction: bool) -> None:
        """Take part in a collective for the other replicas alone, with zeros."""
        dtype = self._reduce_dtype if is_reduction else self._dtype
        one = torch.zeros(self._length, dtype=dtype, device=self._flat.device)
        every = torch.zeros(self._degree * self._length, dtype=dtype, device=self._flat.device)
        if is_reduction:
            self._collectives.reduce_scatter(one, every, group=self.group)
        else:
            self._collectives.all_gather(every, one, group=self.group)

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient's shard of a parameter, reduced; None for none."""
        self.take_reduction()
        return self._sums.get(name)

    def drop_gradient(self, name: str) -> None:
        """Free the gradient's shard of a parameter, which somebody has taken."""
        self._sums.pop(name, None)

    def full(self, name: str) -> torch.Tensor:
        """A parameter unsharded; all replicas call it together."""
        made = torch.empty_like(self.leaves[name], device=self._flat.device, requires_grad=False)
        own = torch.zeros(packed_length([made], self._degree), dtype=made.dtype, device=made.device)
        unpack(own, [made], self._degree, self._index)[0].copy_(self.shards[name])
        everything = own.new_empty(self._degree * own.numel())
        self._collectives.all_gather(everything, own, group=self.group)
        unpack_all(everything, [made], self._degree)
        return made

    def rows(self, name: str) -> RowShard:
        """The rows of a parameter that this replica holds."""
        return shard_rows(self.leaves[name], self._degree, self._index)

    def forget(self) -> None:
        """Free what a step that failed has gathered and reduced."""
        self.reshard()
        self._reduction = None
        self._sums.clear()
        for leaf in self.leaves.values():
            leaf.grad = None


def make_buffer(length: int, like: torch.Tensor) -> torch.Tensor:
    """A buffer that a collective receives; tests let memory run out here."""
    return like.new_empty(length)


class ShardLeaf:
    """The leaf of a sharded parameter for tied gradients: it gives the shard of the gradient."""

    def __init__(self, name: str, group: FsdpGroup) -> None:
        self._name, self._group = name, group

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient shard of this replica, along dim 0."""
        return self._group.gradient(self._name)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        assert value is None, "shards of gradients are only taken"
        self._group.drop_gradient(self._name)


class FsdpParameters:
    """The parameters of a rank's segments, sharded over its replicas.

    Args:
        segments: names of the parameters of each.
        parameters: by name, unsharded.
        replicas: by name, the replicas that shard a parameter.
        masters: whether shards of parameters of low precision are float32 masters of them.
        shared: names of those whose gradients are collected from several segments.
        order: in which they are gathered.
        collectives: of the replicas; None for those of torch.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        segments: Iterable[Sequence[str]],
        parameters: Mapping[str, nn.Parameter],
        replicas: Callable[[str], dist.ProcessGroup],
        masters: bool,
        shared: Collection[str],
        order: UnshardOrder,
        collectives: ReplicaCollectives | None = None,
    ) -> None:
        self._shared = frozenset(shared)
        self.order = order
        self._groups: dict[str, FsdpGroup] = {}
        self.meta_parameters: dict[str, nn.Parameter] = {}
        self.optimizer_tensors: dict[str, nn.Parameter] = {}
        self.leaves: dict[str, ShardLeaf] = {}
        every = collectives or ReplicaCollectives()
        for names in _group_by_readers(segments, parameters, replicas, self._shared):
            own = {name: parameters[name] for name in names}
            is_tied = names[0] in self._shared
            self._add(own, FsdpGroup(own, replicas(names[0]), masters, every, is_tied))

    def _add(self, own: Mapping[str, nn.Parameter], group: FsdpGroup) -> None:
        for name, parameter in own.items():
            self._groups[name] = group
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            absent = AbsentTensor(empty, f"{name!r} is {OF_REPLICAS}")
            made = nn.Parameter(absent, requires_grad=group.trains)
            vars(made).update(vars(parameter))  # what the model's code reads there
            self.meta_parameters[name] = parameter if swap(parameter, made) else made
            if group.trains:
                self.optimizer_tensors[name] = nn.Parameter(group.shards[name])
                self.leaves[name] = ShardLeaf(name, group)

    def shard(self, name: str) -> torch.Tensor:
        """Parameter shard of this replica, along dim 0, in the dtype of its optimizer tensor."""
        return self._groups[name].shards[name]

    def full(self, name: str) -> torch.Tensor:
        """A parameter unsharded, in its own type; all replicas call it together."""
        return self._groups[name].full(name)

    def _groups_of(self, names: Sequence[str]) -> tuple[FsdpGroup, ...]:
        return tuple(dict.fromkeys(self._groups[n] for n in names if n in self._groups))

    def rows(self, name: str) -> RowShard:
        """The rows of a parameter that this replica holds."""
        return self._groups[name].rows(name)

    def start(self, unshards: Iterable[SegmentUnshard]) -> None:
        """Set the order of a step or an evaluation that begins."""
        self.order.start(map(self._unshard, unshards))

    def _unshard(self, own: SegmentUnshard) -> Unshard:
        groups = self._groups_of(own.segment.segment.parameters)
        reduced = [group for group in groups if group.trains and own.reduces(group.is_tied)]
        return Unshard(groups if own.gathers else (), tuple(reduced))

    def begin(self, names: Sequence[str], drained: bool = False) -> None:
        """Gather the parameters of a segment that begins; see `UnshardOrder.begin`."""
        self.order.begin(self._groups_of(names), drained)

    def end(self, names: Sequence[str], drained: bool = False) -> None:
        """Free the parameters of a segment that has ended; see `UnshardOrder.end`."""
        self.order.end(self._groups_of(names), drained)

    def reduce(self, names: Sequence[str], drained: bool = False) -> None:
        """Reduce what a backward has left for later; see `UnshardOrder.reduce`."""
        left = [group for group in self._groups_of(names) if group.trains and not group.is_tied]
        self.order.reduce(tuple(left), drained)

    def abort_step(self) -> None:
        """Abort the step: from the marked action on, only the collectives take part."""
        self.forget()
        self.order.rewind()

    def forget(self) -> None:
        """Free the gathered parameters and the gradients of a step that failed."""
        for group in dict.fromkeys(self._groups.values()):
            group.forget()

    def weights(self, names: Sequence[str], others: ParamLeaves) -> ParamLeaves:
        """The parameters that a segment reads, while they are gathered.

        Args:
            names: of the parameters that it reads.
            others: parameters that are not sharded.
        """
        groups = self._groups
        return {n: groups[n].leaves[n] if n in groups else others[n] for n in names}

    def take_gradients(self) -> None:
        """Move the shards of the gradients to the optimizer tensors.

        Those of tied parameters have theirs already.
        """
        self.order.take_reductions()
        for name, tensor in self.optimizer_tensors.items():
            leaf = self.leaves[name]
            if name not in self._shared:
                tensor.grad = leaf.grad
            leaf.grad = None

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Context in which a model has the parameters unsharded; what is written into them stays.

        All replicas call it together. Masters are not written: they are more precise.
        """
        full = {
            name: nn.Parameter(self.full(name), meta.requires_grad)
            for name, meta in self.meta_parameters.items()
        }
        replace_parameters(model, {id(self.meta_parameters[name]): p for name, p in full.items()})
        try:
            yield
        finally:
            replace_parameters(
                model, {id(p): self.meta_parameters[name] for name, p in full.items()}
            )
        for name, parameter in full.items():
            shard = self.shard(name)
            if shard.dtype == parameter.dtype and shard.numel():
                rows = self.rows(name)
                shard.copy_(rows_of(parameter.detach(), rows.start, rows.stop))


def _group_by_readers(
    segments: Iterable[Sequence[str]],
    parameters: Mapping[str, nn.Parameter],
    replicas: Callable[[str], dist.ProcessGroup],
    tied: Collection[str],
) -> list[list[str]]:
    """Names of each group: of one type, read by the same segments, sharded by the same ranks.

    Tied parameters, which other ranks may read as well, have groups of their own.
    """
    readers: dict[str, list[int]] = {}
    for number, names in enumerate(segments):
        for name in dict.fromkeys(names):
            readers.setdefault(name, []).append(number)
    groups: dict[object, list[str]] = {}
    for name, numbers in readers.items():
        parameter = parameters[name]
        kind = (parameter.dtype, parameter.requires_grad, id(replicas(name)))
        groups.setdefault((tuple(numbers), name in tied, *kind), []).append(name)
    return list(groups.values())


def replace_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Replace some parameters of a model by others.

    Args:
        model: whose parameters they are.
        others: by id of those that they replace.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in others:
                module._parameters[name] = others[id(parameter)]
