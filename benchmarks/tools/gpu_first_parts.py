"""The parts of `gpu_first.py`: small trainings, each beside plain PyTorch on the same device."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tools.models import Size, build_model

Rows = Iterator[dict[str, Any]]
Batch = dict[str, torch.Tensor]
Weights = Mapping[str, torch.Tensor]

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
STEPS, COUNT = 3, 4
"""Steps that are compared, and microbatches of a step."""

SIZE = Size(hidden=64, layers=4, heads=4, vocabulary=128, sequence=32, batch=2, accumulation=COUNT)
LIMIT = 1e-3
"""Most that weights in float32 may be off, as a share of their norm."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A job of two ranks.

    Args:
        degrees: of `merak.init`.
        options: of `merak.parallelize`.
        evaluates: whether it evaluates before it trains, and after.
        resumes: whether it saves after two steps, and takes the third from the checkpoint.
        architecture: "llama", "gpt2" (whose weights are tied) or "mixtral".
    """

    degrees: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    resumes: bool = False
    architecture: str = "llama"


LAYOUTS: Mapping[str, LayoutCase] = MappingProxyType(
    {
        "pp-1f1b": LayoutCase({"pp": 2}, {"schedule": "1f1b"}),
        "pp-interleaved": LayoutCase(
            {"pp": 2}, {"schedule": "interleaved_1f1b"}, evaluates=True, architecture="gpt2"
        ),
        "pp-chimera": LayoutCase({"pp": 2}, {"schedule": "chimera"}),
        "tp": LayoutCase({"tp": 2}),
        "dp-zero1": LayoutCase({"dp": 2}, {"zero": 1}),
        "dp-zero3": LayoutCase({"dp": 2}, {"zero": 3}),
        "pp-checkpoint": LayoutCase({"pp": 2}, {"schedule": "1f1b"}, resumes=True),
        "pp-zero-bubble": LayoutCase({"pp": 2}, {"schedule": "zero_bubble_v"}, architecture="gpt2"),
        "ep": LayoutCase({"dp": 2, "ep": 2}, architecture="mixtral"),
        "cp": LayoutCase({"cp": 2}),
        "tp-sub-pipelined": LayoutCase({"tp": 2}, {"sub_pipelining": "on"}),
    }
)

MODULES = (
    "merak.parallel",
    "merak.trainer",
    "merak.engine.build",
    "merak.graph.trace.trace",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mixtral.modeling_mixtral",
    "torch._inductor.config",
    "torch.distributed.fsdp",
    "torch.export",
)


def load() -> None:
    """Import what the parts need, once for all of them."""
    for module in MODULES:
        importlib.import_module(module)


# ---- models and batches ----


def model_of(architecture: str) -> nn.Module:
    """A small model with weights of a fixed seed."""
    if architecture == "mixtral":
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=SIZE.hidden, intermediate_size=2 * SIZE.hidden, num_hidden_layers=2,
            num_attention_heads=SIZE.heads, num_key_value_heads=SIZE.heads // 2,
            vocab_size=SIZE.vocabulary, num_local_experts=4, use_cache=False,
        )  # fmt: skip
        return MixtralForCausalLM(config).train()
    model = build_model(architecture, SIZE).train()
    model.config.use_cache = False
    return model


def batch(number: int, device: str) -> Batch:
    """The whole batch of a step: (COUNT × microbatch, sequence)."""
    draws = torch.Generator().manual_seed(number)
    shape = (SIZE.batch * COUNT, SIZE.sequence)
    tokens = torch.randint(1, SIZE.vocabulary, shape, generator=draws).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD, whose steps are as exact as the gradients."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ---- plain PyTorch ----


def plain(model: nn.Module, device: str, autocast: torch.dtype | None = None) -> list[float]:
    """Train some steps with plain PyTorch, and leave the model trained; the losses."""
    model.to(device)
    optimizer = sgd(model.parameters())
    losses = []
    for number in range(STEPS):
        own = batch(number, device)
        total = torch.zeros((), device=device)
        for i in range(COUNT):
            part = {name: column.chunk(COUNT)[i] for name, column in own.items()}
            with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(**part).loss / COUNT
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def reference(device: str, folder: Path) -> Rows:
    """What one process computes with plain PyTorch, for the layouts to be compared with."""
    for architecture in sorted({case.architecture for case in LAYOUTS.values()}):
        model = model_of(architecture)
        losses = plain(model, device)
        state = {name: p.detach().cpu() for name, p in model.named_parameters()}
        torch.save({"losses": losses, "weights": state}, folder / f"{architecture}.pt")
        yield {"model": architecture, "losses": rounded(losses)}


# ---- two ranks ----


def layout(device: str, folder: Path, name: str) -> Rows:
    """Train on two ranks, and compare losses and weights with one process's."""
    import merak

    case = LAYOUTS[name]
    started = time.perf_counter()

    def phase(name: str) -> dict[str, Any]:
        return {"phase": name, "seconds": round(time.perf_counter() - started, 1)} | outside(device)

    mesh = merak.init(device=device, **case.degrees)
    yield phase("ranks met")
    made = partial(parallel_of, case, mesh, device)
    parallel = made()
    yield phase("built")
    if case.evaluates:
        before = parallel.evaluate(own_rows(mesh, batch(0, device))).item()
        yield {"phase": "evaluated", "loss": round(before, 5)}
    losses = []
    for number in range(STEPS):
        if case.resumes and number == STEPS - 1:
            parallel.save_checkpoint(folder / "checkpoint")
            parallel = made()
            parallel.load_checkpoint(folder / "checkpoint")
        losses.append(parallel.step(own_rows(mesh, batch(number, device))).item())
        if number == 0:
            yield phase("first step")
    if case.evaluates:
        parallel.evaluate(own_rows(mesh, batch(0, device)))
    found = parallel.gather_state_dict()
    if mesh.rank == 0:
        yield compared(losses, found, torch.load(folder / f"{case.architecture}.pt")) | outside(
            device
        )


