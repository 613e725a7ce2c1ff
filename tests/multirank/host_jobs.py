"""A training script for torchrun on two hosts: `host_jobs.py FOLDER DP TP PP [OPTIONS as JSON]`.

Losses go to FOLDER/losses.jsonl, checkpoints to FOLDER/output.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import transformers

import merak
from tests.multirank.training import Setup, Texts, arguments_of, model_of


class Recorder(transformers.TrainerCallback):
    """Writes down the losses of every step, with what the job ran on.

    Args:
        file: that is appended to.
        note: of the job.
    """

    def __init__(self, file: Path, note: dict[str, Any]) -> None:
        self.file, self.note = file, note

    def on_log(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if args.should_log and "loss" in kwargs["logs"]:
            line = {"step": state.global_step, "loss": kwargs["logs"]["loss"], **self.note}
            with self.file.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file, flush=True)


class Slowly(transformers.TrainerCallback):
    """Takes its time at every step, so that a test can meet a job in the middle.

    Args:
        pause_s: seconds of a step.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(self.pause_s)


class Unmounting(transformers.TrainerCallback):
    """Has a host lose the shared folder in the middle of the job.

    Args:
        host: which one.
        folder: that it loses.
        instead: what it has there then.
    """

    def __init__(self, host: str, folder: Path, instead: Path) -> None:
        self.host, self.folder, self.instead = host, folder, instead

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if socket.gethostname() == self.host:
            mount = ["mount", "--bind", str(self.instead), str(self.folder)]
            subprocess.run(mount, check=True)


def use(trainer: merak.MerakTrainer, folder: Path) -> None:
    """What a script does with its model after training, on every rank by itself."""
    model, rank = trainer.model, trainer.mesh.rank
    for name, call in {
        "state_dict": lambda: len(model.state_dict()),
        "save_pretrained": lambda: model.save_pretrained(folder / "output" / "pretrained"),
        "_save": lambda: trainer._save(str(folder / "output" / "saved")),
        "save_model": lambda: trainer.save_model(str(folder / "output" / "model")),
    }.items():
        try:
            said = f"gives {call()}"
        except merak.core.errors.MerakError as error:
            said = str(error)
        print(f"{name} on rank {rank} of {socket.gethostname()} {said}", flush=True)


def main(folder: Path, dp: int, tp: int, pp: int, options: dict[str, Any]) -> None:
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu", **options.pop("init", {}))
    setup = Setup("gpt2", dropout=0.1, arguments=options.pop("arguments", {}))
    pause_s = options.pop("pause_s", 0.0)
    args = merak.MerakArguments(
        gradient_accumulation_steps=setup.num_microbatches // dp,
        trace_cache=str(folder / "cache"),
        **{**arguments_of(setup, str(folder / "output")), "log_level": "info"},
    )
    trainer = merak.MerakTrainer(
        model=model_of(setup), args=args, train_dataset=Texts(setup.num_samples)
    )
    degrees = [mesh.dp, mesh.tp, mesh.pp]
    trainer.add_callback(Recorder(folder / "losses.jsonl", {"degrees": degrees}))
    if pause_s:
        trainer.add_callback(Slowly(pause_s))
    if host := options.pop("unmounts", ""):
        trainer.add_callback(Unmounting(host, folder / "output", folder / "elsewhere"))
    trainer.train()
    if options.pop("uses", False):
        use(trainer, folder)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        *map(int, sys.argv[2:5]),
        json.loads(sys.argv[5]) if len(sys.argv) > 5 else {},
    )
