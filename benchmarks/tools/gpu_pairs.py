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
from torch import nn
from torch.utils.data import Dataset
from transformers.pytorch_utils import Conv1D

import merak
from merak.plan.device import PRESETS
from tools.gpu_trace import Counts, counted, starting
from tools.models import Size, build_model

NAMES = ("transformers", "merak")
ROUND_STEPS = 3
MOST_ROUNDS, LEAST_ROUNDS = 9, 3
RESERVE = 0.15
"""The share of a part's limit that is left for its end."""

FULL = {
    "GPT-2 1.5B": ("gpt2", Size(1600, 48, 25, 50257, 1024, 4, 4)),
    "Llama 1B": ("llama", Size(2048, 22, 32, 32000, 1024, 4, 4)),
}
TINY = Size(32, 2, 2, 64, 16, 2, 2)

STATE_BYTES = 16
"""Of a parameter in mixed precision: itself, its gradient and AdamW's two, in float32 each."""

SHARE_TO_FILL = 0.8
ACTIVATION_BYTES = {"gpt2": 110, "llama": 90}
"""Upper estimates, for a token and a layer, by what the hidden size is multiplied with."""

LOGIT_BYTES = 20
"""Likewise for a token and a word of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a pair of processes trains.

    Args:
        architecture: as of `build_model`.
        size: sizes of the model and its batch.
        device: "cuda" or "cpu".
    """

    architecture: str
    size: Size
    device: str

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.size.batch * self.size.accumulation * self.size.sequence


def built(case: Case) -> nn.Module:
    """The model with its weights, on the device from the first, where drawing them is quick."""
    with torch.device(case.device):
        model = build_model(case.architecture, case.size)
    model.config.use_cache = False
    return model


def fitted(architecture: str, size: Size, memory_bytes: float) -> Size:
    """A size of which two trainings fit a device: a smaller microbatch, or else fewer layers."""
    for part in (1.0, 0.75, 0.5, 0.25, 0.125):
        for batch in (4, 2, 1):
            smaller = replace(size, layers=max(1, round(size.layers * part)), batch=batch)
            if needed_bytes(architecture, smaller) <= SHARE_TO_FILL * memory_bytes:
                return smaller
    return replace(size, layers=1, batch=1)


def needed_bytes(architecture: str, size: Size) -> float:
    """Bytes of two trainings' states and of one's activations, estimated from above."""
    per_token = ACTIVATION_BYTES[architecture] * size.hidden * size.layers
    activations = size.batch * size.sequence * (per_token + LOGIT_BYTES * size.vocabulary)
    return 2 * STATE_BYTES * num_parameters(architecture, size) + activations


def num_parameters(architecture: str, size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(architecture, size).parameters())


def flops_per_token(architecture: str, size: Size) -> float:
    """FLOPs of training on a token, without those of recomputing.

    Source: arXiv 2204.02311 (PaLM), appendix B; six for every weight of a product, of which the
    head is one, and attention's products in full, as if it were not causal.
    """
    with torch.device("meta"):
        modules = list(build_model(architecture, size).modules())
    weights = sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear | Conv1D))
    return 6.0 * weights + 12.0 * size.layers * size.hidden * size.sequence


def sheet_of(device_name: str) -> str | None:
    """The data sheet among `PRESETS` for a device, by its driver's name for it."""
    words = device_name.lower().replace("-", " ").split()
    if "h100" in words:
        return "h100-pcie" if "pcie" in words else "h100-sxm"
    fitting = [name for name in PRESETS if all(word in words for word in name.split("-"))]
    return max(fitting, key=len, default=None)


class Repeated(Dataset[dict[str, torch.Tensor]]):
    """A few random sequences over and over, whose labels are the sequences themselves."""

    def __init__(self, size: Size, num_different: int = 64) -> None:
        draws = torch.Generator().manual_seed(1)
        shape = (num_different, size.sequence)
        self.tokens = torch.randint(size.vocabulary, shape, generator=draws)
        self.length = 20_000 * size.batch * size.accumulation

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens}


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
    for name, (architecture, size) in FULL.items():
        small = TINY if device == "cpu" else replace(size, layers=4, batch=1, accumulation=2)
        pair = Pair(Case(architecture, small, device))
        try:
            taken = pair.take(Turn(2, 1, profiled=True))
            pair.losses()
        finally:
            pair.close()
        for trainer, found in zip(NAMES, taken, strict=True):
            assert found.counts is not None
            yield {
                "model": f"{name}, {small.layers} layers",
                "microbatches": small.accumulation,
                "trainer": trainer,
                **asdict(found.counts),
            }
