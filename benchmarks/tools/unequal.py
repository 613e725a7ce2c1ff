"""Prices of layouts that Merak does not have: unequal batches, unequal stages, parts anywhere.

Each is found by a small search over the price that Merak's own search has. What that price does
not know is composed of what it knows: a replica of fast devices is one of a job on such devices
alone, a stage of other degrees is that stage of a job whose stages all have them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import torch

from merak.core.errors import MerakError
from merak.core.mesh import pretended
from merak.plan.cluster.cluster import Cluster, Nodes
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.fit import usable_on
from merak.plan.cluster.groups import group_of, send_link
from merak.plan.cost.device import DeviceProfile
from merak.plan.partition import from_sizes
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.price import Misfit, Price
from merak.plan.price.replicas import exposed_gather_s, stage_exchange, zero_sharding
from merak.plan.price.segments import SegmentPrice, price_segments
from merak.plan.price.stages import Stage, boundary_bytes, costs_of, slower
from merak.plan.price.step import price, price_if_fits, priced_stages
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing
from merak.schedule import registry
from merak.schedule.builders.common import single_pipe
from merak.schedule.costs import Costs, Link, stage_costs
from merak.schedule.ir import Schedule
from merak.schedule.list_scheduler import ForwardRule, Job, Policy, list_schedule
from merak.schedule.simulator.simulate import simulate

RECOMPUTES = ("off", "selective", "full")


def only(nodes: Nodes, cluster: Cluster, num_devices: int | None = None) -> Cluster:
    """As many devices of one kind alone, whose network is the slowest of the cluster's.

    Args:
        nodes: the kind.
        cluster: with all kinds.
        num_devices: of the new cluster; None for as many as the whole one has.
    """
    wanted = cluster.num_devices if num_devices is None else num_devices
    network = min((own.network for own in cluster.nodes), key=lambda own: own.bytes_per_s)
    count = math.ceil(wanted / nodes.devices_per_node)
    return Cluster((replace(nodes, count=count, network=network),))


# ---- batches of unequal size -------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class UnequalBatches(JobPricing):
    """Prices of candidates whose replicas each lie on devices of one kind.

    Replicas run different numbers of microbatches of one size, with which all take as long. A step
    takes what the slowest of them takes by itself, its reductions over the slowest network.

    Args:
        counts: of every candidate that was priced, as text, the microbatches of a replica of each
            kind.
    """

    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def problem(self, own: Candidate) -> str | None:
        """Why replicas of a candidate cannot each be on devices of one kind."""
        if self.workload.global_batch % own.microbatch:
            return "the batch is no multiple of the microbatch"
        if own.zero == 3:
            return "zero=3 gathers parameters on all replicas together"
        for nodes in self.cluster.nodes:
            if own.tp > nodes.devices_per_node or nodes.num_devices % (own.tp * own.pp):
                return "a replica has devices of two kinds"
            if own.pp > 1 and nodes.count % own.pp:
                return "a stage has a part of a node"
        return None

    def price(self, candidate: Candidate) -> Price:
        """The price, which the search asks for where nothing fits."""
        return price(self.workload, self.cluster, candidate)

    def price_if_fits(self, candidate: Candidate) -> Price | Misfit:
        """The price with the best numbers of microbatches, or the first misfit."""
        kinds = self.cluster.nodes
        replicas = [own.num_devices // (candidate.tp * candidate.pp) for own in kinds]
        wanted = self.workload.global_batch // candidate.microbatch
        nominal = candidate.num_microbatches
        lines = []
        partition = candidate.partition
        for own in kinds:
            found = []
            for count in (nominal, 2 * nominal):
                tried = replace(candidate, num_microbatches=count, partition=partition)
                one = price_if_fits(self.workload, only(own, self.cluster), tried)
                if isinstance(one, Misfit):
                    return one
                partition = one.candidate.partition
                found.append(one.step_s)
            slope = (found[1] - found[0]) / nominal
            lines.append((found[0] - slope * nominal, slope))
        counts = _shares(lines, replicas, wanted)
        prices = []
        for own, count in zip(kinds, counts, strict=True):
            tried = replace(candidate, num_microbatches=count, partition=partition)
            prices.append(price(self.workload, only(own, self.cluster), tried))
        slowest = max(prices, key=lambda own: own.step_s)
        chosen = replace(candidate, partition=partition)
        self.counts[str(chosen)] = counts
        tokens = wanted * candidate.microbatch * self.workload.tokens_per_sample
        return replace(
            slowest,
            candidate=chosen,
            tokens=tokens,
            peak_memory_bytes=tuple(b for own in prices for b in own.peak_memory_bytes),
            device_bytes=tuple(b for own in prices for b in own.device_bytes),
        )


def _shares(
    lines: Sequence[tuple[float, float]], replicas: Sequence[int], wanted: int
) -> tuple[int, ...]:
    """Microbatches of a replica of each kind, with which the slowest takes the least.

    Where the last of them are fewer than the replicas of a kind, some of these have one less.

    Args:
        lines: of each kind, seconds without microbatches and of each.
        replicas: of each kind.
        wanted: microbatches of all replicas.
    """

    def counts(limit_s: float) -> list[int]:
        return [max(1, math.floor((limit_s - base) / slope + 1e-9)) for base, slope in lines]

    limits = sorted(base + slope * n for base, slope in lines for n in range(1, wanted + 1))
    for limit_s in limits:
        found = counts(limit_s)
        if sum(n * k for n, k in zip(found, replicas, strict=True)) >= wanted:
            return tuple(found)
    raise AssertionError(wanted)


# ---- what both searches of stages need: times and bytes of segments -----------------------------


@dataclass(frozen=True, slots=True)
class Segments:
    """Seconds and bytes of every segment for one microbatch, in one form on one device.

    Args:
        forward_s: of forwards.
        backward_s: of backwards, recomputation included.
        input_s: of the part of a split backward that gives the input's gradient, likewise.
        weight_s: of the other part.
        saved_bytes: from a forward to its backward.
        state_bytes: of parameters, gradients and the optimizer.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    input_s: np.ndarray
    weight_s: np.ndarray
    saved_bytes: np.ndarray
    state_bytes: np.ndarray


