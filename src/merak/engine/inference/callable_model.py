"""A model that is laid out, to be called as it is written: evaluated by others, or generating."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from merak.core.doctor.finding import System
from merak.core.doctor.memory import read_memory
from merak.core.errors import WeightsError
from merak.core.random import random_state, restore_random_state
from merak.engine.engine import Engine
from merak.engine.inference.calls import Calls
from merak.engine.inference.pipeline import Pipeline
from merak.engine.inference.placed import Conversions, Placed, bring, leaves, place, whole
from merak.engine.parameters.held import held_parameters, is_sharded, own_whole
from merak.graph.weights.gather_weights import whole_tensors
from merak.graph.weights.holders import first_names, named_tensors
from merak.graph.weights.laid_out import engine_of, is_in_parts, methods_allowed


@contextmanager
def callable_model(model: nn.Module) -> Iterator[nn.Module]:
    """Context with a model that works as the whole one, its weights where they are.

    Its own Python code runs on all ranks, without gradients. Modules run on the pipeline ranks that
    have their parameters, and what they keep, such as keys and values of earlier tokens, stays
    there; parameters of which ranks have parts (tp, ep, zero=3) are gathered one after another, for
    as long as an operator reads them. Results are whole on every rank. So `generate` works, and
    what calls a model for others, such as a harness of evaluations.

    Ranks of a pipeline call it together, with the same arguments. So do all ranks where parts are
    gathered: as often, with samples of their own where they like; `generate` then goes on until all
    have ended.

    Args:
        model: the user's, as the trainer or `merak.parallelize` got it.

    Yields:
        A copy of it in evaluation mode, which shares its weights; the model itself where every rank
        has all of it.

    Raises:
        WeightsError: while it runs: it reads a parameter that training does not.
    """
    engine: Engine | None = engine_of(model)
    if engine is not None:
        engine.complete_updates()
        engine.optimizer_params.wait()
        if is_in_parts(engine.part):
            with torch.no_grad():
                yield _placed_model(model, engine)
            return
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode


def has_room_for_copies(model: nn.Module, engine: Engine) -> bool:
    """Whether every rank has room for a copy of the whole model, and as much to compute with.

    All ranks call it together, and get the same.

    Args:
        model: the user's, laid out.
        engine: that trains it.
    """
    held, device = held_parameters(model, engine).values(), engine.mesh.device
    needed = 2 * sum(math.prod(one.shape) * one.dtype.itemsize for one in held)
    if device.type == "cuda":
        gaps = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + gaps
    else:
        memory = read_memory(System())
        free = memory.free_bytes // memory.num_local_ranks
    return all(engine.gather(needed <= free, "the memory for a whole model on"))


def _placed_model(model: nn.Module, engine: Engine) -> nn.Module:
    state, mesh = engine._state, engine.mesh
    pipeline = Pipeline(mesh, state.progress)
    calls = Calls(pipeline)
    held, named = held_parameters(model, engine), named_tensors(model)
    parameters: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(first_names(named).values()):
        if not isinstance(named[name], nn.Parameter):
            continue
        found = held.get(name)
        gather: Callable[[], torch.Tensor] | None = None
        own, holders = named[name].detach().to("meta"), pipeline.everyone
        if found is None:
            gather = _Absent(name)
        else:
            own = torch.empty(found.shape, dtype=found.dtype, device="meta")
            holders = frozenset(found.pp_ranks)
            if found.shard is not None or is_sharded(state, name):
                gather = functools.partial(own_whole, state, name, found)
            elif mesh.pp_rank in holders:
                own = state.parameters[name].detach()
        parameters[name] = place(own, calls, holders, mesh.device, gather)
    buffers = {name for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)}
    others = {n: v.to(mesh.device) for n, v in whole_tensors(model, engine.part, buffers)}
    gathers = engine.part.is_sharded or any(one.shard is not None for one in held.values())
    with methods_allowed(model):
        made = copy_with(model, {**parameters, **others})
    call_together(made, pipeline, syncs=gathers and mesh.world_size > mesh.pp)
    return made


def copy_with(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a model in evaluation mode, with other tensors in place of its own.

    Args:
        model: the user's.
        tensors: by their first names.
    """
    named = named_tensors(model)
    new: dict[int, Any] = {id(named[name]): value for name, value in tensors.items()}
    for name, value in tensors.items():
        if isinstance(named[name], nn.Parameter):
            value._is_param = True  # what isinstance(_, nn.Parameter) asks
    return copy.deepcopy(model, new).eval()


class _Absent:
    """Refuses to give a parameter that no rank has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> torch.Tensor:
        raise WeightsError(
            f"no operator of the training reads {self._name}, so that no rank has it, and this "
            "call does."
        )


def call_together(model: Any, pipeline: Pipeline, syncs: bool) -> None:
    """Let calls of a model with placed parameters, and its `generate`, give whole results.

    Args:
        model: whose methods are replaced.
        pipeline: the ranks that call it together.
        syncs: whether all ranks of the job go on generating until all have ended.
    """
    _bring_inputs(model)
    is_inside = False

    def given(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return method(*args, **kwargs)
            is_inside = True
            try:
                with Conversions():
                    found = method(*args, **kwargs | options)
                _share_random_state(pipeline, found)
                return whole(found)
            finally:
                is_inside = False

        return call

    model.forward = given(model.forward)
    if hasattr(model, "generate"):
        model.generate = given(model.generate, **({"synced_gpus": True} if syncs else {}))


def _bring_inputs(model: nn.Module) -> None:
    """Let every module have its inputs where its parameters are before it computes with them."""

    def hook(target: frozenset[int], _: nn.Module, args: Any, kwargs: Any) -> Any:
        return bring(args, target), bring(kwargs, target)

    for module in model.modules():
        holders = [p.holders for p in module.parameters() if isinstance(p, Placed)]
        if holders and (target := frozenset.intersection(*holders)):
            module.register_forward_pre_hook(functools.partial(hook, target), with_kwargs=True)


def _share_random_state(pipeline: Pipeline, found: Any) -> None:
    """Give all ranks of a pipeline the random state of one that has the results.

    It has drawn what the results needed, as a single process had.
    """
    placed = [leaf for leaf in leaves(found) if isinstance(leaf, Placed)]
    if not placed:
        return
    root, device = min(placed[0].holders), pipeline.mesh.device
    devices = dict.fromkeys((torch.device("cpu"), device))
    states = pipeline.broadcast_object([random_state(one) for one in devices], root)
    for one, state in zip(devices, states, strict=True):
        restore_random_state(one, state)
