"""Agreement of the ranks on weights: equal models, and rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from merak.core.errors import WeightsError
from merak.core.health.status import waiting_for_all
from merak.core.storages import memory_of


def is_distributed() -> bool:
    """Whether the job has several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def transfer_device(device: torch.device) -> torch.device:
    """Device for collectives: the CPU wherever a backend serves it, or there is no other rank.

    Args:
        device: the device this rank computes on.
    """
    if not is_distributed():
        return torch.device("cpu")
    config = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in config or "gloo" in config else device


def gather_objects(value: Any, what: str = "what to save or load on") -> list[Any]:
    """All-gather of a value, in rank order.

    Args:
        value: this rank's, which must pickle.
        what: the value, which the watchdog names while ranks wait for it.
    """
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    with waiting_for_all(what):
        dist.all_gather_object(gathered, value)
    return gathered


def example_of_rank0(example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rank 0's example batch, so that what is measured on it is the same everywhere.

    Args:
        example: this rank's, by column; where it is empty, so are those of all ranks.
    """
    own = {name: value.detach().cpu() for name, value in example.items()}
    if not (own and is_distributed()):
        return own
    found: dict[str, torch.Tensor] | None = gather_objects(
        own if dist.get_rank() == 0 else None, "rank 0's example batch on"
    )[0]
    return own if found is None else found  # a rehearsed rank has no rank 0 beside it


def broadcast_from_rank0(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Broadcast rank 0's values into real tensors; equal ones are not sent.

    Args:
        tensors: by name; the same names on every rank.
        device: the device this rank computes on.

    Raises:
        WeightsError: the ranks have different names or shapes.
    """
    if not is_distributed():
        return
    ours = {n: (tuple(t.shape), str(t.dtype), _digest(t)) for n, t in tensors.items()}
    by_rank = gather_objects(ours)
    _check_same_model(by_rank)
    travel = transfer_device(device)
    for name, tensor in tensors.items():
        if len({tensors_of[name][2] for tensors_of in by_rank}) == 1:
            continue
        value = tensor.detach().to(travel).contiguous()
        with waiting_for_all(f"{name} of rank 0 on"):
            dist.broadcast(value, src=0)
        with torch.no_grad():
            tensor.copy_(value)


def _check_same_model(by_rank: Sequence[Mapping[str, tuple[Any, ...]]]) -> None:
    first = {name: entry[:2] for name, entry in by_rank[0].items()}
    for rank, entries in enumerate(by_rank):
        here = {name: entry[:2] for name, entry in entries.items()}
        differing = sorted(n for n in first.keys() | here.keys() if first.get(n) != here.get(n))
        if differing:
            raise WeightsError(
                f"Rank 0 and rank {rank} have built different models: {differing[0]} is "
                f"{_described(first.get(differing[0]))} on rank 0 and "
                f"{_described(here.get(differing[0]))} on rank {rank}; "
                "build the same model in the same way on every rank."
            )


def _described(entry: tuple[Any, ...] | None) -> str:
    return "without weights or absent" if entry is None else f"{entry[1]} of shape {entry[0]}"


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous()
    return hashlib.blake2b(memory_of(flat), digest_size=16).digest()
