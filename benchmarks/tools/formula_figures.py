"""Figures of the papers that are pictures, and formulas of the papers in the notes, beside ours.

Pictures of schedules and memory have no printed numbers: what their text says of them is beside
what the schedules and forecasts of Merak have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import datasets
import torch
import transformers

from merak.data.fetch import collated, make_fetch
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice, segment_kernels
from merak.plan.memory.ledger import Category
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.schedule.costs import uniform
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import Simulation, simulate
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload
from tools.chimera_figures import (
    ASYNCHRONOUS,
    DEPTHS,
    FURTHER,
    SCHEDULES,
    SUPPOSED,
    Job,
    throughput,
)
from tools.paper_jobs import GPTS, adam, chimera_model, cluster, equal_layers, gpt, is_near, read

GIBIBYTE = 2**30
NOTES_CLUSTER = "a100-80gb:8x16"


def merak_5() -> Iterator[dict[str, Any]]:
    """What a layer's time per sample loses at microbatches of 1 and 2, beside those of 8.

    A layer is half of what two layers more take, and a microbatch what one more takes.
    """
    for device in ("rtx-3090", "v100-32gb"):
        row = {"device": device}
        for model in GPTS:
            own = {size: _layer_s(model, size, f"{device}:1") / size for size in (1, 2, 8)}
            row[model] = " and ".join(f"{1 - own[8] / own[size]:.0%}" for size in (1, 2))
        yield row


def _layer_s(model: str, microbatch: int, device: str) -> float:
    _, hidden, heads = GPTS[model]

    def seconds(layers: int, count: int) -> float:
        own = Candidate(microbatch=microbatch, num_microbatches=count, recompute="off")
        workload = gpt(layers, hidden, heads)
        return price(workload, cluster(device), own).step_s

    more, fewer = (seconds(layers, 2) - seconds(layers, 1) for layers in (4, 2))
    return (more - fewer) / 2


def split_loading() -> Iterator[dict[str, Any]]:
    """Time of a batch with all columns ÷ that with the columns of a stage, measured here.

    The first stage reads tokens and their mask, the last labels; medians of 30 batches.
    """
    tokens = torch.randint(50257, (256, 1024)).tolist()
    mask = [[1] * 1024] * 256
    table = datasets.Dataset.from_dict(
        {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    )
    stages = {"first": ("input_ids", "attention_mask"), "last": ("labels",), "between": ()}
    for microbatch in (1, 2, 4, 8):
        own = {name: _loading_s(table, microbatch, columns) for name, columns in stages.items()}
        whole = _loading_s(table, microbatch, tuple(table.column_names))
        mean = (own["first"] + own["last"] + 6 * own["between"]) / 8  # of 8 stages
        yield {
            "microbatch": microbatch,
            "all columns, ms": round(1e3 * whole, 2),
            **{f"{name}, ms": round(1e3 * one, 2) for name, one in own.items()},
            "paper: gain, mean of 8 GPUs": "1.78 to 1.98",
            "Merak: first and last": round(2 * whole / (own["first"] + own["last"]), 2),
            "mean of 8": round(whole / mean, 1),
        }


def _loading_s(table: datasets.Dataset, microbatch: int, columns: tuple[str, ...]) -> float:
    fetch = make_fetch(table, transformers.default_data_collator, columns, seed=0)
    took = []
    for first in range(0, 30 * microbatch, microbatch):
        start = time.perf_counter()
        places = [(first + i) % len(table) for i in range(microbatch)]
        if columns:  # ranks without columns read nothing
            collated(fetch, fetch.dataset.__getitems__(places))
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def chimera_1() -> Iterator[dict[str, Any]]:
    """Bubbles of GPT-2's layouts on 2,048 nodes: table 2's formulas, and our schedules simulated.

    Forward and backward take equally long, as in the formulas; speeds are figure 15's.
    """
    for row in read("chimera.csv"):
        name = SCHEDULES.get(row["schedule"], row["schedule"])
        depth = int(row["pp"] or 8)
        if row["figure"] != "15" or name in ASYNCHRONOUS:
            continue
        count = depth if name != "gems" else 8  # microbatches of 1; GEMS' layout is a picture
        formula = {
            "chimera": (depth - 2) / (2 * count + depth - 2),
            "gems": (depth - 1) / (depth + 0.5),
        }.get(name, (depth - 1) / (count + depth - 1))
        ours = _simulated(name, depth, count).bubble_fraction
        yield {
            "schedule": row["schedule"],
            "D": depth,
            "N": count,
            "paper: bubbles": round(formula, 3),
            "Merak": round(ours, 3),
            "÷ paper": round(ours / formula, 2),
        }


def _simulated(name: str, ranks: int, count: int, **options: Any) -> Simulation:
    schedule = build(name, ranks, count, **options)
    return simulate(schedule, uniform(schedule.num_stages, forward_s=1.0, backward_s=1.0))


def chimera_9() -> Iterator[dict[str, Any]]:
    """GiB of the emptiest and the fullest of 32 nodes; layouts are a picture, ours have D of 8.

    The text: GPipe does not fit, PipeDream is next, GEMS lowest and even, Chimera more even than
    DAPPLE, and its peak lower in four of six layouts.
    """
    for model, nodes, batch, depths, microbatch in (
        ("Bert-48", 32, 512, (4, 8, 16), 8), ("GPT-2", 32, 32, (8, 16, 32), 1)
    ):  # fmt: skip
        workload = chimera_model(model)
        for depth in depths:
            row: dict[str, Any] = {"model": model, "layout": f"W={nodes // depth}, D={depth}"}
            for name in ("gpipe", "pipedream", "pipedream_2bw", "dapple", "chimera", "gems"):
                own = _peaks(workload, name, (nodes // depth, depth, microbatch, batch))
                row[name] = f"{min(own):.1f} to {max(own):.1f}"
            yield row


def _peaks(workload: Workload, name: str, sizes: tuple[int, int, int, int]) -> list[float]:
    dp, pp, microbatch, batch = sizes
    count = batch // dp // microbatch
    own = {"microbatches_per_update": count} if name == "pipedream_2bw" else {}
    updates = 4 if name == "pipedream_2bw" else 1  # one alone needs no second version of weights
    candidate = Candidate(
        dp=dp, pp=pp, microbatch=microbatch, num_microbatches=count * updates, recompute="off",
        schedule=SCHEDULES.get(name, name), schedule_options=own,
        partition=equal_layers(workload, pp),
    )  # fmt: skip
    memory = memory_of(workload, cluster("chimera_piz_daint.yaml"), candidate)
    return [one.peak.total_bytes / GIBIBYTE for one in memory]


def chimera_11() -> Iterator[dict[str, Any]]:
    """GPT-2 on 512 nodes, 512 samples: the baselines' best layouts by price, and the paper's D.

    The text prints D; microbatches are a picture.
    """
    for schedule, depth in (("dapple", 16), ("gpipe", 8), ("pipedream_2bw", 16)):
        job = Job(model="GPT-2", nodes=512, batch=512, schedule=schedule, recompute=True)
        best, words = throughput(job, *SUPPOSED[""])
        own, theirs = throughput(replace(job, depths=(depth,)), *SUPPOSED[""])
        row = {
            "schedule": schedule,
            "paper's D": depth,
            "best of that D": theirs,
            "best by price": words,
            "the paper's ÷ it": round(own / best, 3),
        }
        for name in ("2.3 GB/s between nodes", "0.6 GB/s between nodes"):
            row[f"the same, {name}"] = ""
            if not is_near(own, best):
                supposed = (SUPPOSED | FURTHER)[name]
                ours = {d: throughput(replace(job, depths=(d,)), *supposed)[0] for d in DEPTHS}
                others = max(rate for d, rate in ours.items() if d != depth)
                row[f"the same, {name}"] = round(ours[depth] / others, 3)
        yield row


def notes() -> list[dict[str, Any]]:
    """Formulas of ZeRO, GPipe, Megatron-LM and GShard in the notes, beside ours."""
    found: list[tuple[str, str, float, float]] = []
    workload, total = _half_precision()
    for zero, words, formula in (
        (1, "4+12/N", 4 + 12 / 64), (2, "2+14/N", 2 + 14 / 64), (3, "16/N", 16 / 64)
    ):  # fmt: skip
        own = Candidate(dp=64, microbatch=1, num_microbatches=1, zero=zero, recompute="full")
        memory = memory_of(workload, _devices(), own)[0]
        stage = memory.stages[0]
        # With ZeRO 3 a rank keeps masters alone, and makes its parameters of them.
        held = memory.peak.by_category[Category.PARAMETERS] + stage.gradients + stage.optimizer
        what = f"bytes of states a parameter, stage {zero}, 64 replicas: {words}"
        found.append(("ZeRO", what, formula, held / total))
    ours = _simulated("gpipe", 8, 32).bubble_fraction
    found.append(("GPipe", "bubbles, K=8, M=4K: (K-1)/(M+K-1)", 7 / 39, ours))
    ours = _simulated("interleaved_1f1b", 8, 32, chunks=4).bubble_fraction
    what = "interleaved, idle ÷ busy, p=8, m=32, v=4: (p-1)/(v m)"
    found.append(("Megatron-LM", what, 7 / 128, ours / (1 - ours)))
    elements = 2 * 1024 * 2048 * 8 * 7 / 8
    found.append(("Megatron-LM", "elements sent a layer, t=8: 8bsh(t-1)/t", elements, _sent(2)))
    few, many = _expert_flops(8), _expert_flops(64)
    found.append(("GShard", "FLOPs of 64 experts ÷ of 8, 2 a token", 1.0, many / few))
    return [
        {
            "source": source,
            "what": what,
            "paper": _short(paper),
            "Merak": _short(merak),
            "÷ paper": round(merak / paper, 2),
        }
        for source, what, paper, merak in found
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value > 1000 else f"{value:.3f}"


def _devices() -> Cluster:
    return parse_cluster(NOTES_CLUSTER)


@cache
def _half_precision() -> tuple[Workload, int]:
    """A GPT-2 of eight layers of 2,048 in half precision with masters, and its parameters."""
    config = transformers.GPT2Config(n_layer=8, n_embd=2048, n_head=16, use_cache=False)
    workload = example_workload(
        ModelSource(transformers.GPT2LMHeadModel, config, None), global_batch=64, sequence=1024,
        dtype=torch.bfloat16, optimizer=adam,
    )  # fmt: skip
    workload.common = ParallelOptions(
        master_weights=True, tied_gradients="step", gradient_sums="own", loss_chunk_bytes=0
    )
    workload.kernels = KernelChoice(recomputes_whole=True)  # as of the papers' systems
    return workload, sum(own.numel() for own in workload.model.parameters())


def _sent(microbatch: int) -> float:
    """Elements that a rank sends for a layer, tp over 8, forward and backward."""
    workload, _ = _half_precision()
    form = Candidate(tp=8, microbatch=microbatch, num_microbatches=1).form
    total = 0.0
    for segment in workload.local_graph(form).segments[1:3]:  # attention and feed-forward
        kernels = segment_kernels(segment.graph, workload.kernels, "cuda")
        for kernel in (*kernels.forward, *kernels.backward):
            if kernel.collective is not None:
                kind, num_bytes, _ = kernel.collective
                total += num_bytes / 2 * 7 / 8 * (2 if kind == "all_reduce" else 1)
    return total


def _expert_flops(experts: int) -> float:
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=experts, num_experts_per_tok=2, use_cache=False,
        vocab_size=1024,
    )  # fmt: skip
    source = ModelSource(transformers.MixtralForCausalLM, config, None)
    workload = example_workload(source, global_batch=8, sequence=512, optimizer=adam)
    own = Candidate(microbatch=8, num_microbatches=1)
    return price(workload, _devices(), own).model_flops


FIGURES: dict[str, tuple[str, Callable[[], Iterable[dict[str, Any]]]]] = {
    "5": ("Merak, figure 5: a layer by microbatch", merak_5),
    "split": ("Merak, first version, figure 3: loading of the columns of a stage", split_loading),
    "1": ("Chimera, figure 1: bubbles of GPT-2 on 2,048 nodes", chimera_1),
    "9": ("Chimera, figure 9: memory of 32 nodes", chimera_9),
    "11": ("Chimera, figure 11: the best layouts of GPT-2 on 512 nodes", chimera_11),
    "notes": ("ZeRO, GPipe, Megatron-LM and GShard, by the notes' formulas", notes),
}
