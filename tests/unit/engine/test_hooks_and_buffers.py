"""Hooks on the gradients of parameters, and buffers that change between evaluations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from merak.core import mesh
from merak.core.errors import ScheduleError
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.engine import Engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.unit.engine.models import gpt2, text_batch

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_of(model: nn.Module, batch: dict[str, Tensor], **options: object) -> Engine:
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    columns = signature(batch).columns
    return build_engine(GraphSource(model=model), columns, mesh.current_mesh(), chosen)


def small(gradient: Tensor) -> Tensor:
    """A hook: what is large is cut."""
    return gradient.clamp(-1e-3, 1e-3)


def test_a_hook_on_a_parameter_is_called_for_every_microbatch() -> None:
    batches = [text_batch(seed=i) for i in range(2)]
    model, expected = gpt2(), gpt2()
    expected.load_state_dict(model.state_dict())
    for one in (model, expected):
        one.transformer.h[0].mlp.c_fc.weight.register_hook(small)
    engine = engine_of(model, batches[0], num_microbatches=2)
    columns = [signature(batch).columns for batch in batches]
    engine.train_step(0, columns, batches, 0.5)
    for batch in batches:
        (expected(**batch).loss / 2).backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(engine.parameters[name].grad, parameter.grad), name


def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused() -> None:
    model = gpt2()
    model.transformer.wte.weight.register_hook(small)
    with pytest.raises(
        ScheduleError, match="has a hook on its gradient, but it is read by several"
    ):
        engine_of(model, text_batch())
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.weight.register_hook(small)
    with pytest.raises(ScheduleError, match="computed apart under schedule='zero_bubble_h1'"):
        engine_of(model, text_batch(), schedule="zero_bubble_h1", num_microbatches=2)


class Scaled(nn.Module):
    """Scales by what follows from a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5)
        return (self.layer(x) * (self.mean.norm() * 2)).pow(2).mean()


def test_evaluation_reads_buffers_as_they_are() -> None:
    model, batch = Scaled(), {"x": torch.randn(2, 4)}
    expected = copy.deepcopy(model)
    engine, columns = engine_of(model, batch), signature(batch).columns
    for _ in range(2):
        expected.eval()
        (found,) = engine.evaluate([columns], [batch])
        assert torch.equal(found["loss"], expected(**batch).detach())
        expected.train()
        expected(**batch)
        engine.train_step(0, [columns], [batch])
