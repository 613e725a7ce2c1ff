"""Functions in the place of torch's own that call these: traced once, as eager code has them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.graph.stages import Pipeline, built


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.softmax(self.first(x), -1)
        logits = nn.functional.layer_norm(self.second(hidden), (8,)) * hidden.norm()
        return {"loss": nn.functional.cross_entropy(logits, y)}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.functional, "cross_entropy"),
        (nn.functional, "softmax"),
        (nn.functional, "layer_norm"),
        (torch.Tensor, "norm"),
    ],
)
def test_as_eager(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = Net(), getattr(owner, name)
    batch = {"x": torch.randn(4, 8), "y": torch.randint(8, (4,))}

    @functools.wraps(old)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * old(*args, **kwargs)

    plain = model(**batch)["loss"].detach()
    monkeypatch.setattr(owner, name, doubled)
    expected = model(**batch)["loss"].detach()
    assert not torch.equal(plain, expected)
    pipeline = Pipeline(built(model, batch), model)
    assert getattr(owner, name) is doubled
    torch.testing.assert_close(pipeline.train(batch), expected)
