"""Verification of a traced graph: no constant in it is a fake tensor.

Tensors that a trace computes are fake, and those that no operator makes become constants. A fake
constant is therefore one whose operators the trace has missed: it would be used as if it had
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from merak.graph.ir.ir import Kind
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.node_source import line_of, modules_of

Finding = tuple[fx.Node, torch.Tensor]
"""A node that reads a fake tensor, and that tensor."""


def verify_constants(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Check that no constant of a graph is a fake or meta tensor.

    Args:
        graph: as exported, without nested graphs; its placeholders have names.
        constants: tensors that are neither parameters nor buffers, by name.

    Raises:
        UntraceableError: one is; the error names the line that reads it.
    """
    for rule in RULES:
        for node, tensor in rule(graph, constants):
            place = line_of(node) or "an unknown line"
            what = f"a tensor of the shape {tuple(tensor.shape)} that has no values"
            raise UntraceableError(
                f"the model cannot be traced at {place}: it reads there {what}, since it was made "
                "in a way that the trace does not see, or in another one; make it in the forward "
                "with plain torch operators, or register it with register_buffer.",
                f"{place}: it reads {what}",
                modules_of(node),
            )


def is_fake_or_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _lifted(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Fake constants among the placeholders."""
    for node in graph.find_nodes(op="placeholder"):
        tensor = constants.get(node.meta.get("name", ""))
        if tensor is None or node.meta.get("kind") is not Kind.BUFFER:
            continue
        if is_fake_or_meta(tensor):
            for user in node.users:
                yield user, tensor


def _attributes(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Fake constants among the attributes of the exported module."""
    for node in graph.find_nodes(op="get_attr"):
        tensor: Any = graph.owning_module
        for name in str(node.target).split("."):
            tensor = getattr(tensor, name, None)
        if isinstance(tensor, torch.Tensor) and is_fake_or_meta(tensor):
            yield from ((user, tensor) for user in node.users)


def _arguments(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Fake constants among the arguments of operators."""
    for node in graph.nodes:
        for leaf in tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.Tensor) and is_fake_or_meta(leaf):
                yield node, leaf


RULES: tuple[Callable[[fx.Graph, Mapping[str, torch.Tensor]], Iterator[Finding]], ...] = (
    _lifted,
    _attributes,
    _arguments,
)