_AGAIN = {"off": 0.0, "selective": 0.3, "full": 1.0}
"""Part of a forward that is run again, for the order of a search; its results are priced."""


def segments_of(
    workload: Workload, cluster: Cluster, candidate: Candidate, device: DeviceProfile
) -> Segments:
    """Seconds and bytes of a candidate's segments on a device, for the order of a search."""
    key = ("segment arrays", candidate.choices("num_microbatches", "pp", "schedule",
                                               "schedule_options", "partition"), id(device),
           id(cluster))  # fmt: skip
    return workload.once(key, lambda: _segments_of(workload, cluster, candidate, device))


def _segments_of(
    workload: Workload, cluster: Cluster, candidate: Candidate, device: DeviceProfile
) -> Segments:
    prices = price_segments(workload, candidate, device, cluster)
    recompute = str(candidate.recompute)
    again = np.array([own.forward_s for own in prices]) * _AGAIN.get(recompute, 0.5)
    saved = _saved(workload, candidate, device)
    pricing = JobPricing(workload, cluster, candidate.microbatch)
    sizes = np.array([_parameter_bytes(own) for own in prices], dtype=float)
    alone = replace(candidate, pp=1, partition=None, schedule="1f1b", schedule_options={})
    whole, _ = pricing._state(alone)
    state = sizes * whole.held(alone) / max(1.0, float(sizes.sum()))
    return Segments(
        np.array([own.forward_s for own in prices]),
        np.array([own.backward_s for own in prices]) + again,
        np.array([own.input_gradient.seconds for own in prices]) + again,
        np.array([own.weight_gradient.seconds for own in prices]),
        saved[recompute if recompute in saved else "selective"],
        state,
    )


