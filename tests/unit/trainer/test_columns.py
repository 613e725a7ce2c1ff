from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from merak.trainer.columns import _main_inputs


class Model(nn.Module):
    main_input_name = "input_ids"


class Named(Model):
    def forward(self, input_ids: Any = None, labels: Any = None) -> Any: ...


class Other(Model):
    def forward(self, signal: Any, labels: Any = None, **kwargs: Any) -> Any: ...


class Anything(Model):
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (Named(), {"labels"}, ("input_ids",)),
        (Named(), {"inputs_embeds"}, ()),
        (Other(), {"signal", "labels"}, ()),  # whose main input has a name of its own
        (Anything(), {"labels"}, ("input_ids",)),
        (nn.Linear(2, 2), {"input"}, ()),
    ],
)
def test_columns_that_a_model_needs(model: nn.Module, batch: set[str], expected: Any) -> None:
    assert _main_inputs(model, dict.fromkeys(batch)) == expected
