"""Planning at scale: Llama 405B and DeepSeek-V3 671B on 16,384 H100s, on one core.

    python -m benchmarks.plan_scale [--search-only] [--model llama-405b] [--microbatches 1 2 4]

Every model is planned in a fresh process with one thread and no cached trace: first by the whole
search of `merak plan`, with the prices of some layouts beside it, then in another process phase by
phase: the model is built without weights, traced, sharded over tensor parallel ranks, and the
memory of candidates of 16,384 devices is forecast. The seconds of every phase, elapsed and of the
core, and the peak of resident memory are printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEVICES = 16_384
GLOBAL_BATCH = 2048
SEARCHED_BATCH = {"llama-405b": 2048, "deepseek-v3": 16_384}
TP = 8
PP = 16

LLAMA_405B = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""Source: arXiv:2407.21783, table 3."""

DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip
"""Source: arXiv:2412.19437, section 4.2."""

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama-405b": ("LlamaForCausalLM", LLAMA_405B, 8192),
    "deepseek-v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3, 4096),
}
"""Architecture, config, and tokens of a sequence, by name."""


INTERLEAVED = {"zero": 1, "schedule": "interleaved_1f1b", "microbatch": 1}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "llama-405b": [
        {"dp": 128, "tp": 8, "pp": 16, "sequence_parallel": True, "recompute": recompute,
         "schedule_options": {"chunks": 4}}
        for recompute in ("off", "selective", "full")
    ],
    "deepseek-v3": [
        {"dp": dp, "tp": tp, "pp": 32, "ep": ep, "recompute": "selective",
         "schedule_options": {"chunks": 2}}
        for dp, tp, ep in ((512, 1, 256), (128, 4, 1), (128, 4, 4))
    ],
}  # fmt: skip
"""Layouts beside the fastest one that docs/benchmarks.md names."""
FLOPS_PER_S = 989e12
"""Of an H100 in bfloat16, dense."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print the seconds that something takes."""
    start = time.perf_counter(), time.process_time()
    yield
    seconds, core_s = time.perf_counter() - start[0], time.process_time() - start[1]
    print(f"  {name:44s}{seconds:8.2f} s{core_s:8.2f} s", flush=True)


def run(name: str, microbatches: list[int]) -> None:
    """Plan one model in this process."""
    start = time.perf_counter()
    print(f"{name}, {DEVICES:,} devices, {GLOBAL_BATCH:,} samples a step", flush=True)
    print(f"  {'':44s}{'elapsed':>10s}{'of a core':>10s}")
    with phase("import"):
        import torch

        from merak.plan.options import ParallelOptions
        from merak.plan.partition import from_sizes
        from merak.plan.price.candidate import Candidate
        from merak.zoo.model_source import resolve_model
        from merak.zoo.workload import example_workload

        torch.set_num_threads(1)
    architecture, config, sequence = MODELS[name]
    with phase("build the model, without weights"):
        workload = example_workload(
            resolve_model(architecture, config),
            global_batch=GLOBAL_BATCH,
            sequence=sequence,
            dtype=torch.bfloat16,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            common=ParallelOptions(master_weights=True),
        )
    for microbatch in microbatches:
        with phase(f"graph of microbatches of {microbatch}"):
            count = len(workload.graph(microbatch).segments)
    sizes = tuple(count // PP + (stage < count % PP) for stage in range(PP))
    partition, dp = from_sizes(sizes, count), DEVICES // (TP * PP)
    for microbatch in microbatches:
        for recompute in ("off", "full"):
            candidate = Candidate(
                dp=dp, tp=TP, pp=PP, microbatch=microbatch, zero=1, partition=sizes,
                num_microbatches=max(1, GLOBAL_BATCH // (dp * microbatch)), recompute=recompute,
            )  # fmt: skip
            with phase(f"memory, microbatch {microbatch}, recompute={recompute}"):
                forecast = workload.forecast(candidate, partition)
                forecast.ranks(forecast.layout.schedule)
    print_total(start)


def search_plans(name: str, devices: int, layers: int | None) -> None:
    """Run the whole search for one model in this process, as `merak plan` does."""
    start = time.perf_counter()
    batch = SEARCHED_BATCH[name]
    print(f"{name}: the search for {devices:,} devices and {batch:,} samples a step", flush=True)
    import torch

    from merak.core.garbage import paused_collector
    from merak.plan.cluster.parse import parse_cluster
    from merak.plan.options import ParallelOptions
    from merak.plan.price.candidate import Candidate
    from merak.plan.price.step import price
    from merak.plan.search.explain import describe
    from merak.plan.search.search import search
    from merak.zoo.model_source import resolve_model
    from merak.zoo.workload import example_workload

    torch.set_num_threads(1)
    architecture, config, sequence = MODELS[name]
    workload = example_workload(
        resolve_model(architecture, config | ({"num_hidden_layers": layers} if layers else {})),
        global_batch=batch,
        sequence=sequence,
        dtype=torch.bfloat16,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        common=ParallelOptions(master_weights=True),
    )
    cluster = parse_cluster(f"h100:8x{devices // 8}")
    with paused_collector(process_ends=True):
        found = search(workload, cluster)
    print(f"  {found.num_candidates:,} candidates, {found.num_priced} priced")
    for own in found.plans:
        memory = max(own.peak_memory_bytes) / 1e9
        print(f"  {own.step_s:8.3f} s {memory:6.1f} GB  {describe(own.candidate)}")
    if not found.plans:
        print("  fits nowhere")
    print_total(start)
    for layout in LAYOUTS[name] if (devices, layers) == (DEVICES, None) else ():
        count = batch // layout["dp"]
        own = price(workload, cluster, Candidate(**INTERLEAVED, **layout, num_microbatches=count))
        memory, sent = max(own.peak_memory_bytes) / 1e9, own.exposed_communication_s / own.step_s
        used = own.model_flops / own.step_s / devices / FLOPS_PER_S
        print(f"  {own.step_s:8.3f} s {memory:6.1f} GB  {describe(own.candidate)}: {used:.0%} MFU, "
              f"{sent:.0%} in communication")  # fmt: skip


def print_total(start: float) -> None:
    """Print the seconds since a process began to plan, and its peak of resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.perf_counter() - start
    print(f"  {'all of it':44s}{seconds:8.2f} s{time.process_time():8.2f} s")
    print(f"  {'peak of resident memory':44s}{peak / 1e9:8.2f} GB", flush=True)


def main() -> int:
    """Run every model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--search-only", action="store_true", help="without the single phases")
    parser.add_argument("--devices", type=int, default=DEVICES, help="of the search")
    parser.add_argument("--layers", type=int, help="of the search's model; its own by default")
    parser.add_argument("--here", choices=("search", "phases"), help="in this process")
    chosen = parser.parse_args()
    if chosen.here:
        name = chosen.model or next(iter(MODELS))
        if chosen.here == "search":
            search_plans(name, chosen.devices, chosen.layers)
        else:
            run(name, chosen.microbatches)
        return 0
    counts = [str(count) for count in chosen.microbatches]
    for name in [chosen.model] if chosen.model else MODELS:
        for part in ("search",) if chosen.search_only else ("search", "phases"):
            command = [sys.executable, "-m", "benchmarks.plan_scale", "--here", part]
            command += ["--model", name, "--microbatches", *counts]
            command += ["--devices", str(chosen.devices)]
            command += ["--layers", str(chosen.layers)] if chosen.layers else []
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
