"""The device and the backend of a rank."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from merak.core.errors import MeshError

BACKENDS = ("gloo", "nccl")
"""Backends of the process groups."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""With which a user sets torch's allocator of GPU memory up."""


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse a backend that cannot carry a device's tensors, also in a single process.

    Raises:
        MeshError: it is none of `BACKENDS`, or not for this device.
    """
    if backend is None:
        return
    named = {part.rpartition(":")[2] for part in str(backend).split(",")}
    if not named.issubset(BACKENDS):
        raise MeshError(f"{backend=} is not supported; use 'gloo' or 'nccl', or leave it out.")
    if backend == "nccl" and device.type == "cpu":
        raise MeshError("backend='nccl' carries tensors of GPUs alone; use 'gloo' on the CPU.")


def device_or_cpu(device: torch.device) -> torch.device:
    """Where to try out what a device will run: on it, or on the CPU where it is not here."""
    is_here = device.type == "cpu" or torch.get_device_module(device).is_available()
    return device if is_here else torch.device("cpu")


def pick_device(device: str | torch.device | None) -> torch.device:
    """Choose the device of this rank, and make it torch's current one.

    Args:
        device: as of `merak.init`.

    Raises:
        MeshError: it is not here, or not this rank's.
    """
    wanted = _parsed(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type != "cuda":
        return torch.device(wanted.type)
    if not torch.cuda.is_available():
        raise MeshError("device='cuda' was asked for, but torch sees no GPU; use device='cpu'.")
    _expand_segments()
    num_gpus = torch.cuda.device_count()
    if wanted.index is not None and "RANK" not in os.environ:
        if wanted.index >= num_gpus:
            raise MeshError(
                f"device={str(wanted)!r} is not here: torch sees {num_gpus} GPUs, counted from 0; "
                "use device='cuda', or the number of one of them."
            )
        torch.cuda.set_device(wanted)
        return wanted
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if num_gpus == 1 and _sees_its_own():
        local_rank = 0
    if wanted.index not in (None, local_rank):
        raise MeshError(
            f"device={str(wanted)!r} was asked for on local rank {local_rank}, but every rank "
            "computes on the GPU of its own number; use device='cuda', and CUDA_VISIBLE_DEVICES to "
            "choose among GPUs."
        )
    if local_rank >= num_gpus:
        raise MeshError(
            f"local rank {local_rank} has no GPU of its own: {num_gpus} here; "
            "start at most one rank per GPU."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _expand_segments() -> None:
    """Let torch's allocator grow its segments, which leaves smaller gaps, where nobody chose.

    Not by a variable: processes that this one starts may share tensors of the GPU, which such
    segments cannot hold.
    """
    is_chosen = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if not (is_chosen or torch.version.hip or torch.cuda.is_initialized()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _sees_its_own() -> bool:
    """Whether a launcher has left this rank one GPU to see, which then is its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([one for one in visible.split(",") if one.strip()]) == 1


def _parsed(device: str | torch.device) -> torch.device:
    with suppress(RuntimeError, TypeError):
        found = torch.device(device)
        if found.type in ("cpu", "cuda"):
            return found
    raise MeshError(f"device={str(device)!r} is not supported; use 'cpu' or 'cuda'.")
