"""Which products are of float8 under the option `fp8`, and devices that have none."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from merak.core.errors import PlanError
from merak.graph.float8 import float8_layers
from merak.graph.ir.ir import Segment
from merak.ops.float8 import OF_VALUES, has_float8
from merak.plan.cost.device import DeviceProfile

_MOST_NAMED = 3
"""Layers that are named for each reason."""


def refuse_float8_on(device: torch.device) -> None:
    """Refuse `fp8` on a GPU without products of float8.

    Args:
        device: of this rank; a CPU computes the same in float32.

    Raises:
        PlanError: it has none.
    """
    if device.type == "cuda" and not has_float8(device):
        raise _refusal(torch.cuda.get_device_name(device))


def refuse_float8(devices: Iterable[DeviceProfile]) -> None:
    """Refuse `fp8` in a plan for a GPU without products of float8.

    Args:
        devices: of the plan.

    Raises:
        PlanError: one has no rate of them.
    """
    name = str(OF_VALUES).removeprefix("torch.")
    for own in devices:
        if own.device_type == "cuda" and name not in own.flops_per_s:
            raise _refusal(own.name)


def _refusal(name: str) -> PlanError:
    return PlanError(
        f"fp8=True multiplies in float8, which {name} does not; use a GPU of compute capability "
        "8.9 or more, such as an L40S or H100, or fp8=False."
    )


def float8_sentence(segments: Iterable[Segment]) -> str:
    """How many linear layers have products of float8, and which have not, and why.

    Args:
        segments: as a rank runs them.
    """
    found = list(float8_layers(segments))
    others: dict[str, list[str]] = {}
    for name, obstacle in found:
        if obstacle:
            others.setdefault(obstacle, []).append(name)
    parts = [f"{sum(not why for _, why in found)} of {len(found)} linear layers"]
    for why, names in others.items():
        more = len(names) - _MOST_NAMED
        named = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"not {named} ({why})")
    return "; ".join(parts)
