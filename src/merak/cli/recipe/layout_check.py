"""Degrees of a recipe that its model cannot be laid out with, found before ranks are started.

Only the traced model tells for certain, and every start would wait for its trace. So the shapes of
its parameters tell first which degrees are in doubt, and only those are laid out here as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from merak.cli.recipe.planned_job import PlannedJob
from merak.cli.recipe.recipe import model_of
from merak.cli.recipe.schema import Recipe
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import DataError, TraceError
from merak.core.mesh import Mesh
from merak.engine import forecast_of
from merak.plan.engine_options import EngineOptions
from merak.schedule.registry import resolve
from merak.zoo.workload import empty_model, example_workload, reads_sequence


def check_layout(name: str, recipe: Recipe) -> None:
    """Lay a recipe's model out, without weights and ranks, where its degrees may not fit it.

    Args:
        name: of the recipe.
        recipe: of a job on several ranks.

    Raises:
        MerakError: they do not; the message says which would.
    """
    own = recipe.parallel
    if recipe.plan == AUTO_PLAN or max(own.tp or 1, own.pp or 1, own.ep or 1, own.cp or 1) == 1:
        return
    with recipe.origins.located():
        planned = PlannedJob(name, recipe)
        draft = planned.draft(torch.device("cpu"))
        source = model_of(recipe.model)
        options = draft.options() | {"memory_budget": sys.maxsize}  # whose limit ranks know
        values, mesh = draft.laid_out(), draft.mesh
        num_microbatches = values.get("microbatches", 2 * mesh.pp)  # which 'auto' leaves open
        further = options["schedule_options"] or {}
        schedule = resolve(options["schedule"], mesh.pp, num_microbatches, **further)
        sequence = planned.samples(source).get("sequence")
        if mesh.cp > 1 and sequence is None and reads_sequence(source):
            return  # whose length the ranks' own columns say
        is_split = _splits_tokens(mesh, sequence, options["sequence_parallel"])
        model = empty_model(source, torch.float32)
        if is_split and not is_in_doubt(model, mesh, schedule.num_stages):
            return
        try:
            workload = example_workload(
                source,
                global_batch=values.get("global_batch", 1),
                sequence=sequence,
            )
            draft.give_options(workload)
            forecast_of(
                workload.source,
                workload.columns(values.get("microbatch", 1)),
                mesh,
                EngineOptions(**options, num_microbatches=num_microbatches),
            )
        except (TraceError, DataError):
            return  # samples stand for those of the data here, and ranks have these


def _splits_tokens(mesh: Mesh, sequence: int | None, sequence_parallel: bool) -> bool:
    """Whether samples have tokens that context parallel ranks get equally many of."""
    if mesh.cp == 1:
        return True
    is_multiple = sequence is not None and sequence % mesh.cp == 0
    return is_multiple and not (sequence_parallel and mesh.tp > 1)


def is_in_doubt(model: nn.Module, mesh: Mesh, num_stages: int) -> bool:
    """Whether degrees may not fit a model, by its modules and the shapes of its parameters.

    Args:
        model: without weights.
        mesh: the degrees.
        num_stages: of the schedule.
    """
    blocks = list(_blocks(model))
    parameters = [own for block in blocks for own in block.parameters() if own.dim() > 1]
    sizes = {size for own in parameters for size in own.shape}
    if num_stages > max(len(blocks), 1):
        return True
    if mesh.tp > 1 and not any(size % mesh.tp == 0 for size in sizes):
        return True
    return mesh.ep > 1 and any(count % mesh.ep for count in _expert_counts(blocks))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Items of the outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def _expert_counts(blocks: list[nn.Module]) -> Iterator[int]:
    """Numbers that may be of experts: of modules in a list, and of matrices in a parameter."""
    for block in blocks:
        for module in block.modules():
            if isinstance(module, nn.ModuleList):
                yield len(module)
            for own in module.parameters(recurse=False):
                if own.dim() == 3:
                    yield len(own)
