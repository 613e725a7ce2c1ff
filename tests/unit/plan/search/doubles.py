"""A cheap price of any candidate, with the properties that the rules of the search rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from merak.core.errors import PlanError
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload
from merak.plan.recompute_spec import RECOMPUTES
from merak.plan.search.space import Job

BUBBLES = {"1f1b": 1.0, "zero_bubble_h1": 0.4, "zero_bubble_v": 0.1}


def workload_of(model: nn.Module, autocast: torch.dtype | None = None) -> Workload:
    """What a plan file takes of a workload."""
    own = SimpleNamespace(
        model=model, autocast=autocast, sequence=12, optimizer=torch.optim.SGD,
        common=ParallelOptions(),
    )  # fmt: skip
    return cast(Workload, own)


def job_of(devices: int = 8, batch: int = 16, segments: int = 6, per_node: int = 4) -> Job:
    return Job(
        num_devices=devices,
        devices_per_node=per_node,
        global_batch=batch,
        num_segments=segments,
        problem=lambda tp, cp, ep: f"{3} heads" if tp % 3 == 0 else None,
    )


@dataclass
class Double:
    """Prices by a formula with random weights; more of what saves memory takes time.

    Args:
        weights: of tp, zero, recomputation, microbatches and schedules.
        device_bytes: of a device.
        refused: a schedule that the model does not allow.
        misjudged: rough estimates of memory are as many times the state's.
    """

    weights: tuple[float, ...] = (0.05, 0.02, 0.3, 0.4, 0.01)
    device_bytes: float = 100.0
    refused: str | None = None
    misjudged: float = 1.0
    priced: list[Candidate] = field(default_factory=list)

    def bound_s(self, own: Candidate) -> float:
        again = RECOMPUTES.index(str(own.recompute)) / 2
        stage = own.microbatch * (1 + self.weights[2] * again) / (own.tp * own.pp)
        return stage * own.num_microbatches

    quick_bound_s = bound_s

    def rough_s(self, own: Candidate) -> float:
        return self.bound_s(own) * (1 + 0.1 * (own.pp - 1) / own.num_microbatches)

    def state_bytes(self, own: Candidate) -> float:
        sharded = 90.0 / own.dp if own.zero == 3 else 90.0 - 20.0 * own.zero * (1 - 1 / own.dp)
        return sharded / (own.tp * own.pp)

    def rough_bytes(self, own: Candidate) -> float:
        return self.state_bytes(own) * self.misjudged

    def price_if_fits(self, own: Candidate) -> Price:
        return self.price(own)

    def price(self, own: Candidate) -> Price:
        self.priced.append(own)
        if own.schedule == self.refused:
            raise PlanError(f"{own.schedule} does not fit this model.")
        tp, zero, _, small, sequence = self.weights
        step_s = self.bound_s(own) * (1 + tp * math.log2(own.tp))
        step_s *= 1 + BUBBLES.get(own.schedule, 0.7) * (own.pp - 1) / own.num_microbatches
        step_s += zero * own.zero + small / own.microbatch
        step_s += sequence * own.sequence_parallel - sequence / 2 * (own.sub_pipelining == "on")
        saved = (1.0, 0.5, 0.1)[RECOMPUTES.index(str(own.recompute))]
        held = 40.0 * saved * own.microbatch / own.tp / (2 if own.sequence_parallel else 1)
        peak = int(self.state_bytes(own) + held)
        return Price(
            candidate=own,
            step_s=step_s,
            uncertainty=0.1,
            compute_s=step_s,
            bubble_s=0.0,
            exposed_communication_s=0.0,
            optimizer_s=0.0,
            bubble_fraction=0.0,
            model_flops=1.0,
            tokens=1,
            peak_memory_bytes=(peak,) * own.pp,
            memory_uncertainty=0.1,
            device_bytes=(self.device_bytes,) * own.pp,
        )
