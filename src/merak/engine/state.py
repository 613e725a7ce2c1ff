"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from merak.core.mesh import Mesh
from merak.core.tensor_meta import Signature
from merak.engine.comm.gradient_buckets import GradientReducer
from merak.engine.comm.p2p import Transfers
from merak.engine.comm.replica_buffers import ReplicaBuffers
from merak.engine.comm.stage_io import StageIO
from merak.engine.comm.tied_gradients import TiedGradients
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.engine.microbatches import MicrobatchFactory
from merak.engine.stage import Stage
from merak.engine.zero.fsdp import FsdpParameters
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.program.program import Program
from merak.plan.step_plans import StepPlans

SaveFewer = Callable[[int, Mapping[int, str]], tuple[StepPlans, Program]]
"""Given a step, and why it was given up on some pipeline positions, the plans and the program to go
on with."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine is made of; `engine.build` puts it together.

    Args:
        mesh: the grid of ranks.
        model: the user's model.
        stages: this rank's stages by number.
        stage_rank: the pipeline position of each stage in the first pipe, which evaluates.
        parameters: this rank's parameters by name.
        owned: names of those whose copy on this rank counts, of all ranks of its pipeline.
        norm_order: names of all of the pipeline's that have gradients, in the model's order.
        densified: names of those whose sparse gradients are dense in this layout.
        shared: names of those that several segments of the model read.
        buffers: the model's buffers by name.
        replica_buffers: brings together what replicas write into buffers.
        kept_buffers: names of the model's buffers that this rank keeps up to date.
        base: the program of the shape that the job was planned with.
        program_for: what to run for a signature, in training or evaluation.
        plan_for: the schedule for a number of microbatches.
        microbatches: makes microbatches of batches.
        transfers: the point-to-point traffic between pp ranks.
        stage_io: activations and gradients between stages.
        reducer: the sums over data parallel replicas.
        tied: the exchange of shared parameters' gradients.
        optimizer_params: what the optimizer steps.
        fsdp: the parameters of which replicas hold shares; None for none.
        zero: what is sharded over dp; see `EngineOptions`.
        progress: told of what the engine does.
        oom_guard: what this rank does where memory runs out inside a step.
        save_fewer: how the ranks then change what they run; None where that is not theirs to do.
    """

    mesh: Mesh
    model: torch.nn.Module
    stages: Mapping[int, Stage]
    stage_rank: tuple[int, ...]
    parameters: Mapping[str, torch.nn.Parameter]
    owned: frozenset[str]
    norm_order: tuple[str, ...]
    densified: frozenset[str]
    shared: frozenset[str]
    buffers: Mapping[str, torch.Tensor]
    replica_buffers: ReplicaBuffers
    kept_buffers: frozenset[str]
    base: Program
    program_for: Callable[[Signature, bool], Program]
    plan_for: StepPlans
    microbatches: MicrobatchFactory
    transfers: Transfers
    stage_io: StageIO
    reducer: GradientReducer
    tied: TiedGradients
    optimizer_params: OptimizerParams
    fsdp: FsdpParameters | None
    zero: int
    progress: Progress
    oom_guard: OomGuard
    save_fewer: SaveFewer | None
