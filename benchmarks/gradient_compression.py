"""Compressed gradient reductions beside plain ones: loss curves, bytes and seconds of a step.

A small GPT-2 learns the bytes of Python's own library on two replicas, once with each compression,
with the same weights and batches; beside them 1-bit Adam and LAMB, whose first steps send whole
gradients, and DGC with SGD. Two techniques that are no options of Merak's are tried, too: a
compression that changes while a job trains (ACCORDION), by a checkpoint that is resumed with
another, and TopK at the places of one replica, which all-reduces can add (ScaleCom).

With `--rate` the replicas are on two hosts (network namespaces, which take root) whose link is
limited to it, and what they send is read from its counters. Seconds are medians of all steps after
the first ten, and after those that send whole gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from precision_curves import LENGTH, library_bytes, small_gpt2
from tools import report
from tools.link import sent_bytes, slow_link

import merak
from merak.plan.gradient_compression import COMPRESSIONS, compressed_bytes, num_largest

REPLICAS, SAMPLES = 2, 16
WARMUP = 10
JOBS = {
    **{kind: kind for kind in COMPRESSIONS if kind != "dgc"},
    "1-bit Adam": "1bit",
    "LAMB": "off",
    "1-bit LAMB": "1bit",
    "SGD": "off",
    "SGD dgc": "dgc",
    "off, then topk": "topk",
    "off, then powersgd": "powersgd",
    "ScaleCom": "topk",
}
"""The compression of each training; of AdamW where it has no other name."""


def optimizer_of(job: str, num_steps: int, warmup: int) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer of a training, by the parameters."""
    if "SGD" in job:
        return partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if "LAMB" in job:  # which never freezes without signs
        frozen = warmup if JOBS[job] == "1bit" else num_steps
        return partial(merak.OneBitLamb, lr=0.02, warmup_steps=frozen)
    if "Adam" in job:
        return partial(merak.OneBitAdam, lr=2e-3, warmup_steps=warmup)
    return partial(torch.optim.AdamW, lr=2e-3)


