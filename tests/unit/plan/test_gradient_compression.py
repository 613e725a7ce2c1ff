"""Bytes of compressed gradients, and what the forecast and the price make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from merak.core.errors import ScheduleError
from merak.plan.cluster.cluster import Cluster
from merak.plan.constraints import refuse_reductions
from merak.plan.gradient_compression import (
    COMPRESSIONS,
    WITH_ERROR_FEEDBACK,
    compressed_bytes,
    powersgd_rank,
)
from merak.plan.memory.ledger import Category
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.plan.search.pinned import Pinned
from merak.plan.search.plan_file import plan_of
from merak.plan.search.search import search
from merak.plan.step_plans import StepPlans
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam, cluster

REPLICAS = Candidate(dp=8, microbatch=1, num_microbatches=4)


def workload(kind: str) -> Workload:
    made = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
    made.common = ParallelOptions(gradient_compression=kind)
    return made


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("off", (3, 5), 60),
        ("fp16", (3, 5), 30),
        ("bf16", (), 2),
        ("1bit", (3, 5), 2 + 3 * 4),
        ("1bit", (15,), 2 + 4),
        ("1bit", (0, 5), 0),
        ("powersgd", (100, 10, 5), (100 + 50) * 4 * 4),
        ("powersgd", (8, 8), 256),  # factors of rank 4 would be as large
        ("powersgd", (1000,), 4000),
        ("topk", (100, 10), 10 * (4 + 4)),
        ("dgc", (), 4 + 4),
        ("topk", (0, 5), 0),
    ],
)
def test_bytes_are_those_of_the_formula(kind: str, shape: tuple[int, ...], expected: int) -> None:
    assert compressed_bytes(kind, shape, 4) == expected


def test_torchs_powersgd_decides_as_the_formula() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    for rows in (1, 2, 3, 7, 16, 17, 64):
        for columns in (1, 2, 5, 16, 40, 333):
            rank = min(rows, columns, 4)
            whether, _, _ = _should_compress(rows, columns, rank, 2)
            assert bool(powersgd_rank((rows, columns))) == whether


@pytest.mark.parametrize("kind", COMPRESSIONS[1:])
def test_the_price_falls_and_the_memory_counts_the_errors(kind: str) -> None:
    plain, own = workload("off"), workload(kind)
    slow = cluster(per_node=2, count=4)
    assert price(own, slow, REPLICAS).step_s < price(plain, slow, REPLICAS).step_s
    (before,), (after,) = (memory_of(one, slow, REPLICAS) for one in (plain, own))
    gradients = sum(stage.gradients for stage in before.stages)
    extra = after.peak.by_category[Category.OPTIMIZER] - before.peak.by_category.get(
        Category.OPTIMIZER, 0
    )
    further = {"1bit": gradients // 8, "dgc": gradients}.get(kind, 0)
    assert extra == (2 * (gradients + further) if kind in WITH_ERROR_FEEDBACK else 0)
    alone = Candidate(microbatch=4, num_microbatches=8)
    one, two = (memory_of(each, slow, alone)[0].peak.total_bytes for each in (plain, own))
    assert one == two  # a single replica reduces nothing


def test_experts_over_replicas_are_refused() -> None:
    mesh = Candidate(dp=2, ep=2).mesh(0, torch.device("cpu"))
    schedule = StepPlans("1f1b", 1, 2).base.schedule
    refuse_reductions(schedule, ParallelOptions(), mesh)
    with pytest.raises(ScheduleError, match="use ep=1, or gradient_compression='off'"):
        refuse_reductions(schedule, ParallelOptions(gradient_compression="bf16"), mesh)


def test_a_rehearsal_charges_the_bytes_that_are_sent() -> None:
    from merak.rehearse.rehearsal import rehearse
    from merak.zoo.batches.batch import example_columns
    from merak.zoo.batches.columns import draw_batch

    def sent(kind: str) -> float:
        columns = example_columns(LLAMA.model_class, LLAMA.config, batch=4, sequence=16)
        found = rehearse(
            workload(kind),
            cluster(),
            REPLICAS,
            0,
            draw_batch(columns, seed=0),
            device=torch.device("cpu"),
            steps=1,
        )
        return sum(charge.num_bytes for charge in found.charges if charge.axis == "dp")

    parameters = LLAMA.model_class(LLAMA.config).named_parameters()
    shapes = [tuple(own.shape) for _, own in parameters]
    whole = sum(compressed_bytes("off", shape, 4) for shape in shapes)
    assert whole <= sent("off") < 1.01 * whole  # and the norms and losses of a step
    for kind in ("fp16", "powersgd"):
        own = sum(compressed_bytes(kind, shape, 4) for shape in shapes)
        assert own <= sent(kind) < own + 0.01 * whole
    largest = 8 * sum(compressed_bytes("topk", shape, 4) for shape in shapes)
    assert largest <= sent("topk") < largest + 0.01 * whole
    # Its exchange has the signs of 8 replicas, and its gather those of the sum.
    signs = 9 * sum(compressed_bytes("1bit", shape, 4) for shape in shapes)
    assert 0.95 * signs <= sent("1bit") < signs + 0.02 * whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero": 1}, "use zero=0, or gradient_compression='off'"),
        ({"dp": 4, "pp": 2, "schedule": "pipedream_2bw"}, "use a synchronous schedule such as"),
    ],
)
def test_a_plan_that_the_engine_refuses_has_no_price(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        price(workload("bf16"), cluster(), replace(REPLICAS, **changes))


def test_a_higher_rank_sends_as_much_more_until_a_matrix_goes_whole() -> None:
    sent = [compressed_bytes("powersgd", (64, 32), 4, rank) for rank in (1, 4, 8, 64)]
    assert sent == [4 * (64 + 32), 16 * (64 + 32), 32 * (64 + 32), 4 * 64 * 32]


def plan_cluster(bytes_per_s: float) -> Cluster:
    devices = cluster(per_node=1, count=2)
    network = replace(devices.nodes[0].network, bytes_per_s=bytes_per_s)
    return replace(devices, nodes=tuple(replace(n, network=network) for n in devices.nodes))


def chosen(bytes_per_s: float) -> tuple[str, str, Price]:
    """What a search makes of "auto" over a network, its note, and its fastest plan."""
    made = workload("auto")
    found = search(made, plan_cluster(bytes_per_s), Pinned(dp=2, tp=1, pp=1, cp=1, zero=0), top=1)
    in_file = plan_of(made, found.plans[0]).common.get("gradient_compression", "off")
    assert in_file == made.common.gradient_compression
    return made.common.gradient_compression, found.notes[-1], found.plans[0]


def test_a_compression_is_chosen_where_the_link_is_slow() -> None:
    kind, note, plan = chosen(1e5)
    assert kind == "powersgd"
    assert note.startswith("gradient_compression='powersgd': the fastest step takes ")
    whole = price(workload("off"), plan_cluster(1e5), plan.candidate)
    assert plan.step_s < 0.95 * whole.step_s
    kind, note, _ = chosen(1e15)
    assert kind == "off" and all(f" s with '{own}'" in note for own in ("off", "bf16"))


def test_without_a_plan_there_is_nothing_to_choose_by() -> None:
    with pytest.raises(ScheduleError, match="is chosen with the plan; use plan='auto'"):
        price(workload("auto"), cluster(), REPLICAS)
