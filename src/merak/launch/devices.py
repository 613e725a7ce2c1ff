"""Devices and backends, as the command line names them."""

from __future__ import annotations

import torch

from merak.core.did_you_mean import did_you_mean
from merak.launch.errors import CommandError
from merak.plan.cost.device import PRESETS, DeviceProfile, preset

DEVICES = ("cpu", "cuda")
USUAL_GPU = "h100-sxm"
"""Whose speeds are assumed for a GPU that is not there, and that nothing more is said of."""

BACKENDS = ("gloo", "nccl")


def device_of(asked: str | None) -> torch.device:
    """Return the device that `--device` names.

    Args:
        asked: "cpu" or "cuda"; None for what this machine has.

    Raises:
        CommandError: it is another one, or not there.
    """
    kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in DEVICES:
        raise CommandError(f"--device {kind} is not supported; use cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda was asked for, but torch sees no GPU; use cpu.")
    return torch.device(kind)


def planned_device(asked: str | None) -> tuple[torch.device, DeviceProfile | None]:
    """Return the device that a job is planned for, which need not be on this machine.

    Args:
        asked: "cpu", "cuda", or the name of a GPU that has a data sheet; None for what this
            machine has.

    Returns:
        Where to trace the job, the CPU where this machine has no such device; and the device's
        speeds by its data sheet, None where they can be measured.

    Raises:
        CommandError: it is another one.
    """
    if asked in PRESETS or (asked == "cuda" and not torch.cuda.is_available()):
        sheet = preset(asked if asked is not None and asked in PRESETS else USUAL_GPU)
        # Without torch's own part for GPUs, not even tensors without numbers can be there.
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), sheet
    if asked not in (None, *DEVICES):
        similar = did_you_mean(str(asked), PRESETS)
        known = f"; use cpu, cuda, or one of {', '.join(PRESETS)}."
        raise CommandError(f"--device {asked} is not known{known if similar == '.' else similar}")
    return device_of(asked), None


def check_backend(asked: str | None, device: torch.device) -> None:
    """Refuse a `--backend` that cannot carry tensors of a device.

    Raises:
        CommandError: it cannot.
    """
    if asked is not None and asked not in BACKENDS:
        raise CommandError(f"--backend {asked} is not supported; use gloo or nccl.")
    if asked == "nccl" and device.type == "cpu":
        raise CommandError("--backend nccl carries tensors of GPUs alone; use gloo on the CPU.")
