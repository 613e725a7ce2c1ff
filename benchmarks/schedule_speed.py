"""How long building, checking, lowering and simulating schedules takes, and `auto`, on one core."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tools import report

from merak.schedule import Costs, build, simulate, stage_costs
from merak.schedule.costs import Link, uniform
from merak.schedule.lower import lower
from merak.schedule.search.auto import auto
from merak.schedule.validate.schedule import validate


def median_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def phases(name: str, num_ranks: int, num_microbatches: int, repeats: int) -> dict[str, Any]:
    schedule = build(name, num_ranks, num_microbatches)
    costs = uniform(schedule.num_stages, transfer_s=0.1)
    return {
        "schedule": name,
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "actions": sum(map(len, schedule.actions)),
        "build s": median_s(lambda: build(name, num_ranks, num_microbatches), repeats),
        "simulate s": median_s(lambda: simulate(schedule, costs), repeats),
        "validate s": median_s(lambda: validate(schedule), 1),
        "lower s": median_s(lambda: lower(schedule), 1),
    }


def random_costs(num_stages: int, seed: int) -> Costs:
    draw = random.Random(seed)
    forward = tuple(draw.uniform(0.5, 1.5) for _ in range(num_stages))
    gradient = tuple(seconds * draw.uniform(0.8, 1.3) for seconds in forward)
    weight = tuple(seconds * draw.uniform(0.7, 1.2) for seconds in forward)
    return stage_costs(
        forward,
        tuple(a + b for a, b in zip(gradient, weight)),
        input_gradient_s=gradient,
        weight_gradient_s=weight,
        links=(Link(latency_s=0.1),) * (num_stages - 1),
        checkpoint_bytes=(0.1,) * num_stages,
    )


def synthesis(num_ranks: int, num_microbatches: int, limit: float) -> dict[str, Any]:
    costs = random_costs(num_ranks, seed=0)
    start = time.perf_counter()
    schedule = auto(num_ranks, num_microbatches, costs=costs, memory_limit_bytes=limit)
    seconds = time.perf_counter() - start
    return {
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "memory limit": limit,
        "auto s": seconds,
        "makespan": simulate(schedule, costs).makespan,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--divide", type=int, default=1, help="all ranks and microbatches by this")
    args = parser.parse_args()
    n = args.divide
    tables = {
        "Built-in schedules": [
            phases("early_recompute", 256 // n, 1300 // n, args.repeats),
            phases("zero_bubble_h1", 64 // n, 256 // n, args.repeats),
            phases("chimera", 64 // n, 256 // n, args.repeats),
        ],
        "auto on random stages": [
            synthesis(8, 32, 8.0),
            synthesis(64 // n, 256 // n, 64.0),
            synthesis(64 // n, 256 // n, 20.0),
        ],
    }
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
