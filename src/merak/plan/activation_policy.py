"""The activation policy of a job: which segments save, recompute or offload their activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from merak.plan.cost.selective_ops import SelectiveOps


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """Activations between forward and backward: saved, recomputed or offloaded, by segment.

    A segment that is in none of the fields saves its inputs alone and recomputes everything.

    Args:
        saved: segments whose activations are saved, on the device or in host memory.
        selective: by recomputed segment, the operators whose results are saved all the same.
        offloaded: of the saved segments, those whose activations are copied to host memory.
    """

    saved: frozenset[int] = frozenset()
    selective: Mapping[int, SelectiveOps] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
