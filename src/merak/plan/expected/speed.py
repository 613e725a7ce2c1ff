"""Speeds of a rank's device that are known without measuring anything now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from merak.core.mesh import Mesh
from merak.plan.cluster.from_profile import sheet_of
from merak.plan.cost.benchmark import device_name, measured_before
from merak.plan.cost.data_sheets import SHEETS
from merak.plan.cost.device import DeviceProfile, preset
from merak.plan.engine_options import EngineOptions


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak speed of one device, which MFU is a fraction of.

    Args:
        flops_per_s: of dense matrix products; None where it is not known.
        source: where the figure comes from; empty where there is none.
    """

    flops_per_s: float | None
    source: str


def known_profile(options: EngineOptions, mesh: Mesh, cache: Path | None) -> DeviceProfile | None:
    """Speeds that were given, or measured before, or are in a data sheet; None for none.

    Args:
        options: the user's profile.
        mesh: whose device it is.
        cache: folder of this machine's measured speeds.
    """
    if options.device_profile is not None:
        return options.device_profile
    found = measured_before(mesh.device, cache)
    if found is None and mesh.device.type == "cuda":
        sheet = sheet_of(device_name(mesh.device))
        return None if sheet is None else preset(sheet)
    return found


def peak_speed(profile: DeviceProfile | None, device: torch.device, dtype: torch.dtype) -> Peak:
    """Peak speed of a device for products of a type: of its data sheet, or as measured.

    Args:
        profile: known speeds of the device, where it has no data sheet.
        device: a rank's.
        dtype: that products are computed in.
    """
    name = str(dtype).removeprefix("torch.")
    sheet = sheet_of(device_name(device)) if device.type == "cuda" else None
    if sheet is not None:
        rates = SHEETS[sheet].teraflops
        if name == "float32" and torch.backends.cuda.matmul.allow_tf32 and "tfloat32" in rates:
            name = "tfloat32"
        if name in rates:
            return Peak(rates[name] * 1e12, f"{name}, data sheet of {sheet}")
    if profile is None:
        return Peak(None, "")
    return Peak(profile.flop_rate(dtype), f"{name}, measured by a large product")
