"""Hierarchical reductions against one ring: seconds of a step and bytes on a slow link.

A small GPT-2 learns the bytes of Python's own library on four replicas, two on each of two hosts
(network namespaces, which take root) that are joined by a link of limited rate: with gradients
reduced at once over all four, and by hierarchy, for every stage of ZeRO that is asked for. All have
the same weights and batches. What a host sends is read from the counters of its link. Seconds are
medians of all steps after the first ten; the difference is the largest of all parameters at the
end, relative to the largest parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from precision_curves import LENGTH, library_bytes, small_gpt2
from tools import report
from tools.link import sent_bytes, slow_link

import merak

REPLICAS, SAMPLES = 4, 16
WARMUP = 10
VALUES = ("off", "on", "auto")


def train(value: str, zero: int, num_steps: int, text: torch.Tensor, mesh: Any) -> dict[str, Any]:
    """What a step takes and sends with one way of reducing, and the parameters at the end."""
    draws = torch.Generator().manual_seed(2)
    starts = torch.randint(len(text) - LENGTH, (num_steps, SAMPLES), generator=draws)
    batches = [
        torch.stack([text[s : s + LENGTH] for s in step.chunk(REPLICAS)[mesh.dp_rank].tolist()])
        for step in starts
    ]
    parallel = merak.parallelize(
        small_gpt2(torch.float32),
        {"input_ids": batches[0], "labels": batches[0]},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        max_grad_norm=1.0,
        zero=zero,
        hierarchical_reductions=value,
    )
    losses, seconds, before = [], [], 0
    for number, ids in enumerate(batches):
        if number == WARMUP:
            before = sent_bytes()
        start = time.perf_counter()
        losses.append(float(parallel.step({"input_ids": ids, "labels": ids})))
        seconds.append(time.perf_counter() - start)
    sent = (sent_bytes() - before) / (num_steps - WARMUP)
    state = parallel.gather_state_dict()
    return {
        "zero": zero,
        "value": value,
        "loss": losses[-1],
        "seconds": statistics.median(seconds[WARMUP:]),
        "sent": sent,
        "parameters": torch.cat([own.flatten() for own in state.values()]) if state else None,
    }


def rank_job(options: argparse.Namespace) -> None:
    """One rank of every training; rank 0 writes down what it has found."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(dp=REPLICAS, device="cpu")
    text = library_bytes()
    found = [
        train(value, zero, options.steps, text, mesh) for zero in options.zero for value in VALUES
    ]
    if mesh.rank:
        return
    for own in found:
        plain = next(one for one in found if one["zero"] == own["zero"])["parameters"]
        own["difference"] = float((own["parameters"] - plain).abs().max() / plain.abs().max())
    kept = [{name: own[name] for name in own if name != "parameters"} for own in found]
    Path(options.folder, "found.json").write_text(json.dumps(kept), encoding="utf-8")


def run_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ranks with torchrun, two on each host."""
    script = [str(Path(__file__).resolve()), "--rank", "--folder", options.folder]
    script += ["--steps", str(options.steps), "--zero", *map(str, options.zero)]
    log = Path(options.folder, "log")
    with slow_link(options.rate) as network:
        running = [host.torchrun(REPLICAS // 2, script, log) for host in network.hosts]
        failed = any([one.wait() for one in running])
    if failed:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    found: list[dict[str, Any]] = json.loads(Path(options.folder, "found.json").read_text("utf-8"))
    return found


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table, each way beside one ring of the same stage of ZeRO."""
    plain = {own["zero"]: own for own in found if own["value"] == "off"}
    return [
        {
            "zero": own["zero"],
            "hierarchical_reductions": own["value"],
            "sent kB a step": round(own["sent"] / 1e3, 1),
            "of off's": round(own["sent"] / plain[own["zero"]]["sent"], 2),
            "step ms": round(1e3 * own["seconds"], 1),
            "of off's time": round(own["seconds"] / plain[own["zero"]]["seconds"], 2),
            "last loss": round(own["loss"], 4),
            "difference": f"{own['difference']:.1e}",
        }
        for own in found
    ]


def main() -> None:
    """Train with every way of reducing and compare."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1, 3], help="stages of ZeRO")
    parser.add_argument("--rate", default="50mbit", help="of the link between the hosts")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-hierarchy-") as folder:
        options.folder = folder
        found = run_ranks(options)
    report.show({"A step": rows_of(found)}, options.json)


if __name__ == "__main__":
    main()
