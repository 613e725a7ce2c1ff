"""Tracing and cutting of the largest models, cold and from the cache, each in a fresh process.

`seconds` are those that `merak trace` reports: the model is built without weights, traced, and cut
into segments. `process s` also counts Python's start and all imports. Figures are medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from tools import report

MODELS = {
    "GPT-3 175B": (
        "GPT2LMHeadModel",
        {
            "n_layer": 96,
            "n_embd": 12288,
            "n_head": 96,
            "n_positions": 2048,
        },
        2048,
    ),
    "Llama 405B": (
        "LlamaForCausalLM",
        {
            "num_hidden_layers": 126,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
        8192,
    ),
}
"""By name: the class, its config, and the length of a sequence."""

COMMAND = "from merak.cli.main import main; main()"


def run(model: str, config: dict[str, int], sequence: int, cache: str) -> dict[str, Any]:
    """One `merak trace` in a process of its own."""
    arguments = ["--model", model, "--config", json.dumps(config), "--seq", str(sequence)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "trace", *arguments, "--json"],
        env=os.environ | {"MERAK_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"merak trace failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"process": time.perf_counter() - start}


def rows_of(name: str, repetitions: int) -> list[dict[str, Any]]:
    """The cold and the cached run of a model."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as cache:
            for cached in (False, True):
                found = run(*MODELS[name], cache)
                assert found["cached"] is cached, "the cache did not do what it is for"
                runs[cached].append(found)
    return [_row(name, cached, found) for cached, found in runs.items()]


def _row(name: str, cached: bool, runs: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    first = runs[0]
    return {
        "model": name,
        "parameters": f"{first['parameters'] / 1e9:.1f}e9",
        "segments": first["segments"],
        "most across a cut": max(first["boundary_tensors"]),
        "cached": "yes" if cached else "no",
        **{f"{part} s": median([r["seconds"][part] for r in runs]) for part in first["seconds"]},
        "process s": median([r["process"] for r in runs]),
        "peak GB": median([r["peak_rss_bytes"] for r in runs]) / 1e9,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each kind")
    parser.add_argument("--only", choices=sorted(MODELS), help="one model alone")
    parser.add_argument("--layers", type=int, help="of every model; its own by default")
    args = parser.parse_args()
    if args.layers:
        for _, config, _ in MODELS.values():
            config |= {
                name: args.layers for name in ("n_layer", "num_hidden_layers") if name in config
            }
    names = [args.only] if args.only else list(MODELS)
    rows = [row for name in names for row in rows_of(name, args.repetitions)]
    report.show({"Trace and shard, without weights": rows}, args.json)


if __name__ == "__main__":
    main()
