"""MerakTrainer beside transformers.Trainer on one device, each training alone on it, in turn.

Each training runs in a process of its own, which is forked from one that has imported everything
and has not touched the device: the same model from the same weights on the same tokens.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

import torch
import transformers

import merak
from merak.plan import PRESETS
from merak.trainer import trainer as trainer_module
from tools.backwards import autograd_alone
from tools.forked import error_text
from tools.gpu_cases import (
    FULL,
    TINY,
    Case,
    Repeated,
    built,
    fitted,
    flops_per_token,
    sheet_of,
)
from tools.gpu_trace import Counts, busy_s, counted, starting
from tools.models import Size

WARMUP, STEPS = 3, 6
"""Steps of a training that do not count, and that do; one more is profiled."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Args:
        name: for the table.
        of_merak: by MerakTrainer, or else by transformers' Trainer.
        arguments: beside those of all.
        has_low_weights: whether the model's parameters are bfloat16.
        joins: whether Merak's backwards may be graphs.
    """

    name: str
    of_merak: bool
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    has_low_weights: bool = False
    joins: bool = True


EAGER = Training("transformers", False)
TRAININGS = (
    EAGER,
    Training("merak", True),
    Training("merak, backward by autograd", True, joins=False),
    Training(
        "merak, bfloat16 weights with float32 masters",
        True,
        MappingProxyType({"bf16": False, "master_weights": True}),
        has_low_weights=True,
    ),
    replace(EAGER, name="transformers, once more"),
)
COMPILED = (
    Training("transformers, compiled", False, MappingProxyType({"torch_compile": True})),
    Training("merak, compiled", True, MappingProxyType({"torch_compile": True})),
)
CHUNKED = (
    Training("merak, all logits at once", True, MappingProxyType({"loss_chunk_bytes": 0})),
    Training("merak, the head in chunks", True, MappingProxyType({"loss_chunk_bytes": 2**27})),
)
FLOAT8 = (
    TRAININGS[1],
    Training("merak, float8", True, MappingProxyType({"fp8": True})),
    COMPILED[1],
    Training(
        "merak, float8, compiled", True, MappingProxyType({"fp8": True, "torch_compile": True})
    ),
)


@dataclass(frozen=True, slots=True)
class Taken:
    """A training as it was.

    Args:
        seconds: of the steps that count.
        host_s: of them, until the host had launched everything.
        peak_bytes: the most that the allocator held.
        forecast_bytes: what Merak forecast of that; 0 for others.
        busy: share of the profiled step in which the device computed.
        loss: of the last step.
        counts: kernels and waits of the profiled step.
    """

    seconds: float
    host_s: float
    peak_bytes: int
    forecast_bytes: int
    busy: float
    loss: float
    counts: Counts


class Timing(transformers.TrainerCallback):
    """Times some steps of a training, profiles one, and ends it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.done = 0
        self.started = self.seconds = self.host_s = self.busy = 0.0
        self.peak_bytes = 0
        self.profiler: Any = None
        self.counts: Counts | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done += 1
        if self.done == WARMUP:
            synchronize(self.device)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.started = time.perf_counter()
        elif self.done == WARMUP + STEPS:
            self.host_s = time.perf_counter() - self.started
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.started
            if self.device == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated()
            self.profiler = starting(self.device)
            self.started = time.perf_counter()
        elif self.done == WARMUP + STEPS + 1:
            synchronize(self.device)
            seconds = time.perf_counter() - self.started
            self.profiler.stop()
            self.counts = counted(self.profiler)
            self.busy = busy_s(self.profiler) / seconds
            control.should_training_stop = True


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(training: Training, case: Case, line: Connection) -> None:
    """The process of a training; tells how it was, or in a text why it was not."""
    transformers.logging.set_verbosity_error()
    try:
        around = nullcontext() if training.joins else autograd_alone()
        with around, tempfile.TemporaryDirectory() as folder:
            if training.of_merak:
                merak.init(device=case.device)
            forecasts = seen_forecasts()
            trainer = make_trainer(training, case, folder)
            timing = Timing(case.device)
            trainer.add_callback(timing)
            loss = float(trainer.train().training_loss)
            assert timing.counts is not None
            figures = (timing.seconds, timing.host_s, timing.peak_bytes, peak_of(forecasts))
            line.send(Taken(*figures, timing.busy, loss, timing.counts))
    except BaseException as error:
        traceback.print_exc()
        line.send(error_text(training.name, error))
    sys.stderr.flush()
    os._exit(0)


def seen_forecasts() -> list[Any]:
    """A list that holds the forecast of each job that MerakTrainer builds from now on."""
    seen: list[Any] = []
    build = trainer_module.build_with_forecast

    def watched(*given: Any) -> Any:
        engine, forecast = build(*given)
        seen.append(forecast)
        return engine, forecast

    trainer_module.build_with_forecast = watched
    return seen