def parallel_of(case: LayoutCase, mesh: Any, device: str) -> Any:
    """The model of a case, laid out."""
    import merak

    return merak.parallelize(
        model_of(case.architecture),
        own_rows(mesh, batch(0, device)),
        num_microbatches=COUNT // mesh.dp,
        optimizer=sgd,
        **case.options,
    )


def own_rows(mesh: Any, whole: Batch) -> Batch:
    """The rows of a replica."""
    return {name: column.chunk(mesh.dp)[mesh.dp_rank] for name, column in whole.items()}


def compared(losses: list[float], weights: Weights, expected: Mapping[str, Any]) -> dict[str, Any]:
    """How far losses and weights are from one process's."""
    off_losses = max(abs(a / b - 1) for a, b in zip(losses, expected["losses"], strict=True))
    off_weights, worst = max(
        (off(weights[name], tensor), name) for name, tensor in expected["weights"].items()
    )
    row = {
        "losses": rounded(losses),
        "losses off by": float(f"{off_losses:.1e}"),
        "weights off by": float(f"{off_weights:.1e}"),
        "worst": worst,
    }
    if not max(off_losses, off_weights) < LIMIT:
        row["failed"] = f"off by {off_losses:.1e} (losses), {off_weights:.1e} ({worst})"
    return row


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of two tensors as a share of the second one's norm."""
    apart = (found.detach().double().cpu() - expected.detach().double().cpu()).norm()
    return float(apart / expected.detach().double().cpu().norm().clamp_min(1e-12))


def outside(device: str) -> dict[str, Any]:
    """MB of the card that are no tensors of this process: contexts, communicators, workspaces."""
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "card used, MB": round((total - free) / 1e6),
        "reserved by rank 0, MB": round(torch.cuda.memory_reserved() / 1e6),
    }


# ---- one rank ----


def precisions(device: str, folder: Path) -> Rows:
    """A Llama in each precision and with each way of saving activations, beside plain PyTorch."""
    import merak

    half = torch.bfloat16
    variants: dict[str, tuple[torch.dtype | None, dict[str, Any], float]] = {
        "float32": (None, {}, 1e-4),
        "autocast": (half, {}, 2e-2),
        "autocast, recompute": (half, {"recompute": "full"}, 2e-2),
        "autocast, recompute auto": (half, {"recompute": "auto", **room(device)}, 2e-2),
        "autocast, offload": (half, {"offload_activations": "full"}, 2e-2),
        "bfloat16 with masters": (half, {"master_weights": True}, 2e-2),
        "autocast, mask": (half, {}, 2e-2),
    }
    merak.init(device=device)
    expected = {}
    for autocast in (None, half):
        model = model_of("llama")
        losses = plain(model, device, autocast)
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        expected[autocast] = {"losses": losses, "weights": weights}
    for name, (autocast, options, limit) in variants.items():
        try:
            yield {"variant": name} | precision(name, device, autocast, options, limit, expected)
        except Exception as error:
            traceback.print_exc()
            yield {"variant": name, "failed": f"{name}: {type(error).__name__}: {error}"[:300]}


