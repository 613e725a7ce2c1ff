"""Gradients reduced in the order in which the next forward needs them, beside that of the backward.

    python benchmarks/reduction_order.py [--check docs/benchmarks.md]

By price, for replicas on hosts of one device. "fifo" sums buckets in the order of the backward, and
the next step begins when all are there, as clipping needs them; "by need" sums the bucket of the
earliest layer first whenever the link is free, and a layer's forward begins when its own bucket is
there (TicTac, arXiv 1803.03288; ByteScheduler, SOSP 2019). That cannot clip, or leave out a step
that is not finite. A period is that of a step among many equal ones, without the optimizer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools import report
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cost.device import preset
from merak.plan.price.candidate import Candidate
from merak.plan.price.segments import price_segments
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

REPLICAS, NUM_STEPS = 8, 12
GBITS = (10, 25, 100)
JOBS = {
    "BERT-large": (
        BertForMaskedLM,
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                   intermediate_size=4096),
        8, 128,
    ),
    "GPT-2 345M": (
        GPT2LMHeadModel, GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False), 4, 512,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """Seconds of a segment: forward, backward, and the reduction of its gradients."""

    forward_s: float
    backward_s: float
    reduce_s: float


def layers(name: str, gbits: float) -> list[Layer]:
    """The segments of a job's replica, as the price has them."""
    architecture, config, samples, tokens = JOBS[name]
    source = ModelSource(architecture, config, None)
    workload = example_workload(
        source, global_batch=samples * REPLICAS, sequence=tokens, autocast=torch.float16
    )
    link = Link("network", 2e-5, gbits / 8 * 1e9)
    device = preset("v100")
    cluster = Cluster((Nodes(device, 1, REPLICAS, link, link),))
    candidate = Candidate(dp=REPLICAS, microbatch=samples)
    graph = workload.graph(samples)
    prices = price_segments(workload, candidate, device, cluster)
    group, counted, found = group_of(cluster, REPLICAS, 1), set[str](), []
    for segment, price in zip(graph.segments, prices, strict=True):
        own = set(segment.parameters) - counted  # a tied one is needed by its first reader
        counted |= own
        num_bytes = sum(graph.parameters[name].num_bytes for name in own)
        reduce_s = collective_seconds("all_reduce", num_bytes, group) if num_bytes else 0.0
        found.append(Layer(price.forward_s, price.backward_s, reduce_s))
    return found


def period_s(own: Sequence[Layer], by_need: bool) -> float:
    """Seconds between the ends of two steps, once they are equal."""
    ready, free, ends = [0.0] * len(own), 0.0, []
    now = 0.0
    for _ in range(NUM_STEPS):
        begin = max(ready)
        for number, layer in enumerate(own):
            now = max(now, ready[number] if by_need else begin) + layer.forward_s
        arrived = []
        for number in reversed(range(len(own))):
            now += own[number].backward_s
            arrived.append((now, number))
        ready, free = summed(own, arrived, free, by_need)
        ends.append(now)
    return ends[-1] - ends[-2]


def summed(
    own: Sequence[Layer], arrived: Sequence[tuple[float, int]], free: float, by_need: bool
) -> tuple[list[float], float]:
    """When the sums of each layer are there, and when the link is free again.

    Args:
        own: the layers.
        arrived: when the gradients of each are complete, in order.
        free: when the link is.
        by_need: whether the earliest layer of those that wait is next.
    """
    ready, waiting, left = [0.0] * len(own), list[tuple[int, int]](), list(arrived)
    while left or waiting:
        while left and (left[0][0] <= free or not waiting):
            at, number = left.pop(0)
            free = max(free, at) if not waiting else free
            heapq.heappush(waiting, (number if by_need else -number, number))
        _, number = heapq.heappop(waiting)
        free += own[number].reduce_s
        ready[number] = free
    return ready, free


def rows() -> list[dict[str, Any]]:
    """Lines of the table."""
    found = []
    for name in JOBS:
        for gbits in GBITS:
            own = layers(name, gbits)
            fifo_s, by_need_s = (period_s(own, by_need) for by_need in (False, True))
            computing_s = sum(layer.forward_s + layer.backward_s for layer in own)
            found.append(
                {
                    "model": name,
                    "link, Gbit/s": gbits,
                    "computing, ms": round(1e3 * computing_s, 1),
                    "sums, ms": round(1e3 * sum(layer.reduce_s for layer in own), 1),
                    "fifo, ms": round(1e3 * fifo_s, 1),
                    "by need ÷ fifo": round(by_need_s / fifo_s, 2),
                }
            )
    return found


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--check", type=Path, help="page that must have these rows")
    chosen = parser.parse_args()
    found = {f"{REPLICAS} replicas, one V100 a host": rows()}
    report.show(found, chosen.json)
    if chosen.check:
        report.check(found, chosen.check)


if __name__ == "__main__":
    main()
