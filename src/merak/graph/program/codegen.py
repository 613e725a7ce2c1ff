"""Code generation: a segment's graph as a Python function.

Some operators run otherwise than the trace has them. Random ones draw in the logical order of
elements: torch draws in the order of memory, which no layout keeps, as what goes to another stage
or is reduced over ranks arrives contiguous. A write where a mask is true, of a value that gets a
gradient, is one operator from the mask to the value's own shape: the gradient of what is written
begins with the elements that the mask selects, whose number is known where it runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.split_module import split_module

from merak.graph.ir.operators import (
    RNNS,
    chooses_kernel,
    draws,
    family,
    multiplies_groups,
    room_for_documents,
)
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.joint.compiled import compilable_runs
from merak.graph.segment.cut import copy_graph
from merak.graph.trace.branches.flags import is_condition
from merak.graph.trace.branches.outcomes import BranchValues, branch_values, specialize_branches
from merak.graph.trace.normalize import is_random
from merak.graph.trace.opaque.dynamic_region import dynamic_region_function
from merak.graph.trace.opaque.operator import is_dynamic_region, is_opaque
from merak.graph.trace.opaque.run import opaque_function
from merak.ops.attention.packed import attend_packed
from merak.ops.grouped_product import grouped_product
from merak.ops.recording import one_operator

Function = Callable[..., tuple[torch.Tensor, ...]]

Observe = Callable[[fx.Node, Any], None]
"""Looks at a node and its result."""


class _Observed(fx.Interpreter):
    """Interpreter of a graph that lets somebody look at every node's result."""

    def __init__(self, graph: fx.Graph, observe: Observe) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self._observe = observe

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        self._observe(n, result)
        return result


def runnable(
    graph: fx.Graph, observe: Observe | None = None, compiler: TorchCompiler | None = None
) -> Function:
    """Function that runs a graph's operators one after another.

    Args:
        graph: as traced, or rewritten for a rank's shard of it.
        observe: looks at every result, which takes time; None for nobody.
        compiler: of its operators by `torch.compile`; None runs them as they are.

    Returns:
        A function of the graph's placeholders, in order. Where a condition leaves a layer out,
        nothing of the layer runs.
    """
    places = [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if is_condition(n)]
    whole = _function(graph, observe, compiler)
    if not places:
        return whole

    @lru_cache(maxsize=64)
    def chosen(answers: BranchValues) -> Function:
        return _function(specialize_branches(graph, answers), observe, compiler)

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answers = branch_values([args[i] for i in places])
        return (whole if answers is None else chosen(answers))(*args)

    return run


def as_run(graph: fx.Graph) -> fx.Graph:
    """Graph with the operators that run in the place of those that stand for them.

    Args:
        graph: left as it is.
    """
    if not any(map(_is_replaced, graph.nodes)):
        return graph
    graph, _ = copy_graph(graph)
    for node in graph.nodes:
        if is_opaque(node):
            node.target = opaque_function(node.meta["opaque"])
        elif is_dynamic_region(node):
            node.target = dynamic_region_function(node.meta["region"])
        elif multiplies_groups(node):
            node.target = grouped_product
        elif chooses_kernel(node):
            node.kwargs = {**node.kwargs, "room": room_for_documents(node)}
            node.target = attend_packed
        elif writes_where(node):
            node.target = write_where
    draw_in_logical_order(graph)
    return graph


def _function(graph: fx.Graph, observe: Observe | None, compiler: TorchCompiler | None) -> Function:
    graph = as_run(graph)
    if observe is not None:
        return _Observed(graph, observe).run
    if compiler is not None:
        return compiled(graph, compiler)
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _is_replaced(node: fx.Node) -> bool:
    is_own = is_opaque(node) or is_dynamic_region(node) or multiplies_groups(node)
    return is_own or chooses_kernel(node) or draws_by_memory(node) or writes_where(node)