def room(device: str) -> dict[str, int]:
    """A memory budget where the device does not tell its memory."""
    return {} if device == "cuda" else {"memory_budget": 1 << 30}


def precision(
    name: str,
    device: str,
    autocast: torch.dtype | None,
    options: dict[str, Any],
    limit: float,
    expected: Mapping[torch.dtype | None, Mapping[str, Any]],
) -> dict[str, Any]:
    """Some steps in a precision, and how far they are from plain PyTorch's."""
    import merak
    from tools.gpu_trace import attention_of, starting

    def columns(number: int) -> Batch:
        found = batch(number, device)
        if name.endswith("mask"):
            found["attention_mask"] = torch.ones_like(found["input_ids"])
        return found

    model = model_of("llama")
    stays = autocast
    if options.get("master_weights"):
        model, stays = model.to(torch.bfloat16), None
    parallel = merak.parallelize(
        model, columns(0), num_microbatches=COUNT, optimizer=sgd, autocast=stays, **options
    )
    losses = [parallel.step(columns(number)).item() for number in range(STEPS)]
    row = compared(losses, parallel.gather_state_dict(), expected[autocast])
    row.pop("failed", None)
    if max(row["losses off by"], row["weights off by"]) > limit:
        row["failed"] = f"{name}: weights off by {row['weights off by']}, {row['worst']}"
    profiler = starting(device)
    parallel.step(columns(STEPS))
    if device == "cuda":
        torch.cuda.synchronize()
    profiler.stop()
    return row | {"attention": attention_of(profiler)}


def trainers(device: str, folder: Path) -> Rows:
    """MerakTrainer beside transformers.Trainer, eager and compiled: the losses of some steps."""
    import transformers

    import merak

    merak.init(device=device)
    tokens = [batch(number, "cpu") for number in range(4 * STEPS)]
    data = [{name: column[0] for name, column in own.items()} for own in tokens]
    common: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "bf16": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": device == "cpu",
    }  # fmt: skip
    expected: list[float] = []
    for name, own, arguments, options in (
        ("transformers", transformers.Trainer, transformers.TrainingArguments, {}),
        ("merak", merak.MerakTrainer, merak.MerakArguments, {}),
        ("merak, compiled", merak.MerakTrainer, merak.MerakArguments, {"torch_compile": True}),
    ):
        started = time.perf_counter()
        args = arguments(output_dir=str(folder / "trainer"), **common, **options)
        trainer = own(model=model_of("llama"), args=args, train_dataset=data)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        expected = expected or losses
        row: dict[str, Any] = {"trainer": name, "losses": rounded(losses)}
        row["seconds"] = round(time.perf_counter() - started, 1)
        if max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)) > 1e-3:
            row["failed"] = f"{name}: losses {losses} where transformers has {expected}"
        yield row


def gpu_tests(device: str, folder: Path) -> Rows:
    """The tests marked gpu, in this process."""
    import pytest

    class Failures:
        def __init__(self) -> None:
            self.found: list[dict[str, Any]] = []
            self.passed = 0

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                message = str(getattr(report.longrepr, "reprcrash", report.longrepr))
                self.found.append({"failed": f"{report.nodeid}: {message[:400]}"})
            self.passed += report.passed and report.when == "call"

    seen = Failures()
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(f.relative_to(ROOT)) for f in files if "mark.gpu" in f.read_text("utf-8")]
    os.chdir(ROOT)
    own = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "default", "-o", "minversion=7"]
    pytest.main([*own, "--continue-on-collection-errors", *marked], plugins=[seen])
    yield {"passed": seen.passed, "not passed": len(seen.found)}
    yield from seen.found


def speeds(device: str, folder: Path) -> Rows:
    """The device's speeds beside those of its data sheet."""
    from tools.gpu_parts import profile

    return profile(device, 30.0)


def rounded(losses: list[float]) -> list[float]:
    return [round(loss, 5) for loss in losses]
