"""How sure a price is: what the parts of a step are known to.

The fractions are no less than what the errors of 30 published runs show: of a normal error of each
part, the size that nine of ten do not exceed (`python -m benchmarks.published_runs`). Those runs
have NVLink and InfiniBand, and long kernels; the fraction of kernels whose start counts is an
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_UNCERTAINTY = 0.08

_COMPUTE, _COMMUNICATION, _BUBBLE, _OPTIMIZER = 0.15, 0.10, 0.36, 0.39
_LAUNCH = 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """The seconds of a step by cause.

    Args:
        compute_s: computation of the busiest pp rank.
        bubble_s: its waits for other pp ranks.
        communication_s: collectives that nothing hides.
        optimizer_s: the optimizer's step.
        launch_s: of the computation, overheads of kernels.
        tied_s: of the communication, exchanges of gradients of tied parameters.
    """

    compute_s: float
    bubble_s: float
    communication_s: float
    optimizer_s: float
    launch_s: float
    tied_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.bubble_s + self.communication_s + self.optimizer_s


def uncertainty(shares: Shares) -> float:
    """Fraction by which the true time is likely off at most.

    Args:
        shares: the seconds of a step.
    """
    if not shares.total_s:
        return _COMPUTE
    launch_s = min(shares.launch_s, shares.compute_s)
    seconds = (
        _COMPUTE * (shares.compute_s - launch_s)
        + _LAUNCH * launch_s
        + _COMMUNICATION * shares.communication_s
        + _BUBBLE * shares.bubble_s
        + _OPTIMIZER * shares.optimizer_s
    )
    return seconds / shares.total_s
