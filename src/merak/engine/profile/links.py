"""Links between ranks: messages, collectives of groups, and how they slow computation down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh, carried_device, group_of_lines
from merak.engine.profile.stopwatch import Stopwatch
from merak.plan.cost.calibration import curve_of
from merak.plan.profile.profile import HOST, NETWORK, CollectiveTimes, LinkTimes

SIZES = (2**10, 2**14, 2**18, 2**22, 2**24)
"""Bytes of messages and of collectives' tensors."""

_BESIDE_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths and latencies measured between the ranks of a job.

    Args:
        links: messages by kind of link.
        collectives: of groups.
        interference: by kind of link, the part of a hidden collective's time that computation
            beside it takes longer.
    """

    links: tuple[LinkTimes, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    interference: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """What all measurements need.

    Args:
        mesh: of all ranks.
        hosts: of each rank.
        watch: measures.
        everybody: all ranks.
        sizes: bytes to measure.
    """

    mesh: Mesh
    hosts: tuple[str, ...]
    watch: Stopwatch
    everybody: dist.ProcessGroup
    sizes: Sequence[int]


def measure_links(
    mesh: Mesh, watch: Stopwatch, compute: Callable[[], object], sizes: Sequence[int] = SIZES
) -> Links:
    """Measure the links between a job's ranks; all ranks call it together.

    Args:
        mesh: of the ranks.
        watch: measures.
        compute: some computation, beside which collectives are measured.
        sizes: bytes of messages and tensors.
    """
    everybody = dist.group.WORLD
    if mesh.world_size == 1 or everybody is None:
        return Links()
    hosts = mesh.hosts or ("",) * mesh.world_size
    job = _Job(mesh, hosts, watch, everybody, sizes)
    links = [own for kind in (HOST, NETWORK) for own in _messages(job, kind)]
    groups = list(_groups(job))
    collectives = [own for group in groups for own in _collectives(job, group)]
    slows = {group.link: _interference(job, group, compute) for group in groups}
    return Links(tuple(links), tuple(collectives), tuple(slows.items()))


def measure_pairs(
    mesh: Mesh, watch: Stopwatch, pairs: Sequence[tuple[int, int]], sizes: tuple[int, int]
) -> list[tuple[float, float]]:
    """Measure messages between pairs of ranks, one pair at a time; all ranks call it together.

    Args:
        mesh: of the ranks.
        watch: measures.
        pairs: of different ranks, the same on all ranks.
        sizes: bytes of a small message and of a large one.

    Returns:
        For each pair, the seconds that a message of each size takes.
    """
    everybody = dist.group.WORLD
    assert everybody is not None
    job = _Job(mesh, mesh.hosts, watch, everybody, sizes)
    found = []
    for pair in pairs:
        peers = {pair[0]: pair[1], pair[1]: pair[0]}
        small_s, large_s = (
            watch.together(_exchange(job, peers, size, [pair]), everybody) / 2 for size in sizes
        )
        found.append((small_s, large_s))
    return found


def communicator_bytes(mesh: Mesh) -> int | None:
    """Memory of its GPU that one more communicator of all ranks takes; all ranks call it together.

    Args:
        mesh: of the ranks.

    Returns:
        Bytes of this rank's GPU; None on the CPU, for one rank, and where nothing was seen.
    """
    if carried_device().type == "cpu" or mesh.world_size == 1:
        return None
    large = torch.ones(SIZES[-1], dtype=torch.uint8, device=mesh.device)  # takes a ring
    before, _ = torch.cuda.mem_get_info(mesh.device)
    group = group_of_lines([range(mesh.world_size)], "a communicator that is measured with")
    dist.all_reduce(large, group=group)
    torch.cuda.synchronize(mesh.device)
    after, _ = torch.cuda.mem_get_info(mesh.device)
    dist.destroy_process_group(group)
    return before - after if before > after else None


# Messages


def _messages(job: _Job, kind: str) -> Iterator[LinkTimes]:
    """Messages of one pair of ranks, and of as many as can send at the same time."""
    pairs = _pairs(job.hosts, kind)
    for chosen in [pairs[:1], pairs] if len(pairs) > 1 else [pairs] if pairs else []:
        peers = {rank: other for pair in chosen for rank, other in (pair, pair[::-1])}
        senders = max(
            sum(job.hosts[one] == host or job.hosts[other] == host for one, other in chosen)
            for host in job.hosts
        )
        points = []
        for size in job.sizes:
            seconds = job.watch.together(_exchange(job, peers, size, chosen), job.everybody)
            points.append((float(size), seconds / 2))
        yield LinkTimes(kind, senders, curve_of(points))


def _pairs(hosts: Sequence[str], kind: str) -> list[tuple[int, int]]:
    """Pairs of ranks that can send at the same time, each to a partner of its own."""
    if kind == HOST:
        free: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            free.setdefault(host, []).append(rank)
        return [(own[i], own[i + 1]) for own in free.values() for i in range(0, len(own) - 1, 2)]
    names = list(dict.fromkeys(hosts))
    if len(names) < 2:
        return []
    first, last = ([r for r, host in enumerate(hosts) if host == name] for name in names[:2])
    return list(zip(first, last, strict=False))


def _exchange(
    job: _Job, peers: Mapping[int, int], size: int, pairs: Sequence[tuple[int, int]]
) -> Callable[[], object]:
    """A message to the partner and one back; nothing on ranks without one."""
    rank = job.mesh.rank
    if rank not in peers:
        return lambda: None
    peer = peers[rank]
    message = torch.zeros(size, dtype=torch.uint8, device=job.mesh.device)
    starts = any(rank == one for one, _ in pairs)

    def exchange() -> None:
        for sends in (starts, not starts):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)

    return exchange


# Collectives


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks at equal distances; all such groups communicate at the same time.

    Args:
        own: of this rank.
        ranks: how many.
        hosts: the most that one group is on.
    """

    own: dist.ProcessGroup
    ranks: int
    hosts: int

    @property
    def link(self) -> str:
        """Kind of link that it needs."""
        return NETWORK if self.hosts > 1 else HOST


