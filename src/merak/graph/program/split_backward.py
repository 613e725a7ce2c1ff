"""Split backward: a GEMM's weight gradient deferred, and computed apart from its input's.

Zero-bubble schedules run the gradient of a stage's input (I) as soon as they can, since another
stage waits for it, and the gradients of its weights (W) where there would be a bubble. So the
segments of such a job call GEMMs whose backward gives the input's gradient and leaves the weight's
in a list. All other parameters' gradients are cheap, and come with the input's.

Source: arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from merak.core.gradients import add_gradient
from merak.core.shards import ParameterShard
from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.mutation import eliminate_dead_code
from merak.graph.ir.operators import SPLIT_GEMMS
from merak.graph.segment.cut import copy_graph

aten = torch.ops.aten

WeightGradient = Callable[[], object]
"""Adds one microbatch's gradient of a weight to its gradient."""


class WeightGradients:
    """Deferred weight gradients of one stage."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[WeightGradient]] = {}
        self._microbatch = 0

    def start(self, microbatch: int) -> None:
        """Begin the backward of a microbatch, to which deferred gradients then belong."""
        self._microbatch = microbatch

    def add(self, gradient: WeightGradient) -> None:
        """Defer one weight gradient; called from a backward."""
        self._deferred.setdefault(self._microbatch, []).append(gradient)

    def run(self, microbatch: int) -> None:
        """Compute all weight gradients that a microbatch has deferred so far."""
        with torch.no_grad():
            for gradient in self._deferred.pop(microbatch, ()):
                gradient()

    def forget(self) -> None:
        """Drop the deferred gradients of a step that failed."""
        self._deferred.clear()


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """Rewriting of a segment whose backward autograd runs: its GEMMs defer gradients of weights.

    Args:
        deferred: where to leave them.
        immediate: names of parameters whose gradient is not to be deferred.
    """

    deferred: WeightGradients
    immediate: frozenset[str] = frozenset()

    def __call__(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """The same computation; its backward gives the gradients of inputs and other parameters.

        Args:
            segment: the segment; left as it is.
        """
        graph, _ = copy_graph(segment.graph)
        functions = {
            aten.linear.default: _linear(self.deferred),
            aten.addmm.default: _addmm(self.deferred),
        }
        assert functions.keys() == SPLIT_GEMMS.keys()
        for node in list(graph.nodes):
            if node.target not in SPLIT_GEMMS or node.kwargs:
                continue
            position = SPLIT_GEMMS[node.target].weight
            weight = _unconverted(node.args[position])
            if _is_weight(weight, self.immediate):
                node.target = functions[node.target]
                node.update_arg(position, weight)
        eliminate_dead_code(graph, graph.find_nodes(op="placeholder"))
        return replace(segment, graph=graph), {}

    def deferrable(self, segment: Segment) -> frozenset[str]:
        """Names of a segment's parameters whose gradients may be deferred."""
        return frozenset(segment.parameters) - self.immediate


def _unconverted(argument: Any) -> Any:
    """Operand before autocast's conversion; the GEMM's function converts it again."""
    if isinstance(argument, fx.Node) and argument.target is aten.to.dtype:
        return argument.args[0]
    return argument


def _is_weight(argument: Any, immediate: frozenset[str]) -> bool:
    if not isinstance(argument, fx.Node) or argument.op != "placeholder":
        return False
    return argument.meta["kind"] is Kind.PARAMETER and argument.meta["name"] not in immediate


def _linear(deferred: WeightGradients) -> Callable[..., torch.Tensor]:
    def deferred_linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _Linear.apply(x, weight, bias, deferred)  # type: ignore[no-any-return, no-untyped-call]

    return deferred_linear


def _addmm(deferred: WeightGradients) -> Callable[..., torch.Tensor]:
    def deferred_addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Addmm.apply(bias, x, weight, deferred)  # type: ignore[no-any-return, no-untyped-call]

    return deferred_addmm


class _Linear(torch.autograd.Function):
    """x @ weightᵀ + bias: x (…, in), weight (out, in), bias (out,) or None."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, deferred: WeightGradients) -> Any:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight  # the leaf itself, whatever hooks there are on saved tensors
        ctx.deferred = deferred
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Gradient of x now; that of the weight is deferred."""
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.reshape(-1, gradient.shape[-1])
        if weight.requires_grad:
            inputs = x.reshape(-1, x.shape[-1])
            ctx.deferred.add(lambda: add_gradient(weight, rows.t().mm(inputs)))
        shape = (*gradient.shape[:-1], weight.shape[1])
        of_x = rows.mm(weight.to(rows.dtype)).view(shape) if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None


class _Addmm(torch.autograd.Function):
    """bias + x @ weight: x (rows, in), weight (in, out), bias (out,)."""

    @staticmethod
    def forward(ctx: Any, bias: Any, x: Any, weight: Any, deferred: WeightGradients) -> Any:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias_shape = weight, bias.shape
        ctx.deferred = deferred
        return torch.addmm(bias, x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight.requires_grad:
            ctx.deferred.add(lambda: add_gradient(weight, x.t().mm(gradient)))
        of_bias = gradient.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[0] else None
        of_x = gradient.mm(weight.to(gradient.dtype).t()) if ctx.needs_input_grad[1] else None
        return of_bias, of_x, None, None
