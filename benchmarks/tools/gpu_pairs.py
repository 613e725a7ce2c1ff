"""MerakTrainer beside transformers.Trainer on one device: rounds of steps in turn, or one profiled.

Each trains in a process of its own, the same model from the same weights on the same tokens, and
waits while the other has its turn. Between its turns a process gives its free memory back, so that
a device holds both jobs' weights and optimizers, and the activations of one.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

import merak
from merak.plan import PRESETS
from tools.gpu_cases import (
    FULL,
    TINY,
    Case,
    Repeated,
    built,
    fitted,
    flops_per_token,
    num_parameters,
    sheet_of,
)
from tools.gpu_trace import Counts, counted, starting
from tools.models import Size

NAMES = ("transformers", "merak")
ROUND_STEPS = 3
MOST_ROUNDS, LEAST_ROUNDS = 9, 3
RESERVE = 0.15
"""The share of a part's limit that is left for its end."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a training does next: some steps that do not count, then some that do."""

    warmup: int
    steps: int
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A turn as it was: seconds of the steps that count, most bytes held, what a profiler saw."""

    seconds: float
    peak_bytes: int
    counts: Counts | None


class Turns(transformers.TrainerCallback):
    """Takes a turn whenever it is told to, and tells how it was."""

    def __init__(self, line: Connection, device: str) -> None:
        self.line = line
        self.device = device
        self.turn: Turn | None = None
        self.done = 0
        self.started = 0.0
        self.profiler: Any = None

    def next(self, control: Any) -> None:
        self.turn, self.done = self.line.recv(), 0
        if self.turn is None:
            control.should_training_stop = True
        else:
            self.count(control)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.next(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.turn is not None:
            self.done += 1
            self.count(control)

    def count(self, control: Any) -> None:
        """Look whether the steps that count begin or end here."""
        turn = self.turn
        assert turn is not None
        if self.done == turn.warmup + turn.steps:
            self.line.send(self.ended())
            self.next(control)
        elif self.done == turn.warmup:
            synchronize(self.device)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.profiler = starting(self.device) if turn.profiled else None
            self.started = time.perf_counter()

    def ended(self) -> Taken:
        synchronize(self.device)
        seconds = time.perf_counter() - self.started
        counts = None
        if self.profiler is not None:
            self.profiler.stop()
            counts, self.profiler = counted(self.profiler), None
        if self.device != "cuda":
            return Taken(seconds, 0, counts)
        peak_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return Taken(seconds, peak_bytes, counts)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(name: str, case: Case, line: Connection) -> None:
    """One process: trains, a turn whenever it is told to, and tells its mean loss at the end."""
    transformers.logging.set_verbosity_error()
    try:
        with tempfile.TemporaryDirectory() as folder:
            of_merak = name == "merak"
            if of_merak:
                merak.init(device=case.device)
            trainer = make_trainer(of_merak, case, folder)
            trainer.add_callback(Turns(line, case.device))
            line.send(float(trainer.train().training_loss))
    except BaseException as error:
        line.send(error_text(name, error))
        raise


def error_text(what: str, error: BaseException) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{what}: {type(error).__name__}: {first}"[:500]


def make_trainer(of_merak: bool, case: Case, folder: str) -> transformers.Trainer:
    on_gpu = case.device == "cuda"
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 10_000,
        "per_device_train_batch_size": case.size.batch,
        "gradient_accumulation_steps": case.size.accumulation,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": True,
        # Nothing is read from the device that the steps themselves do not need.
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,
        "use_cpu": not on_gpu,
    }
    if of_merak:
        cls: Any = merak.MerakTrainer
        args = merak.MerakArguments(trace_cache="", **options)
    else:
        cls, args = transformers.Trainer, transformers.TrainingArguments(**options)
    made: transformers.Trainer = cls(
        model=built(case), args=args, train_dataset=Repeated(case.size)
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


class Pair:
    """Both trainings, each in a fresh process, of which one computes at a time."""

    def __init__(self, case: Case) -> None:
        context = mp.get_context("spawn")
        self.lines: list[Connection] = []
        self.processes: list[Any] = []
        for name in NAMES:
            line, theirs = context.Pipe()
            process = context.Process(target=train, args=(name, case, theirs), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(line)
            self.processes.append(process)

    def take(self, turn: Turn, backwards: bool = False) -> tuple[Taken, Taken]:
        """Both take a turn, one after the other; transformers' is first in the result."""
        taken: dict[int, Taken] = {}
        for place in (1, 0) if backwards else (0, 1):
            self.lines[place].send(turn)
            taken[place] = self.answer(place)
        return taken[0], taken[1]

    def answer(self, place: int) -> Any:
        """What a process tells.

        Raises:
            RuntimeError: it has failed.
        """
        try:
            found = self.lines[place].recv()
        except EOFError:
            raise RuntimeError(f"{NAMES[place]} has ended without a word") from None
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def losses(self) -> list[float]:
        """Let both end; the mean loss of each."""
        for line in self.lines:
            line.send(None)
        found = [self.answer(place) for place in range(len(NAMES))]
        for process in self.processes:
            process.join()
        return found

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.is_alive():
                process.kill()


