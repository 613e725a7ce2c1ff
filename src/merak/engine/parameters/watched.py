"""Tensors of an engine that a script must not take for whole parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.engine.state import EngineState
from merak.engine.zero.optimizer_params import OptimizerParam
from merak.graph.weights.sharded import Dims, ShardLayout


def sharded_tensors(state: EngineState) -> Iterator[tuple[nn.Parameter, ShardLayout]]:
    """Parameters and optimizer tensors of which this rank has a shard, and how they are sharded.

    Whole parameters are among them where the optimizer steps other tensors.

    Args:
        state: of this rank's engine.
    """
    items = state.optimizer_params.items
    for name, parameter in state.parameters.items():
        shard, item = state.base.shards.get(name), items.get(name)
        dims: Dims = () if shard is None else ((shard.dim, shard),)
        is_stepped = item is None or item.tensor is parameter
        if not parameter.is_meta and (dims or not is_stepped):
            found = ShardLayout(_described(name, state.mesh, shard, None), dims, is_stepped)
            yield parameter, found
        if item is not None and not is_stepped:
            source = _described(name, state.mesh, shard, item)
            if of_optimizer := _dims_of_rows(item, shard):
                yield item.tensor, ShardLayout(source, of_optimizer)


def _dims_of_rows(item: OptimizerParam, shard: ParameterShard | None) -> Dims:
    """The sharded dims of an optimizer tensor: rows of a shard, or either."""
    dims: dict[int, tuple[object, object]] = {} if shard is None else {shard.dim: (shard, None)}
    if item.rows is not None:
        of_shard, _ = dims.get(0, (None, None))
        dims[0] = of_shard, (item.rows, item.parameter.shape[:1])
    return tuple(sorted(dims.items()))


def _described(
    name: str, mesh: Mesh, shard: ParameterShard | None, item: OptimizerParam | None
) -> str:
    ways = [] if shard is None else [f"over {mesh.shard_axis}={mesh.shard_degree}"]
    ways += ["by rows over replicas (zero)"] if item is not None and item.rows is not None else []
    what = "the optimizer's tensor of " if item is not None else ""
    if not ways:
        return f"{what}{name!r} is whole, and zero or master_weights has the optimizer step another"
    return f"{what}{name!r} is sharded {' and '.join(ways)}"
