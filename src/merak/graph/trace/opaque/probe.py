"""Probes of opaque modules: one module is called on synthetic values to find what it returns.

Only the one module is called, on the CPU or the model's device. What its outputs depend on is
checked with several sets of values, and again when the module runs.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from merak.core.errors import TraceError
from merak.core.start.device import device_or_cpu
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.autograd.calls import applying, plain_apply
from merak.graph.trace.explain import causes
from merak.graph.trace.opaque.buffer_writes import may_write
from merak.graph.trace.opaque.collectives import (
    refuse_in_backward,
    refused_collectives,
)
from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.trace.opaque.operator import CallCost, OpaqueCall
from merak.graph.trace.opaque.pytree import NotPlain, flatten
from merak.graph.trace.opaque.run import autocast_of, invoke, sharing
from merak.graph.trace.state.snapshot import Snapshot
from merak.ops.collectives import of_equal_ranks
from merak.ops.recording import recorded_by

_MODULE_CALL = nn.Module._wrapped_call_impl
_MODULE_GETATTR = nn.Module.__getattr__
_MOST_BYTES = 2**30
"""Weights of more bytes than this are one number seen as many, so that they take no memory."""


class CannotBeOpaque(TraceError):
    """A module that cannot be opaque; the message is a sentence about it.

    Args:
        path: of the module.
        why: the cause.
        is_object: whether the cause is an object that is passed or returned, such as a cache.
    """

    def __init__(self, path: str, why: str, *, is_object: bool = False) -> None:
        super().__init__(f"{path} cannot be opaque: {why}")
        self.path = path
        self.why = why
        self.is_object = is_object


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Outputs, writes and cost of a module, as a probe has found them.

    Args:
        result: nested, with slots in place of tensors.
        cost: as of `OpaqueCall`, with metadata of these tensors.
        written: as of `OpaqueCall`.
        aliases: as of `OpaqueCall`.
        always_used: as of `OpaqueCall`.
        meets_replicas: as of `OpaqueCall`.
    """

    result: Any
    cost: CallCost
    written: tuple[int, ...]
    aliases: frozenset[tuple[int, int]]
    always_used: frozenset[int] = frozenset()
    meets_replicas: bool = False


Values = Callable[[TensorMeta, torch.Generator], torch.Tensor]
"""Makes the values of an input."""


def probe(
    call: OpaqueCall,
    metas: Sequence[TensorMeta],
    real: Mapping[str, torch.Tensor],
    device: torch.device,
    modes: Sequence[TorchFunctionMode] = (),
    example: Sequence[torch.Tensor | None] = (),
) -> ProbeResult:
    """Call a module on values of an example batch and on synthetic ones, and measure it.

    Args:
        call: without its outputs, which are to be found.
        metas: metadata of its tensors, the module's own first.
        real: parameters and buffers that have values already, by name in the module.
        device: device that it will run on.
        modes: function modes to run it in, the outermost first.
        example: values of its inputs for an example batch, where these follow from it alone.

    Raises:
        CannotBeOpaque: it fails on all values that were tried, or its outputs' sizes depend on
            them.
    """
    call, device = tried_on(call, device)
    try:
        return in_own_thread(_probe, _Probe(call, metas, real, device, modes, example))
    except BaseException as failure:
        for error in causes(failure):  # whose frames hold weights and activations
            traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise


def tried_on(call: OpaqueCall, device: torch.device) -> tuple[OpaqueCall, torch.device]:
    """A call and the device to try it on: the CPU, in its autocast, where its own is not here.

    Autograd runs no backward on a device that is not here, of fake tensors either, and the autocast
    of another device converts no tensors of the CPU.
    """
    own = device_or_cpu(device)
    autocast = call.autocast and (own.type, call.autocast[1])
    return replace(call, device=own.type, autocast=autocast), own


@dataclass(frozen=True, slots=True)
class _Probe:
    """The arguments of `probe`."""

    call: OpaqueCall
    metas: Sequence[TensorMeta]
    real: Mapping[str, torch.Tensor]
    device: torch.device
    modes: Sequence[TorchFunctionMode]
    example: Sequence[torch.Tensor | None] = ()


