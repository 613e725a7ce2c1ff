"""Hooks on gradients: run in an opaque module, or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merak.core.errors import TraceError
from merak.graph.trace.opaque.selection import OpaqueSelection
from merak.graph.trace.trace import trace
from tests.unit.graph.odd_models import Layers, Mlp, rows
from tests.unit.graph.stages import metas


class Hooking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / 2)
        return y


class HookedInside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.hooking = Hooking()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.hooking(torch.relu(self.a(x)))).pow(2).mean()


class HookedAtTheTop(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        y.register_hook(lambda gradient: gradient / 2)
        return self.b(y).pow(2).mean()


def unchanged(module: nn.Module, gradients: Any, outputs: Any) -> None:
    """A hook that changes nothing."""


def test_the_module_around_a_hooked_tensor_is_opaque() -> None:
    opaque = OpaqueSelection()
    trace(HookedInside(), metas(rows()), opaque=opaque)
    assert list(opaque.modules) == ["hooking"]
    assert "hooks the gradient of a tensor" in opaque.modules["hooking"]


def test_a_hooked_module_is_opaque() -> None:
    model, opaque = Mlp(), OpaqueSelection()
    model.b.register_full_backward_hook(unchanged)
    trace(model, metas(rows()), opaque=opaque)
    assert list(opaque.modules) == ["b"]


def test_hooks_around_which_no_module_is_are_refused() -> None:
    with pytest.raises(TraceError, match="in the forward of the model itself, which no trace sees"):
        trace(HookedAtTheTop(), metas(rows()))
    model = Mlp()
    model.register_full_backward_pre_hook(lambda module, gradients: None)
    with pytest.raises(TraceError, match="Mlp has backward hooks itself, and no module around it"):
        trace(model, metas(rows()))


def test_hooks_of_the_deprecated_kind_are_refused() -> None:
    model = Mlp()
    model.b.register_backward_hook(unchanged)
    with pytest.raises(TraceError, match=r"b \(Linear\) has a hook of register_backward_hook"):
        trace(model, metas(rows()))


class HooksLater(Layers):
    """Registers a hook when it first runs, and notes that it has."""

    has_hooks = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_hooks:
            self.has_hooks = True
            self.b.register_forward_hook(lambda module, inputs, output: output * 2)
        return self.b(torch.relu(self.a(x))).pow(2).mean()


def test_hooks_that_forward_registers_are_gone_with_the_note_of_them() -> None:
    model = HooksLater()
    counts = [len(trace(model, metas(rows())).graph.nodes) for _ in range(2)]
    assert counts[0] == counts[1]
    assert not model.has_hooks
    assert not model.b._forward_hooks
