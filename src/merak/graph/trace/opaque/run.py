"""Execution of opaque modules: forward, backward, writes and train modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import BackwardHook

from merak.core.errors import TrainingError
from merak.graph.trace.opaque.collectives import may_communicate, refused_collectives
from merak.graph.trace.opaque.operator import OpaqueCall, fake_outputs, in_order
from merak.graph.trace.opaque.pytree import fill, flatten
from merak.graph.trace.state.places import StateLeft
from merak.graph.trace.state.slots import MISSING
from merak.graph.trace.state.snapshot import Snapshot


def opaque_function(call: OpaqueCall) -> Callable[..., list[torch.Tensor]]:
    """The function that runs an opaque call in generated code."""

    def opaque_call(
        written: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], cost: str
    ) -> list[torch.Tensor]:
        return run(call, in_order(call, written, tensors))

    return opaque_call


def run(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run an opaque call on real tensors.

    Args:
        call: the call.
        tensors: the module's parameters and buffers, and its inputs.

    Returns:
        Its output tensors. Tensors that it writes into are changed.

    Raises:
        TrainingError: its writes, outputs or aliases differ from those that its probe has found.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return fake_outputs(call.cost, tensors)
    needs_gradient = call.grad and torch.is_grad_enabled()
    num_states = len(call.states)
    # As in its probe, and behind a boundary of stages: what it draws may follow the memory format.
    given = [t if i < num_states else t.contiguous() for i, t in enumerate(tensors)]
    with autocast_of(call):
        if needs_gradient and any(tensor.requires_grad for tensor in given):
            results = list(_OpaqueFunction.apply(call, *given))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                results = _outcome(call, _separate(call, given))
    for place in reversed(call.written_inputs):
        tensors[place].copy_(results.pop())
    return results


class _OpaqueFunction(Function):
    """Autograd function of the call, in whose backward the module has its weights again.

    Code of the module that runs in the backward may read them: recomputation, reversible layers.
    """

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the module on leaves of its own, and save its graph for the backward."""
        leaves = [t.detach().requires_grad_() if t.requires_grad else t for t in tensors]
        before = Snapshot.take(call.module, attributes_only=True)
        with torch.enable_grad():
            results = _outcome(call, _separate(call, leaves))
        ctx.call, ctx.leaves = call, leaves
        # Not the results, whose memory nothing else may need until then.
        ctx.roots = [get_gradient_edge(r) if r.requires_grad else None for r in results]
        ctx.left = [one for one in before.changes() if one.place.kind is object]
        ctx.set_materialize_grads(False)
        outputs = tuple(result.detach() for result in results)
        plain = [o for o in outputs if not (o.is_floating_point() or o.is_complex())]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the module's own backward, with its attributes as the forward left them."""
        pairs = [
            (root, gradient)
            for root, gradient in zip(ctx.roots, gradients, strict=True)
            if gradient is not None and root is not None
        ]
        call, leaves = ctx.call, ctx.leaves
        where = in_place(call, leaves), _in_place_again(ctx.left)
        with where[0], where[1], _alone(call), torch.enable_grad():
            if pairs:
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        found = [leaf.grad if leaf.requires_grad else None for leaf in leaves]
        for i in call.always_used:  # which what is planned counts on, whatever a loss selects
            found[i] = torch.zeros_like(leaves[i]) if found[i] is None else found[i]
        return None, *found


