"""Which ranks hold each parameter, and their values whole from those that do."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from merak.core.shards import ParameterShard, join
from merak.engine.engine import Engine
from merak.engine.state import EngineState
from merak.graph.weights.holders import first_names, full_shape, named_tensors, shard_shape


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter, and the pp ranks that hold it.

    Args:
        shape: whole.
        dtype: its element type.
        shard: its layout over tp (or ep); None where each rank has all of it.
        pp_ranks: those that hold it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: ParameterShard | None
    pp_ranks: tuple[int, ...]


_KNOWN: weakref.WeakKeyDictionary[Engine, dict[str, Held]] = weakref.WeakKeyDictionary()


def held_parameters(model: nn.Module, engine: Engine) -> dict[str, Held]:
    """The parameters that operators read, by first name; a collective of all ranks at first.

    Args:
        model: the user's.
        engine: that trains it.
    """
    if engine not in _KNOWN:
        _KNOWN[engine] = _find_held(model, engine._state, engine)
    return _KNOWN[engine]


def _find_held(model: nn.Module, state: EngineState, engine: Engine) -> dict[str, Held]:
    mesh, named = state.mesh, named_tensors(model)
    firsts = first_names(named)
    is_first = mesh.replicas_rank == 0 and mesh.tp_rank == 0
    shards = {firsts[name]: shard for name, shard in engine.shards.items()}
    ours = {
        firsts[name]: (full_shape(named[name], shards.get(firsts[name])), named[name].dtype)
        for name in (state.parameters if is_first else ())
    }
    found: dict[str, Held] = {}
    gathered = state.gather((ours, shards), "the layout of parameters on")
    for rank, (entries, layouts) in enumerate(gathered):
        pp_rank = rank // (mesh.replicas * mesh.tp)
        for name, (shape, dtype) in entries.items():
            before = found[name].pp_ranks if name in found else ()
            found[name] = Held(shape, dtype, layouts.get(name), (*before, pp_rank))
    return found


def fetch(
    state: EngineState,
    name: str,
    held: Held,
    readers: Collection[int],
    shard: ParameterShard | None,
) -> torch.Tensor | None:
    """A parameter of other ranks: as it is sharded, or whole for a reader with another layout.

    All ranks call it together.

    Args:
        state: of this rank's engine.
        name: of the parameter.
        held: which ranks hold it.
        readers: the pp ranks that read it.
        shard: the layout in which they do; None for whole.

    Returns:
        The value; what this rank has itself, or None, where it is no reader.
    """
    mesh = state.mesh
    value = None
    if mesh.pp_rank == min(held.pp_ranks):
        value = _unsharded(state, name)
    return broadcast_part(state, name, value, held, readers, shard)


def broadcast_part(
    state: EngineState,
    name: str,
    value: torch.Tensor | None,
    held: Held,
    readers: Collection[int],
    shard: ParameterShard | None,
) -> torch.Tensor | None:
    """A tensor of other ranks that is laid out as a parameter, as of `fetch`.

    Args:
        state: of this rank's engine.
        name: of the parameter.
        value: this rank's part, on the lowest pp rank that holds the parameter.
        held: which ranks hold it.
        readers: the pp ranks that read it.
        shard: the layout in which they do; None for whole.

    Returns:
        The tensor; what this rank has itself, or None, where it is no reader.
    """
    mesh, source = state.mesh, min(held.pp_ranks)
    if value is not None and held.shard is not None and held.shard != shard:
        value = _join(state, name, value, held)
    group = mesh.group("pp")
    if group is None or set(readers) <= {source}:
        return value
    shape = held.shape
    if held.shard is not None and held.shard == shard:
        shape = shard_shape(shape, held.shard, mesh.shard_rank)
    if value is None:
        value = torch.empty(shape, dtype=held.dtype, device=mesh.device)
    value = value.contiguous()
    with state.progress.waiting(f"{name} on", mesh.peers("pp")):
        dist.broadcast(value, src=mesh.rank_at(source), group=group)
    return value


def own_whole(state: EngineState, name: str, held: Held) -> torch.Tensor:
    """A parameter whole on the ranks that hold it, of the parts of which they have one each.

    The ranks that have a part of it call it together, those of each pp rank alone.

    Args:
        state: of this rank's engine.
        name: of the parameter.
        held: which ranks hold it; this one is among them.
    """
    value = _unsharded(state, name)
    return value if held.shard is None else _join(state, name, value, held)


def is_sharded(state: EngineState, name: str) -> bool:
    """Whether replicas have rows of a parameter that this rank holds (zero=3)."""
    return state.fsdp is not None and name in state.fsdp.meta_parameters


def _unsharded(state: EngineState, name: str) -> torch.Tensor:
    """What this rank has of a parameter, beside its own rows those of the other replicas."""
    fsdp = state.fsdp
    if fsdp is not None and name in fsdp.meta_parameters:
        return fsdp.full(name)
    return state.parameters[name].detach()


def _join(state: EngineState, name: str, own: torch.Tensor, held: Held) -> torch.Tensor:
    """A parameter whole, from the ranks that have shards of it."""
    mesh, shard = state.mesh, held.shard
    assert shard is not None
    group, pieces = mesh.group(mesh.shard_axis), []
    first = mesh.rank - mesh.shard_rank * mesh.stride(mesh.shard_axis)
    for index in range(shard.degree):
        shape = shard_shape(held.shape, shard, index)
        piece = own.contiguous() if index == mesh.shard_rank else own.new_empty(shape)
        if piece.numel():
            source = first + index * mesh.stride(mesh.shard_axis)
            with state.progress.waiting(f"{name} on", mesh.peers(mesh.shard_axis)):
                dist.broadcast(piece, src=source, group=group)
        pieces.append(piece)
    return join(pieces, shard)
