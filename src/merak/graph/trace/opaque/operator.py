"""Opaque calls in a graph: one operator that calls a module as eager code does.

Some modules cannot be traced: their control flow, or a size, depends on the values of a tensor.
Such a module becomes one node. Its operands are the module's parameters, buffers and input tensors;
when a segment runs, the module itself is called with them.
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

LOSS_TAIL = "the loss"
"""Path of the tail of a loss, which is an opaque module beside the model."""

MODEL_LOSS = "the model's loss_function"
"""Path of a model's own loss of Python objects, which is another one."""

LOSSES = {
    LOSS_TAIL: "merak.eager_loss, which marks it",
    MODEL_LOSS: "the Python objects that it is given",
}
"""Paths of what is opaque beside the model, and why it is."""


class ModuleRef:
    """Reference to a module of the user's model, of which only the path is stored.

    Args:
        path: of the module, or a function's name.
        module: the module itself; None until `connect_modules` has found it.
    """

    def __init__(self, path: str, module: nn.Module | None = None) -> None:
        self.path = path
        self.module = module

    def __reduce__(self) -> tuple[type[ModuleRef], tuple[str]]:
        """Only the path is written to disk."""
        return ModuleRef, (self.path,)

    def __deepcopy__(self, memo: Any) -> ModuleRef:
        """Copies of a graph refer to the same module."""
        return self


@dataclass(frozen=True, slots=True)
class LoopCost:
    """Cost of an opaque call that loops over a sequence, found in a dry run.

    Args:
        plain_bytes: peak memory of its forward, outputs included, without gradients.
        forward_bytes: the same with gradients, saved tensors included.
        backward_bytes: peak memory of its backward beyond that, gradients included.
        kernels: operators that read or write memory, of its forward and of its backward.
        traffic: bytes that these read and write.
    """

    plain_bytes: int
    forward_bytes: int
    backward_bytes: int
    kernels: tuple[int, int]
    traffic: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CallCost:
    """Outputs and cost of an opaque call, stored in its operator as JSON.

    Args:
        outputs: shape and type of each of its outputs.
        saved_bytes: saved tensors of its backward beside its operands, weights among them.
        flops: of the matrix products of its forward, for synthetic values.
        loop: its cost, where it loops over a sequence.
        number: of the call in its trace; none once the call is in the node's meta.
    """

    outputs: tuple[TensorMeta, ...]
    saved_bytes: int = 0
    flops: int = 0
    loop: LoopCost | None = None
    number: int | None = None

    def to_json(self) -> str:
        """The cost as text; equal calls have equal text."""
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


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """Call of an opaque module or function.

    Its tensors are the module's own, followed by its inputs.

    Args:
        ref: the module.
        class_name: of the module.
        why: why it cannot be traced, and at which line.
        states: per tensor of the module, its names in it (several where it is tied).
        parameters: the number of parameters among these; buffers follow.
        arguments: (args, kwargs) of its forward, with a `Slot` in place of every tensor.
        scalars: slots of scalars, which the graph passes as tensors.
        cost: of it, with metadata of the tensors that it returns.
        modes: train or eval mode of it and its submodules.
        autocast: (device type, dtype) of the autocast that it runs in; None without autocast.
        grad: whether gradients were on where it is called.
        device: type of the device that it runs on.
        written: numbers of its tensors that it writes into.
        aliases: (output, tensor) pairs that share a storage; the tensor ~n is the output n.
        checks_aliases: whether later operators write into its inputs or outputs, so that aliases
            matter.
        always_used: numbers of its tensors that get a gradient in every backward.
        meets_replicas: whether it takes anything from other replicas, each time it is called.
    """

    ref: ModuleRef
    class_name: str
    why: str
    states: tuple[tuple[str, ...], ...]
    parameters: int
    arguments: Any
    scalars: frozenset[int]
    cost: CallCost
    modes: tuple[bool, ...]
    autocast: tuple[str, torch.dtype] | None
    grad: bool
    device: str
    written: tuple[int, ...] = ()
    aliases: frozenset[tuple[int, int]] = frozenset()
    checks_aliases: bool = False
    always_used: frozenset[int] = frozenset()
    meets_replicas: bool = False

    @property
    def module(self) -> nn.Module:
        """The module, which `connect_modules` has found."""
        assert self.ref.module is not None, f"{self.ref.path} is not connected to a model"
        return self.ref.module

    @property
    def is_loss(self) -> bool:
        """Whether it is of a loss, in which the default group is that of the replicas."""
        return self.ref.path in LOSSES

    @property
    def written_inputs(self) -> tuple[int, ...]:
        """Numbers of its inputs, the module's own tensors aside, that it writes into."""
        return tuple(i for i in self.written if i >= len(self.states))


