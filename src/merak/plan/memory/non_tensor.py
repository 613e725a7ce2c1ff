"""Memory of a GPU that holds no tensor: context, communicators, workspaces, gaps.

A forecast counts tensors. What else is on a device is estimated here, and only here: plans,
budgets, `merak memory` and the sentence of an out-of-memory read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merak.core.units import counted, size
from merak.plan.cost.data_sheets import CONNECTION_BYTES

if TYPE_CHECKING:
    from merak.core.mesh import Mesh

_MIB = 2**20

CONTEXT_BYTES = 614 * _MIB
"""Of a CUDA context with the code of torch's kernels, which are loaded when they first run."""

WORKSPACE_BYTES = 96 * _MIB
"""Of matrix products: 32 MiB for each stream that has some, and for cuBLASLt. Source: torch's
getChosenWorkspaceSize, on Hopper; less before."""

GAPS = 0.04
"""Part of a memory between the blocks of torch's allocator."""

_CHANNELS = 24
"""Channels of a collective between GPUs with NVLink, as NCCL logs them on eight of them."""

TRANSFER_CHANNELS = 8
"""Channels that a communicator of transfers between pp ranks may have (`max_ctas`), of NCCL's 32.

Eight carry some 160 GB/s over NVLink, more than a stage's activations need, and leave memory and
multiprocessors to the stage.
"""

_SWITCH_BYTES = 2 * 16 * 8 * 128 * 1024
"""For each rank of a node in a group of more than two, whose NVSwitch reduces. Source: NCCL,
src/transport/nvls.cc (16 channels, two buffers of eight chunks)."""

_NODE = 8
"""GPUs of a node with such switches."""


@dataclass(frozen=True, slots=True)
class NonTensorMemory:
    """Bytes of a GPU that hold no tensor.

    Args:
        context: of CUDA and the code of kernels.
        communicators: buffers of all communicators.
        num_communicators: how many a rank has.
        workspaces: of matrix products.
        gaps: of torch's allocator.
    """

    context: int
    communicators: int
    num_communicators: int
    workspaces: int
    gaps: int

    @property
    def total(self) -> int:
        """Bytes that hold no tensor, in all."""
        return self.context + self.communicators + self.workspaces + self.gaps

    def __str__(self) -> str:
        parts = [f"CUDA's context {size(self.context)}"]
        if self.num_communicators:
            buffers = counted(self.num_communicators, "NCCL communicator")
            parts.append(f"{buffers} {size(self.communicators)}")
        parts.append(f"workspaces of matrix products {size(self.workspaces)}")
        return f"{', '.join(parts)}, gaps of the allocator {size(self.gaps)}"


def non_tensor_memory(
    memory_bytes: int, mesh: Mesh | None = None, communicator_bytes: int | None = None
) -> NonTensorMemory:
    """Estimate the memory of a GPU that holds no tensor of a job.

    Args:
        memory_bytes: of the device, that programs may allocate.
        mesh: of the job; None for one rank.
        communicator_bytes: of a communicator of all ranks, as measured or as the link between them
            has it; None for that of GPUs with NVLink.
    """
    sizes: list[int] = []
    if mesh is not None:
        own = communicator_bytes
        sizes = [own or _collective_bytes(mesh, axis) for axis in mesh.group_axes]
        # Activations and gradients with each neighbour; see `merak.schedule.steps.Channel`.
        transfers = TRANSFER_CHANNELS * CONNECTION_BYTES
        sizes += [min(own or transfers, transfers)] * (2 * min(mesh.pp - 1, 2))
    return NonTensorMemory(
        context=CONTEXT_BYTES,
        communicators=sum(sizes),
        num_communicators=len(sizes),
        workspaces=WORKSPACE_BYTES,
        gaps=int(GAPS * memory_bytes),
    )


def _collective_bytes(mesh: Mesh, axis: str) -> int:
    """Buffers of the communicator along an axis: a ring, and those of a node's NVSwitch."""
    local: int = min(getattr(mesh, axis), _NODE // mesh.stride(axis))
    return _CHANNELS * CONNECTION_BYTES + (_SWITCH_BYTES * local if local > 2 else 0)


def usable_bytes(
    memory_bytes: int, mesh: Mesh | None = None, communicator_bytes: int | None = None
) -> int:
    """Bytes of a device's memory that tensors may fill; half of it at least.

    Args:
        memory_bytes: that programs may allocate.
        mesh: of the job; None for one rank.
        communicator_bytes: as for `non_tensor_memory`.
    """
    others = non_tensor_memory(memory_bytes, mesh, communicator_bytes).total
    return max(memory_bytes - others, memory_bytes // 2)
