"""Whole weights of a model that is laid out, gathered from the ranks that hold them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merak.core.errors import WeightsError
from merak.core.health.status import during, waiting_for_all
from merak.core.shards import join
from merak.graph.weights.holders import find_holders, first_names, named_tensors, shard_shape
from merak.graph.weights.laid_out import (
    Part,
    engine_of,
    like,
    methods_allowed,
    part_of,
    remove_refusals,
)
from merak.graph.weights.rank_agreement import transfer_device


@during("gathering the weights")
def gather_state_dict(model: nn.Module, part: Part) -> dict[str, torch.Tensor]:
    """The state dict of a laid out model on rank 0, on the CPU; collective of all ranks.

    Args:
        model: the user's, unsharded over replicas.
        part: what this rank has of it.

    Returns:
        Parameters and persistent buffers by all of their names; nothing on other ranks.
    """
    names = state_names(model)
    whole = {}
    for name, value in whole_tensors(model, part, frozenset(names.values())):
        if part.mesh.rank == 0:
            whole[name] = value.cpu()
    return {name: whole[first] for name, first in names.items() if first in whole}


def state_names(model: nn.Module) -> dict[str, str]:
    """First name of every tensor by each of its names, without what the state dict leaves out.

    Args:
        model: the user's, laid out or not.
    """
    firsts = first_names(named_tensors(model))
    with methods_allowed(model):
        keys = model.state_dict(keep_vars=True).keys()
    if not keys <= firsts.keys():  # a state dict of names of its own
        return firsts
    return {name: first for name, first in firsts.items() if name in keys}


@during("gathering the weights")
def whole_copy(model: nn.Module, part: Part, device: torch.device) -> nn.Module:
    """A copy of a laid out model with all of its weights, on every rank; collective of all ranks.

    Args:
        model: the user's, unsharded over replicas, with methods of its own.
        part: what this rank has of it.
        device: where the copy is.
    """
    named = named_tensors(model)
    new: dict[int, Any] = {}  # a tensor's id → what the copy has in its place, also where tied
    for name, value in whole_tensors(model, part):
        new[id(named[name])] = like(named[name], value.to(device))
    return copy.deepcopy(model, new).to(device)


@during("gathering the weights")
def make_whole(model: nn.Module) -> None:
    """Make a laid out model whole again on every rank, for another engine; collective of all ranks.

    Args:
        model: the user's; its parameters are new ones, on the CPU. One that is not laid out, or of
            which each rank has everything, stays as it is.

    Raises:
        WeightsError: replicas have shards of it (ZeRO-3), and their engine is no more.
    """
    part = part_of(model)
    if part is None:
        if (other := engine_of(model)) is not None:  # whose parameters are watched, and may be late
            other.complete_updates()
            other.optimizer_params.wait()
            other.watch.close()
        return
    engine = part.engine()
    if engine is None and part.is_sharded:
        raise WeightsError(
            "the trainer that this model was trained by is gone, and with it the shards of zero=3; "
            "keep that trainer until the next one has been made, or save the model and load it."
        )
    named = named_tensors(model)
    firsts = first_names(named)
    with nullcontext() if engine is None else engine.whole_model():
        values = {name: value.cpu() for name, value in whole_tensors(model, part)}
    if engine is not None:
        engine.retire()
    remove_refusals(model)
    made = {name: like(named[name], value) for name, value in values.items()}
    for name, first in firsts.items():
        path, _, attribute = name.rpartition(".")
        module: Any = model.get_submodule(path)
        slots = module._parameters if isinstance(made[first], nn.Parameter) else module._buffers
        slots[attribute] = made[first]


def whole_tensors(
    model: nn.Module, part: Part, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the model by their first names, one after another, on all ranks.

    Args:
        model: the user's, unsharded over replicas.
        part: what this rank has of it.
        names: first names of those that are asked for; None for all that a rank holds.
    """
    mesh = part.mesh
    device = transfer_device(mesh.device)
    holders = find_holders(model, part.held, part.shards, mesh)
    own = named_tensors(model)
    for name in sorted(holders.keys() if names is None else holders.keys() & names):
        held = holders[name]
        pieces = []
        for index, rank in enumerate(held.ranks):
            shape = shard_shape(held.shape, held.shard, index)
            piece = torch.empty(shape, dtype=held.dtype, device=device)
            if mesh.rank == rank:
                piece.copy_(own[name].detach())
            if mesh.world_size > 1 and piece.numel():
                with waiting_for_all(f"{name} on"):
                    dist.broadcast(piece, src=rank)
            pieces.append(piece)
        yield name, pieces[0] if held.shard is None else join(pieces, held.shard)