def _parameter_bytes(own: SegmentPrice) -> int:
    return sum(meta.num_bytes for meta in own.parameters.values())


def _saved(
    workload: Workload, candidate: Candidate, device: DeviceProfile
) -> Mapping[str, np.ndarray]:
    """Bytes that each segment saves of a microbatch, by recomputation."""
    form = candidate.form

    def made() -> Mapping[str, np.ndarray]:
        graph, first = workload.local_graph(form), workload.unique(form)
        float32 = workload.common.float32_gradients
        measured = workload.local_model(form).measured(float32, device.device_type)
        with pretended(Candidate(tp=form.tp, cp=form.cp, ep=form.ep).mesh(0, workload.device)):
            known = {i: measured.held(graph.segments[i])[0] for i in set(first)}
        inputs = np.array(
            [sum(graph.values[n].num_bytes for n in s.inputs) for s in graph.segments], dtype=float
        )
        off = np.array([known[i] for i in first], dtype=float) + inputs
        return {"off": off, "full": inputs, "selective": inputs + 0.5 * (off - inputs)}

    return workload.once(("saved arrays", form, device.device_type), made)


def devices_of_ranks(cluster: Cluster, size: int, num_ranks: int) -> list[DeviceProfile]:
    """The slowest device of every pp rank of so many devices."""
    return [slowest(cluster, size * rank, size) for rank in range(num_ranks)]


def slowest(cluster: Cluster, first: int, size: int) -> DeviceProfile:
    """The slowest of some devices that follow one another."""
    found = {id(d): d for d in (cluster.place(r)[0].device for r in range(first, first + size))}
    return min(found.values(), key=lambda own: max(own.flops_per_s.values()))


# ---- any parts of the model on a device --------------------------------------------------------


