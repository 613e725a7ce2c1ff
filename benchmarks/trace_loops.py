"""Tracing of models whose code loops over the tokens of a sequence, at several lengths.

Every model has the layers and sizes of its published config, no weights, and a process of its own.
`trace CPU s` is the processor time of tracing and cutting, imports and the model's building aside,
so that other work on the machine counts little; `operators` are those of the whole graph.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from tools import report

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba 2.8B": ("Mamba", {"hidden_size": 2560, "num_hidden_layers": 64}),
    "FalconMamba 7B": ("FalconMamba", {"hidden_size": 4096, "num_hidden_layers": 64}),
    "Jamba 52B": ("Jamba", {}),
    "RWKV 7B": ("Rwkv", {"hidden_size": 4096, "num_hidden_layers": 32}),
    "xLSTM 7B": ("xLSTM", {}),
    "RecurrentGemma 2B": ("RecurrentGemma", {}),
    "Zamba 7B": ("Zamba", {}),
    "Zamba2": ("Zamba2", {}),
    "Bamba 9B": ("Bamba", {"attn_layer_indices": [9, 18, 27]}),
    "Mamba2 7B": ("Mamba2", {}),
    "Qwen3-Next 80B": ("Qwen3Next", {}),
    "Qwen3.5 9B": ("Qwen3_5", {}),
    "MiniMax": ("MiniMax", {}),
}
"""By name: the class without ForCausalLM, and what differs from its config's defaults."""


def run_here(name: str, sequence: int) -> dict[str, Any]:
    """Trace one model in this process."""
    import torch
    import transformers

    import merak
    from merak.core.tensor_meta import TensorMeta
    from merak.graph.segment.build import GraphSource, build_timed
    from merak.graph.trace.opaque.operator import opaque_calls

    family, changed = MODELS[name]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**changed)
    with merak.empty_weights():
        model = model_class(config)
    meta = TensorMeta((1, sequence), torch.int64)
    start = time.process_time()
    built = build_timed(GraphSource(model), {"input_ids": meta, "labels": meta}, training=True)
    graph = built.graph
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()) / 1e9,
        "layers": getattr(config, "num_hidden_layers", "-"),
        "tokens": sequence,
        "trace CPU s": time.process_time() - start,
        "operators": sum(len(part.graph.nodes) for part in graph.segments),
        "segments": len(graph.segments),
        "opaque": sorted(
            {call.ref.path.partition(":")[2] or call.class_name for call in opaque_calls(graph)}
        ),
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def run(name: str, sequence: int, timeout_s: float) -> dict[str, Any]:
    """Trace one model in a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--tokens", str(sequence), "--here"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"model": name, "tokens": sequence, "problem": f"not done in {timeout_s:g} s"}
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"model": name, "tokens": sequence, "problem": told}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"opaque": ", ".join(found["opaque"])}


def main() -> None:
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=MODELS, help="one model alone")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one trace, at most")
    parser.add_argument("--here", action="store_true", help="one trace in this process, as JSON")
    args = parser.parse_args()
    names = [args.only] if args.only else list(MODELS)
    if args.here:
        print(json.dumps(run_here(names[0], args.tokens[0])))
        return
    rows = [run(name, tokens, args.timeout) for name in names for tokens in args.tokens]
    report.show({"Traces of loops over tokens": rows}, args.json)


if __name__ == "__main__":
    main()
