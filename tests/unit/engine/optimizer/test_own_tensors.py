"""Optimizers of a user's own over the model's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.errors import ArgumentsError
from merak.engine.optimizer.own_tensors import (
    tensors_by_id,
    use_optimizer_tensors,
)
from merak.engine.zero.optimizer_params import OptimizerParams, Precision
from merak.graph.weights.absent import swap
from merak.graph.weights.materialize import names_of_parameters


def laid_out() -> tuple[nn.Module, OptimizerParams]:
    """A model of bfloat16 with float32 masters, and a layer that is another rank's."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, device="meta")).to(torch.bfloat16)
    own = {name: p for name, p in model.named_parameters() if not p.is_meta}
    return model, OptimizerParams(own, precision=Precision(masters=True))


def test_groups_hold_the_masters_of_this_rank() -> None:
    model, own = laid_out()
    layers = [{"params": list(layer.parameters()), "lr": 0.1 * i} for i, layer in enumerate(model)]
    optimizer = torch.optim.AdamW(layers)
    for _ in range(2):  # what is done already stays
        use_optimizer_tensors(optimizer, tensors_by_id(model, own, {}))
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(own.named[n]) for n in ("0.weight", "0.bias")]
    assert all(p.dtype == torch.float32 for p in first["params"])
    assert second["params"] == []
    assert (first["lr"], second["lr"]) == (0.0, 0.1)


def test_parameters_of_nobody_are_refused() -> None:
    model, own = laid_out()
    optimizer = torch.optim.SGD(nn.Linear(5, 6).parameters())
    with pytest.raises(ArgumentsError, match=r"shape \(6, 5\) that is no parameter of the model"):
        use_optimizer_tensors(optimizer, tensors_by_id(model, own, {}))


def test_a_state_that_was_made_for_other_tensors_is_refused() -> None:
    model, own = laid_out()
    optimizer = torch.optim.Adagrad(model[0].parameters())  # type: ignore[index,union-attr]
    with pytest.raises(ArgumentsError, match=r"Adagrad makes its state before the first step"):
        use_optimizer_tensors(optimizer, tensors_by_id(model, own, {}))


def test_parameters_of_before_the_layout_are_found_by_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    originals, optimizer = names_of_parameters(model), torch.optim.SGD(model.parameters(), lr=0.1)
    shard = nn.Parameter(torch.zeros(3, 1))
    model[0].weight = shard
    model[1].to("meta")
    own = OptimizerParams({n: p for n, p in model.named_parameters() if not p.is_meta})
    use_optimizer_tensors(optimizer, tensors_by_id(model, own, originals))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(shard), id(model[0].bias)]


def test_a_state_of_a_whole_that_is_a_shard_by_now_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    optimizer = torch.optim.Adagrad(model.parameters())
    assert swap(next(model.parameters()), nn.Parameter(torch.zeros(3, 1)))
    own = OptimizerParams(dict(model.named_parameters()))
    with pytest.raises(ArgumentsError, match=r"Adagrad makes its state before the first step"):
        use_optimizer_tensors(optimizer, tensors_by_id(model, own, {}))