@dataclass(slots=True)
class AnyParts:
    """Search for stages of any size on any pp rank, each of which may have several.

    It starts from stages one after another, round and round, down and up, and as FTPipe places
    them: cut equally, the longest first on the rank that has least. Then cuts and stages move as
    long as the list schedule gets shorter.

    Args:
        workload: the job.
        cluster: the devices.
        base: a layout, whose degrees, microbatch, recomputation and ZeRO stage are kept.
        moves: of each start.
        most_stages: on a rank, on average.
    """

    workload: Workload
    cluster: Cluster
    base: Candidate
    moves: int = 60
    most_stages: int = 3
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, Schedule | None]] = field(
        default_factory=dict
    )
    _squeeze: float = 1.0

    def best(self) -> Price | None:
        """The fastest that fits, by its price; None for none."""
        found: Price | None = None
        for self._squeeze in (1.0, 0.85, 0.7):
            self._known.clear()
            ranked = sorted(self._climbed(), key=lambda own: own[0])[:4]
            for step_s, sizes, schedule in ranked:
                if schedule is None or not math.isfinite(step_s):
                    continue
                own = self._priced(sizes, schedule)
                if own is not None and (found is None or own.step_s < found.step_s):
                    found = own
            if found is not None:
                break
        return found

    def _priced(self, sizes: tuple[int, ...], schedule: Schedule) -> Price | None:
        name = f"parts_{next(_NUMBERS)}"
        registry.register(name, lambda num_ranks, num_microbatches: schedule, searched=())
        chosen = replace(self.base, schedule=name, schedule_options={}, partition=sizes)
        try:
            own = price_if_fits(self.workload, self.cluster, chosen)
        except MerakError:
            return None
        return own if isinstance(own, Price) else None

    def _climbed(self) -> Iterator[tuple[float, tuple[int, ...], Schedule | None]]:
        draw = Random(1)
        for sizes, ranks in dict.fromkeys(self._starts()):
            here = self._timed(sizes, ranks)
            for _ in range(self.moves):
                moved = self._moved(sizes, ranks, draw)
                if moved is None:
                    continue
                other = self._timed(*moved)
                if other[0] < here[0]:
                    (sizes, ranks), here = moved, other
            yield here[0], sizes, here[1]

    def _starts(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        num_ranks, count = self.base.pp, len(self._rows[0].forward_s)
        speeds = np.array([1.0 / (r.forward_s + r.backward_s).sum() for r in self._rows])
        for several in range(1, self.most_stages + 1):
            num_stages = several * num_ranks
            if num_stages > count:
                return
            round_and_round = tuple(s % num_ranks for s in range(num_stages))
            down_up = tuple(
                s % num_ranks if s // num_ranks % 2 == 0 else num_ranks - 1 - s % num_ranks
                for s in range(num_stages)
            )
            for ranks in (round_and_round, down_up):
                yield self._cut(speeds[list(ranks)]), ranks
            sizes = self._cut(np.ones(num_stages))
            ranks = self._longest_first(sizes)
            if set(ranks) == set(range(num_ranks)):  # slow ranks may get none
                yield sizes, ranks

    def _cut(self, weights: np.ndarray) -> tuple[int, ...]:
        """Sizes of stages whose times are as these weights."""
        times = np.cumsum(self._rows[0].forward_s + self._rows[0].backward_s)
        wanted = np.cumsum(weights)[:-1] / weights.sum() * times[-1]
        cuts = [0, *np.searchsorted(times, wanted) + 1, len(times)]
        for i in range(1, len(cuts) - 1):
            cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), len(times) - (len(cuts) - 1 - i))
        return tuple(int(b - a) for a, b in itertools.pairwise(cuts))

    def _longest_first(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        times = [
            [float(part.sum()) for part in _split(row.forward_s + row.backward_s, sizes)]
            for row in self._rows
        ]
        load, ranks = [0.0] * self.base.pp, [0] * len(sizes)
        for stage in sorted(range(len(sizes)), key=lambda s: -times[0][s]):
            rank = min(range(self.base.pp), key=lambda r: load[r] + times[r][stage])
            ranks[stage] = rank
            load[rank] += times[rank][stage]
        return tuple(ranks)

    def _moved(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...], draw: Random
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        own, placed = list(sizes), list(ranks)
        stage, kind = draw.randrange(len(own)), draw.randrange(3)
        if kind == 0:
            other = stage + draw.choice((-1, 1))
            if not 0 <= other < len(own) or own[stage] == 1:
                return None
            own[stage], own[other] = own[stage] - 1, own[other] + 1
        elif kind == 1:
            placed[stage] = draw.randrange(self.base.pp)
        else:
            other = draw.randrange(len(own))
            placed[stage], placed[other] = placed[other], placed[stage]
        if set(placed) != set(range(self.base.pp)):
            return None
        return tuple(own), tuple(placed)

    def _timed(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...]
    ) -> tuple[float, Schedule | None]:
        if (sizes, ranks) not in self._known:
            self._known[sizes, ranks] = self._scheduled(sizes, ranks)
        return self._known[sizes, ranks]

    def _scheduled(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...]
    ) -> tuple[float, Schedule | None]:
        costs, saved, limits = self._costs(sizes, ranks)
        best: tuple[float, Schedule | None] = (math.inf, None)
        if min(limits) <= 0:
            return best
        count, num_stages = self.base.num_microbatches, len(sizes)
        nothing = (0.0,) * num_stages
        depth = [num_stages - s for s in range(num_stages)]
        for is_split, extra in itertools.product((True, False), (0, self.base.pp)):
            job = Job(
                count, ranks, costs.forward_s, (None,) * num_stages, nothing,
                costs.input_gradient_s if is_split else costs.backward_s,
                costs.weight_gradient_s if is_split else (None,) * num_stages,
                tuple(
                    0.0 if a == b else link.latency_s + size / link.bandwidth_bytes_per_s
                    for (a, b), link, size in zip(
                        itertools.pairwise(ranks), costs.links, costs.boundary_bytes, strict=True
                    )
                ),
                saved, nothing, saved, limits,
            )  # fmt: skip
            policy = Policy(
                tuple(min(count, d + extra) for d in depth),
                tuple(range(self.base.pp)),
                ForwardRule.LATEST_STAGE,
            )
            lists = list_schedule(job, policy)
            if lists is None:
                continue
            schedule = single_pipe("parts", ranks, lists, count, (False,) * num_stages)
            step_s = simulate(schedule, costs).makespan
            if step_s < best[0]:
                best = step_s, schedule
        return best

    @property
    def _rows(self) -> list[Segments]:
        made = devices_of_ranks(self.cluster, self.base.stage_ranks, self.base.pp)
        return [segments_of(self.workload, self.cluster, self.base, own) for own in made]

    def _costs(
        self, sizes: tuple[int, ...], ranks: tuple[int, ...]
    ) -> tuple[Costs, tuple[float, ...], tuple[float, ...]]:
        """Costs of stages on their ranks, what they save, and what ranks have left for that."""
        rows, size = self._rows, self.base.stage_ranks
        graph = self.workload.local_graph(self.base.form)
        partition = from_sizes(sizes, sum(sizes))

        def summed(name: str) -> tuple[float, ...]:
            return tuple(
                float(getattr(rows[rank], name)[list(own)].sum())
                for rank, own in zip(ranks, partition.stages, strict=True)
            )

        links = []
        for a, b in itertools.pairwise(ranks):
            link = send_link(self.cluster, a * size, b * size) if a != b else None
            links.append(Link() if link is None else Link(link.latency_s, link.bytes_per_s))
        costs = stage_costs(
            summed("forward_s"),
            summed("backward_s"),
            input_gradient_s=summed("input_s"),
            weight_gradient_s=summed("weight_s"),
            links=tuple(links),
            boundary_bytes=boundary_bytes(graph, partition),
        )
        mesh = self.base.mesh(0, torch.device("cpu"))
        made = devices_of_ranks(self.cluster, size, self.base.pp)
        limits = [self._squeeze * usable_on(own, mesh) for own in made]
        for rank, state in zip(ranks, summed("state_bytes"), strict=True):
            limits[rank] -= state
        return costs, summed("saved_bytes"), tuple(limits)


