"""Price of a candidate: seconds of a step by cause, and peak bytes of every pp rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from merak.plan.cluster.fit import HostUse
from merak.plan.price.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Predicted time and memory of a candidate's step.

    Args:
        candidate: what was priced, with its partition and everything that "auto" has chosen.
        step_s: seconds of one step.
        uncertainty: of `step_s`, as a fraction: the true time is likely within ± this.
        compute_s: of `step_s`, computation on the busiest pp rank, exposed collectives left out.
        bubble_s: of `step_s`, waiting of that rank for other pp ranks.
        exposed_communication_s: of `step_s`, collectives and transfers that nothing hides.
        tied_s: of `exposed_communication_s`, exchanges of gradients of tied parameters.
        optimizer_s: of `step_s`, the optimizer's step.
        bubble_fraction: idle time of all pp ranks ÷ (pp · time of the pipeline), up to its last
            backward; 0 for one pp rank.
        model_flops: of one step of the whole job, without recomputation, forward and backward.
        tokens: of one step of the whole job; samples where a sample has no tokens.
        peak_memory_bytes: of each pp rank.
        memory_uncertainty: of the peaks, as a fraction.
        device_bytes: memory of each pp rank's device that a job may use.
        host: the host memory of the node that has the least of it left.
        is_balanced: whether stages are as they are where no partition is given.
    """

    candidate: Candidate
    step_s: float
    uncertainty: float
    compute_s: float
    bubble_s: float
    exposed_communication_s: float
    optimizer_s: float
    bubble_fraction: float
    model_flops: float
    tokens: int
    peak_memory_bytes: tuple[int, ...]
    memory_uncertainty: float
    device_bytes: tuple[float, ...]
    tied_s: float = 0.0
    host: HostUse = field(default_factory=HostUse)
    is_balanced: bool = True

    @property
    def fits(self) -> bool:
        """Whether every pp rank holds its peak, and every node what is in host memory."""
        return self.host.fits and all(
            peak <= most
            for peak, most in zip(self.peak_memory_bytes, self.device_bytes, strict=True)
        )

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput of one device."""
        return self.tokens / self.step_s / self.candidate.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate for which a device's or a host's memory is too small, which makes a price idle.

    Args:
        candidate: what does not fit.
        rank: the pp rank of the device; None of a host.
        peak_bytes: of it.
        device_bytes: memory that a job may use there.
    """

    candidate: Candidate
    rank: int | None
    peak_bytes: int
    device_bytes: float