def _probe(subject: _Probe) -> ProbeResult:
    path = subject.call.ref.path
    found: list[ProbeResult] = []
    errors: list[Exception] = []
    synthetic = replace(subject, example=())
    every = (_usual, _other, _ones, _fractions)
    tries = [(synthetic, *own) for own in product(_numbers(subject), every)]
    if any(value is not None for value in subject.example):
        numbers = next(_numbers(subject))
        tries = [(subject, numbers, _usual), (subject, numbers, _fractions), *tries]
    is_of_example = False
    with undisturbed(subject.call):
        for one, numbers, values in tries:
            try:
                found.append(_try(one, values, numbers))
                is_of_example |= one is subject
            except TraceError:
                raise
            except Exception as error:  # whatever the module's code does with synthetic values
                errors.append(error)
            if len(found) > 1 + is_of_example:
                break
    if not found:
        reason = f"{type(errors[0]).__name__}: {str(errors[0]).strip().partition(chr(10))[0]}"
        both = (
            "the values of the first batch and on synthetic ones" if tries[0][0] is subject else ""
        )
        raise CannotBeOpaque(path, f"it fails on {both or 'synthetic values'} ({reason})")
    first, *others = found
    for other in others:
        if (other.cost.outputs, other.result) != (first.cost.outputs, first.result):
            raise CannotBeOpaque(
                path, "what it returns has sizes, or numbers, that depend on values"
            )
    suspected = may_write(subject.call.module)
    written = sorted(
        {place for one in found for place in one.written}
        | {i for i, names in enumerate(subject.call.states) if suspected.intersection(names)}
    )
    aliases = frozenset(pair for one in found for pair in one.aliases)
    most = first if is_of_example else max(found, key=lambda one: one.cost.flops)
    used = frozenset.intersection(*(one.always_used for one in found))
    meets = any(one.meets_replicas for one in found)
    return replace(
        most, written=tuple(written), aliases=aliases, always_used=used, meets_replicas=meets
    )


def _try(subject: _Probe, values: Values, numbers: Mapping[int, Any]) -> ProbeResult:
    """Call it twice: with other results the second time, it could not be recomputed."""
    before = Snapshot.take(subject.call.module)
    try:
        replicas: AbstractContextManager[list[Any]] = nullcontext([])
        with _other_replicas() if subject.call.is_loss else replicas as met:
            first, _ = _once(subject, values, numbers)
            again, found = _once(subject, values, numbers)
            refuse_in_backward(again)
    finally:
        before.restore()
    if len(first) != len(again) or not all(map(_equal, first, again)):
        raise CannotBeOpaque(
            subject.call.ref.path,
            "called twice alike it returns two things: it draws random numbers that torch's seed "
            "does not decide, or keeps a state outside of its buffers",
        )
    return replace(found, meets_replicas=bool(met))


