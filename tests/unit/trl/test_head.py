"""TRL's fused head as plain operators gives what TRL's own function gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction
from trl.trainer import utils

from merak.trl.head import PlainLogProbs, plain_head


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    return hidden, weight, torch.randn(11, requires_grad=True), torch.randint(11, (7,))


def _run(function: Any, *how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    hidden, weight, bias, targets = _inputs()
    made = function.apply(hidden, weight, bias, targets, *how)
    loss = (made[0] * torch.arange(7.0)).sum() + (made[1] ** 2).sum()
    return list(made), list(torch.autograd.grad(loss, (hidden, weight, bias)))


@pytest.mark.parametrize("how", [(1.0, 4, None, 1.0), (0.7, 5, 2.0, 1.5)])
def test_values_and_gradients_are_those_of_trl(how: tuple[Any, ...]) -> None:
    found, expected = (
        _run(function, *how, OPTIONAL_OUTPUTS)
        for function in (PlainLogProbs, ChunkedLogProbFunction)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_asked_for_is_not_computed() -> None:
    hidden, weight, bias, targets = _inputs()
    found = PlainLogProbs.apply(hidden, weight, bias, targets, 1.0, 4)
    assert found[0].shape == (7,) and found[1:] == (None, None, None, None)


def test_the_plain_head_is_gone_behind_a_trace() -> None:
    own = utils._ChunkedLogProbFunction, utils._use_triton
    with plain_head():
        assert utils._ChunkedLogProbFunction is PlainLogProbs
        assert not utils._use_triton(torch.device("cuda"))
    assert (utils._ChunkedLogProbFunction, utils._use_triton) == own
