"""Comparison of all copies of every parameter by digests, against silent corruption of data.

Replicas hold the same parameters, pp ranks the same tied ones, tensor parallel ranks the same ones
that they do not split. All are stepped with the same gradients, so their bits are equal, unless a
device, a kernel or a program has changed some. A rank's digest of a parameter is the sum of its
bits as whole numbers: one pass over the memory, on the device. One all-reduce of the least and the
greatest digests then shows every copy that differs.

Shards of ZeRO 3 have no copies, and an optimizer's states of ZeRO none either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from merak.core.errors import TrainingError
from merak.engine.state import EngineState

REPLICA_CHECK_STEPS = 100
"""Steps after which replicas are compared, unless the user says otherwise."""

_ABSENT = torch.iinfo(torch.int64).max
_BITS = 62
_LOW: int = 2**_BITS - 1
_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

Slot = tuple[str, int]
"""A parameter, and a number for its shard, and for its replica where Local SGD lets those part."""


def check_replicas(state: EngineState, when: str) -> None:
    """Refuse to go on where copies of a parameter differ; all ranks call it together.

    Args:
        state: of this rank's engine.
        when: the step, for people to read.

    Raises:
        TrainingError: they differ; all ranks raise it, with the ranks that hold them.
    """
    if state.mesh.world_size == 1:
        return
    own = digests(state)
    slots = _slots(state)
    table = torch.full((2, len(slots)), _ABSENT)
    for place, slot in enumerate(slots):
        if slot in own:
            table[0, place], table[1, place] = own[slot], -own[slot]
    table = table.to(state.mesh.device)
    others = tuple(rank for rank in range(state.mesh.world_size) if rank != state.mesh.rank)
    with state.progress.waiting("the digests of parameters on", others):
        dist.all_reduce(table, dist.ReduceOp.MIN)
    differs = ((table[0] != -table[1]) & (table[0] != _ABSENT)).cpu()
    if not bool(differs.any()):
        return
    everyone = state.gather(own, "the digests of parameters that differ on")
    names = [slot for slot, is_other in zip(slots, differs.tolist(), strict=True) if is_other]
    raise TrainingError(_sentence(names, everyone, when))


@torch.no_grad()
def digests(state: EngineState) -> dict[Slot, int]:
    """Digests of this rank's parameters that are whole, and of their masters where they are whole.

    Args:
        state: of this rank's engine.
    """
    params, shards = state.optimizer_params, state.base.shards
    params.wait()
    tensors = {n: p.detach() for n, p in state.parameters.items() if not p.is_meta}
    for name, item in params.items.items():
        if item.is_master and not params.is_sharded:
            tensors[f"{name} (its float32 master)"] = item.tensor.detach()
    sums = [_sum_of_bits(tensor).to(state.mesh.device) for tensor in tensors.values()]
    if not sums:
        return {}
    values = torch.stack(sums).tolist()  # the only wait for the device
    mesh = state.mesh
    replica = mesh.dp_rank * mesh.shard_degree if _may_differ(state) else 0
    return {
        (name, replica + (mesh.shard_rank if _is_shard(name, shards) else 0)): _folded(value)
        for name, value in zip(tensors, values, strict=True)
    }


def _is_shard(name: str, shards: Mapping[str, object]) -> bool:
    return name.partition(" (")[0] in shards


def _may_differ(state: EngineState) -> bool:
    """Whether replicas differ rightly: inside a round of Local SGD."""
    return state.local_steps is not None and state.local_steps.is_inside_round


def _slots(state: EngineState) -> list[Slot]:
    """All parameters and their masters, the same list on every rank."""
    names = [n for n, _ in state.model.named_parameters(remove_duplicate=False)]
    num_different = state.mesh.shard_degree * (state.mesh.dp if _may_differ(state) else 1)
    return [
        (name, number)
        for parameter in names
        for name in (parameter, f"{parameter} (its float32 master)")
        for number in range(num_different)
    ]


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, read as the widest whole numbers that its size allows."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.reshape(-1)
    num_bytes = flat.numel() * flat.element_size()
    width = next(size for size in _WHOLE if num_bytes % size == 0)
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(_WHOLE[width]).sum(dtype=torch.int64)


def _folded(value: int) -> int:
    """A sum in fewer bits, so that it has a negative; whichever bit differs still does."""
    whole: int = value % 2**64
    return (whole & _LOW) ^ (whole >> _BITS)


def _sentence(names: list[Slot], everyone: list[Mapping[Slot, int]], when: str) -> str:
    """What differs, and where: the ranks that differ from most, or all where no value is usual."""
    first = names[0]
    held = {rank: own[first] for rank, own in enumerate(everyone) if first in own}
    (usual, most), *others = Counter(held.values()).most_common()
    odd = [rank for rank, value in held.items() if value != usual]
    if others and others[0][1] == most:
        where = f"on ranks {_listed(list(held))}"
    else:
        rest = [rank for rank, value in held.items() if value == usual]
        where = f"on {_ranks(odd)} from the one on {_ranks(rest)}"
    more = f", and so do {len(names) - 1} other parameters" if len(names) > 1 else ""
    return (
        f"{when}, parameter {first[0]} differs {where}{more}, though all copies are stepped with "
        "the same gradients: a device or the memory of a host may be faulty, or something writes "
        "into parameters on some ranks; go on from the last checkpoint, without that host, or set "
        "check_replicas_steps=0."
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
