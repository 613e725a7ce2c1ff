"""The parts of `gpu_first.py`: small trainings, each beside plain PyTorch on the same device."""

from __future__ import annotations

import importlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
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
STEPS, COUNT = 3, 4
"""Steps that are compared, and microbatches of a step."""

SIZE = Size(hidden=64, layers=4, heads=4, vocabulary=128, sequence=32, batch=2, accumulation=COUNT)
LIMIT = 1e-3
"""Most that weights in float32 may be off, as a share of their norm."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A job of some ranks on one card.

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

    @property
    def num_ranks(self) -> int:
        """Ranks of the job; experts are spread over replicas."""
        return math.prod(number for name, number in self.degrees.items() if name != "ep")


LAYOUTS: Mapping[str, LayoutCase] = MappingProxyType(
    {
        "pp-1f1b": LayoutCase({"pp": 2}, {"schedule": "1f1b"}, resumes=True),
        "pp-interleaved": LayoutCase(
            {"pp": 4}, {"schedule": "interleaved_1f1b"}, evaluates=True, architecture="gpt2"
        ),
        "pp-chimera": LayoutCase({"pp": 4}, {"schedule": "chimera"}),
        "pp-tp": LayoutCase({"pp": 2, "tp": 2}, {"schedule": "zero_bubble_v"}, architecture="gpt2"),
        "dp-zero1": LayoutCase({"dp": 2}, {"zero": 1}),
        "dp-zero3": LayoutCase({"dp": 2}, {"zero": 3}),
        "pp-dp-zero2": LayoutCase({"pp": 2, "dp": 2}, {"schedule": "1f1b", "zero": 2}),
        "ep": LayoutCase({"dp": 2, "ep": 2}, architecture="mixtral"),
        "ep-capacity": LayoutCase(
            {"dp": 2, "ep": 2},
            {"expert_capacity": 4.0},
            architecture="mixtral",  # drops none
        ),
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


def plain(
    model: nn.Module,
    columns: Callable[[int], Batch],
    device: str,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Train some steps with plain PyTorch, and leave the model trained; the losses."""
    model.to(device)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=autocast == torch.float16)
    losses = []
    for number in range(STEPS):
        own = columns(number)
        total = torch.zeros((), device=device)
        for i in range(COUNT):
            part = {name: column.chunk(COUNT)[i].to(device) for name, column in own.items()}
            with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(**part).loss / COUNT
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def reference(device: str, folder: Path) -> Rows:
    """What one process computes with plain PyTorch, for the layouts to be compared with."""
    for architecture in sorted({case.architecture for case in LAYOUTS.values()}):
        model = model_of(architecture)
        losses = plain(model, partial(batch, device=device), device)
        state = {name: p.detach().cpu() for name, p in model.named_parameters()}
        torch.save({"losses": losses, "weights": state}, folder / f"{architecture}.pt")
        yield {"model": architecture, "losses": rounded(losses)}


# ---- several ranks ----


def layout(device: str, folder: Path, name: str) -> Rows:
    """Train on some ranks, and compare losses and weights with one process's."""
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


def compared(
    losses: list[float], weights: Weights, expected: Mapping[str, Any], limit: float = LIMIT
) -> dict[str, Any]:
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
    if not max(off_losses, off_weights) < limit:
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


@dataclass(frozen=True, slots=True)
class Precision:
    """A training of one rank in a precision.

    Args:
        autocast: to which plain PyTorch is compared; None for float32.
        options: of `merak.parallelize`.
        columns: more columns of the batch: positions of "documents" that fill the rows, or the
            attention "mask" of rows that are padded.
        architecture: as of `LayoutCase`.
        limit: most that losses and weights may be off.
    """

    autocast: torch.dtype | None = torch.bfloat16
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: str = ""
    architecture: str = "llama"
    limit: float = 1e-2


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32": Precision(None, limit=1e-4),
        "autocast": Precision(),
        "autocast, mask": Precision(columns="mask", limit=2e-3),
        "autocast, documents": Precision(columns="documents", limit=2e-3),
        "autocast, recompute": Precision(options={"recompute": "auto"}),
        "autocast, offload": Precision(options={"offload_activations": "full"}),
        "bfloat16 with masters": Precision(options={"master_weights": True}),
        "float16": Precision(torch.float16),
        "autocast, experts": Precision(architecture="mixtral"),
        "bfloat16 with masters, experts": Precision(
            options={"master_weights": True}, architecture="mixtral"
        ),
    }
)


