"""Seconds a token where each stage of a pipeline has its own layers, and where a rank has all.

Two ranks generate with a Llama that is laid out as a pipeline, whose layers stay where they are
(`merak.callable_model`), and each with a copy of all of it, in turn. One stage is at work at a
time, so that 1 is the best ratio; what is above is the host's, for calls that pass through Python.
Copies run on a core each, at once.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from tools import report
from transformers import LlamaConfig, LlamaForCausalLM

import merak
from merak.core.units import size
from merak.engine.inference.placed import Placed
from merak.launch.ranks import Work, run_ranks


def model_of(width: int, layers: int) -> LlamaForCausalLM:
    """The model that generates, which never ends a sequence by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, vocab_size=1024,
        num_attention_heads=8, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    config.eos_token_id = None
    return LlamaForCausalLM(config)


def seconds_a_token(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Of one call of `generate`."""
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return (time.perf_counter() - start) / tokens


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that this rank has."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(p.nbytes for p in model.parameters() if not p.is_meta)


def measure(request: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Rows of both ways, on rank 0."""
    torch.set_num_threads(1)
    merak.init(pp=2, device="cpu")
    rows = []
    for width in request.widths:
        model = model_of(width, request.layers)
        ids = torch.randint(3, 1024, (request.samples, 8))
        given = {"input_ids": ids, "labels": ids}
        whole = model_of(width, request.layers).eval()
        merak.parallelize(
            model, given, num_microbatches=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
        )
        found: dict[str, list[float]] = {"a copy of all": [], "two stages": []}
        with merak.callable_model(model) as staged:
            assert any(isinstance(p, Placed) for p in staged.parameters())
            ways = {"a copy of all": whole, "two stages": staged}
            for _ in range(request.repeats + 1):
                for name, way in ways.items():
                    found[name].append(seconds_a_token(way, ids, request.tokens))
            first = median(found["a copy of all"][1:])
            for name, way in ways.items():
                own = median(found[name][1:])
                rows.append(
                    {
                        "width": width,
                        "weights": name,
                        "on rank 0": size(held_bytes(way)),
                        "ms a token": round(own * 1e3, 1),
                        "ratio": round(own / first, 2),
                    }
                )
    return rows if merak.current_mesh().rank == 0 else None


def main() -> None:
    """Measure and print the rows."""
    parser = report.parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512, 1024])
    for name, default in (("layers", 8), ("samples", 4), ("tokens", 16), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    request = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report.show({"generation": run_ranks(Work(measure, (request,)), 2)}, request.json)


if __name__ == "__main__":
    main()
