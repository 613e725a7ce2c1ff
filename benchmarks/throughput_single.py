"""Steps of MerakTrainer on one device against those of transformers.Trainer, in turn.

Both train the same model from the same weights on the same samples, each in a process of its own.
After every step one waits while the other takes its step, so both meet the same machine. A step is
all that happens from the end of the step before: loading, forwards, backwards, clipping, optimizer,
learning rate, callbacks. The ratios of the fastest steps and of processor time depend less on what
else the machine does. Two runs of one process differ by a few percent, by where its
memory happens to lie; so several fresh pairs of processes are measured, and ratios are medians over
pairs of a pair's median. The losses are compared too.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from tools import report
from tools.models import SIZES, build_model, samples

import merak
from merak.core.start.allocator import keep_freed_memory


@dataclass(frozen=True, slots=True)
class Step:
    """What a trainer tells after a step: seconds, and seconds of processor time."""

    wall_s: float
    processor_s: float


class Turns(transformers.TrainerCallback):
    """Takes a step whenever it is told to, and tells how long it took."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.losses: list[float] = []
        self.started = (0.0, 0.0)

    def wait(self) -> None:
        self.line.recv()
        self.started = (time.perf_counter(), time.process_time())

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wall_s = time.perf_counter() - self.started[0]
        self.line.send(Step(wall_s, time.process_time() - self.started[1]))
        if state.global_step < args.max_steps:
            self.wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def make_trainer(
    cls: type[transformers.Trainer], model: torch.nn.Module, folder: str, options: Any
) -> transformers.Trainer:
    of_merak = issubclass(cls, merak.MerakTrainer)
    arguments_class = merak.MerakArguments if of_merak else transformers.TrainingArguments
    size = SIZES[options.size]
    args = arguments_class(
        output_dir=folder,
        max_steps=options.steps + options.warmup,
        per_device_train_batch_size=size.batch,
        gradient_accumulation_steps=size.accumulation,
        learning_rate=1e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = cls(model=model, args=args, train_dataset=samples(size, options.steps + 8))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(of_merak: bool, architecture: str, options: Any, line: Connection) -> None:
    """One process: trains, a step whenever it is its turn, and tells its losses at the end."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if of_merak:
        merak.init()
    elif options.keep_freed:
        keep_freed_memory()
    cls = merak.MerakTrainer if of_merak else transformers.Trainer
    turns = Turns(line)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(architecture, SIZES[options.size])
        trainer = make_trainer(cls, model, folder, options)
        trainer.add_callback(turns)
        trainer.train()
    line.send(turns.losses)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both trainings, transformers' first: median and least seconds of a step, and the losses."""

    wall_s: tuple[float, ...]
    fastest_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    losses: tuple[list[float], ...]


def run_pair(architecture: str, options: Any) -> Pair:
    """Both trainings in fresh processes, of which one runs at a time."""
    context = mp.get_context("spawn")
    lines = []
    processes = []
    for of_merak in (False, True):
        line, their_end = context.Pipe()
        arguments = (of_merak, architecture, options, their_end)
        processes.append(context.Process(target=train, args=arguments, daemon=True))
        lines.append(line)
        processes[-1].start()
        their_end.close()
    steps: tuple[list[Step], list[Step]] = ([], [])
    for _ in range(options.warmup + options.steps):
        for line, taken in zip(lines, steps):
            line.send("go")
            taken.append(line.recv())
    losses = [line.recv() for line in lines]
    for process in processes:
        process.join()
    measured = [taken[options.warmup :] for taken in steps]
    wall_s = [statistics.median(step.wall_s for step in taken) for taken in measured]
    processor_s = [statistics.median(step.processor_s for step in taken) for taken in measured]
    fastest_s = [min(step.wall_s for step in taken) for taken in measured]
    return Pair(tuple(wall_s), tuple(fastest_s), tuple(processor_s), tuple(losses))


def row(architecture: str, options: Any) -> dict[str, Any]:
    """A line of the table."""
    pairs = [run_pair(architecture, options) for _ in range(options.pairs)]
    ratios = [pair.wall_s[0] / pair.wall_s[1] for pair in pairs]
    size = SIZES[options.size]
    tokens = size.batch * size.accumulation * size.sequence
    return {
        "model": architecture,
        "tokens a step": tokens,
        "transformers tokens/s": tokens / statistics.median(pair.wall_s[0] for pair in pairs),
        "merak tokens/s": tokens / statistics.median(pair.wall_s[1] for pair in pairs),
        "ratio": statistics.median(ratios),
        "ratios": f"{min(ratios):.3f} … {max(ratios):.3f}",
        "ratio of fastest steps": statistics.median(
            pair.fastest_s[0] / pair.fastest_s[1] for pair in pairs
        ),
        "processor ratio": statistics.median(p.processor_s[0] / p.processor_s[1] for p in pairs),
        "largest loss difference": max(
            abs(a - b) / abs(a) for pair in pairs for a, b in zip(*pair.losses)
        ),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--steps", type=int, default=10, help="steps that a pair measures")
    parser.add_argument("--pairs", type=int, default=5, help="fresh pairs of processes")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument(
        "--keep-freed",
        action="store_true",
        help="transformers' process keeps freed memory as well, as merak.init has it on CPUs",
    )
    options = parser.parse_args()
    rows = [row(name, options) for name in ("gpt2", "llama")]
    title = "MerakTrainer against transformers.Trainer at 1 × 1 × 1"
    report.show({title: rows}, options.json)


if __name__ == "__main__":
    main()
