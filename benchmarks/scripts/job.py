"""The job of all scripts in this folder: its model, its samples, and the clock they report to.

Nothing here needs Merak: every framework's own environment reads this file.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

VOCABULARY, SEQUENCE, SAMPLES, MICROBATCHES = 8192, 128, 16, 8
WARMUP, STEPS = 2, int(os.environ.get("STEPS", "4"))
OPTIONS: dict[str, Any] = json.loads(os.environ.get("OPTIONS", "{}"))
"""What a case of the comparison gives its script, such as degrees or a schedule."""
SGD = os.environ.get("OPTIMIZER") == "sgd"
"""Whether weights move by their gradients as they are, so that losses show a wrong scale."""
RATE = 0.5 if SGD else 1e-3
TRAINING = {"learning_rate": RATE} | ({"optim": "sgd", "max_grad_norm": 0.0} if SGD else {})
"""The same optimizer as fields of `TrainingArguments`."""
torch.set_num_threads(1)


def build_model() -> LlamaForCausalLM:
    """A Llama of 30 million parameters, with weights from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=512,
        intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        tie_word_embeddings=False, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all loops."""
    return (torch.optim.SGD if SGD else torch.optim.AdamW)(parameters, lr=RATE)


def tokens() -> torch.Tensor:
    """The samples of all steps."""
    shape = ((WARMUP + STEPS) * SAMPLES, SEQUENCE)
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def batches() -> Iterator[torch.Tensor]:
    """A batch for each step: (samples, tokens)."""
    yield from tokens().split(SAMPLES)


class Samples(Dataset[dict[str, torch.Tensor]]):
    """The samples as a trainer reads them."""

    def __init__(self) -> None:
        self.rows = tokens()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock(TrainerCallback):
    """Seconds of every step, and the memory that this rank's process takes above its imports.

    The peak is that of the measured steps: what the first ones take besides is left out.
    """

    def __init__(self) -> None:
        gc.collect()
        self.before = memory("VmRSS")
        self.times: list[float] = []
        self.loss: float | None = None

    def step(self, loss: float | None) -> None:
        """Note the end of a step, and its loss where this rank has it."""
        self.note()
        self.loss = loss
        if len(self.times) == WARMUP + STEPS:
            self.report()

    def note(self) -> None:
        """Note the end of a step."""
        self.times.append(time.perf_counter())
        if len(self.times) == WARMUP:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is anew from here

    def report(self) -> None:
        """Write down what was measured."""
        ends = self.times[WARMUP - 1 :]
        found = {
            "seconds": [end - start for start, end in pairwise(ends)],
            "memory": memory("VmHWM") - self.before,
            "loss": self.loss,
        }
        rank = os.environ.get("RANK", "0")
        Path(os.environ.get("REPORTS", "."), f"rank{rank}.json").write_text(json.dumps(found))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Report with the trainer's one log of a loss, which is the mean over all steps."""
        if "loss" in logs:
            self.loss = logs["loss"]
            self.report()


def memory(which: str) -> int:
    """Bytes of this process: VmRSS, now; or VmHWM, at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))
