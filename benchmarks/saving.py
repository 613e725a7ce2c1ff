"""Saves of a checkpoint: how long training stands still, and how much is written.

Three jobs of the same model, one after the other: MerakTrainer that saves in the background, the
same that waits for each save, and transformers.Trainer in one process. The stall of a save is the
time from the end of a step until the next one may begin; the first save of a job, which makes room
for its copies, is told apart. The ratio is to the job that waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tools import report
from tools.models import Tokens

import merak

JOBS = {"merak, in the background": True, "merak, waiting": False, "transformers": None}
SEQUENCE = 32


class Clock(transformers.TrainerCallback):
    """Takes the time between the end of a step and the beginning of the next."""

    def __init__(self) -> None:
        self.ended_s = 0.0
        self.gaps_s: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended_s = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            self.gaps_s[state.global_step] = time.perf_counter() - self.ended_s


def build(hidden: int, layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=hidden // 64, n_positions=SEQUENCE, **special
    )
    return transformers.GPT2LMHeadModel(config)


def train(options: argparse.Namespace) -> None:
    """One job, in each of its processes; rank 0 writes what it measured."""
    every, steps = options.every, options.every * options.saves + 1
    shared: dict[str, Any] = {
        "output_dir": options.folder,
        "max_steps": steps,
        "save_steps": every,
        "save_total_limit": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    model = build(options.hidden, options.layers)
    generator = torch.Generator().manual_seed(0)
    data = Tokens(torch.randint(0, 50257, (2 * steps, SEQUENCE), generator=generator))
    clock = Clock()
    if options.job == "transformers":
        args = transformers.TrainingArguments(**shared)
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[clock])
    else:
        merak.init(pp=options.ranks)
        own = merak.MerakArguments(**shared, async_save=JOBS[options.job])
        trainer = merak.MerakTrainer(model, own, train_dataset=data, callbacks=[clock])
    began_s = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began_s
    if not trainer.args.should_save:
        return
    saves = [gap for step, gap in clock.gaps_s.items() if step % every == 0]
    others = [gap for step, gap in clock.gaps_s.items() if step % every]
    newest = max(Path(options.folder).glob("checkpoint-*"), key=lambda f: f.stat().st_mtime)
    num_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    usual = statistics.median(others)
    found = {
        "first": saves[0] - usual,
        "later": statistics.median(saves[1:]) - usual,
        "seconds": seconds,
        "num_bytes": num_bytes,
        "parameters": sum(p.numel() for p in build(options.hidden, options.layers).parameters()),
    }
    Path(options.folder, "measured.json").write_text(json.dumps(found))


def measure(job: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job in processes of its own."""
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        script = [__file__, "--job", job, "--folder", folder]
        for name in ("hidden", "layers", "every", "saves", "ranks"):
            script += [f"--{name}", str(getattr(options, name))]
        launcher = [sys.executable]
        if job != "transformers":
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(options.ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MERAK_CACHE": ""}
        subprocess.run([*launcher, *script], check=True, env=environment, stdout=sys.stderr)
        measured: dict[str, Any] = json.loads(Path(folder, "measured.json").read_text())
    return measured


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks of Merak's jobs")
    parser.add_argument("--every", type=int, default=3, help="steps between saves")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--disk", default=None, help="folder to save in; a temporary one")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        train(options)
        return
    found = {job: measure(job, options) for job in JOBS}
    waiting = found["merak, waiting"]["later"]
    rows = [
        {
            "job": job,
            "first save stalls s": one["first"],
            "later ones s": one["later"],
            "ratio to waiting": one["later"] / waiting,
            "checkpoint GB": one["num_bytes"] / 1e9,
            "whole job s": one["seconds"],
        }
        for job, one in found.items()
    ]
    parameters = found["transformers"]["parameters"] / 1e6
    report.show({f"GPT-2 of {parameters:.0f}M parameters": rows}, options.json)


if __name__ == "__main__":
    main()
