"""A function whose backward gives no gradient, behind those that change gradients on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from merak.core.mesh import Mesh, pretended
from merak.ops.collectives import copy_parts_to, copy_to, leave_partial_grad
from merak.ops.vocab_parallel import vocab_parallel_embedding

Function = Callable[[torch.Tensor], torch.Tensor]
INDICES = torch.tensor([0, 1, 1])


class _Forgets(torch.autograd.Function):
    """Like the routing of some experts, whose backward returns None for one of its inputs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize(
    "function",
    [
        lambda t: copy_to(t, "tp"),
        lambda t: copy_parts_to(t, 0, (2, 2), (0,), "tp"),
        lambda t: leave_partial_grad(t, "tp"),
        lambda t: vocab_parallel_embedding(t, INDICES, -1, True, False, 8, "tp"),
    ],
    ids=["copy_to", "copy_parts_to", "leave_partial_grad", "vocab_parallel_embedding"],
)
def test_no_gradient_stays_none(function: Function) -> None:
    tensor = torch.ones(4, 3, requires_grad=True)
    with pretended(Mesh(1, 2, 1, 0, torch.device("cpu"), None)):
        _Forgets.apply(function(tensor)).sum().backward()  # type: ignore[no-untyped-call]
    assert tensor.grad is None
