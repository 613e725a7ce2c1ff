"""Whole parameters of a laid out model, to read or to write between steps, at once or in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from merak.core.errors import ArgumentsError, did_you_mean
from merak.core.shards import take
from merak.engine.comm.row_shards import rows_of
from merak.engine.engine import Engine
from merak.engine.parameters.held import Held, broadcast_part, fetch, held_parameters
from merak.engine.state import EngineState
from merak.graph.weights.gather_weights import state_names, whole_tensors
from merak.graph.weights.holders import first_names, named_tensors, shard_shape
from merak.graph.weights.laid_out import engine_of


@contextmanager
def gathered_parameters(
    model: nn.Module, names: str | Iterable[str] | None = None, *, in_place: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Context with whole parameters on every rank; all ranks enter and leave it together.

    What is written into them in place is the model's when it ends: of the lowest rank that has
    written, so that random draws are the same everywhere. It works in every layout and for a
    model on one device, which no engine trains.

    Args:
        model: the user's, as the trainer or `merak.parallelize` got it.
        names: of parameters, or one of them; None for all, which must fit in memory together.
        in_place: whether the model's modules have the whole ones meanwhile, with the gradients that
            the optimizer steps by, for code that walks a model, such as an adapter's.

    Yields:
        Parameters by those names, whole; without gradients, unless they are in their places.

    Raises:
        ArgumentsError: the model has no such parameter, or replicas have models of their own
            (`local_steps`).
    """
    wanted, firsts = _wanted(model, names)
    engine: Engine | None = engine_of(model)
    if engine is None:
        named = dict(model.named_parameters(remove_duplicate=False))
        yield {name: named[name] if in_place else named[name].detach() for name in wanted}
        return
    _await_update(engine, "gathered_parameters")
    state, held = engine._state, held_parameters(model, engine)
    if unread := [name for name in wanted if firsts[name] not in held and names is not None]:
        raise ArgumentsError(f"no operator reads {unread[0]}, so that no rank has it.")
    values = {n: _whole(state, firsts[n], held) for n in wanted if firsts[n] in held}
    if in_place:
        seen = {name: value.clone() for name, value in values.items()}
        with _in_place(model, values, _whole_gradients(state, firsts, held, values)) as whole:
            yield {**whole}
            # Some write into `parameter.data`, of which no version tells.
            values = {name: parameter.detach() for name, parameter in whole.items()}
        changed = [name for name, value in values.items() if not torch.equal(value, seen[name])]
    else:
        before = {name: value._version for name, value in values.items()}
        yield values
        changed = [name for name, value in values.items() if value._version != before[name]]
    writers: dict[str, int] = {}
    for rank, theirs in enumerate(state.gather(changed, "what has been written on")):
        writers = {**dict.fromkeys(theirs, rank), **writers}
    if writers:
        engine.last_weights.forget("parameters have been written since weights were last saved")
    for name in values:
        if name in writers:
            _write(state, firsts[name], held[firsts[name]], values[name], writers[name])


