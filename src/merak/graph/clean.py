"""Make an exported graph plain: no nested graphs, no assertions, no operators without effect."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from merak.graph.ir import Kind, TensorMeta

aten = torch.ops.aten

_ASSERTIONS = {
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten._assert_async.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
}
_CONVERSIONS = {"aten.to.dtype_layout", "aten.to.dtype", "aten.to.device", "aten.to.other"}
_SAME = {"aten.alias.default", "aten.lift_fresh_copy.default"}
_NO_GRADIENT = {
    "aten.detach.default",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.empty_like.default",
    "aten.full_like.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_empty.default",
    "aten.new_full.default",
    "aten.rand_like.default",
    "aten.randn_like.default",
}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def clean_graph(graph: fx.Graph) -> frozenset[str]:
    """Rewrite an exported graph in place, and give every node its Merak meta.

    Returns:
        The source files its nodes come from.
    """
    _inline_subgraphs(graph)
    sources: set[str] = set()
    for node in list(graph.nodes):
        if str(node.target) in _ASSERTIONS:
            graph.erase_node(node)
            continue
        _set_meta(node, sources)
        if (replaced := _without_effect(node)) is not None:
            node.replace_all_uses_with(replaced)
            graph.erase_node(node)
    eliminate_dead_code(graph)
    return frozenset(sources)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase nodes whose result nobody reads, but for operators that write into a tensor."""
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node.users:
            continue
        if node.op == "call_function" and is_mutating(node):
            continue
        graph.erase_node(node)


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator writes into one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(
        target._schema.is_mutable or _updates_running_statistics(node)
    )


def _updates_running_statistics(node: fx.Node) -> bool:
    """Batch norm in training writes its running mean and variance, though no schema says so."""
    if str(node.target) not in ("aten.batch_norm.default", "aten.instance_norm.default"):
        return False
    return bool(node.args[5]) and isinstance(node.args[3], fx.Node)


def is_random(node: fx.Node) -> bool:
    """Whether the operator draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if str(target) == "aten.scaled_dot_product_attention.default":
        return bool(_argument(node, 4, "dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in target.tags or str(target) in (
        "aten.dropout.default",
        "aten.dropout_.default",
        "aten.alpha_dropout.default",
        "aten.feature_dropout.default",
    )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _inline_subgraphs(graph: fx.Graph) -> None:
    """Replace `wrap_with_set_grad_enabled` and `wrap_with_autocast` by what they wrap."""
    module = graph.owning_module
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node))
        body: Any = getattr(module, str(node.args[position].target))
        _inline_subgraphs(body.graph)
        detached = name == "wrap_with_set_grad_enabled" and node.args[0] is False
        _inline(graph, node, body.graph, node.args[position + 1 :], detached)
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)


def _inline(
    graph: fx.Graph, call: fx.Node, body: fx.Graph, args: tuple[Any, ...], detached: bool
) -> None:
    env: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), args, strict=True))
    results: tuple[Any, ...] = ()
    with graph.inserting_before(call):
        for node in body.nodes:
            if node.op == "output":
                results = tuple(env[n] for n in node.args[0])
            elif node.op != "placeholder":
                env[node] = graph.node_copy(node, lambda n: env[n])
        if detached:
            results = tuple(_detach(graph, result) for result in results)
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user} reads the tuple of {call} as a whole")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def _detach(graph: fx.Graph, result: fx.Node) -> fx.Node:
    node = graph.call_function(aten.detach.default, (result,))
    node.meta |= {k: v for k, v in result.meta.items() if k in ("val", "stack_trace")}
    return node


def _set_meta(node: fx.Node, sources: set[str]) -> None:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [f for f in frames if "/merak/graph/" not in f[0]]
    where = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    sources.update(f[0] for f in frames)
    modules = node.meta.get("nn_module_stack") or {}
    path = f"{next((p for p, _ in reversed(modules.values())), '')}.".removeprefix("model.")
    tensor = tensor_meta(node.meta.get("val"), _carries_gradient(node))
    kept = {k: node.meta[k] for k in ("kind", "name") if k in node.meta}
    node.meta = {"tensor": tensor, "source": where, "module": path.rstrip("."), **kept}


def tensor_meta(value: Any, requires_grad: bool) -> Any:
    """What a node yields, from the fake value that the trace gave it."""
    if isinstance(value, torch.Tensor):
        gradient = requires_grad and (value.is_floating_point() or value.is_complex())
        return TensorMeta(tuple(int(s) for s in value.shape), value.dtype, gradient)
    if isinstance(value, (tuple, list)):
        return tuple(tensor_meta(v, requires_grad) for v in value)
    return None


def _carries_gradient(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return bool(
            node.meta.get("kind") is Kind.PARAMETER
            and getattr(node.meta.get("val"), "requires_grad", True)
        )
    if str(node.target) in _NO_GRADIENT:
        return False
    return any(requires_grad(parent.meta.get("tensor")) for parent in node.all_input_nodes)


def requires_grad(meta: Any) -> bool:
    """Whether a gradient flows through a node with this meta."""
    if isinstance(meta, TensorMeta):
        return meta.requires_grad
    return isinstance(meta, tuple) and any(requires_grad(m) for m in meta)


def _without_effect(node: fx.Node) -> fx.Node | None:
    """The argument that a node returns unchanged, or None."""
    name = str(node.target)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name in _SAME:
        return source
    if name == "aten.dropout.default" and (node.args[1] == 0 or not node.args[2]):
        return source
    same = node.meta.get("tensor") == source.meta.get("tensor")
    copies = node.kwargs.get("copy", False) or any(a is True for a in node.args[2:])
    if name in _CONVERSIONS and same and not copies:
        return source
    return None
