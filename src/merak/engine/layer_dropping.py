"""Progressive layer dropping in the engine: the blocks' probabilities, before every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from merak.graph.segment.build import GraphSource
from merak.graph.trace.branches.residual_blocks import KEEP, OWN_NUMBER, add_buffers, find_stacks
from merak.plan.engine_options import EngineOptions
from merak.plan.layer_dropping import kept, kept_at


def drop_layers(source: GraphSource, options: EngineOptions) -> None:
    """Trace the sublayers of a model's blocks as randomly dropped, where `layer_keep` is below 1.

    Args:
        source: the model, before it is traced.
        options: of the job.

    Raises:
        TraceError: the model has no blocks that can be dropped.
    """
    if options.layer_keep < 1:
        source.dropped = find_stacks(source.model)
        add_buffers(source.model, source.dropped, source.device)


@dataclass(frozen=True, slots=True)
class LayerDropping:
    """The schedule of a job's probabilities.

    Args:
        buffers: of blocks, by name: the block's number from 1, and how many the stack has; of
            modules that drop layers themselves: 0 and 0.
        limit: the probability with which a sublayer of the last block is kept in the end.
        decay: how fast it comes there, per step.
    """

    buffers: Mapping[str, tuple[int, int]]
    limit: float
    decay: float

    def start_step(self, step: int, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set the probabilities of a step.

        Args:
            step: number of optimizer steps before it.
            buffers: of the model, by name.
        """
        last = kept(step, self.limit, self.decay)
        for name, (depth, count) in self.buffers.items():
            buffers[name].fill_(kept_at(depth, count, last) if depth else 1.0 - last)


def layer_dropping(source: GraphSource, options: EngineOptions) -> LayerDropping | None:
    """The schedule of a job; None where nothing is dropped.

    Args:
        source: the model, as of `drop_layers`.
        options: of the job.
    """
    stacks = source.dropped
    if stacks is None or not options.trains:
        return None
    found = {
        f"{name}.{KEEP}": (depth, len(stack))
        for stack in stacks.blocks
        for depth, name in enumerate(stack, 1)
    }
    found |= {f"{name}.{OWN_NUMBER}".lstrip("."): (0, 0) for name in stacks.droppers}
    return LayerDropping(found, options.layer_keep, options.layer_keep_decay)