def _groups(job: _Job) -> Iterator[_Group]:
    """Groups of every size and distance that a job of these ranks could have; one of each form."""
    total, seen = job.mesh.world_size, set()
    for size in range(2, total + 1):
        for stride in range(1, total // size + 1):
            if total % (size * stride):
                continue
            lines = [
                list(range(block + start, block + size * stride, stride))
                for block in range(0, total, size * stride)
                for start in range(stride)
            ]
            hosts = max(len({job.hosts[rank] for rank in line}) for line in lines)
            if (size, hosts) in seen:
                continue
            seen.add((size, hosts))
            own, _ = dist.new_subgroups_by_enumeration(lines)
            assert own is not None
            yield _Group(own, size, hosts)


def _collectives(job: _Job, group: _Group) -> Iterator[CollectiveTimes]:
    for kind, begin in _KINDS.items():
        points = []
        for size in job.sizes:
            call = begin(max(1, size // 4 // group.ranks), group, job.mesh.device)
            points.append((float(size), job.watch.together(call, job.everybody)))
        yield CollectiveTimes(kind, group.ranks, group.hosts, curve_of(points))


def _all_reduce(count: int, group: _Group, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(count * group.ranks, device=device)
    return lambda: dist.all_reduce(whole, group=group.own)


def _all_gather(count: int, group: _Group, device: torch.device) -> Callable[[], object]:
    whole, shard = (
        torch.zeros(count * group.ranks, device=device),
        torch.zeros(count, device=device),
    )
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(whole, shard, group=group.own)


def _reduce_scatter(count: int, group: _Group, device: torch.device) -> Callable[[], object]:
    whole, shard = (
        torch.zeros(count * group.ranks, device=device),
        torch.zeros(count, device=device),
    )
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(shard, whole, group=group.own)


def _broadcast(count: int, group: _Group, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(count * group.ranks, device=device)
    return lambda: dist.broadcast(whole, group=group.own, group_src=0)


def _all_to_all(count: int, group: _Group, device: torch.device) -> Callable[[], object]:
    pieces = max(1, count // group.ranks) * group.ranks
    received, shard = torch.zeros(pieces, device=device), torch.zeros(pieces, device=device)
    return lambda: dist.all_to_all_single(received, shard, group=group.own)


_KINDS: Mapping[str, Callable[[int, _Group, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}


# Computation beside a collective


def _interference(job: _Job, group: _Group, compute: Callable[[], object]) -> float:
    """Part of a hidden all-reduce's time that computation beside it takes longer."""
    tensor = torch.zeros(_BESIDE_BYTES // 4, device=job.mesh.device)

    def reduce() -> None:
        dist.all_reduce(tensor, group=group.own)

    collective_s = job.watch.together(reduce, job.everybody)
    once_s = job.watch.together(compute, job.everybody)
    calls = max(1, min(1000, round(collective_s / once_s)))

    def computing() -> None:
        for _ in range(calls):
            compute()

    def both() -> None:
        work = dist.all_reduce(tensor, group=group.own, async_op=True)
        computing()
        work.wait()

    alone_s = job.watch.together(computing, job.everybody)
    both_s = job.watch.together(both, job.everybody)
    return min(1.0, max(0.0, (both_s - max(alone_s, collective_s)) / min(alone_s, collective_s)))