_NUMBERS = itertools.count()


def _split(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])


@dataclass(frozen=True, slots=True)
class _Between:
    """Times and bytes of a stage from each segment to each, (segments, segments).

    Args:
        seconds: of a forward and a backward; infinite where a stage would end before it begins.
        saved_bytes: of a microbatch.
        state_bytes: of parameters, gradients and the optimizer.
    """

    seconds: np.ndarray
    saved_bytes: np.ndarray
    state_bytes: np.ndarray


def _between(own: Segments) -> _Between:
    def matrix(values: np.ndarray) -> np.ndarray:
        sums = np.concatenate(([0.0], np.cumsum(values)))
        return (sums[None, 1:] - sums[:-1, None]).astype(np.float32)

    seconds = matrix(own.forward_s + own.backward_s)
    seconds[np.tril_indices(len(seconds), -1)] = math.inf
    return _Between(seconds, matrix(own.saved_bytes), matrix(own.state_bytes))


# ---- degrees of its own for each stage ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A stage with degrees of its own.

    Args:
        segments: number of them.
        dp: data parallel degree.
        tp: tensor parallel degree.
        first: its first device.
    """

    segments: int
    dp: int
    tp: int
    first: int

    @property
    def size(self) -> int:
        """Number of its devices."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.segments} segments on dp {self.dp} × tp {self.tp}"


@dataclass(frozen=True, slots=True)
class Staged:
    """A layout with degrees of its own for each stage, and what a step of it takes.

    Args:
        step_s: of a step.
        parts: the stages.
        samples: of a microbatch of all replicas.
        recompute: of all stages.
        schedule: of the stages.
    """

    step_s: float
    parts: tuple[Part, ...]
    samples: int
    recompute: str
    schedule: str

    @property
    def are_equal(self) -> bool:
        """Whether all stages have the same degrees."""
        return len({(own.dp, own.tp) for own in self.parts}) == 1


