"""Gradients are summed in the order of one process's autograd, whatever the segments are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from merak.core import mesh
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.comm.gradient_norm import pipeline_norm
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.tiers import one_in

WIDTH, CPU = 24, torch.device("cpu")


class Reader(nn.Module):
    """Reads the same states several times in a block, as a decoder reads its encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        return x + torch.tanh(self.one(states) * self.two(x + states)) * self.three(states)


class ReadOften(nn.Module):
    """States that many segments read, each several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Reader() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        states = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x, states)
        return (x - states).square().mean()


class UsedOften(nn.Module):
    """One block that is used again and again, twice between any two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.same = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for other in self.others:
            x = other(x + self.same(x) * self.same(x + 1))
            x = x + self.same(x)
        return x.square().mean()


class LaidOut(nn.Module):
    """Values that lie transposed in memory, and gradients that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardswish())
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 3, 4, 6)[:, :1].expand(-1, 4, -1, -1).repeat(1, 1, 3, 2)
        for convolution in self.convolutions:
            x = convolution(x)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("kind", [ReadOften, UsedOften, LaidOut])
@one_in(3)
@pytest.mark.parametrize(
    "options", [{}, {"recompute": "full"}, {"offload_activations": "full"}], ids=str
)
def test_sums_are_those_of_one_process(kind: type[nn.Module], options: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = kind()
    expected = copy.deepcopy(model)
    batches = [{"x": torch.randn(6, WIDTH)} for _ in range(2)]
    columns = [signature(batch).columns for batch in batches]
    chosen = EngineOptions(num_microbatches=2, **options)  # type: ignore[arg-type]
    engine = build_engine(GraphSource(model=model), columns[0], mesh.current_mesh(), chosen)
    assert len(engine._state.base.stages[0].segments) > 2
    engine.train_step(0, columns, batches, 0.5)
    for batch in batches:
        (expected(**batch) / 2).backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(engine.parameters[name].grad, parameter.grad), name
    norm = nn.utils.get_total_norm([p.grad for p in expected.parameters()])
    assert torch.equal(engine.gradient_norm(), norm)


def test_the_norm_of_a_pipeline_is_torchs_whoever_counts_what() -> None:
    torch.manual_seed(0)
    gradients = {f"w{i}": torch.randn(7 + i, 5) for i in range(37)}
    expected = nn.utils.get_total_norm(list(gradients.values()))
    backwards = dict(reversed(gradients.items()))
    assert torch.equal(pipeline_norm(backwards, list(gradients), None, CPU), expected)


def test_the_norm_of_a_sparse_gradient_is_that_of_its_rows() -> None:
    places, numbers = [[1, 3, 1]], torch.randn(3, 4)
    rows = torch.sparse_coo_tensor(places, numbers, (6, 4), check_invariants=True)
    expected = rows.to_dense().norm()
    assert torch.allclose(pipeline_norm({"w": rows}, ["w"], None, CPU), expected)


def test_no_gradients_have_the_norm_zero() -> None:
    assert pipeline_norm({}, ["w"], None, CPU).item() == 0.0
