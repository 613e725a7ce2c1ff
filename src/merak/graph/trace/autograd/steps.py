"""Operators that autograd runs for the nodes of a graph, recorded step by step.

The graph runs once more on fake tensors, node by node, and operators beneath autograd are recorded:
for `aten.linear` a transposition and a product, for a gradient that the model takes the operators
of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.graph.ir.ir import Kind
from merak.graph.trace.autograd.calls import (
    applying,
    creates_graph,
    differentiate,
    input_leaves,
    is_autograd_call,
    is_gradient_switch,
    plain_apply,
)

AUTOCAST = "autocast"
"""In the meta of a call of autograd: the autocast that it runs under."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An operator that ran for a node of the graph.

    Args:
        func: the operator.
        args: its arguments, with tensors among them.
        kwargs: its arguments by name.
        result: its results.
        node: the node of the graph for which it ran.
        is_saved: whether autograd has run it to save a result: the tensor that it detaches is, to
            a second derivative, the result itself.
        is_tracked: whether gradients were on as it ran.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    node: fx.Node
    is_saved: bool
    is_tracked: bool

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether autograd found a result to have no gradient, such as the statistics of a norm."""
        return self.is_tracked and not tensor.requires_grad

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors among its arguments."""
        return (t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor))

    @property
    def is_view(self) -> bool:
        """Whether it returns a view of its argument."""
        return self.func.is_view and isinstance(self.result, torch.Tensor)


@dataclass(slots=True)
class Steps:
    """All operators that ran for a graph, by node.

    Args:
        of: per node, its steps in order.
        values: every node's value.
        makers: the first step that made a tensor, by the tensor's identity.
    """

    of: dict[fx.Node, list[Step]] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    makers: dict[int, Step] = field(default_factory=dict)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records the operators that run beneath autograd."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = steps
        self.node: fx.Node | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_saved = func is torch.ops.aten.detach.default and _is_above_autograd()
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if made and self.node is not None:
            step = Step(
                func, args, kwargs or {}, result, self.node, is_saved, torch.is_grad_enabled()
            )
            self.steps.of[self.node].append(step)
            for tensor in made:
                self.steps.makers.setdefault(id(tensor), step)
        return result


def _is_above_autograd() -> bool:
    """Whether an operator was called past autograd's own kernel, as for a saved result."""
    key = torch._C.DispatchKey.ADInplaceOrView
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def run_steps(graph: fx.Graph) -> Steps:
    """Run a graph on fake tensors and record its operators, with gradients that the model takes.

    Args:
        graph: as exported, without nested graphs; its sizes are numbers.
    """
    steps = Steps()
    recorder = _Recorder(steps)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = _leaves(graph)
    twice = any(is_autograd_call(n) and creates_graph(n) for n in graph.nodes)
    # The other kernels of attention have no second derivative.
    kernels: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH) if twice else nullcontext()
    with mode, recorder, torch.enable_grad(), kernels:
        for node in graph.nodes:
            recorder.node = None
            if node.op == "placeholder":
                value = _fresh(node)
            elif node.op == "output":
                break
            else:
                recorder.node = node
                steps.of[node] = []
                value = _run(node, steps.values)
                recorder.node = None
            if node in leaves and not value.requires_grad:
                value.requires_grad_()
            steps.values[node] = value
    return steps


def _leaves(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of gradients that were leaves, without an operator in the graph that made them so."""
    switched = {node.args[0] for node in graph.nodes if is_gradient_switch(node)}
    found: set[fx.Node] = set()
    for node in filter(is_autograd_call, graph.nodes):
        inputs: Any = node.args[1]
        flags = input_leaves(node)
        found |= {i for i, is_leaf in zip(inputs, flags, strict=True) if is_leaf}
    return found - switched


def _fresh(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    is_trained = node.meta.get("kind") is Kind.PARAMETER and value.requires_grad
    return made.requires_grad_(is_trained)


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    mapped: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = mapped
    if not is_autograd_call(node):
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        return function(*args, **kwargs)
    autocast = node.meta.get(AUTOCAST)
    with torch.autocast(*autocast) if autocast else nullcontext(), applying(_refuse_apply):
        return [gradient for gradient in differentiate(*args[:6]) if gradient is not None]


def _refuse_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Refuse an autograd function in a backward: recorded steps would lose its own backward."""
    if cls.__module__.startswith("torch."):
        return plain_apply(cls, *args, **kwargs)
    raise RuntimeError(f"a backward calls the autograd function {cls.__qualname__}")
