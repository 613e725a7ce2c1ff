"""Memory of a segment whose backward autograd runs, measured with fake tensors.

The segment is run forward and backward as the engine runs it: operators and autograd work as
always, and only the kernels are left out. So the saved tensors of autograd are counted, no matter
which operators and functions the model uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.core.gradients import gradient_dtype, sum_in_float32
from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment
from merak.graph.program.codegen import runnable
from merak.plan.cost.gpu_kernels import graph_of, kernels_of
from merak.plan.cost.segments.memory import BackwardMemory, Output, SegmentMemory


def storage_bytes(segment: Segment, device: torch.device) -> dict[str, int]:
    """Bytes of the storage of each of a segment's outputs; views of one storage count it once."""
    run = FakeRun(segment, device)
    with torch.no_grad(), Storages(run.arguments) as storages:
        outputs = run.call()
        places = _places(run, outputs, storages)
    return {name: place.num_bytes for name, place in places.items()}


def saved_and_outputs(segment: Segment, device: torch.device, kernels: str) -> tuple[int, int]:
    """Bytes that a segment saves of a microbatch for its backward, and those of its outputs.

    Args:
        segment: by the shapes in its graph.
        device: of fake tensors.
        kernels: type of the device whose kernels run.

    Returns:
        Bytes of `SegmentMemory.saved_bytes`, and those of the outputs.
    """
    run = FakeRun(segment, device, kernels)
    with torch.enable_grad(), Storages(run.arguments) as storages:
        outputs = run.call()
        places = _places(run, outputs, storages)
        own = sum(o.num_bytes for name, o in places.items() if o.root == name)
        return storages.live_bytes - own, sum(o.num_bytes for o in places.values())


class FakeRun:
    """A segment with fake arguments.

    Args:
        segment: whose placeholders describe the arguments.
        device: of the fake tensors.
        kernels: type of the device whose kernels run; None for `device`'s.
    """

    def __init__(self, segment: Segment, device: torch.device, kernels: str | None = None) -> None:
        self.segment = segment
        self._kernels, self._device = kernels or device.type, device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._function = runnable(graph_of(segment.graph, self._kernels, device))
        self.arguments: list[torch.Tensor] = []
        self.inputs: dict[str, torch.Tensor] = {}
        self.parameters: list[torch.Tensor] = []
        for node in segment.graph.find_nodes(op="placeholder"):
            kind, meta = node.meta["kind"], node.meta["tensor"]
            argument = self.fake(meta, device)
            argument.requires_grad_(meta.requires_grad and kind in (Kind.PARAMETER, Kind.VALUE))
            self.arguments.append(argument)
            if kind is Kind.VALUE:
                self.inputs[node.meta["name"]] = argument
            elif kind is Kind.PARAMETER and argument.requires_grad:
                self.parameters.append(argument)

    def fake(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        """A fake tensor."""
        with self.mode:
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def call(self) -> tuple[torch.Tensor, ...]:
        """Run the forward; returns the segment's outputs."""
        with self.mode, kernels_of(self._kernels, self._device):
            outputs: tuple[torch.Tensor, ...] = self._function(*self.arguments)
        return outputs

    def gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Fake gradients of the outputs that require one."""
        with self.mode, torch.no_grad():
            return [torch.empty_like(o) for o in outputs if o.requires_grad]

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Run the segment's backward."""
        if gradients:
            with self.mode:
                torch.autograd.backward([o for o in outputs if o.requires_grad], gradients)


def memory_by_autograd(
    segment: Segment, device: torch.device, kernels: str | None, float32_gradients: bool
) -> SegmentMemory:
    """Memory of a segment whose backward autograd runs, in one piece also where others are split.

    Args:
        segment: by the shapes in its graph.
        device: of fake tensors.
        kernels: type of the device whose kernels run; None for `device`'s.
        float32_gradients: whether gradients of low precision are accumulated in float32.
    """
    run = FakeRun(segment, device, kernels)
    if float32_gradients:
        sum_in_float32(run.parameters)
    return _measure(run)


def _measure(run: FakeRun) -> SegmentMemory:
    with torch.no_grad(), Storages(run.arguments) as plain:
        run.call()
    held, first, places = _backward(run)
    with run.mode, torch.no_grad():
        for parameter in run.parameters:
            parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
    _, later, _ = _backward(run)
    own = sum(o.num_bytes for name, o in places.items() if o.root == name)
    return SegmentMemory(
        outputs=places,
        saved_bytes=held[0] - own,
        saved_outputs=frozenset(places),
        forward_bytes=plain.peak_bytes,
        saving_forward_bytes=held[1],
        recompute_bytes=held[1],
        whole=BackwardMemory(first, later),
        split=BackwardMemory(first, later),
        offload_sizes=(),
        resident_bytes=held[0] - own,
        offload_values=frozenset(),
    )


def _backward(run: FakeRun) -> tuple[tuple[int, int], int, dict[str, Output]]:
    """One forward and backward: what is held and taken by the forward, what by the backward."""
    known = [*run.arguments, *(p.grad for p in run.parameters if p.grad is not None)]
    for argument in run.inputs.values():
        argument.grad = None
    with torch.enable_grad(), Storages(known) as storages:
        outputs = run.call()
        forward = (storages.live_bytes, storages.peak_bytes)
        places = _places(run, outputs, storages)
        gradients = run.gradients(outputs)
        start_bytes = storages.live_bytes
        storages.restart()
        run.backward(outputs, gradients)
        taken = storages.peak_bytes - start_bytes
    return forward, taken, places


def _places(run: FakeRun, outputs: Sequence[torch.Tensor], storages: Storages) -> dict[str, Output]:
    roots = {value.untyped_storage()._cdata: name for name, value in run.inputs.items()}
    places = {}
    for name, output in zip(run.segment.outputs, outputs, strict=True):
        storage = output.untyped_storage()
        contiguous = output.is_contiguous()
        if not storages.holds(output):
            # An input's storage is counted as the input; any other argument's not at all.
            places[name] = Output(0, roots.get(storage._cdata, ""), contiguous)
            continue
        root = roots.setdefault(storage._cdata, name)
        places[name] = Output(storage.nbytes(), root, contiguous)
    return places