def cost_of(node: fx.Node) -> CallCost:
    """The cost of an opaque call or data-dependent region."""
    return CallCost.from_json(str(node.args[-1]))


def record_call(call: OpaqueCall, number: int, tensors: Sequence[torch.Tensor]) -> Any:
    """Record an opaque call in a trace; see `attach_calls`.

    Args:
        call: the call.
        number: of the call in this trace.
        tensors: its tensors.

    Returns:
        Its outputs.
    """
    written = [tensors[i] for i in call.written]
    others = [t for i, t in enumerate(tensors) if i not in call.written]
    torch.autograd.graph.increment_version(written)  # the operator counts none of fakes
    return OPAQUE_CALL(written, others, replace(call.cost, number=number).to_json())


def attach_calls(module: fx.GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Attach the recorded calls to the operators of an exported module."""
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
    """The nodes of a graph that call opaque modules, in order."""
    parts = (graph.prologue, *graph.segments)
    return [node for part in parts for node in part.graph.nodes if is_opaque(node)]


def opaque_calls(graph: ModelGraph) -> list[OpaqueCall]:
    """The opaque calls of a graph, in order."""
    return [node.meta["opaque"] for node in opaque_nodes(graph)]


def connect_modules(graph: ModelGraph, model: nn.Module) -> None:
    """Connect the opaque calls of a graph that was read from disk to a model's modules."""
    for call in opaque_calls(graph):
        path = call.ref.path
        call.ref.module = FunctionModule(path) if is_function(path) else model.get_submodule(path)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Memory of a fake call, in bytes."""

    saved: int
    forward: int = 0
    backward: int = 0


class _FakeCall(Function):
    """Autograd function with the shapes and the memory of a call, for fake tensors."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[TensorMeta], sizes: _Sizes, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Empty results, and as many saved bytes as the module saves."""
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
    """Allocate memory and free it at once, for the peak."""
    torch.empty(max(0, num_bytes), dtype=torch.uint8, device=device)


def fake_outputs(cost: CallCost, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake outputs of a call, with the memory of the real one.

    Args:
        cost: of the call.
        tensors: its operands.
    """
    if not cost.outputs:
        return []
    sizes, loop = _Sizes(cost.saved_bytes), cost.loop
    if loop is not None:
        is_plain = not torch.is_grad_enabled()
        taken = loop.plain_bytes if is_plain else loop.forward_bytes
        sizes = _Sizes(0 if is_plain else cost.saved_bytes, taken, loop.backward_bytes)
    return list(_FakeCall.apply(cost.outputs, sizes, *tensors))  # type: ignore[no-untyped-call]


def fake_call(
    written: list[torch.Tensor], tensors: list[torch.Tensor], text: str
) -> list[torch.Tensor]:
    """Fake outputs of an opaque call: the operator's kernel, which computes nothing."""
    return fake_outputs(CallCost.from_json(text), [*written, *tensors])


OPAQUE_CALL = register(
    "opaque_call(Tensor(a!)[] written, Tensor[] tensors, str cost) -> Tensor[]",
    Role.OPAQUE_CALL,
    fake_call,
)