@dataclass(slots=True)
class OwnDegrees:
    """Search for stages with degrees of their own (DAPPLE, Alpa): dynamic programming.

    For every size of a microbatch, recomputation and longest stage, the program finds consecutive
    stages on consecutive devices whose times add up to the least, each within its devices' memory
    under 1F1B. The best by (sum + (microbatches − 1) × longest) are then priced.

    Args:
        workload: the job.
        cluster: the devices.
        degrees: tensor parallel degrees that the model can have.
        most_stages: of a layout.
        priced: layouts that are priced.
    """

    workload: Workload
    cluster: Cluster
    degrees: tuple[int, ...]
    most_stages: int = 8
    priced: int = 12
    _rows: dict[tuple[int, int, int, str, int], Segments | None] = field(default_factory=dict)

    def best(self) -> tuple[Staged | None, Staged | None]:
        """The fastest layouts that fit: of any degrees, and of equal ones."""
        found: dict[tuple[int, str, tuple[Part, ...]], float] = {}
        batch = self.workload.global_batch
        sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if batch % s == 0 and batch // s >= 2]
        for samples, recompute in itertools.product(sizes, RECOMPUTES):
            for rough_s, parts in self._programmed(samples, recompute):
                key = samples, recompute, parts
                found[key] = min(found.get(key, math.inf), rough_s)
        order = sorted(found, key=lambda key: found[key])
        unequal = [k for k in order if len({(p.dp, p.tp) for p in k[2]}) > 1]
        equal = [k for k in order if len({(p.dp, p.tp) for p in k[2]}) == 1]
        return self._first(unequal), self._first(equal)

    def _first(self, keys: Sequence[tuple[int, str, tuple[Part, ...]]]) -> Staged | None:
        best: Staged | None = None
        tried = 0
        for samples, recompute, parts in keys:
            if tried == self.priced:
                break
            own = self.price(samples, recompute, parts)
            tried += own is not None or best is not None
            if own is not None and (best is None or own.step_s < best.step_s):
                best = own
        return best

    def _row(
        self, samples: int, part: tuple[int, int], recompute: str, first: int
    ) -> Segments | None:
        """Segments of a stage of such degrees, per microbatch of all its replicas."""
        dp, tp = part
        device = slowest(self.cluster, first, dp * tp)
        key = samples, dp, tp, recompute, id(device)
        if key not in self._rows:
            candidate = Candidate(
                dp=dp, tp=tp, microbatch=samples // dp, recompute=recompute, zero=int(dp > 1)
            )
            try:
                own = segments_of(self.workload, self._alone(device), candidate, device)
            except MerakError:
                own = None
            self._rows[key] = own
        return self._rows[key]

    def _alone(self, device: DeviceProfile) -> Cluster:
        nodes = next(own for own in self.cluster.nodes if own.device is device)
        # Several times as many devices: a stage is priced as one of a job of equal stages.
        return self.workload.once(
            ("alone", id(device), id(self.cluster)),
            lambda: only(nodes, self.cluster, self.most_stages * self.cluster.num_devices),
        )

    def _shapes(self, samples: int) -> list[tuple[int, int]]:
        """Degrees of a stage: powers of two of devices, or whole nodes."""
        total = self.cluster.num_devices
        node = min(own.devices_per_node for own in self.cluster.nodes)
        counts = {2**i for i in range(20) if 2**i <= total} | {total}
        counts |= set(range(node, total + 1, node))
        return [
            (count // tp, tp)
            for count in sorted(counts)
            for tp in self.degrees
            if count % tp == 0 and tp <= node and samples % (count // tp) == 0
            and samples // (count // tp) <= 8
        ]  # fmt: skip

    def _programmed(self, samples: int, recompute: str) -> Iterator[tuple[float, tuple[Part, ...]]]:
        shapes = self._shapes(samples)
        count = self.workload.global_batch // samples
        total = self.cluster.num_devices
        tables = {}
        for shape, first in itertools.product(shapes, range(total)):
            if first + shape[0] * shape[1] <= total:
                own = self._row(samples, shape, recompute, first)
                if own is not None:
                    tables[shape, first] = own
        if not tables:
            return
        whole = min(
            float((own.forward_s + own.backward_s).sum()) * shape[0] * shape[1]
            for (shape, _), own in tables.items()
        )  # device seconds of a microbatch at the least
        shown = {key: _between(own) for key, own in tables.items()}
        for factor in (1.0, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0):
            longest_s = factor * whole / total
            for rough_s, parts in self._program(shown, longest_s):
                yield rough_s + (count - 1) * longest_s, parts

    def _program(
        self, tables: Mapping[tuple[tuple[int, int], int], _Between], longest_s: float
    ) -> Iterator[tuple[float, tuple[Part, ...]]]:
        """Stages no longer than a limit whose times add up to the least, for any number of them."""
        total = self.cluster.num_devices
        num_segments = len(next(iter(tables.values())).seconds)
        short = {
            key: np.where(own.seconds <= longest_s, own.seconds, math.inf)
            for key, own in tables.items()
        }
        limits = {
            (shape, first): 0.93 * usable_on(slowest(self.cluster, first, shape[0] * shape[1]))
            for shape, first in tables
        }
        # before[first device]: seconds from each segment on to the end, of the last stages.
        before = {total: np.append(np.full(num_segments, math.inf), 0.0)}
        rows = np.arange(num_segments)
        steps: list[dict[int, list[tuple[tuple[int, int], int] | None]]] = []
        for stage in range(1, self.most_stages + 1):
            now: dict[int, np.ndarray] = {}
            chosen: dict[int, list[tuple[tuple[int, int], int] | None]] = {}
            for (shape, first), own in tables.items():
                rest = before.get(first + shape[0] * shape[1])
                if rest is None:
                    continue
                fits = own.state_bytes + stage * own.saved_bytes <= limits[shape, first]
                value = np.where(fits, short[shape, first] + rest[1:], math.inf)
                ends = np.argmin(value, axis=1)
                least = value[rows, ends]
                best = now.setdefault(first, np.full(num_segments + 1, math.inf))
                choice = chosen.setdefault(first, [None] * num_segments)
                for start in np.flatnonzero(least < best[:-1]):
                    best[start], choice[start] = least[start], (shape, int(ends[start]) + 1)
            steps.append(chosen)
            if 0 in now and math.isfinite(now[0][0]):
                yield float(now[0][0]), self._parts(steps)
            before = now

    @staticmethod
    def _parts(steps: Sequence[Mapping[int, list[tuple[tuple[int, int], int] | None]]]
               ) -> tuple[Part, ...]:  # fmt: skip
        first = start = 0
        parts = []
        for chosen in reversed(steps):
            found = chosen[first][start]
            assert found is not None
            (dp, tp), end = found
            parts.append(Part(end - start, dp, tp, first))
            first, start = first + dp * tp, end
        return tuple(parts)

    def price(self, samples: int, recompute: str, parts: tuple[Part, ...]) -> Staged | None:
        """The price of a layout, composed of those of layouts of equal stages; None: no fit."""
        count = self.workload.global_batch // samples
        sizes = tuple(own.segments for own in parts)
        stages, exchanges, others_s = [], [], [0.0]
        for number, own in enumerate(parts):
            device = slowest(self.cluster, own.first, own.size)
            alone = self._alone(device)
            candidate = self.candidate(Staged(0.0, parts, samples, recompute, "1f1b"), number)
            try:
                whole = self._whole(alone, candidate)
            except MerakError:
                return None
            if whole is None or whole.peak[number] > whole.price.device_bytes[number]:
                return None
            stages.append(whole.stages[number])
            zero = zero_sharding(candidate, self.workload, self.workload.common.float32_gradients)
            schedule = self.workload.plans(candidate).base.schedule
            exchanges.append(
                stage_exchange(stages[-1], number, alone, candidate, schedule, zero, self.workload)
            )
            others_s.append(whole.price.optimizer_s + whole.price.tied_s)
        links, sent = zip(*self._transfers(samples, parts, sizes)) if len(parts) > 1 else ((), ())
        times = [
            slower(stage.whole, own.passes) for stage, own in zip(stages, exchanges, strict=True)
        ]
        costs = costs_of(times, links, sent, [own.reduction_s for own in exchanges])
        late_s = exposed_gather_s(stages, exchanges) + max(others_s)
        best = None
        for name in ("1f1b", "zero_bubble_h1"):
            try:
                schedule = registry.build(name, len(parts), count)
            except MerakError:
                continue
            if name == "1f1b":
                flags = tuple(stage.whole.recompute_s > 0 for stage in stages)
                schedule = replace(schedule, recompute=flags)
            elif recompute != "off":
                continue
            step_s = simulate(schedule, costs).makespan + late_s
            if best is None or step_s < best.step_s:
                best = Staged(step_s, parts, samples, recompute, name)
        return best

    def candidate(self, own: Staged, number: int) -> Candidate:
        """The layout whose stages all have the degrees of one of them.

        Args:
            own: stages with degrees of their own.
            number: of the stage.
        """
        part = own.parts[number]
        return Candidate(
            dp=part.dp,
            tp=part.tp,
            pp=len(own.parts),
            microbatch=own.samples // part.dp,
            num_microbatches=self.workload.global_batch // own.samples,
            schedule=own.schedule,
            recompute=own.recompute,
            zero=int(part.dp > 1),
            partition=tuple(p.segments for p in own.parts),
        )

    def _whole(self, cluster: Cluster, candidate: Candidate) -> _Whole | None:
        key = ("whole", candidate.choices(), id(cluster))

        def made() -> _Whole | None:
            found = price_if_fits(self.workload, cluster, candidate)
            if isinstance(found, Misfit):
                found = price(self.workload, cluster, candidate)
            stages = priced_stages(self.workload, cluster, candidate)
            return _Whole(found, stages, found.peak_memory_bytes)

        return self.workload.once(key, made)

    def _transfers(
        self, samples: int, parts: Sequence[Part], sizes: Sequence[int]
    ) -> Iterator[tuple[Link, float]]:
        """Link and bytes between each two stages, which reshard what has other degrees behind.

        Every receiver takes the whole rows of its replica, or where it shares them with others of
        its tensor parallel group a part of them, which it then gathers.
        """
        partition = from_sizes(sizes, sum(sizes))
        for number, (own, other) in enumerate(itertools.pairwise(parts)):
            form = Form(samples // own.dp, own.tp)
            rows = boundary_bytes(self.workload.local_graph(form), partition)[number]
            everything = rows * own.dp
            link = max(
                (
                    send_link(self.cluster, own.first + i, other.first + j)
                    for i in (0, own.size - 1)
                    for j in (0, other.size - 1)
                ),
                key=lambda found: 1.0 / found.bytes_per_s,
            )
            taken = everything / other.dp
            whole = max(taken, taken * other.size / own.size)
            nodes = self.cluster.place(other.first)[0]
            gathered_s = collective_seconds(
                "all_gather", taken, group_of(Cluster((nodes,)), other.tp, 1)
            )
            parted = max(taken / other.tp, everything / own.size) + gathered_s * link.bytes_per_s
            equal = (own.dp, own.tp) == (other.dp, other.tp)
            sent = rows if equal else min(whole, parted)
            yield Link(link.latency_s, link.bytes_per_s), sent


@dataclass(frozen=True, slots=True)
class _Whole:
    """A layout of equal stages, of which one is taken.

    Args:
        price: its price.
        stages: its stages.
        peak: bytes of every pp rank.
    """

    price: Price
    stages: tuple[Stage, ...]
    peak: tuple[int, ...]
