"""What a model writes into its parameters while it runs, done before the microbatches run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from merak.core.errors import ScheduleError
from merak.core.shards import ParameterShard, join, take
from merak.engine.state import EngineState
from merak.graph.ir.ir import ParameterWrites
from merak.graph.program.codegen import runnable
from merak.graph.program.program import Program
from merak.graph.trace.branches.flags import optional_parameters
from merak.plan.layout import Layout

Batch = Mapping[str, torch.Tensor]


def apply_parameter_writes(
    state: EngineState, programs: Sequence[Program], batches: Sequence[Batch]
) -> None:
    """Write into this rank's parameters what the model would; called alike on all replicas.

    Args:
        state: what the engine is made of.
        programs: of this replica's microbatches.
        batches: their columns.

    Raises:
        ScheduleError: replicas hold shares of a parameter that is not written share by share.
    """
    every = {
        one.parameter: (one, program) for program in programs for one in program.parameter_writes
    }
    own = [found for name, found in every.items() if name in state.parameters]
    if not own:
        return
    if state.fsdp is not None:
        refuse_sharded_writes([one for one, _ in own])
    state.optimizer_params.wait()
    for one, program in own:
        lookups = _lookups(state, one, batches)
        buffers = {**state.buffers, **program.constants}
        _apply(state, one, [{**buffers, **batch} for batch in lookups])


def _lookups(state: EngineState, one: ParameterWrites, batches: Sequence[Batch]) -> list[Batch]:
    """The columns that are read for it, of every microbatch of all replicas; else nothing, once."""
    if not one.columns:
        return [{}]
    own = [{name: batch[name] for name in one.columns} for batch in batches]
    group = state.mesh.group("dp")
    if group is None:
        return list(own)
    found: list[list[Batch]] = [[] for _ in range(dist.get_world_size(group))]
    with state.progress.waiting(f"what is looked up in {one.parameter} by", state.mesh.peers("dp")):
        dist.all_gather_object(found, own, group=group)
    device = state.mesh.device
    return [{n: t.to(device) for n, t in batch.items()} for each in found for batch in each]


@torch.no_grad()
def _apply(state: EngineState, one: ParameterWrites, given: Sequence[Batch]) -> None:
    """Write one parameter, and what the optimizer steps for it."""
    name = one.parameter
    item = state.optimizer_params.items.get(name)
    if state.fsdp is not None and name in state.fsdp.meta_parameters:
        share = state.fsdp.shard(name)
        low = share.to(state.parameters[name].dtype)
        _follow(share, low, _run(one, low.clone(), given))
        return
    data = state.parameters[name].detach()
    rows = None if item is None or not item.is_master else item.own_rows()
    before = None if rows is None else rows.clone()
    shard = state.base.shards.get(name)
    if shard is None or one.elementwise:
        _run(one, data, given)
    else:
        data.copy_(take(_run(one, _whole(state, data, shard), given), shard, state.mesh.tp_rank))
    if item is not None and rows is not None and before is not None:
        _follow(item.tensor.detach(), before, rows)


def _run(one: ParameterWrites, value: torch.Tensor, given: Sequence[Batch]) -> torch.Tensor:
    write = runnable(one.graph)
    for batch in given:
        write(value, *(batch[name] for name in (*one.buffers, *one.columns)))
    return value


def _follow(master: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """What was written is the new value of a master; it knows more of the rest."""
    torch.where(before == after, master, after.to(master.dtype), out=master)


def _whole(state: EngineState, share: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
    """A parameter that is split over tp, put together for a moment."""
    group = state.mesh.group("tp")
    shares = [torch.empty_like(share) for _ in range(shard.degree)]
    with state.progress.waiting("the shares of a parameter of", state.mesh.peers("tp")):
        dist.all_gather(shares, share.contiguous(), group=group)
    return join(shares, shard)


def refuse_sharded_writes(parameter_writes: Collection[ParameterWrites]) -> None:
    """Shares of a parameter know nothing of each other.

    Raises:
        ScheduleError: one of those is not written element by element.
    """
    for one in parameter_writes:
        if not one.elementwise:
            raise ScheduleError(
                f"zero=3 holds shares of {one.parameter!r}, into which the model writes more than "
                "one share at a time while it runs; use zero=2."
            )


def refuse_parameter_writes(layout: Layout, *, in_shares: bool) -> None:
    """What the model writes into its parameters is written before a step, on all that hold them.

    Args:
        layout: the model, laid out.
        in_shares: whether replicas hold shares of parameters.

    Raises:
        ScheduleError: the layout's steps do not allow that.
    """
    if in_shares:
        refuse_sharded_writes(layout.graph.parameter_writes)
    names = {one.parameter for one in layout.graph.parameter_writes}
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
