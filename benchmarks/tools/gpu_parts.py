"""What one device shows by itself: its speeds, how attention runs, and the forecast of memory."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from memory_device import MODELS, adam, batch_of
from torch import nn

import merak
from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.data import signature
from merak.engine import GraphSource, build_engine, forecast_of
from merak.parallel import ParallelModel
from merak.plan import EngineOptions, preset
from merak.plan.cost.benchmark import measure
from tools.forked import error_text
from tools.gpu_cases import sheet_of
from tools.gpu_trace import attention_kernels, attention_of, kernels_of, starting

AUTOCAST = torch.bfloat16
COUNT = 2
"""Microbatches of a step."""


def profile(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """The measured speeds, which the planner counts with, beside those of the data sheet."""
    started = time.perf_counter()
    found = measure(device)
    taken_s = time.perf_counter() - started
    sheet = sheet_of(found.name) if device == "cuda" else None
    expected = None if sheet is None else preset(sheet)

    def row(what: str, value: float, of_sheet: float | None) -> dict[str, Any]:
        known = {"data sheet's": "", "of it": ""}
        if of_sheet is not None:
            known = {"data sheet's": f"{of_sheet:.4g}", "of it": f"{value / of_sheet:.2f}"}
        return {"figure": what, "measured": f"{value:.4g}", **known}

    for dtype, value in found.flops_per_s.items():
        rates = {} if expected is None else expected.flops_per_s
        yield row(f"{dtype} products, FLOP/s", value, rates.get(dtype))
    names = ("memory_bytes_per_s", "functions_per_s", "randoms_per_s", "overhead_s")
    for name in (*names, "host_bytes_per_s"):
        yield row(name, getattr(found, name), expected and getattr(expected, name))
    yield row("seconds of measuring", taken_s, None)


def parameters(device: str) -> tuple[int, int, int]:
    """Hidden size, samples of a microbatch and tokens of a sample for the models here."""
    return (1024, 8, 512) if device == "cuda" else (64, 2, 16)


def attention(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """How attention is computed in Merak's step and in plain PyTorch, for a few models."""
    merak.init(device=device)
    hidden, samples, sequence = parameters(device)
    for name in MODELS:
        for drops in (False, True):
            row = {"model": name, "dropout": "0.1" if drops else "none"}
            try:
                batch = on(device, batch_of(name, samples, sequence))
                plain = traced(plain_step(model_of(name, hidden, drops, device), batch), device)
                own = traced(merak_step(model_of(name, hidden, drops, device), batch), device)
            except Exception as error:
                yield row | {"failed": error_text(name, error)}
                continue
            yield row | {
                "merak": attention_of(own),
                "plain PyTorch": attention_of(plain),
                "merak's kernels": attention_kernels(kernels_of(own)),
            }
            free(device)


def model_of(name: str, hidden: int, drops: bool, device: str) -> nn.Module:
    """A model, with dropout or without any."""
    torch.manual_seed(0)
    model = MODELS[name](hidden).to(device).train()
    if not drops:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # Rates that go to functions: attention's, by the names that transformers has for it.
            for attribute in ("attention_dropout", "dropout_prob", "dropout"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
    return model


def on(device: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: column.to(device) for name, column in batch.items()}


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    def step() -> None:
        device = next(iter(batch.values())).device
        with torch.autocast(device.type, AUTOCAST):
            loss = model(**batch).loss
        loss.backward()

    return step


def merak_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    parallel = merak.parallelize(model, batch, autocast=AUTOCAST)
    return lambda: parallel.step(batch)


def traced(step: Callable[[], object], device: str) -> Any:
    """A profiler that has seen a step, which is not the first one."""
    step()
    profiler = starting(device)
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    profiler.stop()
    return profiler


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def memory(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """The forecast of a step's peak beside the allocator's, in bf16 autocast."""
    mesh = merak.init(device=device)
    libraries = warmed_up(mesh.device)
    for name in MODELS:
        for recompute in ("off", "full"):
            row: dict[str, Any] = {"model": name, "recompute": recompute}
            try:
                yield row | memory_row(name, recompute, libraries)
            except Exception as error:
                yield row | {"failed": error_text(name, error)}
            free(device)


def warmed_up(device: torch.device) -> int:
    """Let libraries take their workspaces, which are no job's; the bytes that they hold."""
    if device.type != "cuda":
        return 0
    layer = nn.Linear(256, 256, device=device)
    for enabled in (True, False):
        with torch.autocast("cuda", AUTOCAST, enabled=enabled):
            layer(torch.randn(256, 256, device=device)).float().sum().backward()
    del layer
    free("cuda")
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def memory_row(name: str, recompute: str, libraries: int) -> dict[str, Any]:
    """Forecast and run two steps of a job; the peak of the second one."""
    mesh = current_mesh()
    hidden, samples, sequence = parameters(mesh.device.type)
    torch.manual_seed(0)
    model = MODELS[name](hidden).train()
    batch = batch_of(name, samples * COUNT, sequence)
    sample = signature({n: c[:samples] for n, c in batch.items()}).columns
    with tempfile.TemporaryDirectory() as folder:
        source = GraphSource(model, device=mesh.device, cache_dir=Path(folder), autocast=AUTOCAST)
        chosen = EngineOptions(num_microbatches=COUNT, optimizer=adam, recompute=recompute)
        forecast = forecast_of(source, sample, mesh, chosen)
        peak = forecast.ranks(forecast.layout.schedule)[0].peak
        engine = build_engine(source, sample, mesh, chosen)
    parallel = ParallelModel(model, engine, COUNT, adam, None)
    parallel.step(batch)
    measured = peak_of_step(parallel, batch) - libraries
    return {
        "forecast, MB": round(peak.total_bytes / 1e6, 1),
        "measured, MB": round(measured / 1e6, 1),
        "off by %": round(100 * (peak.total_bytes / measured - 1), 1),
        "peak at": peak.at,
        "libraries, MB": round(libraries / 1e6, 1),
    }


def peak_of_step(parallel: ParallelModel, batch: dict[str, torch.Tensor]) -> int:
    """The most bytes in a step: the allocator's, or on the CPU those of storages."""
    device = parallel.engine.mesh.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        parallel.step(batch)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    state = parallel.optimizer.state.values() if parallel.optimizer is not None else ()
    held = [*parallel.engine.parameters.values(), *parallel.model.buffers()]
    held += [t for own in state for t in own.values() if isinstance(t, torch.Tensor)]
    held = [tensor for tensor in held if tensor.device.type != "meta"]
    static = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    with Storages([*held, *batch.values()]) as storages:
        parallel.step(batch)
    return storages.peak_bytes + sum(static.values()) + sum(c.nbytes for c in batch.values())
