"""Where ranks compute and what carries tensors between them, as the command line names it."""

from __future__ import annotations

import torch

from merak.cli.errors import CommandError

DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")


def device_of(asked: str | None) -> torch.device:
    """The device that is meant by `--device`.

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


def check_backend(asked: str | None, device: torch.device) -> None:
    """Refuse a `--backend` that cannot carry tensors of a device.

    Raises:
        CommandError: it cannot.
    """
    if asked is not None and asked not in BACKENDS:
        raise CommandError(f"--backend {asked} is not supported; use gloo or nccl.")
    if asked == "nccl" and device.type == "cpu":
        raise CommandError("--backend nccl carries tensors of GPUs alone; use gloo on the CPU.")
