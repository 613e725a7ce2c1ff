"""The operators that the call of a block has recorded, and their copies for another block."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from merak.graph.ir.custom_operators import role_of
from merak.graph.trace.repeats.block import NotRepeatable

_SWITCHES = (torch._C._set_grad_enabled, operator.getitem)


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive nodes of a trace that one call has recorded.

    Args:
        nodes: all of them.
        outputs: those whose values the call returns.
        outside: nodes before them that they read.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    outside: tuple[fx.Node, ...]

    @staticmethod
    def of(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Region:
        """The region of some nodes.

        Args:
            nodes: in the order of the trace.
            outputs: those whose values are returned.

        Raises:
            NotRepeatable: one is no operator on tensors of fixed sizes.
        """
        inside = set(nodes)
        for node in nodes:
            known = isinstance(node.target, torch._ops.OpOverload) or node.target in _SWITCHES
            if node.op != "call_function" or not known or role_of(node) is not None:
                raise NotRepeatable(f"{node} is no operator that could be copied")
            if not all(map(_is_fixed, tree_leaves(node.meta.get("val")))):
                raise NotRepeatable(f"the size of {node} depends on values")
        places = Counter(storage_id(value) for node in nodes for value in _tensors(node))
        if any(places[storage_id(value)] > 1 for node in outputs for value in _tensors(node)):
            raise NotRepeatable("it returns a view, or what has one")
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
        return Region(tuple(nodes), tuple(outputs), tuple(read))

    def left_open(self) -> Iterator[fx.Node]:
        """Nodes whose values something outside reads, though they are no outputs."""
        inside, outputs = set(self.nodes), set(self.outputs)
        for node in self.nodes:
            if node not in outputs and not inside.issuperset(node.users):
                yield node

    def copy(
        self, graph: fx.Graph, instead: Mapping[fx.Node, fx.Node], paths: tuple[str, str]
    ) -> dict[fx.Node, fx.Node]:
        """Record the same operators once more, at the end of the trace.

        Args:
            graph: of the trace.
            instead: nodes that the copies read in place of those outside.
            paths: of the block in the names of modules, and of the one in its place.

        Returns:
            The copy of every node.
        """
        made, outputs = dict(instead), set(self.outputs)
        values = _Values({})
        for node, other in instead.items():
            values.note(node.meta.get("val"), other.meta.get("val"))
        for node in self.nodes:
            args: Any = fx.map_arg(node.args, made.__getitem__)
            kwargs: Any = fx.map_arg(node.kwargs, made.__getitem__)
            new = graph.create_node("call_function", node.target, args, kwargs, node.name)
            new.meta = dict(node.meta)
            if node not in outputs:
                new.meta["val"] = tree_map_only(FakeTensor, values.like, node.meta.get("val"))
            stack = node.meta.get("nn_module_stack")
            if stack is not None:
                new.meta["nn_module_stack"] = _renamed(stack, *paths)
            made[node] = new
        return made


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of copied nodes: views of one tensor are views of one in the copies, too.

    Args:
        storages: of the copies, by the identity of the storage that each stands for.
    """

    storages: dict[int, torch.UntypedStorage]

    def note(self, value: Any, instead: Any) -> None:
        """Note the value that stands for one outside of the region."""
        if isinstance(value, torch.Tensor) and isinstance(instead, torch.Tensor):
            with torch._C.DisableTorchFunction():
                self.storages[storage_id(value)] = instead.untyped_storage()

    def like(self, value: FakeTensor) -> FakeTensor:
        """A fake tensor with the metadata of another, in the storage that stands for its."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            storage = value.untyped_storage()
            if storage._cdata not in self.storages:
                whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                self.storages[storage._cdata] = whole.untyped_storage()
            place = (value.storage_offset(), value.shape, value.stride())
            made = torch.empty(0, dtype=value.dtype, device="meta")
            made.set_(self.storages[storage._cdata], *place)
            made.requires_grad_(value.requires_grad)
            return FakeTensor(value.fake_mode, made, value.device)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, while the tensor lives."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _renamed(stack: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The modules around an operator, with those of another block."""

    def own(path: str) -> str:
        is_inside = path == old or path.startswith((f"{old}.", f"{old}@"))
        return new + path[len(old) :] if is_inside else path

    return {own(key): (own(path), cls) for key, (path, cls) in stack.items()}


def _is_fixed(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(type(size) is int for size in (*value.shape, *value.stride()))
    return value is None or type(value) in (bool, int, float)


def nodes_after(start: fx.Node) -> Iterator[fx.Node]:
    """The nodes behind one, in the order of the trace."""
    node = start.next
    while node.op != "root":
        yield node
        node = node.next


def node_of(tensor: torch.Tensor, tracer: Any) -> fx.Node:
    """The node whose value a fake tensor is.

    Raises:
        NotRepeatable: there is none, or its value is known.
    """
    found = get_proxy_slot(tensor, tracer, None)
    if found is None or found.constant is not None:
        raise NotRepeatable("a tensor that the trace does not follow")
    node: fx.Node = found.proxy.node
    return node


def is_followed(tensor: torch.Tensor, tracer: Any) -> bool:
    """Whether a tensor stands for a node."""
    return get_proxy_slot(tensor, tracer, None) is not None


def follow(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Bind a tensor to another node from now on."""
    track_tensor(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


def tracked_like(value: torch.Tensor, node: fx.Node, tracer: Any) -> torch.Tensor:
    """A fake tensor with the metadata of another, as the value of a node."""
    assert isinstance(value, FakeTensor)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), value.fake_mode:
        made: torch.Tensor = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        if value.requires_grad:
            with torch.enable_grad():
                made = made.requires_grad_().clone()  # the result of an operator, no leaf
    follow(made, node, tracer)
    set_meta(fx.Proxy(node, tracer), made)
    return made
