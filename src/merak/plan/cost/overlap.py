"""Times of tensor parallel layers, whole or as two interleaved sub-microbatches.

A layer computes for T_m forward and 2 T_m backward, and its all-reduce takes T_a in each direction.
Whole that is T_m + T_a and 2 T_m + T_a. Two sub-microbatches (`engine.segments.run_sub_pipelined`)
are interleaved: each computes beside the other's all-reduce, and goes on when both are done. Only
the first computation of the first and the last all-reduce of the second stand alone.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from merak.schedule.costs import Costs, stage_costs

INTERFERENCE = 0.15
"""Part of a hidden collective's time that the computation beside it takes longer.

An estimate, until a profile of the links has it.
"""

Step = tuple[float, float]
"""Seconds of computation, and of the all-reduce after it, for a whole microbatch."""


def sequential_s(steps: Sequence[Step]) -> float:
    """Seconds of steps that wait for every all-reduce."""
    return sum(compute_s + all_reduce_s for compute_s, all_reduce_s in steps)


def interleaved_s(steps: Sequence[Step], fraction: float = 0.5) -> float:
    """Seconds of the same steps as two interleaved sub-microbatches.

    Args:
        steps: of a whole microbatch.
        fraction: of the microbatch in the first sub-microbatch, and of the time.
    """
    merged = _merged(steps)
    other = 1 - fraction
    total = merged[0][0] * fraction
    for (compute_s, all_reduce_s), (next_s, _) in pairwise([*merged, (0.0, 0.0)]):
        total += max(compute_s * other, all_reduce_s * fraction)
        total += max(next_s * fraction, all_reduce_s * other)
    return total


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Steps merged so that each but the last ends in an all-reduce."""
    merged: list[Step] = []
    before = 0.0
    for compute_s, all_reduce_s in steps:
        before += compute_s
        if all_reduce_s:
            merged.append((before, all_reduce_s))
            before = 0.0
    return [*merged, (before, 0.0)]


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal tensor parallel layers on one stage, for one microbatch.

    Args:
        num_layers: blocks with one all-reduce in each direction.
        compute_s: forward computation of one layer.
        communication_s: one all-reduce of its result.
        backward_compute_s: backward computation of one layer; None for twice the forward's.
        recompute_compute_s: computing one layer's activations again; None for the forward's.
    """

    num_layers: int
    compute_s: float
    communication_s: float
    backward_compute_s: float | None = None
    recompute_compute_s: float | None = None

    def forward_s(self, split: bool) -> float:
        """Seconds of the forward of all layers."""
        return self._seconds([(self.compute_s, self.communication_s)], split)

    def recompute_s(self, split: bool) -> float:
        """Seconds of the recomputation of all layers, ahead of the backward."""
        return self._seconds([self._recompute], split)

    def backward_s(self, split: bool) -> float:
        """Seconds of the backward of all layers."""
        return self._seconds([self._backward], split)

    def recomputed_backward_s(self, split: bool) -> float:
        """Seconds of a backward that recomputes each layer first, in one go."""
        return self._seconds([self._recompute, self._backward], split)

    def input_gradient_s(self, split: bool) -> float:
        """Seconds of the backward without the gradients of the weights: half its computation."""
        return self._seconds([self._input_gradient], split)

    def recomputed_input_gradient_s(self, split: bool) -> float:
        """Seconds of the input gradient that recomputes each layer first."""
        return self._seconds([self._recompute, self._input_gradient], split)

    def weight_gradient_s(self) -> float:
        """Seconds of the gradients of the weights, which have no all-reduce."""
        return self.num_layers * self._backward[0] / 2

    @property
    def _recompute(self) -> Step:
        own = self.recompute_compute_s
        return self.compute_s if own is None else own, self.communication_s

    @property
    def _backward(self) -> Step:
        own = self.backward_compute_s
        return 2 * self.compute_s if own is None else own, self.communication_s

    @property
    def _input_gradient(self) -> Step:
        return self._backward[0] / 2, self.communication_s

    def _seconds(self, layer: Sequence[Step], split: bool) -> float:
        steps = [*layer] * self.num_layers
        return interleaved_s(steps) if split else sequential_s(steps)


def layer_costs(stages: Sequence[Layers], split: bool, **others: object) -> Costs:
    """Costs of stages of tensor parallel layers, for the simulator.

    Args:
        stages: the layers of each.
        split: whether microbatches are split into sub-microbatches.
        **others: further fields of `Costs`.
    """
    backward_s = tuple(own.backward_s(split) for own in stages)
    input_gradient_s = tuple(own.input_gradient_s(split) for own in stages)
    return stage_costs(
        tuple(own.forward_s(split) for own in stages),
        backward_s,
        recompute_s=tuple(own.recompute_s(split) for own in stages),
        recompute_in_backward_s=tuple(
            own.recomputed_backward_s(split) - alone
            for own, alone in zip(stages, backward_s, strict=True)
        ),
        recompute_in_input_gradient_s=tuple(
            own.recomputed_input_gradient_s(split) - alone
            for own, alone in zip(stages, input_gradient_s, strict=True)
        ),
        input_gradient_s=input_gradient_s,
        weight_gradient_s=tuple(own.weight_gradient_s() for own in stages),
        **others,
    )
