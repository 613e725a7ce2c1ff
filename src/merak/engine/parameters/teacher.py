"""Averages of a student's parameters in a teacher of the same model, in every layout.

BYOL, MoCo, DINO and mean teachers have a second network in the model, whose parameters follow those
of the first. A rank averages what it has of both. Where the student's part is on another pipeline
stage or is sharded otherwise, the ranks that have it send it.

Source: arXiv:1703.01780 (mean teachers), equation 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from merak.core.errors import ArgumentsError, did_you_mean
from merak.core.shards import take
from merak.engine.comm.row_shards import rows_of
from merak.engine.engine import Engine
from merak.engine.parameters.held import Held, fetch, held_parameters
from merak.engine.state import EngineState
from merak.graph.weights.holders import first_names, named_tensors
from merak.graph.weights.laid_out import engine_of

Pair = tuple[str, str]
"""Names of a teacher's parameter and of the student's that it follows."""


@torch.no_grad()
def average_teacher(model: nn.Module, teacher: str, student: str, decay: float) -> None:
    """Average a teacher's parameters with its student's; all ranks call it together.

    Every parameter of the teacher becomes `decay * teacher + (1 - decay) * student`. It works in
    every layout and for a model on one device, which no engine trains.

    Args:
        model: the user's, as the trainer or `merak.parallelize` got it.
        teacher: name of the submodule that follows, whose parameters are frozen.
        student: name of the submodule that is trained; it may have further parameters.
        decay: the teacher's part of the average, from 0 to 1.

    Raises:
        ArgumentsError: the names, shapes or the decay do not fit, or the teacher is not frozen.
    """
    if not 0.0 <= decay <= 1.0:
        raise ArgumentsError(f"{decay=} is no part of an average; use a number from 0 to 1.")
    pairs = _pairs(model, teacher, student)
    engine: Engine | None = engine_of(model)
    if engine is None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _check_shapes(pairs, {name: tuple(p.shape) for name, p in parameters.items()})
        for own, other in pairs:
            _average(parameters[own].detach(), parameters[other].detach(), decay)
        return
    if engine.local_steps is not None:
        raise ArgumentsError(
            "average_teacher needs a student that is the same on all replicas, and with "
            "local_steps each has its own between rounds; leave local_steps out."
        )
    engine.optimizer_params.wait()
    state = engine._state
    held = held_parameters(model, engine)
    _check_shapes(pairs, {name: one.shape for name, one in held.items()})
    for own, other in pairs:
        if own in held:  # or no operator reads it
            _average_held(state, (own, other), held, decay)


def _pairs(model: nn.Module, teacher: str, student: str) -> list[Pair]:
    """The names of the parameters of both, by the first name where they are tied."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in (teacher, student):
        if name not in modules:
            raise ArgumentsError(
                f"the model has no submodule {name!r}{did_you_mean(name, modules)}"
            )
    firsts = first_names(named_tensors(model))
    followed = dict(modules[student].named_parameters(remove_duplicate=False))
    pairs: dict[str, str] = {}
    for name, parameter in modules[teacher].named_parameters(remove_duplicate=False):
        own, other = f"{teacher}.{name}", f"{student}.{name}".lstrip(".")
        if name not in followed:
            raise ArgumentsError(f"{own} has no parameter to follow: there is no {other}.")
        if parameter is followed[name]:
            continue
        if parameter.requires_grad:
            raise ArgumentsError(
                f"{own} is trained; freeze the teacher (requires_grad_(False)) where the model is "
                "made, so that the average alone changes it."
            )
        pairs[firsts[own]] = firsts[other]
    return list(pairs.items())


def _check_shapes(pairs: Sequence[Pair], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for own, other in pairs:
        if own not in shapes:
            continue
        if other not in shapes:
            raise ArgumentsError(f"no operator reads {other}, which {own} is to follow.")
        if shapes[own] != shapes[other]:
            raise ArgumentsError(
                f"{own} is of shape {shapes[own]}, and {other} of {shapes[other]}; name a teacher "
                "and a student of the same structure."
            )


def _average(own: torch.Tensor, other: torch.Tensor, decay: float) -> None:
    own.mul_(decay).add_(other, alpha=1.0 - decay)


def _average_held(state: EngineState, pair: Pair, held: Mapping[str, Held], decay: float) -> None:
    """Average one parameter on the ranks that hold it."""
    own, other = held[pair[0]], held[pair[1]]
    is_owner = state.mesh.pp_rank in own.pp_ranks
    fsdp = state.fsdp
    if own.shard == other.shard and set(own.pp_ranks) <= set(other.pp_ranks):
        if is_owner and fsdp is not None and pair[0] in fsdp.meta_parameters:
            rows = fsdp.shard(pair[1]).to(other.dtype)
            _average(fsdp.shard(pair[0]), rows, decay)
        elif is_owner:
            names = {name: state.parameters[name].detach() for name in pair}
            _average(names[pair[0]], names[pair[1]], decay)
        return
    value = fetch(state, pair[1], other, own.pp_ranks, own.shard)
    if not is_owner:
        return
    assert value is not None
    if own.shard != other.shard and own.shard is not None:
        value = take(value, own.shard, state.mesh.shard_rank)
    if fsdp is not None and pair[0] in fsdp.meta_parameters:
        rows_here = fsdp.rows(pair[0])
        value = rows_of(value, rows_here.start, rows_here.stop)
        _average(fsdp.shard(pair[0]), value, decay)
    else:
        _average(state.parameters[pair[0]].detach(), value, decay)
