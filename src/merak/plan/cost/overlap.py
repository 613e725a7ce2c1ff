"""How long tensor parallel layers take, with their all-reduces in line or beside the other half.

A layer computes for T_m forward and 2 T_m backward, and sums over the ranks for T_a in each
direction. In line that is T_m + T_a and 2 T_m + T_a. In halves
(`engine.segments.run_sub_pipelined`) the halves take turns: each computes while the other's sum is
under way, and the next turn begins when both are done. Only the first half's first computation and
the second half's last sum stand alone.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from merak.schedule.costs import Costs, stage_costs

Step = tuple[float, float]
"""Seconds of computation, and of the sum over the ranks that follows it, of a whole microbatch."""


def sequential_s(steps: Sequence[Step]) -> float:
    """Seconds of work whose every sum is waited for."""
    return sum(compute_s + sum_s for compute_s, sum_s in steps)


def interleaved_s(steps: Sequence[Step], share: float = 0.5) -> float:
    """Seconds of the same work in halves that take turns.

    Args:
        steps: of a whole microbatch; a half takes its share of the time.
        share: what the first half has of the microbatch.
    """
    merged = _merged(steps)
    other = 1 - share
    total = merged[0][0] * share
    for (compute_s, sum_s), (next_s, _) in pairwise([*merged, (0.0, 0.0)]):
        total += max(compute_s * other, sum_s * share)
        total += max(next_s * share, sum_s * other)
    return total


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Steps that end in a sum each, but for the last: a half goes on where there is none."""
    merged: list[Step] = []
    before = 0.0
    for compute_s, sum_s in steps:
        before += compute_s
        if sum_s:
            merged.append((before, sum_s))
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

    def forward_s(self, in_halves: bool) -> float:
        """Seconds of the forward of all layers."""
        return self._seconds([(self.compute_s, self.communication_s)], in_halves)

    def recompute_s(self, in_halves: bool) -> float:
        """Seconds of the recomputation of all layers, ahead of the backward."""
        return self._seconds([self._recompute], in_halves)

    def backward_s(self, in_halves: bool) -> float:
        """Seconds of the backward of all layers."""
        return self._seconds([self._backward], in_halves)

    def recomputed_backward_s(self, in_halves: bool) -> float:
        """Seconds of a backward that recomputes each layer first, in one go."""
        return self._seconds([self._recompute, self._backward], in_halves)

    def input_gradient_s(self, in_halves: bool) -> float:
        """Seconds of the backward without the gradients of the weights: half its computation."""
        return self._seconds([self._input_gradient], in_halves)

    def recomputed_input_gradient_s(self, in_halves: bool) -> float:
        """Seconds of the same that recomputes each layer first."""
        return self._seconds([self._recompute, self._input_gradient], in_halves)

    def weight_gradient_s(self) -> float:
        """Seconds of the gradients of the weights, which sum nothing over the ranks."""
        return self.num_layers * self._backward[0] / 2

    def gain(self) -> float:
        """How many times as fast forward and backward are in halves."""
        whole, halves = (self.forward_s(h) + self.backward_s(h) for h in (False, True))
        return whole / halves if halves else 1.0

    def paper_s(self) -> float:
        """Forward and backward in halves by the paper's formula, which runs them in one go."""
        compute, communication = self.compute_s, self.communication_s
        longest = max(3 * compute, 2 * compute + communication, 2 * communication)
        return 0.75 * compute + 0.5 * communication + (self.num_layers - 0.25) * longest

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

    def _seconds(self, layer: Sequence[Step], in_halves: bool) -> float:
        steps = [*layer] * self.num_layers
        return interleaved_s(steps) if in_halves else sequential_s(steps)


def layer_costs(stages: Sequence[Layers], in_halves: bool, **others: object) -> Costs:
    """What stages of tensor parallel layers cost a schedule's simulation.

    Args:
        stages: the layers of each.
        in_halves: whether microbatches run in halves.
        **others: further fields of `Costs`.
    """
    backward_s = tuple(own.backward_s(in_halves) for own in stages)
    input_gradient_s = tuple(own.input_gradient_s(in_halves) for own in stages)
    return stage_costs(
        tuple(own.forward_s(in_halves) for own in stages),
        backward_s,
        recompute_s=tuple(own.recompute_s(in_halves) for own in stages),
        recompute_in_backward_s=tuple(
            own.recomputed_backward_s(in_halves) - alone
            for own, alone in zip(stages, backward_s, strict=True)
        ),
        recompute_in_input_gradient_s=tuple(
            own.recomputed_input_gradient_s(in_halves) - alone
            for own, alone in zip(stages, input_gradient_s, strict=True)
        ),
        input_gradient_s=input_gradient_s,
        weight_gradient_s=tuple(own.weight_gradient_s() for own in stages),
        **others,
    )