def throughput(device: str, limit_s: float, name: str) -> Iterator[dict[str, Any]]:
    """Tokens per second of both, in rounds of steps that take turns; a round goes first in turn."""
    begun = time.perf_counter()
    architecture, case = case_of(device, name)
    pair = Pair(case)
    try:
        rounds: list[tuple[Taken, Taken]] = []
        warmup = 2
        while len(rounds) < MOST_ROUNDS:
            at = time.perf_counter()
            rounds.append(pair.take(Turn(warmup, ROUND_STEPS), backwards=bool(len(rounds) % 2)))
            now, warmup = time.perf_counter(), 1
            is_late = now - begun + (now - at) > (1 - RESERVE) * limit_s
            if is_late and len(rounds) >= LEAST_ROUNDS:
                break
        losses = pair.losses()
    finally:
        pair.close()
    yield throughput_row(name, case, rounds, losses) | mfu(architecture, case, rounds)


def case_of(device: str, name: str) -> tuple[str, Case]:
    """What is trained on a device under a name."""
    architecture, size = FULL[name]
    if device == "cpu":
        return architecture, Case(architecture, TINY, device)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return architecture, Case(architecture, fitted(architecture, size, memory_bytes), device)


def throughput_row(
    name: str, case: Case, rounds: Sequence[tuple[Taken, Taken]], losses: Sequence[float]
) -> dict[str, Any]:
    """A line of the table: medians over rounds, and the ratio within each."""
    ratios = [theirs.seconds / own.seconds for theirs, own in rounds]
    return {
        "model": f"{name}, {case.size.layers} layers",
        "parameters": num_parameters(case.architecture, case.size),
        "tokens a step": case.tokens,
        "microbatches": case.size.accumulation,
        "rounds": len(rounds),
        "transformers tokens/s": round(rate(case, rounds, 0), 1),
        "merak tokens/s": round(rate(case, rounds, 1), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": f"{min(ratios):.3f} … {max(ratios):.3f}",
        "transformers peak, GB": round(max(t.peak_bytes for t, _ in rounds) / 1e9, 2),
        "merak peak, GB": round(max(t.peak_bytes for _, t in rounds) / 1e9, 2),
        "losses differ by %": round(100 * abs(losses[1] / losses[0] - 1), 3),
    }


def rate(case: Case, rounds: Sequence[tuple[Taken, Taken]], place: int) -> float:
    return case.tokens * ROUND_STEPS / statistics.median(taken[place].seconds for taken in rounds)


def mfu(
    architecture: str, case: Case, rounds: Sequence[tuple[Taken, Taken]]
) -> dict[str, float | str]:
    """Model FLOPs as a share of the data sheet's bf16 peak, in percent; none without a sheet."""
    if case.device == "cpu":
        return {}
    sheet = sheet_of(torch.cuda.get_device_name(0))
    if sheet is None:
        return {"data sheet": "unknown"}
    peak = PRESETS[sheet].teraflops.get("bfloat16", 0.0) * 1e12
    if not peak:
        return {"data sheet": f"{sheet}, without bfloat16"}
    flops = flops_per_token(architecture, case.size)
    shares = [round(100 * flops * rate(case, rounds, place) / peak, 1) for place in (0, 1)]
    return {"transformers MFU, %": shares[0], "merak MFU, %": shares[1], "data sheet": sheet}


def launches(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Kernels of a step of both, and how often the host waits for the device in it."""
    cases = {name: profiled_case(device, *full) for name, full in FULL.items()}
    pairs = {name: Pair(case) for name, case in cases.items()}  # all start beside one another
    try:
        for name, pair in pairs.items():
            yield from launches_rows(name, cases[name].size, pair.take(Turn(2, 1, profiled=True)))
            pair.losses()
    finally:
        for pair in pairs.values():
            pair.close()


def profiled_case(device: str, architecture: str, size: Size) -> Case:
    """A few layers are enough to count kernels in."""
    small = TINY if device == "cpu" else replace(size, layers=4, batch=1, accumulation=2)
    return Case(architecture, small, device)


def launches_rows(name: str, size: Size, taken: tuple[Taken, Taken]) -> Iterator[dict[str, Any]]:
    """Two lines of the table."""
    for trainer, found in zip(NAMES, taken, strict=True):
        assert found.counts is not None
        yield {
            "model": f"{name}, {size.layers} layers",
            "microbatches": size.accumulation,
            "trainer": trainer,
            **asdict(found.counts),
        }
