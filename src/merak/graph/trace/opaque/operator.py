"""Modules kept whole in a graph: one operator that calls the module as eager code does.

The inside of some modules cannot be written down as operators: what runs next, or a size, depends
there on the numbers in a tensor. Such a module becomes one node. Its operands are the module's
parameters and buffers and the tensors it is called with; when a segment runs, the module itself is
called with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.autograd import Function

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, register, role_of
from merak.graph.ir.ir import ModelGraph
from merak.graph.trace.opaque.functions import FunctionModule, is_function

T = TypeVar("T")


class ModuleRef:
    """Where a module is in the user's model; the module itself does not travel to other processes.

    Args:
        path: of the module.
        module: itself.
    """

    def __init__(self, path: str, module: nn.Module | None = None) -> None:
        self.path = path
        self.module = module

    def __reduce__(self) -> tuple[type[ModuleRef], tuple[str]]:
        """Only the path is written to disk."""
        return ModuleRef, (self.path,)

    def __deepcopy__(self, memo: Any) -> ModuleRef:
        """A copied graph calls the same module."""
        return self


@dataclass(frozen=True, slots=True)
class LoopCost:
    """What a call that loops over a sequence costs, found on tensors without numbers.

    Args:
        plain_bytes: the most that its forward takes at once, outputs included, without a backward.
        forward_bytes: the same with what the backward needs.
        backward_bytes: the most that its backward takes beyond that, gradients included.
        kernels: operators that read or write memory, of its forward and of its backward.
        traffic: bytes that these read and write.
    """

    plain_bytes: int
    forward_bytes: int
    backward_bytes: int
    kernels: tuple[int, int]
    traffic: tuple[int, int]


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """One call of a module that is kept whole.

    Its tensors are first those of the module, then those it is called with.

    Args:
        ref: the module.
        class_name: of the module.
        why: what in it cannot be traced, and where.
        states: per tensor of the module, its names in it (several where it is shared).
        parameters: how many of these are parameters; buffers follow.
        arguments: (args, kwargs) of its forward, with a `Slot` in the place of every tensor.
        numbers: slots that are numbers for the module, which others give as tensors.
        written: which of its tensors it writes into.
        outputs: the tensors that it returns.
        shared: (output, tensor) pairs that lie in one memory; the tensor ~n is the output n.
        modes: train or eval mode of it and its submodules.
        autocast: (device type, type) of the mixed precision that it runs in; None for none.
        grad: whether gradients were on where it is called.
        saved_bytes: what its backward needs, inputs and weights aside.
        flops: of the matrix products of its forward, for made-up values.
        watched: whether something is written, after the call, into what it returns or is given.
        always: which of its tensors get a gradient in every backward.
        loop: what it costs, where it is opaque for a loop.
    """

    ref: ModuleRef
    class_name: str
    why: str
    states: tuple[tuple[str, ...], ...]
    parameters: int
    arguments: Any
    numbers: frozenset[int]
    written: tuple[int, ...]
    outputs: tuple[TensorMeta, ...]
    shared: frozenset[tuple[int, int]]
    modes: tuple[bool, ...]
    autocast: tuple[str, torch.dtype] | None
    grad: bool
    saved_bytes: int
    flops: int
    watched: bool = False
    always: frozenset[int] = frozenset()
    loop: LoopCost | None = None

    @property
    def written_inputs(self) -> tuple[int, ...]:
        """Which of its tensors that are not the module's own it writes into."""
        return tuple(i for i in self.written if i >= len(self.states))


@dataclass(frozen=True, slots=True)
class CallCost:
    """What an opaque call returns and takes, as its operator has it in JSON.

    Args:
        outputs: shape and type of each of its outputs.
        saved_bytes: what its backward needs beside its operands.
        flops: of the matrix products of its forward.
        loop: its cost, where it loops over a sequence.
        number: of the call in its trace; none once the call is in the node's meta.
    """

    outputs: tuple[TensorMeta, ...]
    saved_bytes: int
    flops: int
    loop: LoopCost | None = None
    number: int | None = None

    def to_json(self) -> str:
        """The cost as text; calls that are alike have the same."""
        outputs = [(meta.shape, str(meta.dtype).removeprefix("torch.")) for meta in self.outputs]
        found = {"outputs": outputs, "saved": self.saved_bytes, "flops": self.flops}
        if self.loop is not None:
            found["loop"] = astuple(self.loop)
        if self.number is not None:
            found["number"] = self.number
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> CallCost:
        """The cost that `to_json` has written."""
        found = json.loads(text)
        loop = None
        if "loop" in found:
            plain, forward, backward, kernels, traffic = found["loop"]
            loop = LoopCost(plain, forward, backward, tuple(kernels), tuple(traffic))
        outputs = tuple(TensorMeta(tuple(s), getattr(torch, d)) for s, d in found["outputs"])
        return cls(outputs, found["saved"], found["flops"], loop, found.get("number"))


def cost_of(node: fx.Node) -> CallCost:
    """The cost of an opaque call or data-dependent region."""
    return CallCost.from_json(str(node.args[-1]))


