"""Whole parameters for optimizers whose update needs them, where ranks hold shards.

Every parameter that is cut has an owner among the ranks with a piece of it. Before a step the owner
gets all pieces of the parameter and of its gradient; it alone steps the whole, has its optimizer
state, and sends the pieces back. What each rank holds between two steps is what it holds anyway.

Source: the layer-wise distributed optimizer of Megatron-LM.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merak.core.mesh import REPLICAS, largest
from merak.core.shards import join, take
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.optimizer.own_tensors import refuse_state
from merak.engine.state import EngineState
from merak.graph.weights.sharded import ShardLayout
from merak.plan.memory.whole_tensors import owners

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank has of a parameter: shapes of its piece and its shard; whether it steps it."""

    piece: Shape
    shard: Shape
    is_stepped: bool


class WholeTensors:
    """The whole parameters that a rank's optimizer steps for others.

    Args:
        state: of this rank's engine.
        optimizer: of this rank's tensors, which gets whole ones in their place; None for none.
        by_reductions: whether it steps shards itself where all ranks of the stage have some.
    """

    def __init__(
        self,
        state: EngineState,
        optimizer: torch.optim.Optimizer | None,
        by_reductions: bool = False,
    ) -> None:
        self._state = state
        self._items = state.optimizer_params.items
        everyone = state.gather(_held(state, optimizer), "the tensors of the optimizer by")
        cut = _cut_names(state, everyone)
        self.reduced = _on_all_ranks(state, cut, everyone) if by_reductions else []
        self._names = [name for name in cut if name not in self.reduced]
        self._rows = _exchanges(state, self._names, everyone, None)
        owned = {name for one in self._rows for name in one.owned}
        shared_out = {name for one in self._rows for name in one.names}
        here = [name for name in self._names if name in owned or name not in shared_out]
        self._shards = _exchanges(state, here, everyone, state.base.shards)
        elsewhere = {n for one in self._shards for n in one.names if n not in one.owned}
        self.tensors = {n: self._whole(n) for n in here if n not in elsewhere}
        if optimizer is not None:
            self._replace(optimizer)

    def _whole(self, name: str) -> nn.Parameter:
        item, shard = self._items[name], self._state.base.shards.get(name)
        shape = list(item.parameter.shape)
        if shard is not None and shard.owner is None:
            shape[shard.dim] = sum(shard.parts)
        return nn.Parameter(item.tensor.detach().new_zeros(shape))

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer step the whole parameters that this rank owns."""
        names = {id(self._items[name].tensor): name for name in self._names}
        for group in optimizer.param_groups:
            kept = []
            for tensor in group["params"]:
                if (name := names.get(id(tensor))) is None:
                    kept.append(tensor)
                    continue
                refuse_state(optimizer, tensor)
                kept += [self.tensors[name]] if name in self.tensors else []
            group["params"][:] = kept

    def for_others(self) -> Iterator[tuple[nn.Parameter, ShardLayout]]:
        """The whole parameters, which have gradients in a step alone, and what to say of them."""
        for name, tensor in self.tensors.items():
            source = f"{name!r} is whole inside of the optimizer's step alone"
            yield tensor, ShardLayout(source, (), is_stepped=False)

    def stepped(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Whole tensor that the optimizer steps for a rank's shard; None where another rank does.

        Args:
            tensor: of this rank, cut or whole.
        """
        for name in self._names:
            if self._items[name].tensor is tensor:
                return self.tensors.get(name)
        return tensor

    @torch.no_grad()
    def collect(self) -> None:
        """Gather whole parameters and gradients on owners before a step; all ranks call it."""
        whole = self._joined({n: self._items[n].tensor.detach() for n in self._names})
        for name, parameter in self.tensors.items():
            parameter.copy_(whole[name].view_as(parameter))
        del whole  # before there are whole gradients, too
        gradients: dict[str, torch.Tensor] = {}
        for name in self._names:
            tensor = self._items[name].tensor
            found = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            gradients[name] = found.to_dense() if found.is_sparse else found
        has_gradient = have_gradients(self._state, self._names)
        whole_gradients = self._joined(gradients)
        for name, parameter in self.tensors.items():
            gradient = whole_gradients[name].view_as(parameter)
            parameter.grad = gradient if name in has_gradient else None

    @torch.no_grad()
    def distribute(self) -> None:
        """Scatter the parameters that owners have stepped to all ranks, which call it together."""
        pieces: dict[str, torch.Tensor] = {n: p.detach() for n, p in self.tensors.items()}
        for one in (*self._shards, *self._rows):
            pieces |= one.scatter(pieces)
        for name in self._names:
            tensor = self._items[name].tensor
            tensor.copy_(pieces[name].reshape(tensor.shape))
        for parameter in self.tensors.values():
            parameter.grad = None

    def _joined(self, pieces: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(pieces)
        for one in (*self._rows, *self._shards):
            found |= one.gather(found)
        return found


def have_gradients(state: EngineState, names: Sequence[str]) -> set[str]:
    """The parameters of which any rank has a gradient; all ranks of a stage call it.

    Args:
        state: of this rank's engine.
        names: of parameters that are cut, the same on all.
    """
    mesh, params = state.mesh, state.optimizer_params
    flags = [int(params.items[name].tensor.grad is not None) for name in names]
    for axis in (REPLICAS, mesh.shard_axis) if names else ():
        group = mesh.group(axis)
        if group is not None and (axis != REPLICAS or params.is_sharded):
            with state.progress.waiting("which gradients there are on", others_of(group)):
                flags = largest(flags, group)
    return {name for name, flag in zip(names, flags, strict=True) if flag}


def _held(state: EngineState, optimizer: torch.optim.Optimizer | None) -> dict[str, _Held]:
    groups = [] if optimizer is None else optimizer.param_groups
    stepped = {id(tensor) for group in groups for tensor in group["params"]}
    return {
        name: _Held(tuple(i.tensor.shape), tuple(i.parameter.shape), id(i.tensor) in stepped)
        for name, i in state.optimizer_params.items.items()
    }


def _of_stage(
    state: EngineState, everyone: Sequence[Mapping[str, _Held]]
) -> Sequence[Mapping[str, _Held]]:
    mesh = state.mesh
    size = mesh.replicas * mesh.tp
    return everyone[mesh.pp_rank * size : (mesh.pp_rank + 1) * size]


def _on_all_ranks(
    state: EngineState, names: Sequence[str], everyone: Sequence[Mapping[str, _Held]]
) -> list[str]:
    """Names of the parameters of which all ranks of this stage step a piece."""
    stage = _of_stage(state, everyone)
    return [name for name in names if all(name in own and own[name].is_stepped for own in stage)]


def _cut_names(state: EngineState, everyone: Sequence[Mapping[str, _Held]]) -> list[str]:
    """Names of the parameters that are cut, and stepped by any rank of this stage."""
    items, stage = state.optimizer_params.items, _of_stage(state, everyone)
    stepped = {name for held in stage for name, one in held.items() if one.is_stepped}
    cut = {n for n, shard in state.base.shards.items() if shard.owner is None}
    return [n for n, item in items.items() if n in stepped and (n in cut or item.rows is not None)]


def _exchanges(
    state: EngineState,
    names: Collection[str],
    everyone: Sequence[Mapping[str, _Held]],
    shards: Mapping[str, Any] | None,
) -> list[_Exchange]:
    """The exchanges of rows over replicas, or of shards over tensor parallel ranks."""
    mesh, params = state.mesh, state.optimizer_params
    by_kind: dict[tuple[int, torch.dtype], tuple[dist.ProcessGroup, list[str]]] = {}
    for name in names:
        if shards is None:
            group = params.group_of(name) if params.items[name].rows is not None else None
        else:
            shard = shards.get(name)
            has_shards = shard is not None and shard.owner is None
            group = mesh.group(mesh.shard_axis) if has_shards else None
        if group is not None:
            key = (id(group), params.items[name].tensor.dtype)
            by_kind.setdefault(key, (group, []))[1].append(name)
    return [_Exchange(state, group, own, everyone, shards) for group, own in by_kind.values()]


class _Exchange:
    """One collective that brings pieces to owners, and the one that brings them back.

    Args:
        state: of this rank's engine.
        group: the ranks that hold the pieces.
        names: of the parameters, the same on all of them.
        everyone: what each rank of the job holds.
        shards: layouts of the shards; None for rows.
    """

    def __init__(
        self,
        state: EngineState,
        group: dist.ProcessGroup,
        names: Sequence[str],
        everyone: Sequence[Mapping[str, _Held]],
        shards: Mapping[str, Any] | None,
    ) -> None:
        self.names, self._group, self._progress = names, group, state.progress
        self._layouts, self._device = shards, state.mesh.device
        first = state.optimizer_params.items[names[0]].tensor
        self._dtype, self._home = first.dtype, first.device
        members = [everyone[rank] for rank in dist.get_process_group_ranks(group)]
        self._index = dist.get_rank(group)
        self._shapes = {
            n: [own[n].piece if shards is None else own[n].shard for own in members] for n in names
        }
        self._shard_shape = {n: members[self._index][n].shard for n in names}
        self._owners = _owners(names, self._shapes, members)
        self.owned = [name for name in names if self._owners[name] == self._index]

    def gather(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Join the pieces of all ranks to what this rank owns."""
        sent = [[pieces[n] for n in self.names if self._owners[n] == r] for r in self._ranks()]
        sizes = [[self._size(n, r) for n in self.owned] for r in self._ranks()]
        received = self._swap(sent, sizes)
        found = {}
        for place, name in enumerate(self.owned):
            own = [flat[place] for flat in received]
            if self._layouts is None:
                found[name] = torch.cat(own).view(self._shard_shape[name])
            else:
                shaped = [o.view(s) for o, s in zip(own, self._shapes[name], strict=True)]
                found[name] = join(shaped, self._layouts[name])
        return found

    def scatter(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut what this rank owns into the pieces of all ranks; returns this rank's pieces."""
        cut = {name: self._cut(name, whole[name]) for name in self.owned}
        sent = [[cut[name][r] for name in self.owned] for r in self._ranks()]
        of = [[n for n in self.names if self._owners[n] == r] for r in self._ranks()]
        sizes = [[self._size(n, self._index) for n in own] for own in of]
        received = self._swap(sent, sizes)
        return {
            name: flat
            for own, flats in zip(of, received, strict=True)
            for name, flat in zip(own, flats, strict=True)
        }

    def _cut(self, name: str, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._layouts is None:
            sizes = [self._size(name, rank) for rank in self._ranks()]
            rows: Sequence[torch.Tensor] = whole.reshape(-1).split(sizes)
            return rows
        return [take(whole, self._layouts[name], r) for r in self._ranks()]

    def _ranks(self) -> range:
        return range(dist.get_world_size(self._group))

    def _size(self, name: str, rank: int) -> int:
        return math.prod(self._shapes[name][rank])

    def _swap(
        self, sent: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[Sequence[torch.Tensor]]:
        """Send flat tensors to each rank; returns those of each, of the given sizes."""
        flat = [tensor.reshape(-1) for own in sent for tensor in own]
        given = torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype, device=self._device)
        given = given.to(self._device)
        each = given.element_size()
        total = sum(map(sum, sizes))
        received = torch.empty(total, dtype=self._dtype, device=self._device)
        with self._progress.waiting("pieces of parameters from", others_of(self._group)):
            dist.all_to_all_single(  # bytes, of which every backend can send as many as it likes
                received.view(torch.uint8),
                given.view(torch.uint8),
                [each * sum(own) for own in sizes],
                [each * sum(tensor.numel() for tensor in own) for own in sent],
                group=self._group,
            )
        parts = received.to(self._home).split([sum(own) for own in sizes])
        return [part.split(list(own)) for part, own in zip(parts, sizes, strict=True)]


def _owners(
    names: Sequence[str],
    shapes: Mapping[str, Sequence[Shape]],
    members: Sequence[Mapping[str, _Held]],
) -> dict[str, int]:
    """The owner of each parameter, of those who step it; of empty pieces, the first."""
    sizes = {name: sum(math.prod(shape) for shape in shapes[name]) for name in names}
    able = {n: [i for i, held in enumerate(members) if held[n].is_stepped] for n in names}
    return owners(sizes, able, len(members))