class ScaleCom:
    """TopK whose places are those of one replica's largest elements, each replica's in its turn.

    Source: arXiv 2104.11125, algorithm 1, without its low-pass filter (β = 1).
    """

    def __init__(self, model: torch.nn.Module, mesh: Any) -> None:
        self.model, self.mesh = model, mesh
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-3)
        self.left = [torch.zeros(own.numel()) for own in self.parameters]
        self.number = 0

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Train a step; returns the mean loss of the replicas."""
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        for left, own in zip(self.left, self.parameters, strict=True):
            left += own.grad.flatten()
        largest = [left.abs().topk(num_largest(len(left))).indices for left in self.left]
        sizes = [len(places) for places in largest]
        places = torch.cat(largest).int()
        dist.broadcast(places, self.number % self.mesh.dp)
        chosen = places.long().split(sizes)
        values = torch.cat([left[at] for left, at in zip(self.left, chosen, strict=True)])
        dist.all_reduce(values)
        every = zip(self.parameters, self.left, chosen, values.split(sizes), strict=True)
        for own, left, at, summed in every:
            left[at] = 0
            own.grad.zero_().view(-1)[at] = summed / self.mesh.dp
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.number += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / self.mesh.dp


def make(job: str, kind: str, batch: dict[str, Any], num_steps: int, warmup: int) -> Any:
    """What trains a step of a job: the small GPT-2 with a compression."""
    return merak.parallelize(
        small_gpt2(torch.float32),
        batch,
        optimizer=optimizer_of(job, num_steps, warmup),
        max_grad_norm=1.0,
        gradient_compression=kind,
    )


def train(
    job: str, num_steps: int, text: torch.Tensor, mesh: Any, warmup: int, folder: Path
) -> dict[str, Any]:
    """Losses of every step of one training, and what a step takes."""
    kind = JOBS[job]
    draws = torch.Generator().manual_seed(2)
    starts = torch.randint(len(text) - LENGTH, (num_steps, SAMPLES), generator=draws)
    batches = []
    for step in starts:
        ids = torch.stack(
            [text[s : s + LENGTH] for s in step.chunk(REPLICAS)[mesh.dp_rank].tolist()]
        )
        batches.append({"input_ids": ids, "labels": ids})
    changes = job.startswith("off, then")
    parallel = make(job, "off" if changes else kind, batches[0], num_steps, warmup)
    shapes = [tuple(parameter.shape) for parameter in small_gpt2(torch.float32).parameters()]
    if job == "ScaleCom":
        parallel = ScaleCom(small_gpt2(torch.float32), mesh)
    losses, seconds, before = [], [], 0
    first = min(WARMUP + (warmup if "1-bit" in job or changes else 0), num_steps - 2)
    for number, batch in enumerate(batches):
        if changes and number == warmup:
            parallel.save_checkpoint(folder / job)
            parallel = make(job, kind, batch, num_steps, warmup)
            parallel.load_checkpoint(folder / job)
        if number == first:
            before = sent_bytes()
        start = time.perf_counter()
        losses.append(float(parallel.step(batch)))
        seconds.append(time.perf_counter() - start)
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[first:]),
        "sent": (sent_bytes() - before) / (num_steps - first),
        "gradients": sum(compressed_bytes(kind, shape, 4) for shape in shapes),
    }


def rank_job(options: argparse.Namespace) -> None:
    """One rank of every training; rank 0 writes down what it has found."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(dp=REPLICAS, device="cpu")
    text = library_bytes()
    folder = Path(options.folder)
    found = {
        job: train(job, options.steps, text, mesh, options.warmup, folder) for job in options.jobs
    }
    if mesh.rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Run both ranks with torchrun, on this host or on two."""
    script = [str(Path(__file__).resolve()), "--rank", "--folder", options.folder]
    script += ["--steps", str(options.steps), "--warmup", str(options.warmup or options.steps // 3)]
    script += ["--jobs", *options.jobs]
    log = Path(options.folder, "log")
    with slow_link(options.rate) as network:
        if network is not None:
            running = [host.torchrun(1, script, log) for host in network.hosts]
            failed = any([one.wait() for one in running])
        else:
            job = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}"]
            with log.open("wb") as out:
                command = [sys.executable, *job, *script]
                failed = bool(subprocess.call(command, stdout=out, stderr=out))
    if failed:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    found: dict[str, Any] = json.loads(Path(options.folder, "found.json").read_text("utf-8"))
    return found


def rows_of(found: dict[str, Any], stretch: int, has_link: bool) -> dict[str, list[dict[str, Any]]]:
    """Tables of the steps and of the loss curves."""
    plain = next(iter(found.values()))
    steps = [
        {
            "compression": kind,
            "gradients kB": round(own["gradients"] / 1e3, 1),
            "sent kB a step": round(own["sent"] / 1e3, 1) if has_link else "",
            "step ms": round(1e3 * own["seconds"], 1),
            "of plain": round(own["seconds"] / plain["seconds"], 2),
        }
        for kind, own in found.items()
    ]
    count = len(plain["losses"])
    curves = [
        {"steps": f"{start + 1}–{start + stretch}"}
        | {
            kind: round(statistics.mean(own["losses"][start : start + stretch]), 3)
            for kind, own in found.items()
        }
        for start in range(0, count - stretch + 1, stretch)
    ]
    return {"A step": steps, "Mean loss": curves}


def main() -> None:
    """Train with every compression and compare."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument(
        "--warmup",
        type=int,
        default=0,
        help="steps that send whole gradients before signs, or before they change; 0: a third",
    )
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--stretch", type=int, default=50, help="steps whose mean loss is printed")
    parser.add_argument("--rate", help="of the link between two hosts, such as 50mbit; one host")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-compression-") as folder:
        options.folder = folder
        found = run_ranks(options)
    report.show(rows_of(found, options.stretch, bool(options.rate)), options.json)


if __name__ == "__main__":
    main()
