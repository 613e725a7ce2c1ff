"""Microbatches of this rank: columns on the device, and the batch-only values derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._prims_common import suggest_memory_format

from merak.core.mesh import Mesh
from merak.core.random import own_random_state, set_random_state
from merak.engine.segments.context import OperatorObserver
from merak.engine.stage import Microbatch
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program, SegmentProgram


class MicrobatchFactory:
    """Makes the microbatches of this rank.

    Args:
        mesh: the grid of ranks.
        buffers: the model's buffers by name.
        seed: the job's seed, for random state.
    """

    def __init__(self, mesh: Mesh, buffers: Mapping[str, torch.Tensor], seed: int) -> None:
        self._mesh = mesh
        self._buffers = buffers
        self._seed = seed
        self.observer: OperatorObserver | None = None  # of the step that runs

    def make(
        self, program: Program, batch: Mapping[str, torch.Tensor], step: int, number: int
    ) -> Microbatch:
        """A microbatch with the columns that this rank reads, without batch-only values.

        Args:
            program: what to run for its shape.
            batch: at least the columns this rank reads.
            step: the job's step.
            number: of the microbatch in its replica's step.
        """
        device = self._mesh.device
        columns = {
            name: _contiguous(batch[name]).to(device, non_blocking=True) for name in program.columns
        }
        # The microbatch's place in the step over all replicas, as one process would count it.
        place = number * self._mesh.dp + self._mesh.dp_rank
        return Microbatch(program, columns, {}, (self._seed, "microbatch", step, place))

    def compute_batch_only(self, microbatch: Microbatch) -> None:
        """Compute masks, position ids and the like, as far as this rank's stages read them."""
        program = microbatch.program
        versions = [
            self._buffers[name]._version
            for name in program.fixed.segment.buffers
            if name not in program.constants
        ]
        fixed = program.fixed_values.at(versions, lambda: self._run(program.fixed, microbatch, {}))
        cpu = torch.device("cpu")  # whose generator names the microbatch to its draws
        with own_random_state(cpu):
            set_random_state(cpu, *microbatch.random_key, "choices")
            varying = self._run(program.batch_only, microbatch, microbatch.columns)
        microbatch.batch_only = fixed | varying

    def _run(
        self,
        prologue: SegmentProgram,
        microbatch: Microbatch,
        columns: Mapping[str, torch.Tensor],
    ) -> TensorDict:
        if not prologue.segment.outputs:
            return {}
        function: Callable[..., tuple[torch.Tensor, ...]] = prologue.function
        if self.observer is not None:
            function = self.observer.function(prologue.segment, microbatch.random_key)
        buffers = {**self._buffers, **microbatch.program.constants}
        with torch.no_grad():
            values = function(
                *(buffers[name] for name in prologue.segment.buffers),
                *(columns[name] for name in prologue.segment.columns),
            )
        return dict(zip(prologue.segment.outputs, values, strict=True))


def _contiguous(column: torch.Tensor) -> torch.Tensor:
    """A column as programs were traced for: a slice or transpose is copied, channels last is not.

    Code such as `labels.contiguous().view(-1)` is a view alone in the graph, which was traced with
    columns that are contiguous.
    """
    if column.is_contiguous():
        return column
    return column.contiguous(memory_format=suggest_memory_format(column))
