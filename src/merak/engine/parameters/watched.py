"""Tensors of an engine that a script must not take for whole parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.engine.state import EngineState
from merak.engine.zero.optimizer_params import OptimizerParam, OptimizerParams
from merak.graph.weights.absent import AbsentTensor
from merak.graph.weights.sharded import DimCut, Dims, ShardLayout


def sharded_tensors(state: EngineState) -> Iterator[tuple[nn.Parameter, ShardLayout]]:
    """Parameters and optimizer tensors of which this rank has a shard, and how they are sharded.

    Whole parameters are among them where the optimizer steps other tensors or other stages have
    further ones, and absent ones of which each replica has shards.

    Args:
        state: of this rank's engine.
    """
    items = state.optimizer_params.items
    for name, parameter in state.parameters.items():
        shard, item = state.base.shards.get(name), items.get(name)
        dims: Dims = ()
        if shard is not None:
            dims = ((shard.dim, DimCut(shard, sum(shard.parts))),)
        is_stepped = item is None or item.tensor is parameter
        is_here = not parameter.is_meta
        if dims or (is_here and (not is_stepped or state.mesh.pp > 1)):
            described = _described(name, state.mesh, shard, None, is_stepped)
            found = ShardLayout(described, dims, is_stepped)
            yield parameter, found
        if item is not None and not is_stepped:
            source = _described(name, state.mesh, shard, item, True)
            if of_optimizer := _dims_of_rows(item, shard):
                yield item.tensor, ShardLayout(source, of_optimizer)


def watch_absent(model: nn.Module, params: OptimizerParams) -> None:
    """Set absent gradients on the parameters of other stages, for scripts that read gradients.

    Args:
        model: the user's, as it is laid out.
        params: this rank's, which have gradients when those of other ranks do.
    """

    def has_gradients() -> bool:
        return any(item.tensor.grad is not None for item in params.items.values())

    for parameter in model.parameters():
        if isinstance(parameter, AbsentTensor):
            parameter.has_gradients = has_gradients


def _dims_of_rows(item: OptimizerParam, shard: ParameterShard | None) -> Dims:
    """The sharded dims of an optimizer tensor: rows of a shard, or either."""
    dims: dict[int, DimCut] = {}
    if shard is not None:
        dims[shard.dim] = DimCut((shard, None), sum(shard.parts))
    if item.rows is not None:
        size = item.parameter.shape[0] if item.parameter.dim() else 1
        of_shard = dims.get(0, DimCut((None, None), size))
        dims[0] = DimCut((of_shard.by, item.rows, size), of_shard.size)
    return tuple(sorted(dims.items(), key=lambda one: one[0]))


def _described(
    name: str,
    mesh: Mesh,
    shard: ParameterShard | None,
    item: OptimizerParam | None,
    is_stepped: bool,
) -> str:
    ways = [] if shard is None else [f"over {mesh.shard_axis}={mesh.shard_degree}"]
    ways += ["by rows over replicas (zero)"] if item is not None and item.rows is not None else []
    what = "the optimizer's tensor of " if item is not None else ""
    if ways:
        return f"{what}{name!r} is sharded {' and '.join(ways)}"
    if is_stepped:
        return f"{name!r} is whole, and other stages (pp={mesh.pp}) have further parameters"
    return f"{what}{name!r} is whole, and zero or master_weights has the optimizer step another"