def compiled(graph: fx.Graph, compiler: TorchCompiler) -> Callable[..., Any]:
    """Function that runs a graph, whose compilable runs of operators are compiled.

    These are evaluations, and segments whose backward autograd runs; others are compiled part by
    part (`merak.graph.joint.compiled`).

    Args:
        graph: of a segment.
        compiler: of the runs.
    """
    operators = (node for node in graph.nodes if node.op == "call_function")
    number_of: dict[fx.Node, int] = {}
    compilable: set[int] = set()
    for number, (is_compilable, run) in enumerate(compilable_runs(operators)):
        number_of |= dict.fromkeys(run, number)
        if is_compilable:
            compilable.add(number)
    whole = fx.GraphModule(torch.nn.Module(), graph)
    split = split_module(whole, whole, number_of.__getitem__, keep_original_order=True)
    for name, module in list(split.named_children()):
        if int(name.removeprefix("submod_")) in compilable:
            setattr(split, name, compiler.compile(cast("fx.GraphModule", module)))
    return split.forward


_DRAW_INSIDE = ("attention", "packed_")
"""Parts of the names of operators that draw for values which they compute themselves, in an order
of their own; recurrent ones do so as well."""


def draws_by_memory(node: fx.Node) -> bool:
    """Whether an operator draws in the order in which an operand's elements lie in memory."""
    if node.op != "call_function" or not is_random(node) or not node.all_input_nodes:
        return False
    # Of an operator of another library nobody knows whether it draws, and in which order.
    if not draws(node.target):
        return False
    own = family(node.target)
    return own not in RNNS and not any(part in own for part in _DRAW_INSIDE)


def draw_in_logical_order(graph: fx.Graph) -> None:
    """Make a graph's random operators draw in logical order; contiguous operands keep their kernel.

    Args:
        graph: changed in place.
    """
    for node in filter(draws_by_memory, list(graph.nodes)):
        node.target = _in_logical_order(node.target)


@cache
def _in_logical_order(draw: torch._ops.OpOverload) -> Callable[..., Any]:
    """An operator on contiguous copies of operands that are not; what it writes is copied back."""
    writes = draw._schema.is_mutable

    def drawn(*args: Any, **kwargs: Any) -> Any:
        own = [_contiguous(argument) for argument in args]
        result = draw(*own, **kwargs)
        if not writes or own[0] is args[0]:
            return result
        return args[0].copy_(result)

    drawn.__name__ = drawn.__qualname__ = family(draw)
    return drawn


def _contiguous(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.contiguous()
    if isinstance(argument, (list, tuple)):
        return [_contiguous(each) for each in argument]
    return argument


aten = torch.ops.aten


def writes_where(node: fx.Node) -> bool:
    """Whether a node writes a value that gets a gradient where a mask is true."""
    if node.target is not aten.index_put_.default or len(node.args) != 3:
        return False
    written, masks, value = node.args
    mask = masks[0] if isinstance(masks, list | tuple) and len(masks) == 1 else None
    if not all(isinstance(one, fx.Node) for one in (written, mask, value)):
        return False
    dtype, gains = (mask.meta["tensor"].dtype, value.meta["tensor"].requires_grad)  # type: ignore[union-attr]
    return bool(dtype == torch.bool and gains)


def write_where(
    tensor: torch.Tensor, masks: Sequence[torch.Tensor], value: torch.Tensor
) -> torch.Tensor:
    """Write a value into a tensor where a mask is true, in place, with the bits of `index_put_`.

    Args:
        tensor: of any shape, and of the value's element type.
        masks: a single one, of the tensor's first dims.
        value: broadcast to what the mask selects.

    Returns:
        The tensor.
    """
    (mask,) = masks
    return _Write.apply(tensor, mask, value)  # type: ignore[no-any-return, no-untyped-call]


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The tensor, written."""
        ctx.mark_dirty(tensor)
        ctx.save_for_backward(mask)
        ctx.shape = value.shape
        return tensor.index_put_([mask], value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, Any]:
        """Gradients of what was there before, and of the value."""
        (mask,) = ctx.saved_tensors
        zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        rest = gradient.index_put([mask], zero) if ctx.needs_input_grad[0] else None
        return rest, None, _gradient(gradient, mask, ctx.shape)


@one_operator
def _gradient(gradient: torch.Tensor, mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Gradient of a value that was written."""
    if isinstance(gradient, FakeTensor) or gradient.is_meta:
        return gradient.new_empty(shape)
    return gradient[mask].sum_to_size(shape)
