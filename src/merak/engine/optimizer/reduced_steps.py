"""Steps over shards with full reductions of whole parameters, which ranks exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist

from merak.core.gradients import dense, no_gradient
from merak.core.shards import ParameterShard, RowShard
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.comm.gradient_norm import pieces_of
from merak.engine.optimizer.whole_tensors import have_gradients
from merak.engine.state import EngineState
from merak.graph.weights.holders import full_shape
from merak.plan.optimizer.whole_reductions import (
    Combine,
    CutParameter,
    Partial,
    WholeReductions,
    shards_of,
)

_OPERATIONS = {Combine.SUM: dist.ReduceOp.SUM, Combine.MAX: dist.ReduceOp.MAX}


class ReducedSteps:
    """The parameters whose shards a rank's optimizer steps by reductions over all shards.

    Args:
        state: of this rank's engine.
        names: of the parameters, the same on all ranks of a stage.
    """

    def __init__(self, state: EngineState, names: Collection[str]) -> None:
        self._state = state
        self._names = [name for name in state.optimizer_params.items if name in names]
        self._cuts = {name: _cut(state, name) for name in self._names}
        self._groups = {name: _groups(state, name) for name in self._names}
        every = (group for groups in self._groups.values() for group in groups)
        self._every = list({id(group): group for group in every}.values())
        self._mode: WholeReductions | None = None

    @torch.no_grad()
    def begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Begin a step, in which the optimizer's operators are followed; all ranks call it.

        Args:
            optimizer: that steps; None on a rank without one.
        """
        self.leave()
        items = self._state.optimizer_params.items
        has_gradient = have_gradients(self._state, self._names)
        for name in self._names:
            tensor = items[name].tensor
            if tensor.grad is not None:
                tensor.grad = dense(tensor.grad)
            elif name in has_gradient:
                tensor.grad = no_gradient(tensor)
        if optimizer is not None and self._names:
            cuts: dict[torch.Tensor, CutParameter] = {}
            for name in self._names:
                cuts[items[name].tensor] = self._cuts[name]
            self._mode = WholeReductions(shards_of(optimizer, cuts), self._exchange)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End a step: what waits for reductions runs."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def leave(self) -> None:
        """Leave a step that an error has ended."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(RuntimeError, None, None)

    def _exchange(self, parts: Sequence[Partial]) -> list[torch.Tensor]:
        """Reduce parts over the ranks that have shards: all of one kind at once."""
        found = [part.value.to(self._state.mesh.device) for part in parts]
        for group in self._every:
            for combine, operation in _OPERATIONS.items():
                chosen = [
                    place
                    for place, part in enumerate(parts)
                    if part.combine is combine and group in self._groups.get(part.cut.name, ())
                ]
                if not chosen:
                    continue
                values = torch.stack([found[place] for place in chosen])
                with self._state.progress.waiting("norms of shards from", others_of(group)):
                    dist.all_reduce(values, operation, group=group)
                for place, value in zip(chosen, values.unbind(), strict=True):
                    found[place] = value
        return found


def _groups(state: EngineState, name: str) -> list[dist.ProcessGroup]:
    """The groups of ranks that have rows or shards of a parameter."""
    params, shard = state.optimizer_params, state.base.shards.get(name)
    rows = params.group_of(name) if params.items[name].rows is not None else None
    has_shards = shard is not None and shard.owner is None
    shards = state.mesh.group(state.mesh.shard_axis) if has_shards else None
    return [group for group in (rows, shards) if group is not None]


def _cut(state: EngineState, name: str) -> CutParameter:
    item, shard = state.optimizer_params.items[name], state.base.shards.get(name)
    numel = math.prod(full_shape(item.parameter, shard))
    pieces = _counted(shard, item.rows, state.mesh.shard_rank)
    return CutParameter(name, numel, tuple(item.tensor.shape), pieces)


def _counted(
    shard: ParameterShard | None, rows: RowShard | None, index: int
) -> Callable[[torch.Tensor], list[tuple[torch.Tensor, int]]]:
    """What splits a tensor of a shard's rows into pieces, and says how many ranks have each."""
    if shard is None or shard.owner is not None:
        return lambda tensor: [(tensor, 1)]
    size = sum(stop - start for start, stop in shard.ranges(index))
    if rows is not None and shard.dim == 0:
        size = min(max(size - rows.start, 0), rows.stop - rows.start)

    def counted(tensor: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        pieces = pieces_of(tensor, shard, rows, shard.degree)
        is_padded = not shard.whole and size < tensor.shape[shard.dim]
        return [(p.narrow(shard.dim, 0, size), n) for p, n in pieces] if is_padded else pieces

    return counted
