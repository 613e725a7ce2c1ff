"""A step on one GPU against plain PyTorch there: gradients, precisions, activations, kernels."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import merak
from merak.core import mesh
from merak.data import signature
from merak.engine.build import forecast_of
from merak.engine.step.optimizer_step import StepEnd
from merak.graph.segment.build import GraphSource
from merak.graph.trace.trace import trace
from merak.parallel import ParallelModel
from merak.plan.engine_options import EngineOptions

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
COUNT, SAMPLES, LENGTH, WORDS = 2, 4, 64, 512
CAUSAL = "aten.scaled_dot_product_attention.default"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mesh.reset()
    merak.init(device=DEVICE)
    yield
    mesh.reset()


def gpt2(dropout: float = 0.0, hidden: int = 128, layers: int = 2) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=hidden, n_layer=layers, n_head=hidden // 64,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def batch(samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (samples, LENGTH), generator=draws)
    return {"input_ids": tokens, "labels": tokens.clone()}


def step(model: nn.Module, **options: Any) -> tuple[ParallelModel, torch.Tensor]:
    """A model that has taken a step, and its loss."""
    parallel = merak.parallelize(model, batch(), num_microbatches=COUNT, **options)
    return parallel, parallel.step(batch())


def gradients(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    named = parallel.engine.parameters.items()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def eager(model: nn.Module, autocast: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The gradients of plain PyTorch for the same step."""
    model = copy.deepcopy(model).to(DEVICE)
    whole = {name: column.to(DEVICE) for name, column in batch().items()}
    for i in range(COUNT):
        own = {name: column.chunk(COUNT)[i] for name, column in whole.items()}
        with nullcontext() if autocast is None else torch.autocast(DEVICE, autocast):
            loss = model(**own).loss
        (loss.float() / COUNT).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float
) -> None:
    """Every gradient is off by less than a share of its norm; float16 may have lost it to zero."""
    assert found.keys() == expected.keys()
    for name, own in found.items():
        off = (own.double() - expected[name].double()).norm()
        assert off <= limit * expected[name].double().norm() + 1e-9, name


@pytest.mark.parametrize(
    ("autocast", "limit"),
    [(None, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)],
    ids=str,
)
def test_gradients_are_those_of_plain_pytorch(autocast: torch.dtype | None, limit: float) -> None:
    model = gpt2()
    expected = eager(model, autocast)
    parallel, loss = step(model, autocast=autocast)
    assert loss.device == torch.device(DEVICE, 0)
    assert_near(gradients(parallel), expected, limit)


def test_float16_goes_on_after_an_overflow() -> None:
    parallel, _ = step(gpt2(), autocast=torch.float16, optimizer=torch.optim.SGD)
    assert parallel.scaler is not None
    parallel.scaler.update(2.0**120)
    before = [p.clone() for p in parallel.engine.parameters.values()]
    parallel.step(batch())
    assert parallel.scaler.get_scale() == 2.0**119
    assert all(map(torch.equal, before, parallel.engine.parameters.values()))
    parallel.scaler.update(2.0**10)
    parallel.step(batch())
    assert not all(map(torch.equal, before, parallel.engine.parameters.values()))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, {"recompute": "selective"}, {"offload_activations": "full"}],
    ids=str,
)
def test_activations_that_are_not_kept_change_no_dropout(
    options: dict[str, str], autocast: torch.dtype | None
) -> None:
    expected, loss = step(gpt2(0.2), autocast=autocast)
    parallel, found = step(gpt2(0.2), autocast=autocast, **options)
    torch.testing.assert_close(found, loss)
    assert_near(gradients(parallel), gradients(expected), 1e-2)


def test_attention_knows_that_it_is_causal_and_runs_in_a_fused_kernel() -> None:
    columns = signature(batch()).columns
    graph = trace(gpt2(), dict(columns), device=torch.device(DEVICE), autocast=torch.bfloat16).graph
    calls = [node for node in graph.nodes if str(node.target) == CAUSAL]
    assert len(calls) == 2
    assert all(node.args[3] is None and node.args[5] is True for node in calls)
    parallel, _ = step(gpt2(), autocast=torch.bfloat16)
    host = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=host, acc_events=True) as profiler:
        parallel.step(batch())
    names = {event.name for event in profiler.events()}
    assert not [name for name in names if "attention_math" in name]