def record_call(call: OpaqueCall, number: int, tensors: Sequence[torch.Tensor]) -> Any:
    """Record the call in a trace; see `attach_calls`.

    Args:
        call: what is called.
        number: of the call in this trace.
        tensors: its tensors.

    Returns:
        Its outputs.
    """
    cost = CallCost(call.outputs, call.saved_bytes, call.flops, call.loop, number)
    written = [tensors[i] for i in call.written]
    others = [t for i, t in enumerate(tensors) if i not in call.written]
    return OPAQUE_CALL(written, others, cost.to_json())


def attach_calls(module: fx.GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Put the recorded calls into the meta of an exported module's operators."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if is_opaque(node):
                cost = cost_of(node)
                assert cost.number is not None
                node.meta["opaque"] = calls[cost.number]
                # Without the number, calls of modules that are alike are alike.
                node.args = (*node.args[:-1], replace(cost, number=None).to_json())


def is_opaque(node: fx.Node) -> bool:
    """Whether a node calls an opaque module or function."""
    return role_of(node) is Role.OPAQUE_CALL and "region" not in node.meta


def is_dynamic_region(node: fx.Node) -> bool:
    """Whether a node stands for a data-dependent region."""
    return role_of(node) is Role.OPAQUE_CALL and "region" in node.meta


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors of a call, in the order of `OpaqueCall`."""
    written: Any
    others: Any
    written, others, _ = node.args
    return in_order(node.meta["opaque"], written, others)


def in_order(call: OpaqueCall, written: Sequence[T], others: Sequence[T]) -> list[T]:
    """The operator's tensors in the order of `OpaqueCall`: the operator has written ones first."""
    first, rest = iter(written), iter(others)
    count = len(written) + len(others)
    return [next(first) if i in call.written else next(rest) for i in range(count)]


def opaque_nodes(graph: ModelGraph) -> list[fx.Node]:
    """The operators that call modules that are kept whole, in order."""
    parts = (graph.prologue, *graph.segments)
    return [node for part in parts for node in part.graph.nodes if is_opaque(node)]


def opaque_calls(graph: ModelGraph) -> list[OpaqueCall]:
    """The calls of modules that are kept whole, in order."""
    return [node.meta["opaque"] for node in opaque_nodes(graph)]


def connect_modules(graph: ModelGraph, model: nn.Module) -> None:
    """Let the operators of a graph that was read from disk call the modules of this model."""
    for call in opaque_calls(graph):
        path = call.ref.path
        call.ref.module = FunctionModule(path) if is_function(path) else model.get_submodule(path)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a pretended call takes, in bytes."""

    saved: int
    forward: int = 0
    backward: int = 0


class _Pretended(Function):
    """Takes the shapes and the memory of the call, on tensors without numbers."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[TensorMeta], sizes: _Sizes, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Empty results, and as many saved bytes as the module keeps."""
        device = tensors[0].device if tensors else torch.device("cpu")
        made = tuple(torch.empty(m.shape, dtype=m.dtype, device=device) for m in outputs)
        plain = (m for m in made if not (m.is_floating_point() or m.is_complex()))
        ctx.mark_non_differentiable(*plain)
        ctx.tensors, ctx.sizes = tensors, sizes
        saved = sizes.saved if any(ctx.needs_input_grad) else 0
        _take(sizes.forward - saved - sum(m.num_bytes for m in outputs), device)
        if any(ctx.needs_input_grad):
            ctx.saved = torch.empty(sizes.saved, dtype=torch.uint8, device=device)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)
        made = [torch.empty_like(t) if needed else None for t, needed in wanted]
        taken = sum(g.nbytes for g in made if g is not None)
        _take(ctx.sizes.backward - taken, gradients[0].device)
        return None, None, *made


def _take(num_bytes: int, device: torch.device) -> None:
    """Hold memory for a moment, as what is pretended does."""
    torch.empty(max(0, num_bytes), dtype=torch.uint8, device=device)


def fake_outputs(
    outputs: Sequence[TensorMeta],
    saved_bytes: int,
    tensors: Sequence[torch.Tensor],
    loop: LoopCost | None = None,
) -> list[torch.Tensor]:
    """What the call is on tensors without numbers.

    Args:
        outputs: what it returns.
        saved_bytes: what its backward needs beside its operands.
        tensors: its operands.
        loop: what it costs, where it loops over a sequence.
    """
    if not outputs:
        return []
    sizes = _Sizes(saved_bytes)
    if loop is not None:
        is_plain = not torch.is_grad_enabled()
        taken = loop.plain_bytes if is_plain else loop.forward_bytes
        sizes = _Sizes(0 if is_plain else saved_bytes, taken, loop.backward_bytes)
    return list(_Pretended.apply(outputs, sizes, *tensors))  # type: ignore[no-untyped-call]


def fake_call(
    written: list[torch.Tensor], tensors: list[torch.Tensor], text: str
) -> list[torch.Tensor]:
    """The operator itself, which computes nothing: its outputs have the cost's shapes."""
    cost = CallCost.from_json(text)
    return fake_outputs(cost.outputs, cost.saved_bytes, [*written, *tensors], cost.loop)


OPAQUE_CALL = register(
    "opaque_call(Tensor(a!)[] written, Tensor[] tensors, str cost) -> Tensor[]",
    Role.OPAQUE_CALL,
    fake_call,
)
