"""A job for torchrun that meets one fault after the other: `fault_jobs.py FOLDER NUM_STEPS`.

The script resumes by `resume_from_checkpoint="auto"`; nothing else in it is for restarts. A fault
is put into one of Merak's own functions from outside. The folder's `faults.json` lists them; each
attempt meets the first that none has met yet. With FAULT_OPTIMIZER, the optimizer's states are in
files of the folder of that name.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

import merak
from merak.checkpoint.storage import CheckpointWriter
from merak.engine import engine
from merak.engine.comm import gradient_buckets
from merak.engine.stage import Stage
from merak.trainer.evaluation import Evaluation

SAVE_STEPS, EVAL_STEPS = 2, 3
HANG_LIMIT_S = float(os.environ.get("FAULT_HANG_LIMIT_S", "8"))


class Model(nn.Module):
    """A chain of blocks with dropout, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + self.dropout(torch.relu(block(x)))
        return {"loss": nn.functional.mse_loss(x, labels)}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random vectors."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": -self.x[index]}


class Losses(TrainerCallback):
    """Writes every logged loss with all its digits, by step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        for name in ("loss", "eval_loss"):
            if state.is_world_process_zero and name in logs:
                restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
                with (self.folder / "losses").open("a") as file:
                    file.write(f"{name} {state.global_step} {logs[name]!r} {restarts}\n")


def raise_in_thread() -> None:
    def work() -> None:
        raise ValueError("raised in a thread of the script's own")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def hold_the_gil() -> None:
    all(itertools.repeat(True))  # in C, which looks at no signal


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def own(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": own(signal.SIGKILL),
    "term": own(signal.SIGTERM),
    "int": own(signal.SIGINT),
    "stop": own(signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0) and None,
    "exception": raising(ValueError("raised by the script")),
    "thread": raise_in_thread,
    "abort": os.abort,
    "gil": hold_the_gil,
    "memory": raising(MemoryError()),
    "device memory": raising(torch.OutOfMemoryError("out of memory")),
    "disk": raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
}
"""Kinds of faults, and what the rank does then."""

MOMENTS: dict[str, tuple[Any, str]] = {
    "forward": (Stage, "forward"),
    "backward": (Stage, "backward"),
    "reduction": (gradient_buckets.GradientReducer, "wait"),
    "evaluation": (Evaluation, "result"),
    "save": (CheckpointWriter, "write_data"),
    "step": (engine.Engine, "train_step"),
    "states": (os, "pwritev"),  # of an optimizer in files
}
"""Moments, and the function that a rank calls then."""


def inject(folder: Path) -> None:
    """Let a rank meet the next fault in some call of a function, counted from 0."""
    faults = folder / "faults.json"
    met = len(list(folder.glob("fault-*")))
    if not faults.exists() or met >= len(planned := json.loads(faults.read_text())):
        return
    kind, moment, call, rank = planned[met]
    if rank != int(os.environ["RANK"]):
        return
    owner, name = MOMENTS[moment]
    before, calls = getattr(owner, name), [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call + 1:
            (folder / f"fault-{met}").touch()
            FAULTS[kind]()
        return before(*args, **kwargs)

    setattr(owner, name, called)


def main(folder: Path, num_steps: int) -> None:
    torch.set_num_threads(1)
    num_ranks = int(os.environ["WORLD_SIZE"])
    states = os.environ.get("FAULT_OPTIMIZER")
    degrees = {os.environ.get("FAULT_AXIS", "dp"): num_ranks}
    merak.init(**degrees, device="cpu", timeout_s=60.0)
    (folder / "port").write_text(os.environ["MASTER_PORT"])
    inject(folder)
    args = merak.MerakArguments(
        output_dir=str(folder / "run"),
        max_steps=num_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=SAVE_STEPS,
        eval_strategy="steps",
        eval_steps=EVAL_STEPS,
        save_total_limit=2,
        disable_tqdm=True,
        hang_limit_s=HANG_LIMIT_S,
        resume_from_checkpoint="auto",
        offload_optimizer=str(folder / states) if states else "off",
    )
    torch.manual_seed(0)
    trainer = merak.MerakTrainer(
        model=Model(),
        args=args,
        train_dataset=Samples(24),
        eval_dataset=Samples(8),
        callbacks=[Losses(folder)],
    )
    trainer.train()
    (folder / f"ended-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
