"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from merak.core.mesh import Mesh
from merak.engine.gradients import GradientReducer
from merak.engine.program import Program
from merak.engine.stage import Stage
from merak.engine.tied import TiedGradients
from merak.engine.transfers import Transfers
from merak.graph.ir import TensorMeta
from merak.schedule.ir import Kind, Schedule
from merak.schedule.steps import Step

Signature = tuple[tuple[str, TensorMeta], ...]
"""The columns of a microbatch and what each is, in a fixed order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for some number of microbatches, and every rank's steps of it."""

    schedule: Schedule
    steps: tuple[tuple[Step, ...], ...]

    def order(self, stage: int, kinds: Collection[Kind]) -> tuple[int, ...]:
        """The order in which a stage's microbatches meet actions of some kinds."""
        return tuple(
            action.microbatch
            for own in self.schedule.actions
            for action in own
            if action.stage == stage and action.kind in kinds
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; `engine.build` puts it together.

    Args:
        mesh: the grid of ranks.
        stages: this rank's stages by number.
        stage_rank: the pipeline position of each stage.
        parameters: this rank's parameters by name.
        buffers: names of the model's buffers that this rank keeps up to date.
        shared: names of those that several segments of the model read.
        base: the program of the shape that the job was planned with.
        program_for: what to run for a signature, in training or evaluation.
        plan_for: the schedule for a number of microbatches.
        transfers: the traffic between pipeline positions.
        reducer: the sums over data parallel replicas.
        tied: the exchange of shared parameters' gradients.
        seed: the job's seed.
    """

    mesh: Mesh
    stages: Mapping[int, Stage]
    stage_rank: tuple[int, ...]
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: frozenset[str]
    shared: frozenset[str]
    base: Program
    program_for: Callable[[Signature, bool], Program]
    plan_for: Callable[[int], Plan]
    transfers: Transfers
    reducer: GradientReducer
    tied: TiedGradients
    seed: int