@contextmanager
def _other_replicas() -> Iterator[list[Any]]:
    """Context in which other replicas have the same tensors, with what meets them."""
    met: list[Any] = []

    def record(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
        met.append(function)
        return of_equal_ranks(function, args, kwargs)

    with recorded_by(record):
        yield met


def _once(
    subject: _Probe, values: Values, numbers: Mapping[int, Any]
) -> tuple[list[torch.Tensor], ProbeResult]:
    call = subject.call
    tensors = _tensors(subject, values, numbers)
    versions = [tensor._version for tensor in tensors]
    outside = {t.untyped_storage()._cdata for t in tensors}
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no other gets the place of one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside:
            saved[storage._cdata] = storage
        # An operator that saved its own output as it is would hold itself, and never be freed.
        return tensor.detach()

    with (
        _inside(subject.modes),
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.set_grad_enabled(call.grad),
        _flop_counter() as counter,
    ):
        result = called(call, tensors)
    written = tuple(i for i, t in enumerate(tensors) if t._version != versions[i])
    outputs, described = describe(call, tensors, result)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    cost = replace(described.cost, saved_bytes=saved_bytes, flops=counter.get_total_flops())
    used = _used(tensors, outputs) if call.is_loss else frozenset()
    return outputs, replace(described, cost=cost, written=written, always_used=used)


def _used(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """The tensors that a loss gives a gradient; where other values do not, it is zero."""
    live = [output for output in outputs if output.requires_grad]
    wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not (live and wanted):
        return frozenset()
    found = torch.autograd.grad(
        live,
        [tensors[i] for i in wanted],
        [torch.ones_like(output) for output in live],
        retain_graph=True,
        allow_unused=True,
    )
    return frozenset(i for i, gradient in zip(wanted, found, strict=True) if gradient is not None)


def describe(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], result: Any
) -> tuple[list[torch.Tensor], ProbeResult]:
    """The tensors in a module's result, and their description."""
    try:
        outputs, template = flatten(result)
    except NotPlain as error:
        raise CannotBeOpaque(call.ref.path, f"it returns a {error}", is_object=True) from error
    metas = tuple(TensorMeta(tuple(t.shape), t.dtype) for t in outputs)
    return outputs, ProbeResult(template, CallCost(metas), (), sharing(outputs, tensors))


def _flop_counter() -> FlopCounterMode:
    """A FLOP counter without a module tracker: the tracker's hooks need every graph to be whole."""
    counter = FlopCounterMode(display=False)
    everything = nullcontext()
    everything.parents = {"Global"}  # type: ignore[attr-defined]
    counter.mod_tracker = everything  # type: ignore[assignment]
    return counter


def called(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> Any:
    """Result of the module's call on real tensors.

    Raises:
        CannotBeOpaque: it keeps a tensor for others or for its next call, or draws on the host.
    """
    before, states = Snapshot.take(call.module, attributes_only=True), host_generators()
    buffers = set(map(id, call.module.buffers()))
    with autocast_of(call):
        result = invoke(call, tensors)
    if host_generators() != states:
        raise CannotBeOpaque(
            call.ref.path,
            "it draws random numbers with Python's or NumPy's generator; draw with torch",
        )
    held = [f"its attribute {left.inside}" for left in before.changes() if _has_tensor(left.new)]
    held += [f"the new buffer {n}" for n, b in call.module.named_buffers() if id(b) not in buffers]
    for where in held:
        raise CannotBeOpaque(
            call.ref.path,
            f"it keeps a tensor in {where}; register a buffer for it before training, or return it",
        )
    return result


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def _tensors(subject: _Probe, values: Values, numbers: Mapping[int, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    call = subject.call
    made = []
    states_bytes = sum(meta.num_bytes for meta in subject.metas[: len(call.states)])
    given: list[torch.Tensor | None] = [*(None for _ in call.states), *subject.example]
    for i, meta in enumerate(subject.metas):
        if i < len(given) and (value := given[i]) is not None:
            tensor = value.detach().clone()
        elif i < len(call.states):
            real = subject.real.get(call.states[i][0])
            tensor = _state(meta, real, generator, states_bytes > _MOST_BYTES)
        elif i - len(call.states) in numbers:
            tensor = torch.tensor(numbers[i - len(call.states)]).to(meta.dtype)
        else:
            tensor = values(meta, generator)
        tensor = tensor.to(subject.device)
        if meta.requires_grad:
            tensor.requires_grad_()
            # Inputs may be written into, which no leaf may.
            tensor = tensor if i < len(call.states) else tensor.clone()
        made.append(tensor)
    return made


def _state(
    meta: TensorMeta, real: torch.Tensor | None, generator: torch.Generator, as_one: bool
) -> torch.Tensor:
    """A parameter or buffer: its own values, where it has any, else synthetic ones."""
    if real is not None and not real.is_meta:
        return real.detach().clone()
    if not meta.dtype.is_floating_point:
        return torch.zeros(meta.shape, dtype=meta.dtype)
    if as_one:
        return torch.full((1,) * len(meta.shape), 0.02, dtype=meta.dtype).expand(meta.shape)
    return (0.02 * torch.randn(meta.shape, generator=generator)).to(meta.dtype)


def _usual(meta: TensorMeta, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; zeros, which are valid indices of anything; and true booleans."""
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        return torch.randn(meta.shape, generator=generator).to(meta.dtype)
    if meta.dtype is torch.bool:
        return torch.ones(meta.shape, dtype=torch.bool)
    return torch.zeros(meta.shape, dtype=meta.dtype)


def _other(meta: TensorMeta, generator: torch.Generator) -> torch.Tensor:
    """Other normal numbers, larger ones; zeros and ones."""
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        torch.randn(meta.shape, generator=generator)
        return (4 * torch.randn(meta.shape, generator=generator)).to(meta.dtype)
    return torch.randint(0, 2, meta.shape, generator=generator).to(meta.dtype)


def _ones(meta: TensorMeta, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; ones, which are sizes as well as indices."""
    if meta.dtype.is_floating_point or meta.dtype.is_complex or meta.dtype is torch.bool:
        return _usual(meta, generator)
    return torch.ones(meta.shape, dtype=meta.dtype)


def _fractions(meta: TensorMeta, generator: torch.Generator) -> torch.Tensor:
    """Ascending fractions in each row: probabilities, or the sides of boxes, however these count.

    Whole numbers are zeros, and booleans true.
    """
    if not meta.dtype.is_floating_point:
        return _usual(meta, generator)
    found = torch.rand(meta.shape, generator=generator)
    return (found.sort(-1).values if meta.shape else found).to(meta.dtype)


def _numbers(subject: _Probe) -> Iterator[dict[int, Any]]:
    """Values of unknown scalars: fractions of a size first, as for a split."""
    slots = sorted(subject.call.scalars)
    if not slots:
        yield {}
        return
    inputs = subject.metas[len(subject.call.states) :]
    sizes = dict.fromkeys(m.shape[0] for m in inputs if m.shape)
    for size in sizes:
        part, more = divmod(size, len(slots))
        yield {slot: part + (i < more) for i, slot in enumerate(slots)}
    yield dict.fromkeys(slots, 0)
    yield dict.fromkeys(slots, 1)


@contextmanager
def undisturbed(call: OpaqueCall) -> Iterator[None]:
    """Undo the patches of a trace, so that a module runs as in eager code, but for collectives."""
    module, patch = call.module, mock.patch.multiple
    forward = vars(module).pop("forward", None)
    with (
        patch(nn.Module, __call__=_MODULE_CALL, __getattr__=_MODULE_GETATTR),
        applying(plain_apply),
        patch(torch.compiler, _is_compiling_flag=False, _is_exporting_flag=False),
        patch(torch.fx._symbolic_trace, _is_fx_tracing_flag=False),
        torch.random.fork_rng(),
        refused_collectives(),
    ):
        try:
            yield
        finally:
            if forward is not None:
                vars(module)["forward"] = forward


@contextmanager
def _inside(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Push function modes of another thread: to enter them twice could undo them.

    Args:
        modes: the outermost first.
    """
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.detach(), other.detach(), equal_nan=True)


def host_generators() -> tuple[Any, int, bytes]:
    """The states of Python's and NumPy's global generators."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), int(state["pos"]), state["key"].tobytes()
