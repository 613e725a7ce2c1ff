"""Checks that ranks run together: they meet, reduce, measure their links and compare hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.doctor.finding import Finding, Level, System
from merak.core.health import failure
from merak.core.health.status import named
from merak.core.mesh import Mesh
from merak.core.start.init import init
from merak.core.units import counted
from merak.engine.profile.links import measure_pairs
from merak.engine.profile.stopwatch import Stopwatch
from merak.launch.doctor.clocks import clock_offsets, judge_clocks
from merak.launch.doctor.differences import Traits, compare_hosts, merge_hosts, read_traits
from merak.launch.doctor.links import LARGE_BYTES, SMALL_BYTES, chosen_pairs, judge_links

REDUCED = 2**18
"""Elements of the tensor that ranks all-reduce: more than fits into one message of a library."""

ROUND_S = 0.005
"""Seconds of a round of messages."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Examination of ranks: device, backend and time limit.

    Args:
        device: that they compute on.
        backend: that carries tensors; None for what fits the device.
        timeout_s: seconds that they wait for one another.
    """

    device: torch.device
    backend: str | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _Own:
    """What one rank contributes.

    Args:
        findings: of its host; empty but for the first rank of each host.
        traits: of its host and process.
        has_right_sum: whether its result of the all-reduce is right.
    """

    findings: tuple[Finding, ...]
    traits: Traits
    has_right_sum: bool


def examine_ranks(wanted: Examination, own: Sequence[Finding] | None) -> list[Finding] | None:
    """Connect the ranks of a job, and check them together; all ranks call it.

    Args:
        wanted: device, backend and time limit.
        own: findings of this rank's host; None where all ranks are on one that is checked already.

    Returns:
        What was found on all hosts, on rank 0; None on the others.

    Raises:
        MerakError: the ranks cannot meet.
    """
    failure.install()
    start = time.perf_counter()
    num_ranks = int(os.environ["WORLD_SIZE"])
    mesh = init(
        dp=num_ranks,
        device=wanted.device.type,
        backend=wanted.backend,
        timeout_s=wanted.timeout_s,
    )
    joined_s = time.perf_counter() - start
    hosts = mesh.hosts or ("",) * num_ranks
    contributed = _gather(mesh, _contribution(mesh, hosts, own or ()))
    together = [_meeting(mesh, hosts, joined_s), _sums(mesh, contributed)]
    together += [*judge_clocks(clock_offsets(mesh, hosts), hosts), *_links(mesh, hosts)]
    if mesh.rank:
        return None
    by_host = {host: contributed[hosts.index(host)] for host in dict.fromkeys(hosts)}
    found = merge_hosts({host: list(one.findings) for host, one in by_host.items()})
    return [*found, *together, *compare_hosts({h: one.traits for h, one in by_host.items()})]


def _contribution(mesh: Mesh, hosts: Sequence[str], own: Sequence[Finding]) -> _Own:
    is_first = hosts.index(hosts[mesh.rank]) == mesh.rank
    return _Own(tuple(own) if is_first else (), read_traits(System()), _reduces_rightly(mesh))


def _reduces_rightly(mesh: Mesh) -> bool:
    """Whether an all-reduce of every rank's number gives their sum, on the job's device."""
    reduced = torch.full((REDUCED,), float(mesh.rank + 1), device=mesh.device)
    dist.all_reduce(reduced)
    return bool((reduced == mesh.world_size * (mesh.world_size + 1) // 2).all())


def _gather(mesh: Mesh, own: _Own) -> list[_Own]:
    found: list[_Own] = [own] * mesh.world_size
    dist.all_gather_object(found, own)
    return found


def _meeting(mesh: Mesh, hosts: Sequence[str], joined_s: float) -> Finding:
    where = counted(len(set(hosts)), "host")
    config = dist.get_backend_config()
    backend = dict(part.split(":") for part in config.split(",")).get(mesh.device.type, config)
    found = f"{counted(mesh.world_size, 'rank')} on {where} met in {joined_s:.1f} s ({backend})"
    return Finding("ranks", Level.OK, found)


def _sums(mesh: Mesh, contributed: Sequence[_Own]) -> Finding:
    wrong = [rank for rank, own in enumerate(contributed) if not own.has_right_sum]
    if not wrong:
        return Finding("all-reduce", Level.OK, f"the sum is right on {mesh.device.type}")
    return Finding(
        "all-reduce",
        Level.PROBLEM,
        f"the sum over all ranks is wrong on {named(tuple(wrong))}",
        "a device or a link is faulty: leave these ranks out to find it, and look at the kernel's "
        "log (dmesg) of their hosts",
    )


def _links(mesh: Mesh, hosts: Sequence[str]) -> list[Finding]:
    pairs = chosen_pairs(hosts)
    watch = Stopwatch(mesh.device, ROUND_S)
    times = measure_pairs(mesh, watch, pairs, (SMALL_BYTES, LARGE_BYTES))
    return judge_links(pairs, times, hosts)
