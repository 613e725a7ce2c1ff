"""Activations in host memory on a GPU: pinned, beside the computation, and off the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import merak
from merak.core import mesh
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.segments.activation_offload import (
    ActivationOffload,
    OffloadedTensors,
    unpacked,
)
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions

pytestmark = pytest.mark.gpu

WIDTH, SAMPLES, LAYERS, COUNT = 512, 4096, 8, 4
CYCLES = 500_000_000


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mesh.reset()
    merak.init(device="cuda")
    yield
    mesh.reset()


class Layers(nn.Module):
    """Layers with residuals and dropout, whose activations are much larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + nn.functional.dropout(nn.functional.gelu(layer(x)), 0.1)
        return {"loss": nn.functional.cross_entropy(x, y)}


def batch(seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=draws)
    return {"x": x.cuda(), "y": torch.randint(0, WIDTH, (SAMPLES,), generator=draws).cuda()}


def step(offloaded_forward: str | None) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of a second step, and the most bytes it held beyond its start."""
    torch.manual_seed(0)
    options = EngineOptions(
        schedule="gpipe", num_microbatches=COUNT, offload_activations=offloaded_forward
    )
    batches = [batch(seed) for seed in range(COUNT)]
    columns = [signature(one).columns for one in batches]
    engine = build_engine(GraphSource(Layers()), columns[0], mesh.current_mesh(), options)
    for number in range(2):
        engine.optimizer_params.clear_gradients()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = engine.train_step(number, columns, batches, 1 / COUNT)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = [p.grad.clone() for p in engine.parameters.values() if p.grad is not None]
    return [losses, *gradients], peak


def test_gradients_are_the_same_and_the_device_holds_less() -> None:
    expected, most = step(None)
    found, least = step("full")
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert least < most / 2


def test_copies_run_beside_the_computation_from_and_to_pinned_memory() -> None:
    offload, offloaded = ActivationOffload(torch.device("cuda", 0)), OffloadedTensors()
    made = (torch.randn(SAMPLES, WIDTH, device="cuda") * 2).exp()
    expected = made.clone()
    packed = offload.pack([made], offloaded, [])
    offload.offload_saved(offloaded, [])
    torch.cuda.synchronize()
    (stored,) = offloaded.alive()
    offload.segment_ended()
    torch.cuda._sleep(CYCLES)
    assert stored.copied is not None and stored.host is not None
    stored.copied.synchronize()
    assert not torch.cuda.current_stream().query(), "the copy waits for what is computed meanwhile"
    assert stored.host.is_pinned()
    del made
    offload.segment_ended()
    assert stored.on_device is None
    torch.cuda.synchronize()
    offload.prefetch(offloaded)
    torch.cuda._sleep(CYCLES)
    assert offloaded.fetched is not None
    offloaded.fetched.synchronize()
    assert not torch.cuda.current_stream().query(), "the copy waits for what is computed meanwhile"
    offload.fetch(offloaded)
    assert torch.equal(unpacked(packed[0]), expected)