def peak_of(forecasts: list[Any]) -> int:
    """The peak of the last forecast, in bytes; 0 where there is none."""
    if not forecasts:
        return 0
    forecast = forecasts[-1]
    return int(forecast.ranks(forecast.layout.schedule)[0].peak.total_bytes)


def make_trainer(training: Training, case: Case, folder: str) -> transformers.Trainer:
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
        **training.arguments,
    }
    if training.of_merak:
        cls: Any = merak.MerakTrainer
        args = merak.MerakArguments(trace_cache="", **options)
    else:
        cls, args = transformers.Trainer, transformers.TrainingArguments(**options)
    model = built(case)
    if training.has_low_weights:
        model = model.to(torch.bfloat16)
    made: transformers.Trainer = cls(
        model=model, args=args, train_dataset=Repeated(case.size, case.documents)
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def take(training: Training, case: Case, limit_s: float) -> Taken:
    """Run a training alone on the device.

    Raises:
        RuntimeError: it has failed, or was ended when its time was over.
    """
    context = mp.get_context("fork")
    line, theirs = context.Pipe()
    process = context.Process(target=train, args=(training, case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not line.poll(max(limit_s, 0.0)):
            raise RuntimeError(f"{training.name}: stopped after {limit_s:.0f} s")
        found = line.recv()
    except EOFError:
        raise RuntimeError(f"{training.name} has ended without a word") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    assert isinstance(found, Taken)
    return found


def throughput(
    device: str,
    limit_s: float,
    name: str,
    trainings: tuple[Training, ...] = TRAININGS,
    documents: int = 0,
) -> Iterator[dict[str, Any]]:
    """Tokens per second of each training, and how they compare with transformers' first."""
    deadline = time.perf_counter() + limit_s
    architecture, case = case_of(device, name)
    case = replace(case, documents=documents)
    base: Taken | None = None
    for training in trainings:
        row: dict[str, Any] = {"model": f"{name}, {case.size.layers} layers"}
        row["trainer"] = training.name
        try:
            taken = take(training, case, deadline - time.perf_counter())
        except RuntimeError as error:
            yield row | {"failed": str(error)}
            continue
        base = base or taken
        yield row | throughput_row(architecture, case, taken, base)


def case_of(device: str, name: str) -> tuple[str, Case]:
    """What is trained on a device under a name."""
    architecture, size = FULL[name]
    if device == "cpu":
        return architecture, Case(architecture, TINY, device)
    memory_bytes = float(asked("memory.total").split()[0]) * 2**20
    return architecture, Case(architecture, fitted(architecture, size, memory_bytes), device)


def asked(what: str) -> str:
    """What the driver says of the first GPU; a fork may use no CUDA once its parent has."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return told.stdout.splitlines()[0].strip()


def throughput_row(architecture: str, case: Case, taken: Taken, base: Taken) -> dict[str, Any]:
    """A line of the table."""
    tokens_per_s = case.tokens * STEPS / taken.seconds
    row: dict[str, Any] = {
        "tokens a step": case.tokens,
        "microbatches": case.size.accumulation,
        "tokens/s": round(tokens_per_s, 1),
        "ratio": round(base.seconds / taken.seconds, 3),
        "host, share of the time": round(taken.host_s / taken.seconds, 3),
        "device busy": round(taken.busy, 3),
        "kernels a step": taken.counts.kernels,
        "waits a step": taken.counts.waits,
        "peak, GB": round(taken.peak_bytes / 1e9, 2),
        "loss": round(taken.loss, 4),
    }
    if taken.forecast_bytes and taken.peak_bytes:
        row["forecast off by %"] = round(100 * (taken.forecast_bytes / taken.peak_bytes - 1), 1)
    return row | mfu(architecture, case, tokens_per_s)


def mfu(architecture: str, case: Case, tokens_per_s: float) -> dict[str, float | str]:
    """Model FLOPs as a share of the data sheet's bf16 peak, in percent; none without a sheet."""
    if case.device == "cpu":
        return {}
    sheet = sheet_of(asked("name"))
    if sheet is None:
        return {"data sheet": "unknown"}
    peak = PRESETS[sheet].teraflops.get("bfloat16", 0.0) * 1e12
    if not peak:
        return {"data sheet": f"{sheet}, without bfloat16"}
    flops = flops_per_token(architecture, case.size)
    return {"MFU, %": round(100 * flops * tokens_per_s / peak, 1), "data sheet": sheet}


def launches(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Kernels of a step of both, and how often the host waits for the device in it."""
    deadline = time.perf_counter() + limit_s
    for name, full in FULL.items():
        case = profiled_case(device, *full)
        for training in TRAININGS[:2]:
            taken = take(training, case, deadline - time.perf_counter())
            yield {
                "model": f"{name}, {case.size.layers} layers",
                "microbatches": case.size.accumulation,
                "trainer": training.name,
                **asdict(taken.counts),
            }


def profiled_case(device: str, architecture: str, size: Size) -> Case:
    """A few layers are enough to count kernels in."""
    small = TINY if device == "cpu" else replace(size, layers=4, batch=1, accumulation=2)
    return Case(architecture, small, device)
