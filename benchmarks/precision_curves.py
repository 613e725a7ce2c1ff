"""Loss curves of float32, bf16 and fp16 over the same steps of the same training.

A small GPT-2 learns the bytes of Python's own library in a pipeline of two stages, once in each
precision, with the same weights and batches. A difference is that of the mean loss of a stretch of
steps to float32's, in percent. Stretches are long enough that rounding, which sends single steps
elsewhere, does not show; a precision that trained something else would.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import transformers
from tools import report

import merak

NUM_STAGES = 2
LENGTH, SAMPLES, MICROBATCHES = 64, 16, 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"autocast": torch.bfloat16},
    "bf16, weights too, float32 masters": {"master_weights": True},
    "fp16, loss scale": {"autocast": torch.float16},
}


def library_bytes() -> torch.Tensor:
    """The first two million bytes of the standard library's modules, (2,000,000,)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = itertools.chain.from_iterable(file.read_bytes() for file in files)
    return torch.tensor(list(itertools.islice(text, 2_000_000)), dtype=torch.long)


def small_gpt2(dtype: torch.dtype) -> transformers.GPT2LMHeadModel:
    """Two blocks, the same weights every time."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def losses_of(name: str, num_steps: int, text: torch.Tensor) -> list[float]:
    """The loss of every step in one precision."""
    draws = torch.Generator().manual_seed(2)
    starts = torch.randint(len(text) - LENGTH, (num_steps, SAMPLES), generator=draws)
    batches = [torch.stack([text[s : s + LENGTH] for s in step.tolist()]) for step in starts]
    options = PRECISIONS[name]
    parallel = merak.parallelize(
        small_gpt2(torch.bfloat16 if "master_weights" in options else torch.float32),
        {"input_ids": batches[0], "labels": batches[0]},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        num_microbatches=MICROBATCHES,
        max_grad_norm=1.0,
        **options,
    )
    return [float(parallel.step({"input_ids": ids, "labels": ids})) for ids in batches]


def train(rank: int, file: str, port: int, num_steps: int) -> None:
    """One rank of every training; rank 0 writes the losses down."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_STAGES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    merak.init(pp=NUM_STAGES)
    text = library_bytes()
    found = {name: losses_of(name, num_steps, text) for name in PRECISIONS}
    if rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Train in every precision and compare the curves."""
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--stretch", type=int, default=50, help="steps whose mean is compared")
    parser.add_argument("--port", type=int, default=29541, help="where the ranks meet")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "losses.json"))
        mp.spawn(train, (file, options.port, options.steps), nprocs=NUM_STAGES)
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    rows = []
    for first in range(0, options.steps, options.stretch):
        means = {
            name: statistics.mean(losses[first : first + options.stretch])
            for name, losses in found.items()
        }
        row = {"steps": f"{first + 1} to {min(first + options.stretch, options.steps)}"}
        row |= {"float32": f"{means['float32']:.4f}"}
        for name in list(PRECISIONS)[1:]:
            row[name] = f"{100 * (means[name] / means['float32'] - 1):+.2f} %"
        rows.append(row)
    report.show({"mean loss, and the difference to float32's": rows}, options.json)


if __name__ == "__main__":
    main()
