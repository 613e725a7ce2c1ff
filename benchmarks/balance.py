"""Segments to stages along the critical path: against all partitions, and against simpler rules.

Small random cases are compared with the best of all partitions, on equal devices and on unequal
ones with unequal links; large models, whose partitions nobody can list, with the rules that other
tools use. Times are those of the 1F1B recurrence, and of the simulator on unequal devices.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tools import report
from tools.plans import iteration_time, min_max

from merak.plan import Partition, SegmentTimes
from merak.plan.balance import balance, balance_uneven
from merak.plan.partition import from_sizes
from merak.schedule import build, simulate, stage_costs
from merak.schedule.costs import Link

LARGE = ((98, 4, 8), (98, 4, 32), (98, 8, 32), (194, 16, 64), (194, 64, 256))
"""Segments, stages and microbatches: GPT-2 with 48 layers, GPT-3 with 96."""


def random_case(rng: random.Random) -> tuple[list[SegmentTimes], int, int, float]:
    num_segments = rng.randint(3, 12)
    kind = rng.choice(("random", "equal", "heavy head"))
    costs = []
    for index in range(num_segments):
        forward = rng.uniform(0.1, 2.0) if kind == "random" else 1.0
        if kind == "heavy head" and index == num_segments - 1:
            forward = rng.uniform(0.3, 4.0)
        ratio = rng.uniform(1.0, 3.0) if kind == "random" else 2.0
        costs.append(SegmentTimes(str(index), forward, forward * ratio))
    num_stages = rng.randint(2, min(num_segments, 6))
    return costs, num_stages, rng.randint(1, 16), rng.choice((0.0, 0.0, 0.2))


def equal_counts(num_segments: int, num_stages: int) -> Partition:
    """As many segments for every stage, the first ones one more where they do not divide."""
    size, more = divmod(num_segments, num_stages)
    return from_sizes([size + (stage < more) for stage in range(num_stages)], num_segments)


def small_cases(num_cases: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    excess: dict[str, list[float]] = {}
    for _ in range(num_cases):
        costs, num_stages, microbatches, transfer_s = random_case(rng)
        n, case = len(costs), (costs, num_stages, microbatches)
        everything = [Partition(n, cuts) for cuts in combinations(range(1, n), num_stages - 1)]
        found = {
            "critical path": balance(*case, transfer_s=transfer_s),
            "critical path, search alone": balance(*case, transfer_s=transfer_s, listed=0),
            "min-max": min_max(costs, num_stages),
            "equal counts": equal_counts(n, num_stages),
        }
        times = {
            partition: iteration_time(costs, partition, microbatches, transfer_s=transfer_s)
            for partition in everything
        }
        best = min(times.values())
        for rule, partition in found.items():
            excess.setdefault(rule, []).append(times[partition] / best - 1)
    return _shares(excess)


def _shares(excess: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "rule": rule,
            "best of all": f"{sum(math.isclose(e, 0, abs_tol=2e-9) for e in shares)}/{len(shares)}",
            "mean excess %": 100 * statistics.mean(shares),
            "worst excess %": 100 * max(shares),
        }
        for rule, shares in excess.items()
    ]


@dataclass(frozen=True)
class Uneven:
    """Stages on unequal devices: times of every segment on each, links, and bytes of each cut."""

    rows: list[list[SegmentTimes]]
    microbatches: int
    links: list[Link]
    cut_bytes: list[float]

    def seconds(self, partition: Partition) -> float:
        """Seconds of an iteration by the simulator."""
        forward_s, backward_s = (
            tuple(
                sum(getattr(row[i], field) for i in own)
                for row, own in zip(self.rows, partition.stages, strict=True)
            )
            for field in ("forward_s", "backward_s")
        )
        costs = stage_costs(
            forward_s,
            backward_s,
            links=tuple(self.links),
            boundary_bytes=tuple(self.cut_bytes[cut - 1] for cut in partition.cuts),
        )
        schedule = build("1f1b", len(self.rows), self.microbatches, recompute=False)
        return simulate(schedule, costs).makespan


def uneven_case(rng: random.Random) -> Uneven:
    """Up to 14 segments on up to 4 devices of half to twice the speed."""
    num_segments = rng.randint(4, 14)
    base = [(rng.uniform(0.1, 2.0), rng.uniform(1.0, 3.0)) for _ in range(num_segments)]
    rows = []
    for _ in range(rng.randint(2, 4)):
        speed = rng.uniform(0.5, 2.0)
        rows.append([SegmentTimes("", f / speed, f * b / speed) for f, b in base])
    links = [Link(rng.choice((0.0, 0.2)), rng.uniform(0.5, 5.0)) for _ in rows[1:]]
    cut_bytes = [rng.uniform(0.0, 4.0) for _ in base[1:]]
    return Uneven(rows, rng.randint(1, 16), links, cut_bytes)


def uneven_cases(num_cases: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    excess: dict[str, list[float]] = {}
    for _ in range(num_cases):
        case = uneven_case(rng)
        n, num_stages = len(case.rows[0]), len(case.rows)
        with_links = {"links": case.links, "cut_bytes": case.cut_bytes}
        found = {
            "critical path": balance_uneven(case.rows, case.microbatches, **with_links),
            "critical path, search alone": balance_uneven(
                case.rows, case.microbatches, **with_links, listed=0
            ),
            "as if devices were equal": balance(case.rows[0], num_stages, case.microbatches),
            "equal counts": equal_counts(n, num_stages),
        }
        everything = [Partition(n, cuts) for cuts in combinations(range(1, n), num_stages - 1)]
        best = min(map(case.seconds, everything))
        for rule, partition in found.items():
            excess.setdefault(rule, []).append(case.seconds(partition) / best - 1)
    return _shares(excess)


def large_case(num_segments: int, num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """Attention and feed-forward blocks of 1 : 2 in time, with an embedding and a head."""
    layers = (num_segments - 2) // 2
    forward = [0.05, *[0.5, 1.0] * layers, 2.0]
    costs = [SegmentTimes(str(i), f, 2 * f) for i, f in enumerate(forward)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        found = balance(costs, num_stages, num_microbatches)
        seconds.append(time.perf_counter() - start)
    best = iteration_time(costs, found, num_microbatches)
    others = {
        "min-max": min_max(costs, num_stages),
        "equal counts": equal_counts(num_segments, num_stages),
    }
    return {
        "segments": num_segments,
        "stages": num_stages,
        "microbatches": num_microbatches,
        "search s": statistics.median(seconds),
        **{
            f"{rule} ÷ ours": iteration_time(costs, partition, num_microbatches) / best
            for rule, partition in others.items()
        },
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--cases", type=int, default=300, help="random small cases")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tables = {
        "Excess over the best of all partitions": small_cases(args.cases, args.seed),
        "The same on unequal devices and links": uneven_cases(args.cases, args.seed),
        "Iteration times of other rules ÷ ours": [large_case(*sizes) for sizes in LARGE],
    }
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
