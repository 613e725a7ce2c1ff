"""Local SGD and DiLoCo against reductions in every step: loss curves, and steps on a slow link.

A small GPT-2 learns the bytes of Python's own library on data parallel replicas, once in each way,
with the same weights and batches, so at equal tokens. The first table has the mean training loss
of stretches of steps and the loss of texts that were held out. The second has seconds of a step
over whole rounds on two replicas, each on a host of its own (network namespaces, which take root),
that are joined by a link of limited rate, and the bytes that crossed it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import transformers
from tools import report
from tools.link import sent_bytes, slow_link

import merak

LENGTH, SAMPLES, HELD_OUT = 64, 16, 64
PORT = 29543
EVERY = "every step"


def ways(local_steps: int) -> dict[str, dict[str, Any]]:
    """The ways to train, by name."""
    local = {"local_steps": local_steps}
    return {
        EVERY: {},
        "average": local,
        "DiLoCo": {**local, "outer_optimizer": "nesterov"},
    }


def library_bytes() -> torch.Tensor:
    """The first two million bytes of the standard library's modules, (2,000,000,)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = itertools.chain.from_iterable(file.read_bytes() for file in files)
    return torch.tensor(list(itertools.islice(text, 2_000_000)), dtype=torch.long)


def small_gpt2() -> transformers.GPT2LMHeadModel:
    """Two blocks, the same weights every time."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def windows(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Texts from random places, (count, LENGTH)."""
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (count,), generator=draws).tolist()
    return torch.stack([text[start : start + LENGTH] for start in starts])


def parallel_model(dp: int, options: dict[str, Any]) -> Any:
    """The model as replicas train it."""
    example = torch.zeros(SAMPLES // dp, LENGTH, dtype=torch.long)
    return merak.parallelize(
        small_gpt2(),
        {"input_ids": example, "labels": example},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        max_grad_norm=1.0,
        **options,
    )


def curve(mesh: Any, num_steps: int, options: dict[str, Any], text: torch.Tensor) -> list[float]:
    """The loss of every step, and at last that of texts that were held out."""
    parallel = parallel_model(mesh.dp, options)
    seen, held_out = text[:1_900_000], text[1_900_000:]

    def own(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        part = ids.chunk(mesh.dp)[mesh.dp_rank]
        return {"input_ids": part, "labels": part}

    losses = [float(parallel.step(own(windows(seen, SAMPLES, s)))) for s in range(num_steps)]
    batches = windows(held_out, HELD_OUT, -1).split(SAMPLES)
    return [*losses, statistics.mean(float(parallel.evaluate(own(ids))) for ids in batches)]


def train(rank: int, file: str, options: argparse.Namespace) -> None:
    """One rank of every training; rank 0 writes the losses down."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.replicas)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(dp=options.replicas)
    text = library_bytes()
    found = {
        name: curve(mesh, options.steps, way, text)
        for name, way in ways(options.local_steps).items()
    }
    if rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def time_rounds(options: argparse.Namespace) -> None:
    """On a rank of two hosts: seconds and sent bytes of a step, over two rounds."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(dp=2, device="cpu")
    ids = torch.randint(256, (SAMPLES // 2, LENGTH))
    found = {}
    for name, way in ways(options.local_steps).items():
        parallel = parallel_model(2, way)
        count = 2 * options.local_steps
        parallel.step({"input_ids": ids, "labels": ids})
        parallel.engine.complete_updates()
        sent, start = sent_bytes(), time.perf_counter()
        for _ in range(count):
            parallel.step({"input_ids": ids, "labels": ids})
        seconds = (time.perf_counter() - start) / count
        found[name] = {"step_s": seconds, "bytes": (sent_bytes() - sent) / count}
    if mesh.rank == 0:
        Path(options.time_into).write_text(json.dumps(found), encoding="utf-8")


def timed(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What two hosts measure that a slow link joins."""
    with slow_link(options.rate) as network, tempfile.TemporaryDirectory() as folder:
        assert network is not None
        file = Path(folder, "times.json")
        script = [__file__, "--local-steps", str(options.local_steps), "--time-into", str(file)]
        logs = [Path(folder, f"{host.name}.log") for host in network.hosts]
        running = [h.torchrun(1, script, log) for h, log in zip(network.hosts, logs)]
        if any([one.wait() for one in running]):
            sys.exit("".join(log.read_text(encoding="utf-8") for log in logs))
        found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
        return found


def curves_table(found: dict[str, list[float]], stretch: int) -> list[dict[str, str]]:
    """The loss of stretches of steps, and of what was held out."""
    num_steps = len(found[EVERY]) - 1
    rows = []
    for first in range(0, num_steps, stretch):
        last = min(first + stretch, num_steps)
        means = {name: statistics.mean(own[first:last]) for name, own in found.items()}
        rows.append({"steps": f"{first + 1} to {last}"} | _beside(means))
    held_out = {name: own[-1] for name, own in found.items()}
    return [*rows, {"steps": "held out, at the end"} | _beside(held_out)]


def _beside(losses: dict[str, float]) -> dict[str, str]:
    base = losses[EVERY]
    return {
        name: f"{loss:.3f}" if name == EVERY else f"{loss:.3f} ({100 * (loss / base - 1):+.1f} %)"
        for name, loss in losses.items()
    }


def main() -> None:
    """Train in every way, and time rounds on a slow link."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--stretch", type=int, default=100, help="steps whose mean is shown")
    parser.add_argument("--replicas", type=int, default=4, help="of the loss curves")
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--rate", default="50mbit", help="of the link; '' times nothing")
    parser.add_argument("--port", type=int, default=PORT, help="where the ranks meet")
    parser.add_argument("--time-into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time_into:
        time_rounds(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "losses.json"))
        mp.spawn(train, (file, options), nprocs=options.replicas)
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    tables = {"mean loss, and the difference to every step's": curves_table(found, options.stretch)}
    if options.rate:
        times = timed(options)
        tables[f"a step of two hosts on {options.rate}"] = [
            {
                "replicas exchange": name,
                "s a step": f"{own['step_s']:.3f}",
                "of every step's": f"{own['step_s'] / times[EVERY]['step_s']:.2f}",
                "kB sent a step": f"{own['bytes'] / 1e3:.1f}",
            }
            for name, own in times.items()
        ]
    report.show(tables, options.json)


if __name__ == "__main__":
    main()