def _separate(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of inputs that the module writes into: autograd must see the write and the value."""
    copied = call.written_inputs
    return [t.clone() if i in copied else t for i, t in enumerate(tensors)]


def _outcome(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The module's outputs, followed by the inputs that it wrote into."""
    versions = [tensor._version for tensor in tensors]
    with _alone(call):
        results = invoke(call, tensors)
    path = call.ref.path
    for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
        if tensor._version != version and i not in call.written:
            raise TrainingError(
                f"the module {path}, which is opaque for {call.why}, writes into {_what(call, i)} "
                "for these values of the batch and did not when the model was traced; let it write "
                "there always, or make a new tensor."
            )
    found, _ = flatten(results)
    _refuse_other_outputs(call, found)
    if call.checks_aliases and not sharing(found, tensors) <= call.aliases:
        raise TrainingError(
            f"the module {path}, which is opaque for {call.why}, returns for these values of the "
            "batch what shares memory with something that is written into later, and did not when "
            "the model was traced; let it return a clone."
        )
    taken = {t.untyped_storage()._cdata for t in tensors}
    own = [t.clone() if t.untyped_storage()._cdata in taken else t for t in found]
    return [*own, *(tensors[i] for i in call.written_inputs)]


def _alone(call: OpaqueCall) -> AbstractContextManager[Any]:
    """Context in which a module may not communicate, in code that its probe has not come to."""
    if call.is_loss:
        return refused_collectives(of_model=call.meets_replicas)
    is_probed = call.cost.loop is not None  # no line of which depends on values
    return (
        refused_collectives() if not is_probed and may_communicate(call.module) else nullcontext()
    )


def sharing(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> frozenset[tuple[int, int]]:
    """Pairs of an output and a tensor, or ~number of a later output, that share a storage."""
    places: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.untyped_storage()._cdata, []).append(i)
    found = set()
    for i, output in reversed(list(enumerate(outputs))):
        known = places.setdefault(output.untyped_storage()._cdata, [])
        found |= {(i, place) for place in known}
        known.append(~i)
    return frozenset(found)


def _refuse_other_outputs(call: OpaqueCall, found: Sequence[torch.Tensor]) -> None:
    known = [(meta.shape, meta.dtype) for meta in call.cost.outputs]
    now = [(tuple(tensor.shape), tensor.dtype) for tensor in found]
    if now != known:
        raise TrainingError(
            f"the module {call.ref.path}, which is opaque for {call.why}, returns {_listed(now)} "
            f"for these values of the batch and {_listed(known)} when the model was traced; let "
            "the sizes of what it returns not depend on values."
        )


def invoke(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> Any:
    """The module's result; buffers that it replaces are written instead."""
    module = call.module
    inputs = tensors[len(call.states) :]
    values = [t.item() if i in call.scalars else t for i, t in enumerate(inputs)]
    args, kwargs = fill(call.arguments, values)
    with in_place(call, tensors):
        result = _forward(module, args, kwargs)
        for names, tensor in zip(call.states, tensors, strict=False):
            owner, name = _slot(module, names[0])
            made = owner._buffers.get(name)
            if made is not None and made is not tensor:
                tensor.copy_(made.detach())
    return result


def _forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's forward with its backward hooks; its forward hooks run around the call."""
    hooks, _ = module._get_backward_hooks()
    before = module._get_backward_pre_hooks()
    if not (hooks or before):
        return module.forward(*args, **kwargs)
    hook = BackwardHook(module, hooks, before)
    args = hook.setup_input_hook(args)
    result = module.forward(*args, **kwargs)
    return hook.setup_output_hook(result)


@contextmanager
def in_place(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put parameters and buffers into the module, and the train modes it was traced in."""
    module = call.module
    before: list[tuple[dict[str, Any], str, Any]] = []
    modes = [part.training for part in module.modules()]
    try:
        for names, tensor in zip(call.states, tensors, strict=False):
            for path in names:
                owner, name = _slot(module, path)
                slots: Any = owner._parameters if name in owner._parameters else owner._buffers
                before.append((slots, name, slots[name]))
                slots[name] = tensor
        _train(module, call.modes)
        with _flat_weights(module):
            yield
    finally:
        _train(module, modes)
        for slots, name, tensor in reversed(before):
            slots[name] = tensor


@contextmanager
def _flat_weights(module: nn.Module) -> Iterator[None]:
    """Put the parameters into the second list of them that recurrent modules have."""
    found = [part for part in module.modules() if "_flat_weights_names" in vars(part)]
    before = [vars(part)["_flat_weights"] for part in found]
    try:
        for part in found:
            names: Any = part._flat_weights_names
            vars(part)["_flat_weights"] = [getattr(part, name, None) for name in names]
        yield
    finally:
        for part, weights in zip(found, before, strict=True):
            vars(part)["_flat_weights"] = weights


def _train(module: nn.Module, modes: Sequence[bool]) -> None:
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode


def _slot(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


@contextmanager
def _in_place_again(left: Sequence[StateLeft]) -> Iterator[None]:
    """Set the attributes that the module's forward gave it; another call may have followed."""
    now = [one.place.owner.get(one.key, MISSING) for one in left]
    try:
        for one in left:
            one.put(one.new)
        yield
    finally:
        for one, value in zip(left, now, strict=True):
            one.put(value)


def autocast_of(call: OpaqueCall) -> AbstractContextManager[Any]:
    """The autocast context that a module runs in."""
    return nullcontext() if call.autocast is None else torch.autocast(*call.autocast)


def _what(call: OpaqueCall, place: int) -> str:
    if place < len(call.states):
        return f"{call.ref.path}.{call.states[place][0]}"
    return f"the tensor number {place - len(call.states)} that it is called with"


def _listed(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} of {shape}" for shape, dtype in tensors) or "no tensors"
