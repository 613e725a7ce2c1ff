"""The cost of comparing replicas: its time, over the time of the steps between two comparisons.

Two replicas train a GPT-2 of the given width and depth; a step and a comparison take turns in one
job, and their medians count. With two GPUs the ranks compute there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import transformers
from tools import report

import merak
from merak.engine.step.replica_check import REPLICA_CHECK_STEPS
from merak.launch.ranks import Work, run_ranks

VOCABULARY = 50257


def measure(request: argparse.Namespace) -> dict[str, Any]:
    """Train and compare on this rank."""
    mesh = merak.init(dp=2)
    config = transformers.GPT2Config(
        n_layer=request.layers, n_embd=request.width, n_head=request.width // 64, use_cache=False
    )
    with merak.empty_weights():
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, VOCABULARY, (request.samples, request.sequence)).to(mesh.device)
    batch = {"input_ids": ids, "labels": ids}
    parallel = merak.parallelize(
        model, batch, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5), nan_policy="ignore"
    )
    steps, checks = [], []
    for _ in range(request.repeats):
        steps.append(_seconds(lambda: float(parallel.step(batch))))
        checks.append(_seconds(parallel.check_replicas))
    step_s, check_s = statistics.median(steps[1:]), statistics.median(checks[1:])
    return {
        "parameters": sum(p.numel() for p in parallel.engine.parameters.values()),
        "tokens of a step": 2 * request.samples * request.sequence,
        "step, s": round(step_s, 3),
        "comparison, s": round(check_s, 4),
        "comparison ÷ step": round(check_s / step_s, 4),
        f"of {REPLICA_CHECK_STEPS} steps, %": round(
            100 * check_s / step_s / REPLICA_CHECK_STEPS, 4
        ),
    }


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print a row."""
    parser = report.parser(__doc__)
    for name, default in (("layers", 6), ("width", 512), ("samples", 1), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=8)
    request = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    row = run_ranks(Work(measure, (request,)), 2)
    report.show({"comparison of two replicas": [row]}, request.json)


if __name__ == "__main__":
    main()
