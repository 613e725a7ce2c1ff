"""Costs of a schedule's actions, transfers and reductions: the simulator's input."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from merak.core.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Link:
    """Link between the ranks of two neighbouring stages, the same in both directions."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and sizes per stage, all for one microbatch. Build with `stage_costs` or `uniform`."""

    forward_s: tuple[float, ...]
    # Of a stage that recomputes, in its R.
    recompute_s: tuple[float, ...]
    # Recomputation inside a B, or an I, that has no R before it.
    recompute_in_backward_s: tuple[float, ...]
    recompute_in_input_gradient_s: tuple[float, ...]
    # Without any recomputation.
    backward_s: tuple[float, ...]
    # The two parts of a split backward.
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    # Between stage i and stage i + 1.
    links: tuple[Link, ...]
    boundary_bytes: tuple[float, ...]
    # Whether a rank computes while what it sends travels.
    overlap: bool
    # Reduction of a stage's gradients over its replicas and over data parallel ranks.
    reduction_s: tuple[float, ...]
    # Saved activations, and those of them that are left between I and W.
    activation_bytes: tuple[float, ...]
    weight_gradient_bytes: tuple[float, ...]
    # Of them, the saved input of a stage that recomputes.
    checkpoint_bytes: tuple[float, ...]
    # Weights, gradients and optimizer state; and of it one version of the weights.
    state_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    # rank_factors[rank][stage]: times of the stage's actions on that rank, in times of those above;
    # empty where all ranks of a stage are alike.
    rank_factors: tuple[tuple[float, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.forward_s)


def stage_costs(
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    **others: object,
) -> Costs:
    """Costs of stages, with defaults for every field that is not given.

    Args:
        forward_s: duration of a forward, one per stage.
        backward_s: duration of a backward without recomputation, one per stage.
        **others: any other field of `Costs`. Left out, recomputation takes as long as a forward
            wherever it is done, either half of a split backward takes half of it, transfers and
            reductions take no time, activations count 1 per microbatch and stage (all saved until
            W), and checkpoints and weights count nothing.

    Raises:
        ScheduleError: a field has the wrong length, or a time or size is negative.
    """
    num_stages = len(forward_s)
    nothing, one = (0.0,) * num_stages, (1.0,) * num_stages
    recompute_s = others.get("recompute_s", forward_s)
    values: dict[str, object] = {
        "forward_s": forward_s,
        "recompute_s": recompute_s,
        "recompute_in_backward_s": recompute_s,
        "recompute_in_input_gradient_s": recompute_s,
        "backward_s": backward_s,
        "input_gradient_s": tuple(b / 2 for b in backward_s),
        "weight_gradient_s": tuple(b / 2 for b in backward_s),
        "links": (Link(),) * (num_stages - 1),
        "boundary_bytes": (0.0,) * (num_stages - 1),
        "overlap": True,
        "reduction_s": nothing,
        "activation_bytes": one,
        "weight_gradient_bytes": others.get("activation_bytes", one),
        "checkpoint_bytes": nothing,
        "state_bytes": nothing,
        "weight_bytes": nothing,
    }
    costs = Costs(**{**values, **others})  # type: ignore[arg-type]
    _check(costs)
    return costs


def uniform(
    num_stages: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    recompute_s: float = 1.0,
    transfer_s: float = 0.0,
) -> Costs:
    """Costs of equal stages, whose transfers take a fixed time and never queue up.

    A microbatch in flight counts 1, recomputed or not: memory is the number in flight.
    """
    return stage_costs(
        (forward_s,) * num_stages,
        (backward_s,) * num_stages,
        recompute_s=(recompute_s,) * num_stages,
        links=(Link(latency_s=transfer_s),) * (num_stages - 1),
        checkpoint_bytes=(1.0,) * num_stages,
    )


def _check(costs: Costs) -> None:
    num_stages = costs.num_stages
    rows = {f"rank_factors[{rank}]": row for rank, row in enumerate(costs.rank_factors)}
    whole = {entry.name: getattr(costs, entry.name) for entry in fields(costs)}
    for name, values in (whole | rows).items():
        if name in ("overlap", "rank_factors"):
            continue
        wanted = num_stages - 1 if name in ("links", "boundary_bytes") else num_stages
        if len(values) != wanted:
            raise ScheduleError(
                f"{name} has {len(values)} values; {num_stages} stages need {wanted}."
            )
        if name == "links":
            continue
        if any(not value >= 0 for value in values):
            raise ScheduleError(f"{name} is {values}; times and sizes are 0 or more.")
        if math.inf in values:
            raise ScheduleError(f"{name} is {values}; times and sizes are finite.")
    for field in ("checkpoint_bytes", "weight_gradient_bytes"):
        part = getattr(costs, field)
        if any(p > whole for p, whole in zip(part, costs.activation_bytes)):
            raise ScheduleError(
                f"{field} is {part}, more than all of a microbatch's activations, "
                f"{costs.activation_bytes}; count only those that are left of them."
            )
    for link in costs.links:
        if not (0 <= link.latency_s < math.inf and link.bandwidth_bytes_per_s > 0):
            raise ScheduleError(f"{link} is no link; latency is 0 or more, bandwidth above 0.")
