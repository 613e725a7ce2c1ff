"""Share of a model's parameters that tensor parallelism splits at published widths.

    python -m benchmarks.tensor_parallel_share [--tp 8] [--tokens 1024] [--whole] [NAME …]

Models have a few layers of their published widths, and no weights. Every model is traced for one
sequence. Beside the share is that of transformers' own plan (`base_model_tp_plan`), then how often
the ranks send something in each pass of one layer, and what that is together in activations: twice
for an all-reduce, as a gather and a scatter are once. `--whole` lists what stays whole, and why.
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

# Fields that differ from the defaults of transformers' configs, which are published sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-70b": ("LlamaForCausalLM", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256}),
    "qwen3-32b": ("Qwen3ForCausalLM", {
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}),
    "llama-2-kv4": ("LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000}),
    "gemma3-27b": ("Gemma3ForCausalLM", {
        "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128}),
    "mixtral-8x7b": ("MixtralForCausalLM", {}),
    "qwen3-moe-235b": ("Qwen3MoeForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", {}),
    "glm4-moe": ("Glm4MoeForCausalLM", {}),
    "gpt-oss-120b": ("GptOssForCausalLM", {}),
    "flex-olmo": ("FlexOlmoForCausalLM", {}),
    "ernie4.5-moe": ("Ernie4_5_MoeForCausalLM", {}),
    "afmoe": ("AfmoeForCausalLM", {}),
    "exaone-moe": ("ExaoneMoeForCausalLM", {}),
    "jetmoe": ("JetMoeForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "llama4": ("Llama4ForCausalLM", {}),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "granite-moe": ("GraniteMoeForCausalLM", {
        "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24,
        "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
        "vocab_size": 49155}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "mamba2-2.7b": ("Mamba2ForCausalLM", {}),
    "mamba-2.8b": ("MambaForCausalLM", {"hidden_size": 2560}),
}  # fmt: skip
"""Architecture, and fields of the published config that the class's defaults do not have."""

DENSE_FIRST = {"deepseek-v3": 5, "deepseek-v3.2": 5, "qwen3-next": 4, "llama4": 4}
"""Layers, where the first few are of another kind."""


def source_of(name: str) -> Any:
    """The model's class and config, with few layers."""
    from merak.zoo.model_source import resolve_model

    kind, fields = MODELS[name]
    layers = DENSE_FIRST.get(name, 3)
    return resolve_model(kind, {**fields, "num_hidden_layers": layers})


def graph_of(source: Any, tokens: int) -> tuple[Any, torch.nn.Module]:
    """The model's segments at one sequence."""
    from merak.graph.segment.build import GraphSource, build_timed
    from merak.graph.weights.empty_weights import empty_weights
    from merak.zoo.batches.batch import example_arguments, example_columns

    columns = example_columns(source.model_class, source.config, batch=1, sequence=tokens)
    with empty_weights():
        module = source.build()
    metas = {name: column.meta for name, column in columns.items()}
    built = build_timed(
        GraphSource(module, fixed=example_arguments(source.model_class)), metas, training=True
    )
    return built.graph, module


def share_of_plan(module: Any, shapes: dict[str, int]) -> float | None:
    """Share that transformers' own plan splits; None where it has no plan."""
    plan = getattr(module, "tp_plan", None)
    if not plan:
        return None
    whole = ("replicate", "all_reduce", "moe_", "mla_", "ep_", "local", "replicated")
    patterns = [p for p, style in plan.items() if not str(style).startswith(whole)]
    split = 0
    for name, size in shapes.items():
        paths = (name, name.rpartition(".")[0])
        if any(fnmatchcase(path, f"*{p}") for path in paths for p in patterns):
            split += size
    return split / sum(shapes.values())


def report(name: str, tp: int, tokens: int, whole: bool) -> None:
    """Print one model's line."""
    from merak.graph.tensor_parallel.apply import auto_tensor_parallel
    from merak.graph.tensor_parallel.report import report_sharding, sizes_of_read, split_share
    from merak.graph.tensor_parallel.search.cost import ALL_REDUCES, FORWARD

    graph, module = graph_of(source_of(name), tokens)
    shapes = sizes_of_read(graph)
    found = auto_tensor_parallel(graph, tp)
    share = split_share(graph, found)
    theirs = share_of_plan(module, shapes)
    hidden = max(math.prod(graph.values[n].shape) for s in graph.segments[1:2] for n in s.inputs)
    layers = [s for s in graph.segments if re.search(r"\.\d+", s.name)]
    last = max((int(re.search(r"\.(\d+)", s.name)[1]) for s in layers), default=0)
    counts, sizes = [0, 0], [0.0, 0.0]
    weights_sum = 0
    for segment in layers:
        if int(re.search(r"\.(\d+)", segment.name)[1]) != max(last - 1, 0):
            continue
        for transfer in found.split(segment).transfers:
            if transfer.of_weights:
                weights_sum += transfer.numel
                continue
            late = transfer.kind not in FORWARD
            counts[late] += 1
            sizes[late] += transfer.numel * (2 if transfer.kind in ALL_REDUCES else 1) / hidden
    shown = "   –" if theirs is None else f"{theirs:.3f}"
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    print(
        f"{name:16s} {share:.3f} {shown:>6}   forward {counts[0]} ({sizes[0]:.2f})  backward "
        f"{counts[1]} ({sizes[1]:.2f})  weights {weights_sum:,}  {cpu:.0f} s",
        flush=True,
    )
    if whole:
        for segment, reported in zip(graph.segments, report_sharding(graph, found), strict=True):
            print(f"    {segment.name}")
            for n, why in (*reported.split.items(), *reported.whole.items()):
                print(f"      {n} {tuple(graph.parameters[n].shape)}: {why}")
            for t in found.split(segment).transfers:
                print(f"        {t.kind.value}: {t.numel / hidden:.4g} {t.of_weights or ''}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--whole", action="store_true")
    parsed = parser.parse_args(arguments)
    if len(parsed.names) == 1:
        report(parsed.names[0], parsed.tp, parsed.tokens, parsed.whole)
        return
    for name in parsed.names or MODELS:
        each = [sys.executable, "-W", "ignore", "-m", "benchmarks.tensor_parallel_share", name]
        each += ["--tp", str(parsed.tp), "--tokens", str(parsed.tokens)]
        done = subprocess.run(each, capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        print(done.stdout.rstrip() if done.returncode == 0 else f"{name}: {last}", flush=True)


if __name__ == "__main__":
    main()
