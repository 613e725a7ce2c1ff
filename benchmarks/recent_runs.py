"""Published runs on recent devices beside the price that Merak gives them, errors by device.

    python -m benchmarks.recent_runs [--sets R1,R2] [--row TEXT] [--json]

Every row of `data/recent_runs.csv` is a model, a layout and the time of a step that its source
measured, on one node for most. Nothing runs here: the model is an ordinary transformers model
without weights, priced from data sheets. What its framework had is a row of `FRAMEWORKS`.
"""

from __future__ import annotations

import csv
import gc
import logging
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedConfig,
)

from benchmarks.published_runs import equal_layers
from benchmarks.tools import report
from merak.graph.tensor_parallel.features import Vocabulary
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

TABLE = Path(__file__).parent / "data" / "recent_runs.csv"
GIB = 2**30
NODE = {"gb200": 64}
"""Devices that NVLink joins, where they are not eight."""


@dataclass(frozen=True)
class Framework:
    """What a framework had when it ran.

    Args:
        kernels: which kernels it ran.
        is_fused: whether its optimizer was one kernel.
        float32: whether gradients were reduced in float32.
        attention: fractions of the peak that its attention achieves on devices whose own kernels
            it had not, forward and backward.
    """

    kernels: KernelChoice
    is_fused: bool = True
    float32: bool = True
    attention: Mapping[str, float] = field(default_factory=dict)


# On an H100, of figures 5 and 6 of arXiv 2407.08608 (heads of 128, causal and not).
_FLASH_ATTENTION_2 = MappingProxyType({"attention_forward": 0.4, "attention_backward": 0.33})


FRAMEWORKS: Mapping[str, Framework] = {
    # Transformer Engine's kernels, gradients in bfloat16, collectives of tp beside products.
    "nemo": Framework(
        KernelChoice(fused=True, overlaps_products=True, copies_buckets=False),
        float32=False,
    ),
    # The same kernels; no flag of its script overlaps anything.
    "megatron 2023": Framework(
        KernelChoice(fused=True, hides_reductions=False, copies_buckets=False),
        attention=_FLASH_ATTENTION_2,
    ),
    # PyTorch's operators with flash attention, FSDP.
    "foundry": Framework(
        KernelChoice(fused_sums=False),
        is_fused=False,
        attention=_FLASH_ATTENTION_2,
    ),
    "kempner": Framework(
        KernelChoice(fused_sums=False),
        is_fused=False,
        float32=False,
    ),
}

MODELS: Mapping[str, tuple[type[Any], Callable[[dict[str, str]], PreTrainedConfig]]] = {
    "llama": (LlamaForCausalLM, lambda row: LlamaConfig(**_sizes(row))),
    "nemotron": (NemotronForCausalLM, lambda row: NemotronConfig(**_sizes(row))),
    "mpt": (GPT2LMHeadModel, lambda row: _gpt2(row)),
}


def _sizes(row: dict[str, str]) -> dict[str, Any]:
    """The sizes of a model with gated or ungated feed-forward blocks and rotary positions."""
    return {
        "num_hidden_layers": int(row["layers"]),
        "hidden_size": int(row["hidden"]),
        "num_attention_heads": int(row["heads"]),
        "num_key_value_heads": int(row["kv_heads"]),
        "intermediate_size": int(row["ffn"]),
        "vocab_size": int(row["vocab"]),
        "max_position_embeddings": int(row["seq"]),
        "tie_word_embeddings": row["tied"] == "yes",
        "use_cache": False,
    }


def _gpt2(row: dict[str, str]) -> GPT2Config:
    """A model of GPT-2's form, as MPT's with learned positions."""
    return GPT2Config(
        n_layer=int(row["layers"]), n_embd=int(row["hidden"]), n_head=int(row["heads"]),
        n_inner=int(row["ffn"]), vocab_size=int(row["vocab"]), n_positions=int(row["seq"]),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        activation_function="gelu",
    )  # fmt: skip


def rows() -> list[dict[str, str]]:
    """The table."""
    with TABLE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@cache
