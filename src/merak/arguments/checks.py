"""Checks of training arguments beyond the rule for one field of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from transformers.trainer_pt_utils import AcceleratorConfig

from merak.arguments.fields import TrainingFields
from merak.arguments.folders import folder_problems
from merak.arguments.loggers import logger_problems
from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.ranges import loader_problems, range_problems
from merak.arguments.rules import UNKNOWN, Layout, Policy, problems, refusal
from merak.arguments.table import ACCELERATOR
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import ArgumentsError, PlanError
from merak.core.mesh import Mesh
from merak.engine.recording.step_traces import parse_steps
from merak.graph.ir.torch_compiler import INDUCTOR, compile_backends, compile_modes
from merak.plan.activations.offload import parse_offload
from merak.plan.recompute_spec import Mode, parse_recompute


def own_problems(arguments: TrainingFields, mesh: Mesh) -> Iterator[str]:
    """Yield a sentence for every argument that this job cannot honour.

    Args:
        arguments: to look at.
        mesh: the ranks of the job.
    """
    yield from range_problems(arguments)
    yield from loader_problems(arguments)
    yield from logger_problems(arguments)
    yield from _optimizer_problems(arguments, mesh)
    yield from _accelerator_problems(arguments, mesh)
    yield from _compile_problems(arguments)
    yield from _field_problems(arguments, mesh)


def _compile_problems(arguments: TrainingFields) -> Iterator[str]:
    backend, mode = arguments.torch_compile_backend, arguments.torch_compile_mode
    if not arguments.torch_compile or backend is None:
        return
    if backend not in (known := compile_backends()):
        yield f"torch_compile_backend={backend!r} is not a choice; use {_either(known)}."
    elif mode is not None and backend != INDUCTOR:
        yield (
            f"torch_compile_mode={mode!r} is of the backend 'inductor', not of {backend!r}; leave "
            "it out."
        )
    elif mode is not None and mode not in (known := compile_modes()):
        yield f"torch_compile_mode={mode!r} is not a choice; use {_either(known)}."


def _either(choices: Sequence[str]) -> str:
    return " or ".join(map(repr, choices))


def _optimizer_problems(arguments: TrainingFields, mesh: Mesh) -> Iterator[str]:
    name = str(getattr(arguments.optim, "value", arguments.optim))
    rule = OPTIMIZERS.get(name, UNKNOWN)
    if rule.policy is Policy.REFUSED and rule.layout.holds(mesh):
        yield refusal("optim", name, rule)
    elif arguments.zero and mesh.dp > 1 and rule.layout is Layout.TENSOR_PARALLEL:
        yield (
            f"optim={name!r} cannot be honoured with zero={arguments.zero}: its update looks at "
            "whole parameters, of which each replica steps some rows; use 'adamw_torch', or zero=0."
        )
    elif arguments.local_steps and name.startswith("schedule_free"):
        yield (
            f"optim={name!r} cannot be honoured with local_steps={arguments.local_steps}: it steps "
            "parameters that are not the model's, which replicas average; use 'adamw_torch'."
        )
    elif (arguments.zero or arguments.master_weights) and name.startswith("schedule_free"):
        yield (
            f"optim={name!r} cannot be honoured with zero={arguments.zero} and master_weights="
            f"{arguments.master_weights}: it also changes the parameters between steps, which then "
            "are not its own; use 'adamw_torch'."
        )


def _accelerator_problems(arguments: TrainingFields, mesh: Mesh) -> Iterator[str]:
    config: object = arguments.accelerator_config
    if isinstance(config, AcceleratorConfig):
        for sentence in problems(config, ACCELERATOR, frozenset(), mesh):
            yield f"accelerator_config.{sentence}"


def _field_problems(arguments: TrainingFields, mesh: Mesh) -> Iterator[str]:
    cap_mb, bucket_bytes = arguments.ddp_bucket_cap_mb, arguments.bucket_bytes
    if cap_mb is not None and bucket_bytes is not None and bucket_bytes != cap_mb * 2**20:
        yield (
            f"bucket_bytes={bucket_bytes} and ddp_bucket_cap_mb={cap_mb} contradict each other; "
            "set one of them."
        )
    yield from _memory_problems(arguments, mesh)
    if arguments.nan_policy == "rollback" and arguments.save_strategy == "no":
        yield (
            "nan_policy='rollback' loads the last checkpoint, but save_strategy='no' saves none; "
            "set save_strategy='steps' and save_steps."
        )
    if arguments.ema_evaluation and arguments.ema_decay is None:
        yield (
            "ema_evaluation=True evaluates averages of parameters, but ema_decay=None keeps none; "
            "set ema_decay=0.999, or leave ema_evaluation out."
        )
    if arguments.profile_steps is not None:
        try:
            parse_steps(str(arguments.profile_steps))
        except ArgumentsError as error:
            yield str(error)
    if arguments.replan:
        yield from _replan_problems(arguments)
    if mesh.rank == 0:  # which makes it
        yield from folder_problems(arguments)
    partition = arguments.partition
    if partition is not None and (not partition or min(partition) < 1):
        yield f"partition={partition} has an empty stage; give every stage a segment or more."
    if partition is not None and len(partition) % mesh.pp:
        yield (
            f"partition={partition} names {len(partition)} stages, which cannot be laid out over "
            f"pp={mesh.pp} positions; name {mesh.pp} stages, or a multiple."
        )
    if arguments.segment_times is not None and not os.path.isfile(arguments.segment_times):
        yield f"segment_times={arguments.segment_times!r} is not a file; name a JSON file of times."


def _replan_problems(arguments: TrainingFields) -> Iterator[str]:
    if arguments.plan != AUTO_PLAN:
        yield "replan=True is for a plan that is searched; set plan='auto', or leave it out."
    elif arguments.save_strategy == "no" or arguments.save_only_model:
        given = "save_only_model=True" if arguments.save_only_model else "save_strategy='no'"
        yield (
            "replan=True goes on from a checkpoint of the whole training, but "
            f"{given} saves none; save them, or leave replan out."
        )


def _memory_problems(arguments: TrainingFields, mesh: Mesh) -> Iterator[str]:
    budget = arguments.memory_budget
    try:
        recomputed = parse_recompute(arguments.recompute)
        offloaded = parse_offload(arguments.offload_activations)
    except PlanError as error:
        yield str(error)
        return
    for name, spec in (("recompute", recomputed), ("offload_activations", offloaded)):
        if spec.mode is Mode.AUTO and budget is None and mesh.device.type == "cpu":
            yield f"{name}='auto' needs to know the memory of a rank; set memory_budget in bytes."
