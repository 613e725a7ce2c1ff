"""Parameter writes of the model's forward, done before the microbatches run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from merak.core.errors import ScheduleError
from merak.core.shards import ParameterShard, join, take
from merak.engine.state import EngineState
from merak.engine.zero.optimizer_params import update_master
from merak.graph.ir.ir import ParameterWrites
from merak.graph.program.codegen import runnable
from merak.graph.program.program import Program
from merak.graph.trace.branches.flags import optional_parameters
from merak.plan.layout import Layout

Batch = Mapping[str, torch.Tensor]


def apply_parameter_writes(
    state: EngineState, programs: Sequence[Program], batches: Sequence[Batch]
) -> None:
    """Write into this rank's parameters as the model's forward would; replicas call it together.

    Args:
        state: of this rank's engine.
        programs: of this replica's microbatches.
        batches: their columns.

    Raises:
        ScheduleError: a sharded parameter is not written element by element.
    """
    every = {
        write.parameter: (write, program)
        for program in programs
        for write in program.parameter_writes
    }
    own = [found for name, found in every.items() if name in state.parameters]
    if not own:
        return
    if state.fsdp is not None:
        refuse_sharded_writes([write for write, _ in own])
    state.optimizer_params.wait()
    for write, program in own:
        lookups = _gather_columns(state, write, batches)
        buffers = {**state.buffers, **program.constants}
        _apply(state, write, [{**buffers, **batch} for batch in lookups])


def _gather_columns(
    state: EngineState, write: ParameterWrites, batches: Sequence[Batch]
) -> list[Batch]:
    """The columns that a write reads, of every microbatch of all replicas; else one empty batch."""
    if not write.columns:
        return [{}]
    own = [{name: batch[name] for name in write.columns} for batch in batches]
    group = state.mesh.group("dp")
    if group is None:
        return list(own)
    found: list[list[Batch]] = [[] for _ in range(dist.get_world_size(group))]
    with state.progress.waiting(
        f"the columns that write into {write.parameter} of", state.mesh.peers("dp")
    ):
        dist.all_gather_object(found, own, group=group)
    device = state.mesh.device
    return [{n: t.to(device) for n, t in batch.items()} for each in found for batch in each]


@torch.no_grad()
def _apply(state: EngineState, write: ParameterWrites, values: Sequence[Batch]) -> None:
    """Write one parameter, and its optimizer tensor."""
    name = write.parameter
    item = state.optimizer_params.items.get(name)
    if state.fsdp is not None and name in state.fsdp.meta_parameters:
        own = state.fsdp.shard(name)
        low = own.to(state.parameters[name].dtype)
        update_master(own, low, _run(write, low.clone(), values))
        if item is not None and item.is_in_host:
            item.take_written()
        return
    data = state.parameters[name].detach()
    shard = state.base.shards.get(name)
    if shard is not None and not any(shard.sizes(state.mesh.shard_rank)):
        return  # another rank has all of it
    if shard is None or write.elementwise or shard.owner is not None:
        _run(write, data, values)
    else:
        data.copy_(
            take(_run(write, _unsharded(state, data, shard), values), shard, state.mesh.shard_rank)
        )
    if item is not None and item.is_copy:
        item.take_written()


def _run(write: ParameterWrites, value: torch.Tensor, values: Sequence[Batch]) -> torch.Tensor:
    function = runnable(write.graph)
    for batch in values:
        function(value, *(batch[name] for name in (*write.buffers, *write.columns)))
    return value


def _unsharded(state: EngineState, own: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
    """A parameter that is split over ranks, gathered from all shards."""
    axis = state.mesh.shard_axis
    group = state.mesh.group(axis)
    shards = [torch.empty_like(own) for _ in range(shard.degree)]
    with state.progress.waiting("the shards of a parameter of", state.mesh.peers(axis)):
        dist.all_gather(shards, own.contiguous(), group=group)
    return join(shards, shard)


def refuse_sharded_writes(parameter_writes: Collection[ParameterWrites]) -> None:
    """Refuse writes into sharded parameters that need more than one element at a time.

    Raises:
        ScheduleError: a parameter is not written element by element.
    """
    for write in parameter_writes:
        if not write.elementwise:
            raise ScheduleError(
                f"zero=3 holds shards of {write.parameter!r}, into which the model writes more "
                "than one shard at a time while it runs; use zero=2."
            )


def refuse_parameter_writes(layout: Layout, *, is_sharded: bool, delays: bool) -> None:
    """Refuse a layout in which parameters cannot be written before a step.

    Args:
        layout: the model, laid out.
        is_sharded: whether parameters are sharded over replicas.
        delays: whether updates of parameters are delayed by a step.

    Raises:
        ScheduleError: the model writes into parameters, and the layout does not allow that.
    """
    if is_sharded:
        refuse_sharded_writes(layout.graph.parameter_writes)
    names = {write.parameter for write in layout.graph.parameter_writes}
    if names and delays:
        raise ScheduleError(
            f"delay_optimizer_update=True steps parameters while the model runs, which writes into "
            f"the parameter {min(names)!r}; leave it out."
        )
    if names and not layout.schedule.is_synchronous:
        raise ScheduleError(
            f"schedule={layout.schedule.name!r} updates weights inside a step, and the model "
            f"writes into the parameter {min(names)!r} while it runs; use a synchronous schedule "
            "such as '1f1b'."
        )
    for segment in layout.graph.segments:
        if found := names & set(optional_parameters(segment)):
            raise ScheduleError(
                f"the model writes into the parameter {min(found)!r} while it runs, which a step "
                "may leave out, by chance or by the values of a batch; change the parameter "
                "between steps."
            )
