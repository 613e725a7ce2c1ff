"""Tensors made of sizes alone have numbers in a trace, such as masks of contrastive losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.graph.trace.modes.constant_values import ConstantValues
from tests.unit.graph.odd_models import Layers, rows
from tests.unit.graph.stages import Pipeline, assert_like_eager, built


class Pairs(Layers):
    """Picks what is off the diagonal, and by masks that were written and computed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        same = torch.eye(len(h), dtype=torch.bool)
        scores = (h @ h.T)[~same].view(len(h), -1)
        blocks = torch.zeros(len(h), len(h), dtype=torch.bool)
        blocks[: len(h) // 2, : len(h) // 2] = True
        blocks.logical_or_(same)
        rest = (h @ h.T).masked_select(~blocks).mean()
        places = torch.ones(len(h), 3).tril().nonzero()
        assert len(places) == int(torch.ones(len(h), 3).tril().sum())
        rest = rest + h[torch.arange(len(h)), torch.full((), 2, dtype=torch.long)].mean()
        return scores.logsumexp(1).mean() + rest + h[places[:, 0], places[:, 1]].pow(2).mean()


class Overwritten(Layers):
    """A mask of sizes alone, until numbers of the batch are written into it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 8, dtype=torch.bool)
        row = mask[0]
        row.copy_(x[0] > 0)
        h = self.b(torch.relu(self.a(x)))
        return h[mask].pow(2).mean()


@pytest.mark.parametrize("shape", [4, 6])
def test_masks_made_of_sizes_pick_as_in_eager(shape: int) -> None:
    torch.manual_seed(0)
    model = Pairs()
    batch = {"x": torch.randn(shape, 8)}
    assert_like_eager(
        built(model, batch), model, batch, {"rtol": 0.0, "atol": 0.0}, rtol=1e-6, atol=1e-8
    )


def test_a_mask_that_holds_numbers_of_the_batch_is_not_known() -> None:
    model = Overwritten()
    pipeline = Pipeline(built(model, rows()), model)
    for seed in range(2):
        torch.manual_seed(seed)
        batch = rows()
        torch.testing.assert_close(pipeline.train(batch), model(**batch).detach())


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_is_made_of_unknown_values_is_not_known() -> None:
    """Else a trace would hold what memory held: SpecAugment's mask, made of one that is drawn."""
    fakes = FakeTensorMode()
    unknown = fakes.from_tensor(torch.ones(3, dtype=torch.bool))
    values = ConstantValues()
    with fakes, values:
        made = [torch.tensor(unknown), unknown.new_tensor(unknown), unknown.clone()]
        known = [torch.ones(3), torch.zeros_like(unknown)]
    assert [values.follows(tensor) for tensor in made] == [False] * 3
    assert [values.follows(tensor) for tensor in known] == [True] * 2
