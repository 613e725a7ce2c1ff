"""Devices and backends, as the command line names them."""

from __future__ import annotations

import torch

from merak.core.errors import CommandError, did_you_mean
from merak.plan.cost.data_sheets import ALIASES
from merak.plan.cost.device import PRESETS, DeviceProfile, preset, sheet_name

DEVICES = ("cpu", "cuda")
USUAL_GPU = "h100-sxm"
"""Device whose speeds are assumed for a GPU that is not there and has no further name."""

BACKENDS = ("gloo", "nccl")


def device_of(wanted: str | None) -> torch.device:
    """Return the device that `--device` names.

    Args:
        wanted: "cpu" or "cuda"; None for what this machine has.

    Raises:
        CommandError: it is another one, or not there.
    """
    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in DEVICES:
        raise CommandError(f"--device {kind} is not supported; use cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda was wanted for, but torch sees no GPU; use cpu.")
    return torch.device(kind)


def planned_device(wanted: str | None) -> tuple[torch.device, DeviceProfile | None]:
    """Return the device that a job is planned for, which need not be on this machine.

    Args:
        wanted: "cpu", "cuda", or the name of a GPU that has a data sheet, such as "h100"; None for
            what this machine has.

    Returns:
        Where to trace the job, the CPU where this machine has no such device; and the device's
        speeds by its data sheet, None where they can be measured.

    Raises:
        CommandError: it is another one.
    """
    named = None if wanted is None else sheet_name(wanted)
    if named is not None or (wanted == "cuda" and not torch.cuda.is_available()):
        sheet = preset(named or USUAL_GPU)
        return planning_device(sheet), sheet
    if wanted not in (None, *DEVICES):
        suggestion = did_you_mean(str(wanted), [*PRESETS, *ALIASES])
        known = f"; use cpu, cuda, or one of {', '.join(PRESETS)}."
        raise CommandError(
            f"--device {wanted} is not known{known if suggestion == '.' else suggestion}"
        )
    return device_of(wanted), None


def planning_device(profile: DeviceProfile) -> torch.device:
    """Device that a job for another one is traced for: of its type where torch has that."""
    # Without torch's own part for GPUs, not even fake tensors can be on one.
    on_gpu = profile.device_type == "cuda" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def check_backend(wanted: str | None, device: torch.device) -> None:
    """Refuse a `--backend` that cannot carry tensors of a device.

    Raises:
        CommandError: it cannot.
    """
    if wanted is not None and wanted not in BACKENDS:
        raise CommandError(f"--backend {wanted} is not supported; use gloo or nccl.")
    if wanted == "nccl" and device.type == "cpu":
        raise CommandError("--backend nccl carries tensors of GPUs alone; use gloo on the CPU.")