def precisions(device: str, folder: Path) -> Rows:
    """A small model in each precision and with each way of saving activations, beside PyTorch."""
    import merak

    merak.init(device=device)
    for name, case in PRECISIONS.items():
        try:
            yield {"variant": name} | precision(name, device, case)
        except Exception as error:
            traceback.print_exc()
            yield {"variant": name, "failed": f"{name}: {type(error).__name__}: {error}"[:300]}


def columns_of(case: Precision, number: int, device: str) -> Batch:
    """The whole batch of a step, with the columns of a case, which are on the host."""
    found = batch(number, device)
    tokens = found["input_ids"]
    if case.columns == "documents":
        positions = torch.arange(SIZE.sequence).expand(len(tokens), -1)
        begins = SIZE.sequence // 3 + torch.arange(len(tokens))[:, None]
        found["position_ids"] = torch.where(positions < begins, positions, positions - begins)
    if case.columns == "mask":
        lengths = SIZE.sequence - torch.arange(len(tokens))[:, None]
        found["attention_mask"] = (torch.arange(SIZE.sequence) < lengths).long()
    return found


def precision(name: str, device: str, case: Precision) -> dict[str, Any]:
    """Some steps in a precision, and how far they are from plain PyTorch's."""
    import merak
    from tools.backwards import told
    from tools.gpu_trace import attention_of, starting

    columns = partial(columns_of, case, device=device)
    reference = model_of(case.architecture)
    losses = plain(reference, columns, device, case.autocast)
    weights = {name: p.detach().cpu() for name, p in reference.named_parameters()}
    expected = {"losses": losses, "weights": weights}
    options, stays = dict(case.options), case.autocast
    model = model_of(case.architecture)
    if options.get("master_weights"):
        model, stays = model.to(torch.bfloat16), None
    if options.get("recompute") == "auto" and device == "cpu":
        options["memory_budget"] = 1 << 30  # this device does not tell its memory
    parallel = merak.parallelize(
        model, columns(0), num_microbatches=COUNT, optimizer=sgd, autocast=stays, **options
    )
    losses = [parallel.step(columns(number)).item() for number in range(STEPS)]
    row = compared(losses, parallel.gather_state_dict(), expected, case.limit)
    profiler = starting(device)
    parallel.step(columns(STEPS))
    if device == "cuda":
        torch.cuda.synchronize()
    profiler.stop()
    row |= {"attention": attention_of(profiler), "backwards": told(parallel.engine)}
    if case.columns == "documents" and device == "cuda" and "documents" not in row["attention"]:
        row["failed"] = f"{name}: attention is {row['attention']}, not inside documents"
    return row


def trainers(device: str, folder: Path) -> Rows:
    """MerakTrainer beside transformers.Trainer, compiled for packed documents: losses of steps."""
    import transformers

    import merak

    merak.init(device=device)
    common: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "bf16": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": device == "cpu",
    }  # fmt: skip
    expected: dict[str, list[float]] = {}
    for name, is_own, columns, options in (
        ("transformers", False, "", {}),
        ("merak", True, "", {}),
        ("transformers, documents", False, "documents", {}),
        ("merak, documents, compiled", True, "documents", {"torch_compile": True}),
    ):
        started = time.perf_counter()
        arguments = merak.MerakArguments if is_own else transformers.TrainingArguments
        own = merak.MerakTrainer if is_own else transformers.Trainer
        args = arguments(output_dir=str(folder / "trainer"), **common, **options)
        trainer = own(model=model_of("llama"), args=args, train_dataset=samples(columns))
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        right = expected.setdefault(columns, losses)
        row: dict[str, Any] = {"trainer": name, "losses": rounded(losses)}
        row["seconds"] = round(time.perf_counter() - started, 1)
        if max(abs(a / b - 1) for a, b in zip(losses, right, strict=True)) > 1e-3:
            row["failed"] = f"{name}: losses {losses} where transformers has {right}"
        yield row


def samples(columns: str) -> list[Batch]:
    """Samples of a dataset, with more columns as of `Precision`."""
    found = (columns_of(Precision(columns=columns), number, "cpu") for number in range(4 * STEPS))
    return [{name: column[0] for name, column in own.items()} for own in found]


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
