"""Seconds of the optimizer's step: kernels that only move bytes, and the norm of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cost.device import DeviceProfile
from merak.plan.memory.model import StageMemory, UpdateExchange
from merak.plan.memory.zero import ZeroSharding
from merak.plan.optimizer.home import PART_BYTES, folder_of
from merak.plan.optimizer.needs import Needs
from merak.plan.options import zero_degree
from merak.plan.price.candidate import Candidate
from merak.plan.price.stages import Stage

HOST_MEMORY_BYTES_PER_S = 100e9
"""Bytes per second that the processors of a node read and write for an optimizer.

An assumption: half of the peak of one processor with eight channels of DDR4-3200.
"""

FILE_BYTES_PER_S = 3e9
"""Bytes per second that a node reads from its disks, and as many that it writes meanwhile.

An assumption: one NVMe disk on four lanes of PCIe 3.
"""

FOREACH_PASSES = 80 / 28
"""Bytes that torch's default optimizers move, as a multiple of those of a fused one.

AdamW's step by lists (`foreach`) reads and writes 80 bytes for a float32 parameter, operator by
operator (torch/optim/adamw.py); a fused one 28.
"""


@dataclass(frozen=True, slots=True)
class Home:
    """Rates of a rank's part of what has its optimizer's states, if that is not its device.

    Args:
        memory_bytes_per_s: in which the host's processors read and write.
        file_bytes_per_s: of reads, and of as many writes; infinite for states in memory.
    """

    memory_bytes_per_s: float
    file_bytes_per_s: float = math.inf


def home_of(cluster: Cluster, home: str | None) -> Home:
    """The rates of a rank's part of its host, which all ranks of a node use at once.

    Args:
        cluster: the devices.
        home: the option `offload_optimizer`.
    """
    ranks = max(own.devices_per_node for own in cluster.nodes)
    in_files = folder_of(home) is not None
    files = FILE_BYTES_PER_S / ranks if in_files else math.inf
    return Home(HOST_MEMORY_BYTES_PER_S / ranks, files)


def update_seconds(
    stages: Sequence[tuple[Stage, StageMemory]],
    device: DeviceProfile,
    zero: ZeroSharding,
    is_fused: bool,
    home: Home,
    *,
    waits: bool = True,
    backward_s: float = 0.0,
    span_s: float | None = None,
) -> float:
    """Seconds of the optimizer's step and of clipping.

    Args:
        stages: that are stepped, each with its memory, for its optimizer state.
        device: what computes.
        zero: what replicas shard.
        is_fused: whether the optimizer is fused.
        home: what has the state of stages whose memory says that the device has not.
        waits: whether it waits for all gradients, whose norm is computed, and which are clipped.
        backward_s: of the last microbatch's backward, beside which gradients leave the device. An
            update that waits for none runs there, too.
        span_s: of all of the next step, beside which a delayed update of a host runs, and lands
            beside its last backward; None for one that is not delayed.
    """
    trained = {
        name: meta
        for stage, _ in stages
        for name, meta in stage.parameters.items()
        if meta.requires_grad
    }
    if not trained:
        return 0.0
    # Masters are part of the state.
    state = sum(memory.optimizer for _, memory in stages)
    gradients = sum(zero.gradient_bytes(trained).values()) / zero.degree
    parameters = sum(meta.num_bytes for meta in trained.values()) / zero.degree
    passes = 1.0 if is_fused else FOREACH_PASSES
    clipping = 3 * gradients if waits else 0.0
    if away := sum(memory.host for _, memory in stages):
        # Parameters leave beside the next part; the last part has no backward beside it.
        step_s, clip_s = passes * (2 * away - gradients), clipping / home.memory_bytes_per_s
        step_s /= home.memory_bytes_per_s
        files_s, up_s = away / home.file_bytes_per_s, parameters / device.host_bytes_per_s
        part = min(1.0, PART_BYTES / away)
        beside_s = gradients / device.host_bytes_per_s
        if span_s is not None:
            late_s = max(step_s, files_s) + up_s - span_s
            landing_s = max(up_s * part, up_s - backward_s, late_s)
            return max(beside_s * part, beside_s - backward_s) + clip_s + landing_s
        behind_s = max(step_s + clip_s, up_s, files_s)
        if not waits:
            beside_s, behind_s = beside_s + behind_s, 0.0
        return max(beside_s * part, beside_s - backward_s) + behind_s + (up_s + files_s) * part
    stepped = 2 * state + gradients + 2 * parameters
    if device.calibration is not None:
        passes *= device.calibration.update(parameters)
    return (passes * stepped + clipping) / device.memory_bytes_per_s


def norm_seconds(cluster: Cluster, candidate: Candidate) -> float:
    """Seconds in which all ranks agree on the norm of the gradients."""
    groups = [(candidate.tp, 1), (candidate.pp, candidate.stage_ranks)]
    groups += [(zero_degree(candidate, candidate.replicas), candidate.tp)] if candidate.zero else []
    return sum(collective_seconds("all_reduce", 8, group_of(cluster, *own)) for own in groups)


def exchange_seconds(cluster: Cluster, candidate: Candidate, own: UpdateExchange) -> float:
    """Seconds in which ranks with pieces of parameters exchange what an optimizer needs of them.

    Args:
        cluster: the devices.
        candidate: the layout.
        own: what a rank exchanges.
    """
    found, rows = own.findings, zero_degree(candidate, candidate.replicas)
    groups = [group_of(cluster, rows, candidate.tp), group_of(cluster, candidate.tp, 1)]
    if found.needs is Needs.SHARDS or not own.num_parameters:
        return 0.0
    if found.reductions is not None:
        times = found.reductions.exchanges * (own.num_parameters if found.reductions.is_each else 1)
        numbers = found.reductions.num * own.num_parameters
        return times * sum(
            collective_seconds("all_reduce", 8 * numbers / times, group) for group in groups
        )
    # Parameters and gradients to the ranks that step them, and parameters back: rows make up
    # shards, of which each replica then has as much as it had of rows.
    sizes = (own.num_bytes * rows, own.num_bytes * candidate.tp)
    return 3 * sum(
        collective_seconds("all_to_all", size, group)
        for size, group in zip(sizes, groups, strict=True)
    )
