"""Gradients that a model takes in its forward, written out as operators of its graph.

`torch.autograd.grad` becomes the operators that its backward runs. They read the forward's results;
where they need an intermediate result of one of its operators (the noise of a dropout, the
mean of a norm), that operator is written out as well. A second derivative is then simply the
derivative of these operators, and the graph can be cut and split as any other.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from merak.core.errors import TraceError
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import draws
from merak.graph.ir.reachable import reachable
from merak.graph.trace.autograd.calls import (
    creates_graph,
    is_autograd_call,
    is_function,
    is_gradient_switch,
)
from merak.graph.trace.autograd.steps import Step, Steps, run_steps
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.node_source import line_of, modules_of

aten = torch.ops.aten

CONSTANT = "constant"
"""In the meta of a node that is written out: whether autograd has found it to have no gradient."""

_SOURCE_META = ("stack_trace", "nn_module_stack")


def expand_autograd(graph: fx.Graph) -> None:
    """Write out the gradients that a model takes itself as operators.

    Args:
        graph: as exported, without nested graphs; changed in place.

    Raises:
        UntraceableError: one cannot be written as operators.
    """
    calls = [node for node in graph.nodes if is_autograd_call(node)]
    if calls:
        for call in calls:
            _refuse_opaque(graph, call)
        try:
            steps = run_steps(graph)
            _Expansion(graph, steps).run()
        except TraceError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0].rstrip(".")
            reason = f"{type(error).__name__}: {text}"
            raise _untraceable(calls[-1], reason) from error
    for node in list(graph.nodes):
        if is_gradient_switch(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _untraceable(call: fx.Node, reason: str) -> UntraceableError:
    place = line_of(call) or "an unknown line"
    return UntraceableError(
        f"the gradient that the model takes at {place} cannot be written as operators "
        f"({reason}); take it in the forward of a module of its own, which is then opaque.",
        f"{place}: a gradient is taken there that cannot be written as operators ({reason})",
        modules_of(call),
    )


def _refuse_opaque(graph: fx.Graph, call: fx.Node) -> None:
    """Refuse a gradient through an operator whose backward the trace does not have."""
    outputs, inputs = (_nodes(a) for a in call.args[:2])
    after: set[fx.Node] = set(inputs)
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    before = reachable(outputs, lambda node: after.intersection(node.all_input_nodes))
    for node in after & before:
        target = node.target
        is_known = node.op != "call_function" or target is operator.getitem
        if is_known or is_autograd_call(node) or is_gradient_switch(node):
            continue
        is_open = isinstance(target, torch._ops.OpOverload) and target.namespace in _OPEN
        if not is_open and not is_function(node):
            opaque = node.meta.get("opaque")
            what = f"{opaque.ref.path}, which is opaque" if opaque is not None else target
            raise _untraceable(call, f"it goes through {what}")


_OPEN = ("aten", "prim", "prims")


def _nodes(argument: Any) -> list[fx.Node]:
    return [node for node in argument if isinstance(node, fx.Node)]


class _Expansion:
    """Replaces nodes by the operators that autograd has run for them."""

    def __init__(self, graph: fx.Graph, steps: Steps) -> None:
        self._graph = graph
        self._steps = steps
        # Nodes that return a tensor, by the tensor's identity; alone, and in a tuple.
        self._nodes: dict[int, fx.Node] = {}
        self._outputs: dict[int, tuple[fx.Node, int]] = {}
        self._opened: set[fx.Node] = set()
        self._live: set[Step] = set()
        # What backwards without a graph of their own read of the forward, detached.
        self._detached: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        self._find_outputs()
        self._find_live()
        for node in list(self._graph.nodes):
            if node.op != "output":
                self._visit(node)

    def _find_outputs(self) -> None:
        """Find the tensors that nodes return, alone or in a tuple."""
        for node, value in self._steps.values.items():
            if isinstance(value, torch.Tensor):
                self._outputs[id(value)] = (node, -1)
            elif not is_autograd_call(node):
                for i, tensor in enumerate(value if isinstance(value, (tuple, list)) else ()):
                    if isinstance(tensor, torch.Tensor):
                        self._outputs.setdefault(id(tensor), (node, i))

    def _find_live(self) -> None:
        """Find steps of backwards whose results are read, and the nodes that they look into."""
        todo: list[torch.Tensor] = []
        for node, value in self._steps.values.items():
            if not is_autograd_call(node):
                continue
            todo += value
            for step in self._steps.of[node]:
                if step.func._schema.is_mutable:
                    self._live.add(step)
                    todo += step.tensors()
        while todo:
            tensor = todo.pop()
            known = self._outputs.get(id(tensor))
            maker = self._steps.makers.get(id(tensor))
            if known is not None and (maker is None or not is_autograd_call(maker.node)):
                continue
            if maker is None:
                raise RuntimeError("it reads a tensor that the model has not made")
            self._note(maker, todo)

    def _note(self, step: Step, todo: list[torch.Tensor]) -> None:
        """Mark a step as live, or its node as one to write out."""
        if is_function(step.node) and (step.func._schema.is_mutable or draws(step.func)):
            raise RuntimeError(f"an autograd function computes {step.func} for its backward")
        copied = step.is_view or step.is_saved or is_function(step.node)
        if not copied and not is_autograd_call(step.node):
            self._opened.add(step.node)
        elif step not in self._live:
            self._live.add(step)
            todo += step.tensors()

    def _visit(self, node: fx.Node) -> None:
        value = self._steps.values[node]
        parent = node.args[0] if node.target is operator.getitem else None
        if is_autograd_call(node):
            self._expand(node, value)
            if not node.users:
                self._graph.erase_node(node)
        elif is_gradient_switch(node):
            pass
        elif node in self._opened:
            for step in self._steps.of[node]:
                self._emit(step, node)
            self._replace(node, value)
        elif isinstance(parent, fx.Node) and (parent in self._opened or is_autograd_call(parent)):
            self._replace(node, value)
        else:
            _set_value(node, value)
            if isinstance(value, torch.Tensor):
                self._nodes[id(value)] = node

    def _replace(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            node.replace_all_uses_with(self._nodes[id(value)])
        parent = node.args[0] if node.target is operator.getitem else None
        if not node.users:
            self._graph.erase_node(node)
        if isinstance(parent, fx.Node) and not parent.users:
            self._graph.erase_node(parent)  # each of its results has been replaced

    def _expand(self, call: fx.Node, gradients: list[torch.Tensor]) -> None:
        for step in self._steps.of[call]:
            if step in self._live:
                self._emit(step, call)
        for gradient in gradients:
            node = self._node(gradient, call)
            self._nodes[id(gradient)] = node if creates_graph(call) else self._detach(node, call)

    def _emit(self, step: Step, at: fx.Node) -> None:
        """Write a step as a node, before another one."""
        if step.is_saved:
            source = self._node(step.args[0], at)
            if step.result.requires_grad:  # autograd returns another tensor than the view
                source.meta.pop(CONSTANT, None)
            self._nodes[id(step.result)] = source
            return
        # Gradients without a graph of their own are a constant from their first operator on: a
        # segment that ends between two of them would differentiate the first.
        is_constant = is_autograd_call(step.node) and not creates_graph(step.node)

        def operand(tensor: torch.Tensor) -> fx.Node:
            node = self._node(tensor, at)
            return self._detach(node, at) if is_constant else node

        args, kwargs = tree_map_only(torch.Tensor, operand, (step.args, step.kwargs))
        with self._graph.inserting_before(at):
            node = self._graph.call_function(step.func, args, kwargs)
            _describe(node, at, step.result)
            if isinstance(step.result, torch.Tensor):
                self._found(step, step.result, node)
                return
            for i, tensor in enumerate(step.result):
                if isinstance(tensor, torch.Tensor):
                    one = self._graph.call_function(operator.getitem, (node, i))
                    _describe(one, at, tensor)
                    self._found(step, tensor, one)

    def _found(self, step: Step, tensor: torch.Tensor, node: fx.Node) -> None:
        """Note the node that returns a step's result."""
        if is_function(step.node):
            # To its backward, an intermediate result of an autograd function is a constant.
            one = self._graph.call_function(aten.detach.default, (node,))
            _describe(one, node, tensor)
            node = one
        elif step.is_constant(tensor):
            node.meta[CONSTANT] = True
        self._nodes[id(tensor)] = node

    def _detach(self, node: fx.Node, at: fx.Node) -> fx.Node:
        """A node without its gradient, detached once, before another one."""
        if node not in self._detached:
            with self._graph.inserting_before(at):
                made = self._graph.call_function(aten.detach.default, (node,))
            _describe(made, node, node.meta["val"])
            self._detached[node] = self._detached[made] = made
        return self._detached[node]

    def _node(self, tensor: torch.Tensor, at: fx.Node) -> fx.Node:
        """The node that yields a tensor."""
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) in self._outputs:
            node, place = self._outputs[id(tensor)]
            with self._graph.inserting_after(node):
                one = self._graph.call_function(operator.getitem, (node, place))
            _describe(one, node, tensor)
            self._nodes[id(tensor)] = one
            return one
        self._emit(self._steps.makers[id(tensor)], at)
        return self._nodes[id(tensor)]


def _describe(node: fx.Node, source: fx.Node, value: Any) -> None:
    node.meta = {k: source.meta[k] for k in _SOURCE_META if k in source.meta}
    _set_value(node, value)


def _set_value(node: fx.Node, value: Any) -> None:
    """Set a node's fake value: all from one run, so that views share a storage."""
    if node.meta.get("kind") is Kind.PARAMETER:
        node.meta["val"] = value  # whose requires_grad is read later
    else:
        node.meta["val"] = tree_map_only(torch.Tensor, torch.Tensor.detach, value)
