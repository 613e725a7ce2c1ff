"""The optimum of small instances, by a CP-SAT model written apart from `auto`."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from merak.schedule.costs import Costs, Link, stage_costs

MOST_WORK = 10.0
"""How long CP-SAT may search, in its own unit of work: a proof must not depend on the machine."""


@dataclass(frozen=True)
class Instance:
    """A small scheduling problem with whole times."""

    num_ranks: int
    num_microbatches: int
    costs: Costs
    memory_limit: int
    split: bool
    recompute: tuple[bool, ...]


def random_instance(seed: int) -> Instance:
    """P from 2 to 4, M from 2 to 6, uneven stages, transfers, a memory limit; every other split."""
    draw = random.Random(seed)
    num_ranks, num_microbatches = draw.randint(2, 4), draw.randint(2, 6)
    stages = range(num_ranks)
    forward = tuple(float(draw.randint(3, 9)) for _ in stages)
    gradient = tuple(float(draw.randint(3, 9)) for _ in stages)
    weight = tuple(float(draw.randint(2, 9)) for _ in stages)
    split = seed % 2 == 0
    recompute = tuple(not split and draw.random() < 0.6 for _ in stages)
    latency = float(draw.randint(0, 3))
    costs = stage_costs(
        forward,
        tuple(g + w for g, w in zip(gradient, weight)),
        input_gradient_s=gradient,
        weight_gradient_s=weight,
        recompute_s=tuple(float(draw.randint(2, 9)) for _ in stages),
        links=(Link(latency_s=latency),) * (num_ranks - 1),
        activation_bytes=(4.0,) * num_ranks,
        weight_gradient_bytes=(float(draw.randint(1, 4)),) * num_ranks,
        checkpoint_bytes=(1.0,) * num_ranks,
    )
    memory_limit = 4 * draw.randint(1, num_ranks + 1) + draw.randint(0, 3)
    return Instance(num_ranks, num_microbatches, costs, memory_limit, split, recompute)


def optimum(instance: Instance) -> tuple[float, bool]:
    """The shortest makespan that CP-SAT finds, and whether it is proven to be the least."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    costs, num_microbatches = instance.costs, instance.num_microbatches
    horizon = int(
        num_microbatches
        * sum(
            f + b + r + 6 for f, b, r in zip(costs.forward_s, costs.backward_s, costs.recompute_s)
        )
    )

    def new_interval(size: float):
        start = model.new_int_var(0, horizon, "")
        end = model.new_int_var(0, horizon, "")
        return start, end, model.new_interval_var(start, int(size), end, "")

    makespan = model.new_int_var(0, horizon, "makespan")
    upstream = [None] * num_microbatches
    chains = []
    for stage in range(instance.num_ranks):
        machine, held, demands, rows = [], [], [], []
        delay = int(costs.links[stage - 1].latency_s) if stage else 0
        full = int(costs.activation_bytes[stage])
        kept = int(costs.checkpoint_bytes[stage]) if instance.recompute[stage] else full
        for m in range(num_microbatches):
            forward = new_interval(costs.forward_s[stage])
            if upstream[m] is not None:
                model.add(forward[0] >= upstream[m] + delay)
            upstream[m] = forward[1]
            machine.append(forward[2])
            ready = forward[1]
            if instance.recompute[stage]:
                again = new_interval(costs.recompute_s[stage])
                model.add(again[0] >= forward[1])
                machine.append(again[2])
                ready = again[1]
            size = costs.input_gradient_s if instance.split else costs.backward_s
            backward = new_interval(size[stage])
            model.add(backward[0] >= ready)
            machine.append(backward[2])
            _hold(model, held, demands, forward[0], backward[1], kept, horizon)
            if instance.recompute[stage]:
                _hold(model, held, demands, again[0], backward[1], full - kept, horizon)
            last = backward
            if instance.split:
                last = new_interval(costs.weight_gradient_s[stage])
                model.add(last[0] >= backward[1])
                machine.append(last[2])
                left = int(costs.weight_gradient_bytes[stage])
                _hold(model, held, demands, backward[1], last[1], left, horizon)
            model.add(makespan >= last[1])
            rows.append((forward, backward, last))
        # Microbatches are alike, so one order of them is as good as any.
        for kind in range(3):
            for a, b in itertools.pairwise(rows):
                model.add(a[kind][1] <= b[kind][0])
        model.add_no_overlap(machine)
        model.add_cumulative(held, demands, instance.memory_limit)
        chains.append(rows)
    for stage in range(instance.num_ranks - 1):
        delay = int(costs.links[stage].latency_s)
        for m in range(num_microbatches):
            model.add(chains[stage][m][1][0] >= chains[stage + 1][m][1][1] + delay)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = MOST_WORK
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return float("inf"), True
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), status
    return solver.objective_value, status == cp_model.OPTIMAL


def _hold(model, held, demands, start, end, demand, horizon) -> None:
    size = model.new_int_var(0, horizon, "")
    held.append(model.new_interval_var(start, size, end, ""))
    demands.append(demand)