def stream_weights(
    model: nn.Module, rank: int | None = 0
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over a model's weights, whole and one after another; all ranks do so together.

    For what takes weights between steps, such as an engine that generates. No rank holds more than
    one whole tensor beside its own part, in every layout.

    Args:
        model: the user's, as the trainer or `merak.parallelize` got it.
        rank: which gets the tensors; None for every rank.

    Returns:
        Iterator over the names of the state dict, parameters first, in the same order on all
        ranks, each with its whole tensor on the rank's device, or None on other ranks. Tied
        parameters come under every name. A tensor may be the model's own: read it, and copy what
        is to last behind the next one. Each rank takes part until the iterator ends.

    Raises:
        ArgumentsError: there is no such rank, or replicas have models of their own
            (`local_steps`).
    """
    engine: Engine | None = engine_of(model)
    if engine is None:
        named = named_tensors(model)
        return ((name, named[first].detach()) for name, first in state_names(model).items())
    _await_update(engine, "stream_weights")
    mesh = engine.mesh
    if rank is not None and not 0 <= rank < mesh.world_size:
        raise ArgumentsError(
            f"{rank=} is none of the {mesh.world_size} ranks; use 0 to {mesh.world_size - 1}, or "
            "None for all."
        )
    gets = rank is None or rank == mesh.rank
    return ((name, value if gets else None) for name, value in _streamed(model, engine))


def _streamed(model: nn.Module, engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the state dict that ranks hold, by every name, on all ranks."""
    names: dict[str, list[str]] = {}
    for name, first in state_names(model).items():
        names.setdefault(first, []).append(name)
    state, held = engine._state, held_parameters(model, engine)
    for first in [name for name in names if name in held]:
        value = fetch(state, first, held[first], range(state.mesh.pp), None)
        assert value is not None
        yield from ((name, value) for name in names[first])
        del value
    tensors = named_tensors(model)
    buffers = {n for n in names if not isinstance(tensors[n], nn.Parameter)}
    for first, value in whole_tensors(model, engine.part, buffers):
        yield from ((name, value) for name in names[first])


def _await_update(engine: Engine, what: str) -> None:
    """Complete the last update, of which every replica has the same parameters.

    Raises:
        ArgumentsError: they have their own (`local_steps`).
    """
    if engine.local_steps is not None:
        raise ArgumentsError(
            f"{what} needs parameters that are the same on all replicas, and with "
            "local_steps each has its own between rounds; leave local_steps out."
        )
    engine.complete_updates()
    engine.optimizer_params.wait()


def _wanted(
    model: nn.Module, names: str | Iterable[str] | None
) -> tuple[list[str], Mapping[str, str]]:
    """The names of parameters that are asked for, and the first name of each that there is."""
    firsts = first_names(named_tensors(model))
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if names is None:
        return [name for name, _ in model.named_parameters()], firsts
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise ArgumentsError(f"the model has no parameter {name!r}{did_you_mean(name, known)}")
    return wanted, firsts


def _whole(state: EngineState, name: str, held: Mapping[str, Held]) -> torch.Tensor:
    """A parameter whole on this rank, in memory of its own."""
    value = fetch(state, name, held[name], range(state.mesh.pp), None)
    assert value is not None
    return value.clone()


def _whole_gradients(
    state: EngineState, firsts: Mapping[str, str], held: Mapping[str, Held], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The gradients of parameters that have one, whole on every rank."""
    own = [n for n, item in state.optimizer_params.items.items() if item.tensor.grad is not None]
    present = set(chain.from_iterable(state.gather(own, "the gradients of")))
    found = {}
    for name in (name for name in names if firsts[name] in present):
        first, part = firsts[name], None
        if state.mesh.pp_rank == min(held[first].pp_ranks):
            part = _own_gradient(state, first, held[first])
        value = broadcast_part(state, first, part, held[first], range(state.mesh.pp), None)
        assert value is not None
        found[name] = value
    return found


def _own_gradient(state: EngineState, name: str, held: Held) -> torch.Tensor:
    """The gradient of this rank's part of a parameter, whose rows replicas may have shared out."""
    mesh, params, shape = state.mesh, state.optimizer_params, held.shape
    if held.shard is not None:
        shape = shard_shape(shape, held.shard, mesh.shard_rank)
    made = torch.zeros(shape, dtype=held.dtype, device=mesh.device)
    item = params.items[name]
    gradient, rows = item.tensor.grad, item.rows
    if gradient is not None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        (made if rows is None else rows_of(made, rows.start, rows.stop)).copy_(gradient)
    if rows is not None:
        with state.progress.waiting(f"the gradient of {name} on", mesh.peers("dp")):
            dist.all_reduce(made, group=params.group_of(name))  # of zeros but for one's rows
    return made


@contextmanager
def _in_place(
    model: nn.Module, values: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, nn.Parameter]]:
    """Context in which modules have other parameters, each in every place of the model's own."""
    named = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    whole, by_id = {}, {}
    for name, value in values.items():
        own = named[name]
        if id(own) not in by_id:
            by_id[id(own)] = nn.Parameter(value, own.requires_grad)
            by_id[id(own)].grad = gradients.get(name)
        whole[name] = by_id[id(own)]
    places = [
        (module._parameters, key, found)
        for module in nn.Module.modules(model)
        for key, found in module._parameters.items()
        if id(found) in by_id
    ]
    for parameters, key, found in places:
        parameters[key] = by_id[id(found)]
    try:
        yield whole
    finally:
        for parameters, key, found in places:
            parameters[key] = found


@torch.no_grad()
def _write(state: EngineState, name: str, held: Held, value: torch.Tensor, writer: int) -> None:
    """Give every rank that has a part of a parameter its part of what a rank has written."""
    mesh = state.mesh
    if mesh.world_size > 1:
        others = tuple(rank for rank in range(mesh.world_size) if rank != mesh.rank)
        with state.progress.waiting(f"{name} as written on", others):
            dist.broadcast(value, src=writer)
    if mesh.pp_rank not in held.pp_ranks:
        return
    part = value if held.shard is None else take(value, held.shard, mesh.shard_rank)
    item = state.optimizer_params.items.get(name)
    if state.fsdp is not None and name in state.fsdp.meta_parameters:
        rows = state.fsdp.rows(name)
        state.fsdp.shard(name).copy_(rows_of(part, rows.start, rows.stop))
    else:
        state.parameters[name].detach().copy_(part)
    if item is not None and item.is_copy:
        item.tensor.detach().copy_(item.own_rows())
