"""Holders of the model's tensors: which ranks hold which shard of which tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from merak.core.mesh import Mesh
from merak.core.shards import OptimizerTensor, ParameterShard
from merak.graph.weights.rank_agreement import gather_objects


@dataclass(frozen=True, slots=True)
class TensorHolders:
    """Full tensor of the model, and the ranks that hold its shards.

    Args:
        shape: sizes of its dims, whole.
        dtype: its element type.
        shard: how it is split; None where every rank in `ranks` has all of it.
        ranks: the ranks that hold its parts, in the order of the parts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: ParameterShard | None
    ranks: tuple[int, ...]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have in the state dict."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                named[f"{path}.{attribute}" if path else attribute] = buffer
    return named


def first_names(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """First name of every tensor, by each of its names."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in named.items()}


def full_shape(tensor: torch.Tensor, shard: ParameterShard | None) -> tuple[int, ...]:
    """Full shape of a tensor of which a rank holds all or a shard."""
    if shard is None:
        return tuple(tensor.shape)
    before, after = tensor.shape[: shard.dim], tensor.shape[shard.dim + 1 :]
    return (*before, sum(shard.parts), *after)


def shard_shape(
    shape: tuple[int, ...], shard: ParameterShard | None, index: int
) -> tuple[int, ...]:
    """Shape of shard number `index` of a full shape."""
    if shard is None:
        return shape
    return (*shape[: shard.dim], sum(shard.sizes(index)), *shape[shard.dim + 1 :])


@dataclass(frozen=True, slots=True)
class RankView:
    """Tensors that one rank holds, each under its first name.

    Args:
        tensors: parameters and persistent buffers of the model.
        names: id of a tensor → its name.
        owned: those that this rank holds.
        buffers: those that are buffers.
        shards: layouts of the parameters of which it holds a part.
        shard_index: which part.
        optimizer_tensors: by name what the optimizer steps in the place of a parameter, where it is
            not the parameter itself.
        whole: names of the parameters that the optimizer of this rank steps whole, for other ranks.
    """

    tensors: Mapping[str, torch.Tensor]
    names: Mapping[int, str]
    owned: frozenset[str]
    buffers: frozenset[str]
    shards: Mapping[str, ParameterShard]
    shard_index: int
    optimizer_tensors: Mapping[str, OptimizerTensor]
    whole: Collection[str] = ()

    def optimizer_tensor(self, name: str) -> OptimizerTensor:
        """The optimizer's tensor of a parameter."""
        return self.optimizer_tensors.get(name) or OptimizerTensor(self.tensors[name])


def rank_view(
    model: nn.Module,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    optimizer_tensors: Mapping[str, OptimizerTensor] | None = None,
    whole_tensors: Mapping[str, torch.Tensor] | None = None,
) -> RankView:
    """Tensors that this rank holds; names that the model's state dict lacks are left out."""
    named = named_tensors(model)
    firsts = first_names(named)
    tensors = {firsts[name]: tensor for name, tensor in named.items()}
    others = {firsts[n]: found for n, found in (optimizer_tensors or {}).items() if n in firsts}
    names = {id(tensor): name for name, tensor in tensors.items()}
    whole = {firsts[n]: tensor for n, tensor in (whole_tensors or {}).items() if n in firsts}
    names |= {id(found.tensor): name for name, found in others.items()}
    return RankView(
        tensors=tensors,
        names=names | {id(tensor): name for name, tensor in whole.items()},
        whole=whole.keys(),
        optimizer_tensors=others,
        owned=frozenset(firsts[name] for name in owned if name in firsts),
        buffers=frozenset(n for n, t in tensors.items() if not isinstance(t, nn.Parameter)),
        shards={firsts[name]: shard for name, shard in shards.items() if name in firsts},
        shard_index=mesh.shard_rank,
    )


def find_holders(
    model: nn.Module, owned: Collection[str], shards: Mapping[str, ParameterShard], mesh: Mesh
) -> dict[str, TensorHolders]:
    """Holders of every tensor of the state dict, by its first name; the same on every rank.

    Args:
        model: the user's model, holding this rank's parameters.
        owned: names of the parameters and buffers that this rank holds and trains.
        shards: layouts of those of which it holds a part.
        mesh: the grid of ranks.

    Returns:
        The holdings. A buffer that nobody owns is rank 0's; a parameter that nobody has is absent.
    """
    view = rank_view(model, owned, shards, mesh)
    first_of_group = mesh.replicas_rank == 0 and mesh.tp_rank == 0
    ours = {
        name: (full_shape(tensor, view.shards.get(name)), tensor.dtype, view.shards.get(name))
        for name, tensor in view.tensors.items()
        if first_of_group and name in view.owned
    }
    holdings: dict[str, TensorHolders] = {}
    for rank, entries in reversed(list(enumerate(gather_objects(ours)))):
        for name, (shape, dtype, shard) in entries.items():
            ranks = range(rank, rank + (1 if shard is None else shard.degree))
            holdings[name] = TensorHolders(shape, dtype, shard, tuple(ranks))
    for name in view.buffers:
        buffer = view.tensors[name]
        holdings.setdefault(name, TensorHolders(tuple(buffer.shape), buffer.dtype, None, (0,)))
    return holdings
