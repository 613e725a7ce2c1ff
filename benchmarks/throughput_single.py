"""Steps of MerakTrainer on one device against those of transformers.Trainer, in turn.

Both train the same model from the same weights on the same samples in one process. After every step
one trainer waits while the other takes its step, so both meet the same machine. A step is all
that happens from the end of the step before: loading, forwards, backwards, clipping, optimizer,
learning rate, callbacks. `processor ratio` compares the seconds of processor time, which hardly
depend on what else the machine does. The losses are compared too.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import threading
import time
from typing import Any

import torch
import transformers
from tools import report
from tools.models import SIZES, build_model, samples

import merak


class Baton(transformers.TrainerCallback):
    """Lets two trainers take their steps in turn, and times each step."""

    def __init__(self, turn: list[int], own: int, changed: threading.Condition) -> None:
        self.turn = turn
        self.own = own
        self.changed = changed
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.losses: list[float] = []
        self.started = (0.0, 0.0)

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn[0] in (self.own, FREE))
        self.started = (time.perf_counter(), time.process_time())

    def hand_over(self, to: int) -> None:
        with self.changed:
            self.turn[0] = to
            self.changed.notify_all()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started[0])
        self.processor.append(time.process_time() - self.started[1])
        self.hand_over(1 - self.own)
        self.wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


FREE = 2
"""Nobody's turn: a trainer has failed or finished, and the other need not wait."""


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


def run_in_turn(trainers: list[transformers.Trainer], batons: list[Baton]) -> None:
    """Both trainings, each in a thread of its own, of which one runs at a time."""
    failures: list[BaseException] = []

    def train(number: int) -> None:
        batons[number].wait()
        try:
            trainers[number].train()
        except BaseException as error:
            failures.append(error)
        finally:
            batons[number].hand_over(FREE if failures else 1 - number)

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def compare(architecture: str, options: Any) -> dict[str, Any]:
    model = build_model(architecture, SIZES[options.size])
    models = [copy.deepcopy(model), model]
    changed, turn = threading.Condition(), [0]
    with tempfile.TemporaryDirectory() as folder:
        classes = (transformers.Trainer, merak.MerakTrainer)
        trainers = [make_trainer(c, m, folder, options) for c, m in zip(classes, models)]
        batons = [Baton(turn, number, changed) for number in (0, 1)]
        for trainer, baton in zip(trainers, batons):
            trainer.add_callback(baton)
        run_in_turn(trainers, batons)
    theirs, ours = (baton.seconds[options.warmup :] for baton in batons)
    used = [statistics.median(baton.processor[options.warmup :]) for baton in batons]
    differences = [abs(a - b) / abs(a) for a, b in zip(batons[0].losses, batons[1].losses)]
    ratios = [a / b for a, b in zip(theirs, ours)]
    size = SIZES[options.size]
    tokens = size.batch * size.accumulation * size.sequence
    return {
        "model": architecture,
        "parameters": f"{sum(p.numel() for p in models[0].parameters()) / 1e6:.1f}e6",
        "tokens a step": tokens,
        "transformers tokens/s": tokens / statistics.median(theirs),
        "merak tokens/s": tokens / statistics.median(ours),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "median of steps' ratios": statistics.median(ratios),
        "processor ratio": used[0] / used[1],
        "largest loss difference": max(differences),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    merak.init()
    rows = [compare(name, options) for name in ("gpt2", "llama")]
    title = f"MerakTrainer against transformers.Trainer, 1 × 1 × 1, {options.steps} steps each"
    report.show({title: rows}, options.json)


if __name__ == "__main__":
    main()
