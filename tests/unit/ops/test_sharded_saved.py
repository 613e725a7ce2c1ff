"""What autograd saves in functions that save shards of what they gather."""

import gc
import weakref

import torch

from merak.ops.sharded_saved import saving_shards


def test_a_graph_without_a_backward_is_freed() -> None:
    # The gradient of softmax is computed from its own result.
    seen: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (2 * x).softmax(-1)
        seen.append(weakref.ref(y))
        return y.square().sum()

    x = torch.randn(3, 4, requires_grad=True)
    loss = saving_shards(function)(x)
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    (expected,) = torch.autograd.grad((2 * x).softmax(-1).square().sum(), x)
    assert torch.equal(found, expected)
    del loss
    gc.collect()
    assert seen[0]() is None
