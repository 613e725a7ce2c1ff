"""The state of an engine: its stages, parameters, plans and connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.engine.comm.gradient_reducers import GradientReducers
from merak.engine.comm.local_steps import LocalSteps
from merak.engine.comm.p2p import Transfers
from merak.engine.comm.replica_buffers import ReplicaBuffers
from merak.engine.comm.stage_io import StageIO
from merak.engine.comm.tied_gradients import TiedGradients
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.engine.layer_dropping import LayerDropping
from merak.engine.local_programs import ProgramCache
from merak.engine.microbatches import MicrobatchFactory
from merak.engine.stage import Stage
from merak.engine.zero.fsdp import FsdpParameters
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.program.program import Program
from merak.plan.step_plans import StepPlans

SaveFewer = Callable[[int, Mapping[int, str]], tuple[StepPlans, Program]]
"""Gives new plans and a program after a step; by pp rank, the errors that aborted it."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The parts of a rank's engine; `engine.assemble` puts them together.

    Args:
        mesh: the grid of ranks.
        model: the user's model.
        stages: this rank's stages by number.
        stage_rank: the pp rank of each stage in the first pipe, which evaluates.
        parameters: this rank's parameters by name.
        owned: names of the parameters that this rank owns, of all ranks of its pipeline.
        norm_order: names of the pipeline's trained parameters, in the model's order.
        densified: names of parameters whose sparse gradients are dense in this layout.
        shared: names of parameters that several segments of the model read.
        buffers: the model's buffers by name.
        replica_buffers: synchronises the buffers that replicas write.
        kept_buffers: names of the model's buffers that this rank answers for.
        base: the program of the shape that the job was planned with.
        program_for: gives the program of a signature, in training or evaluation.
        plan_for: gives the plan for a number of microbatches.
        microbatches: makes microbatches of batches.
        transfers: the point-to-point traffic between pp ranks.
        stage_io: activations and gradients between stages.
        reducer: reduces gradients over data parallel replicas.
        tied: exchanges the gradients of tied parameters.
        optimizer_params: the optimizer's tensors.
        fsdp: the parameters that are sharded over replicas; None for none.
        zero: the level of ZeRO; see `EngineOptions`.
        ema_decay: of the averages that the optimizers keep of parameters; None for none.
        layer_dropping: the probabilities of blocks that are dropped by chance; None for none.
        local_steps: the rounds of Local SGD; None where replicas reduce gradients in every step.
        progress: of the actions and waits of the engine.
        oom_guard: aborts the step where memory runs out.
        save_fewer: gives a plan that saves fewer activations; None where errors end the job.
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
    program_for: ProgramCache
    plan_for: StepPlans
    microbatches: MicrobatchFactory
    transfers: Transfers
    stage_io: StageIO
    reducer: GradientReducers
    tied: TiedGradients
    optimizer_params: OptimizerParams
    fsdp: FsdpParameters | None
    zero: int
    local_steps: LocalSteps | None
    ema_decay: float | None
    layer_dropping: LayerDropping | None
    progress: Progress
    oom_guard: OomGuard
    save_fewer: SaveFewer | None

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather a value of every rank of the job; all ranks call it together.

        Args:
            value: this rank's, which must pickle.
            what: the value as a noun, which the watchdog names while ranks wait for it.
        """
        size = self.mesh.world_size
        if size == 1:
            return [value]
        everyone: list[Any] = [None] * size
        others = tuple(rank for rank in range(size) if rank != self.mesh.rank)
        with self.progress.waiting(what, others):
            dist.all_gather_object(everyone, value)
        return everyone