def taken_bytes(function: Callable[[], object]) -> tuple[int, int]:
    """The most bytes of the device that a call takes, and those that it keeps."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    most = torch.cuda.max_memory_allocated() - before
    del kept
    return most, torch.cuda.memory_allocated() - before


def fake_tensor() -> torch.Tensor:
    """A large fake tensor, for which torch itself allocates one element of the device."""
    with FakeTensorMode():
        return torch.empty(2**20, device=DEVICE)


def test_tracing_takes_no_memory_of_the_device() -> None:
    columns = dict(signature(batch()).columns)
    model = gpt2()
    of_torch, _ = taken_bytes(fake_tensor)
    assert of_torch < 2**20
    traced = partial(trace, model, columns, device=torch.device(DEVICE), autocast=torch.bfloat16)
    most, kept = taken_bytes(traced)
    assert most <= of_torch and kept == 0


@pytest.mark.parametrize(
    ("nan_policy", "fused", "waits"), [("ignore", False, 0), ("stop", False, 1), ("stop", True, 0)]
)
def test_a_step_waits_for_the_device_only_to_see_whether_it_was_finite(
    monkeypatch: pytest.MonkeyPatch, nan_policy: str, fused: bool, waits: int
) -> None:
    """A step waits where it reads its own end; the one before has long come to the host."""
    half = torch.bfloat16
    optimizer = partial(torch.optim.AdamW, fused=fused)
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 1.0}
    parallel, _ = step(gpt2(0.1), autocast=half, nan_policy=nan_policy, **options)
    own = {name: column.to(DEVICE) for name, column in batch().items()}
    parallel.step(own)
    torch.cuda.synchronize()
    ends: list[StepEnd] = []
    found: list[StepEnd] = []
    made, read = StepEnd.__init__, StepEnd.read
    monkeypatch.setattr(StepEnd, "__init__", lambda end, *a: (made(end, *a), ends.append(end))[0])
    monkeypatch.setattr(StepEnd, "read", lambda end: (found.append(end), read(end))[1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            parallel.step(own)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(ends) == (nan_policy != "ignore")
    assert len([end for end in found if end in ends]) == waits
    assert not [str(w.message) for w in told if "called a synchronizing" in str(w.message)]


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_the_peak_is_forecast(recompute: str) -> None:
    warm_up()
    libraries = torch.cuda.memory_allocated()
    model, samples, optimizer = gpt2(0.1, 512, 8), 32, torch.optim.AdamW
    columns = {name: column.repeat(samples, 1) for name, column in batch().items()}
    sample = signature({n: c[: len(c) // COUNT] for n, c in columns.items()}).columns
    source = GraphSource(model, device=torch.device(DEVICE), autocast=torch.bfloat16)
    options = EngineOptions(num_microbatches=COUNT, optimizer=optimizer, recompute=recompute)
    forecast = forecast_of(source, sample, mesh.current_mesh(), options)
    expected = forecast.ranks(forecast.layout.schedule)[0].peak.total_bytes
    parallel = merak.parallelize(
        model, columns, num_microbatches=COUNT, autocast=torch.bfloat16, optimizer=optimizer,
        recompute=recompute,
    )  # fmt: skip
    parallel.step(columns)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    parallel.step(columns)
    found = torch.cuda.max_memory_allocated() - libraries
    assert abs(expected / found - 1) < 0.15, (expected, found)


def warm_up() -> None:
    """Let libraries take their workspaces."""
    layer = nn.Linear(256, 256, device=DEVICE)
    for enabled in (True, False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            layer(torch.randn(256, 256, device=DEVICE)).float().sum().backward()
    del layer
    gc.collect()
    torch.cuda.synchronize()


def losses(cls: type[transformers.Trainer], arguments: Any, folder: Path) -> list[float]:
    """The losses of some steps of a trainer."""
    args = arguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=SAMPLES // COUNT,
        gradient_accumulation_steps=COUNT, learning_rate=1e-3, logging_steps=1, bf16=True,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    columns = batch(32)
    rows = [{n: c[i] for n, c in columns.items()} for i in range(32)]
    trainer = cls(model=gpt2(), args=args, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_gives_the_losses_of_transformers_trainer(tmp_path: Path) -> None:
    expected = losses(transformers.Trainer, transformers.TrainingArguments, tmp_path / "theirs")
    found = losses(merak.MerakTrainer, merak.MerakArguments, tmp_path / "own")
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-2)
