"""Dry runs of opaque loops: outputs, memory and FLOPs, found on meta tensors.

Nothing in such a loop depends on values, else it could not be traced either; so nothing is computed
and no memory taken, however long the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.opaque.buffer_writes import may_write
from merak.graph.trace.opaque.collectives import CollectiveError
from merak.graph.trace.opaque.extrapolate import extrapolated
from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.trace.opaque.operator import CallCost, LoopCost, OpaqueCall
from merak.graph.trace.opaque.probe import (
    CannotBeOpaque,
    ProbeResult,
    called,
    describe,
    tried_on,
    undisturbed,
)
from merak.graph.trace.state.snapshot import Snapshot


def dry_run(
    call: OpaqueCall,
    metas: Sequence[TensorMeta],
    device: torch.device,
    length: int | None = None,
) -> ProbeResult:
    """Call a module on meta or fake tensors, and measure it.

    Args:
        call: without its outputs, which are to be found.
        metas: metadata of its tensors, the module's own first.
        device: device that it will run on.
        length: the size that is the sequence's length; None to find it.

    Raises:
        CannotBeOpaque: it needs values, keeps a tensor, or writes into its inputs.
    """
    call, device = tried_on(call, device)
    return in_own_thread(_dry_run, call, metas, device, length)


def _dry_run(
    call: OpaqueCall, metas: Sequence[TensorMeta], device: torch.device, length: int | None
) -> ProbeResult:
    path = call.ref.path
    if call.scalars:
        raise CannotBeOpaque(path, "it is called with a number that depends on values")
    reason = ""
    with undisturbed(call):
        for mode, where in _modes(call, device):
            before = Snapshot.take(call.module)
            try:
                with mode:
                    measure = partial(_measured, call, device=where)
                    return extrapolated(measure, metas, length) or measure(metas)
            except (CannotBeOpaque, CollectiveError):
                raise
            except Exception as error:  # whatever the code does on meta tensors
                reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            finally:
                before.restore()
    raise CannotBeOpaque(path, f"it fails on fake tensors ({reason})")


def _modes(
    call: OpaqueCall, device: torch.device
) -> Iterator[tuple[AbstractContextManager[Any], torch.device]]:
    """Contexts to try: meta tensors are ten times as fast as fake ones, and know no autocast."""
    if call.autocast is None:
        yield nullcontext(), torch.device("meta")
    yield FakeTensorMode(allow_non_fake_inputs=True), device


class _Costs(Storages):
    """Dispatch mode that counts live bytes, FLOPs and traffic, with little overhead per operator.

    Args:
        known: as of `Storages`.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__(known)
        self.flops = 0
        self.kernels = 0
        self.traffic = 0
        self._kinds: dict[Any, tuple[bool, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and count its work; views do none."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        kind = self._kinds.get(func)
        if kind is None:
            products = flop_registry.get(func.overloadpacket)
            kind = self._kinds[func] = (func.is_view, products)
        is_view, products = kind
        if is_view:
            return result
        if products is not None:
            self.flops += products(*args, **(kwargs or {}), out_val=result)
        made = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        for tensor in (*made, *args):
            if isinstance(tensor, torch.Tensor):
                self.traffic += tensor.numel() * tensor.itemsize
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        self.kernels += 1
        return result


def _measured(call: OpaqueCall, metas: Sequence[TensorMeta], device: torch.device) -> ProbeResult:
    tensors = [_empty(meta, device) for meta in metas]
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad(), _Costs(tensors) as plain:
        called(call, tensors)
    with torch.set_grad_enabled(call.grad), _Costs(tensors) as costs:
        result = called(call, tensors)
        outputs, found = describe(call, tensors, result)
        del result
        forward_bytes = costs.peak_bytes
        own = {o.untyped_storage()._cdata: o.untyped_storage() for o in outputs if costs.holds(o)}
        saved_bytes = costs.live_bytes - sum(storage.nbytes() for storage in own.values())
        before = (costs.kernels, costs.traffic)
        backward_bytes, always_used = _backward(costs, tensors, outputs)
    if any(tensor >= 0 for _, tensor in found.aliases):
        raise CannotBeOpaque(call.ref.path, "it returns what it is given")
    loop = LoopCost(
        plain_bytes=plain.peak_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        kernels=(plain.kernels, costs.kernels - before[0]),
        traffic=(plain.traffic, costs.traffic - before[1]),
    )
    return replace(
        found,
        cost=CallCost(found.cost.outputs, max(0, saved_bytes), plain.flops, loop),
        written=_written(call, tensors, versions),
        always_used=always_used,
    )


def _empty(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    made = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    return made.requires_grad_(meta.requires_grad)


def _backward(
    costs: _Costs, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[int, frozenset[int]]:
    """The backward's peak beyond what is live, and which tensors get a gradient."""
    live = [output for output in outputs if output.requires_grad]
    wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not (live and wanted):
        return 0, frozenset()
    gradients = [torch.empty_like(output) for output in live]
    costs.restart()
    start = costs.live_bytes
    found = torch.autograd.grad(live, [tensors[i] for i in wanted], gradients, allow_unused=True)
    reached = (i for i, gradient in zip(wanted, found, strict=True) if gradient is not None)
    return costs.peak_bytes - start, frozenset(reached)


def _written(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], versions: Sequence[int]
) -> tuple[int, ...]:
    """The buffers that a module writes into.

    Raises:
        CannotBeOpaque: it writes into its inputs.
    """
    suspected = may_write(call.module)
    written = {i for i, tensor in enumerate(tensors) if tensor._version != versions[i]}
    if any(i >= len(call.states) for i in written):
        raise CannotBeOpaque(call.ref.path, "it writes into what it is called with")
    written |= {i for i, names in enumerate(call.states) if suspected.intersection(names)}
    return tuple(sorted(written))
