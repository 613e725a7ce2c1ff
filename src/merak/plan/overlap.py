"""How long tensor parallel layers take, with their all-reduces in line or beside the other half.

A layer computes for T_m forward and 2 T_m backward, and sums over the ranks for T_a in each
direction. In line that is T_m + T_a and 2 T_m + T_a. In halves (`engine.interleave`) the device and
the link each have a queue of half pieces, and the longer one lasts: only the first piece of the one
and the last of the other stand alone.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal tensor parallel layers on one stage, for one microbatch.

    Args:
        num_layers: blocks with one all-reduce in each direction.
        compute_s: forward computation of one layer; its backward takes twice as long.
        communication_s: one all-reduce of its result.
    """

    num_layers: int
    compute_s: float
    communication_s: float

    def forward_s(self, in_halves: bool) -> float:
        """Seconds of the forward (or the recomputation) of all layers."""
        return self._seconds(self.compute_s, in_halves)

    def backward_s(self, in_halves: bool) -> float:
        """Seconds of the backward of all layers."""
        return self._seconds(2 * self.compute_s, in_halves)

    def gain(self) -> float:
        """How many times as fast forward and backward are in halves."""
        whole, halves = (self.forward_s(h) + self.backward_s(h) for h in (False, True))
        return whole / halves if halves else 1.0

    def paper_s(self) -> float:
        """Forward and backward in halves by the paper's formula, which runs them in one go."""
        compute, communication = self.compute_s, self.communication_s
        longest = max(3 * compute, 2 * compute + communication, 2 * communication)
        return 0.75 * compute + 0.5 * communication + (self.num_layers - 0.25) * longest

    def _seconds(self, compute_s: float, in_halves: bool) -> float:
        if not in_halves:
            return self.num_layers * (compute_s + self.communication_s)
        if not self.num_layers:
            return 0.0
        longest = max(compute_s, self.communication_s)
        alone = (compute_s + self.communication_s) / 2
        return alone + (self.num_layers - 0.5) * longest