def _workload(items: tuple[tuple[str, str], ...]) -> Workload:
    row = dict(items)
    model, config = MODELS[row["kind"]]
    own = FRAMEWORKS[row["framework"]]

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=own.is_fused)

    workload = example_workload(
        ModelSource(model, config(row), None),
        global_batch=int(row["batch"]),
        sequence=int(row["seq"]),
        dtype=torch.bfloat16,
        optimizer=adam,
        common=ParallelOptions(
            master_weights=True,
            tied_gradients="step",
            loss_chunk_bytes=0,
            gradient_sums="float32" if own.float32 else "own",
        ),
    )
    named = dict(workload.model.named_parameters())
    tables = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight")
    workload.features = {name: Vocabulary() for name in tables if name in named}
    fused = own.kernels.fused or row["compiled"] == "yes"
    workload.kernels = replace(own.kernels, fused=fused, recomputes_whole=True)
    return workload


def priced(row: dict[str, str]) -> Price:
    """The price of a row."""
    degrees = {name: int(row[name]) for name in ("dp", "tp", "pp", "cp")}
    devices = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    size = min(devices, NODE.get(row["device"], 8))
    microbatch, chunks = int(row["microbatch"]), int(row["chunks"])
    stages = degrees["pp"] * chunks
    even = stages > 1 and int(row["layers"]) % stages == 0
    candidate = Candidate(
        **degrees,
        microbatch=microbatch,
        num_microbatches=int(row["batch"]) // (degrees["dp"] * microbatch),
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        schedule_options={"chunks": chunks} if chunks > 1 else {},
        recompute="full" if row["recompute"] == "full" else "off",
        # Merak shares out tokens once: over cp where there is one.
        sequence_parallel=row["sequence_parallel"] == "yes" and degrees["tp"] > 1 == degrees["cp"],
        partition=equal_layers(int(row["layers"]) // stages, stages) if even else None,
        zero=int(row["zero"]) if degrees["dp"] * degrees["cp"] > 1 else 0,
    )
    cluster = parse_cluster(f"{row['device']}:{size}x{devices // size}")
    if row["device"].startswith("h"):
        cluster = _with_attention(cluster, FRAMEWORKS[row["framework"]].attention)
    return price(_workload(tuple(row.items())), cluster, candidate)


def _with_attention(cluster: Cluster, fractions: Mapping[str, float]) -> Cluster:
    """A cluster whose devices run another kernel of attention."""
    nodes = []
    for node in cluster.nodes:
        assert node.device.efficiency is not None
        efficiency = replace(node.device.efficiency, **fractions)
        nodes.append(replace(node, device=replace(node.device, efficiency=efficiency)))
    return replace(cluster, nodes=tuple(nodes))


def line(row: dict[str, str], own: Price) -> dict[str, Any]:
    """The line of a row."""
    seconds = float(row["seconds"])
    degrees = "×".join(row[name] for name in ("dp", "tp", "pp", "cp"))
    parts = [own.compute_s, own.bubble_s, own.exposed_communication_s, own.optimizer_s]
    memory = max(own.peak_memory_bytes) / GIB
    return {
        "set": row["set"],
        "device": row["device"],
        "model": row["model"],
        "dp×tp×pp×cp": degrees,
        "microbatch": row["microbatch"],
        "tokens": row["seq"],
        "recompute": row["recompute"],
        "published s": seconds,
        "Merak s": round(own.step_s, 3),
        "error, %": round(100 * (own.step_s / seconds - 1), 1),
        "compute/bubble/comm/update, %": "/".join(f"{100 * p / own.step_s:.0f}" for p in parts),
        "published GiB": row["peak_gib"],
        "Merak GiB": round(memory, 1),
    }


def by_device(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Signed errors of the times, by device."""
    found = []
    for device in dict.fromkeys(own["device"] for own in lines):
        errors = [own["error, %"] for own in lines if own["device"] == device]
        found.append(
            {
                "device": device,
                "rows": len(errors),
                "mean error, %": round(statistics.mean(errors), 1),
                "mean size, %": round(statistics.mean(map(abs, errors)), 1),
                "lowest": min(errors),
                "highest": max(errors),
            }
        )
    return found


def main() -> None:
    """Print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("--sets", default="")
    parser.add_argument("--row", default="", help="rows with this text in model, device or layout")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = []
    for row in rows():
        if arguments.sets and row["set"] not in arguments.sets.split(","):
            continue
        if arguments.row and arguments.row not in " ".join(row.values()):
            continue
        lines.append(line(row, priced(row)))
        print(list(lines[-1].values()), file=sys.stderr, flush=True)
        gc.collect()
    report.show({"Runs": lines, "Errors by device": by_device(lines)}, arguments.json)


if __name__ == "__main__":
    main()
