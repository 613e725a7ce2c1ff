"""What one segment holds and needs for one microbatch, found on tensors without numbers.

A segment is run forward and backward as the engine runs it, on fake tensors: operators and autograd
work as always, and only the kernels are left out. So what is counted is what autograd saves, no
matter which operators and functions the model uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.core.gradients import gradient_dtype, sum_in_float32
from merak.core.storages import can_move, storages_of
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment
from merak.graph.program.codegen import runnable
from merak.ops.sharded_saved import saved_by
from merak.plan.cost.live_storages import Storages


@dataclass(frozen=True, slots=True)
class Output:
    """Where an output of a segment lies.

    Args:
        num_bytes: of its storage; 0 where it lies in a parameter, buffer, column or batch-only
            value.
        root: the input, or the first output, in whose storage it lies; itself if its own.
        in_a_row: whether its numbers lie one after another; else it is copied to be sent.
    """

    num_bytes: int
    root: str
    in_a_row: bool = True


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """What a segment holds and needs for one microbatch.

    Args:
        outputs: where each output lies, by name.
        saved_bytes: what autograd holds for the backward beyond the segment's inputs and outputs.
        forward_bytes: the most that a forward which keeps nothing takes while it runs, outputs
            included.
        kept_forward_bytes: likewise one that keeps its activations.
        first_backward_bytes: the most that the backward takes beyond what it starts with, when
            gradients of parameters are new; gradients of inputs included.
        backward_bytes: likewise when they are added to those of earlier microbatches.
        deferred_bytes: what is left for the weights' gradients, where backwards are split.
        moved_bytes: of `saved_bytes`, what goes to host memory if the segment's activations do.
        left_bytes: of `saved_bytes`, what stays on the device all the same.
        moved_values: inputs and outputs that autograd saves, and that could go likewise.
    """

    outputs: Mapping[str, Output]
    saved_bytes: int
    forward_bytes: int
    kept_forward_bytes: int
    first_backward_bytes: int
    backward_bytes: int
    deferred_bytes: int
    moved_bytes: int
    left_bytes: int
    moved_values: frozenset[str]

    @property
    def own_bytes(self) -> int:
        """Of the outputs that lie in memory of their own."""
        return sum(o.num_bytes for name, o in self.outputs.items() if o.root == name)


class SegmentMemories:
    """Finds what segments need; those that are alike, as blocks of a model are, only once.

    Args:
        device: type of device they run on, which may choose other kernels than another's.
        float32_gradients: whether gradients of low precision are summed in float32.
    """

    def __init__(self, device: torch.device, float32_gradients: bool = True) -> None:
        self._device = device
        self._float32_gradients = float32_gradients
        self._known: dict[Any, tuple[SegmentMemory, Segment]] = {}

    def __call__(self, segment: Segment) -> SegmentMemory:
        """What a segment needs, by the shapes in its graph."""
        key = likeness(segment.graph)
        if key not in self._known:
            self._known[key] = (self._measure(segment), segment)
        found, known = self._known[key]
        names = dict(zip(known.inputs + known.outputs, segment.inputs + segment.outputs))
        outputs = {
            names[name]: replace(output, root=names.get(output.root, output.root))
            for name, output in found.outputs.items()
        }
        moved = frozenset(names[name] for name in found.moved_values)
        return replace(found, outputs=outputs, moved_values=moved)

    def _measure(self, segment: Segment) -> SegmentMemory:
        run = FakeRun(segment, self._device)
        if self._float32_gradients:
            sum_in_float32(run.parameters)
        return _measure(run)


def storage_bytes(segment: Segment, device: torch.device) -> dict[str, int]:
    """Bytes of the storage of each of a segment's outputs; views of one storage count it once."""
    run = FakeRun(segment, device)
    with torch.no_grad(), Storages(run.arguments) as storages:
        outputs = run.call()
        places = _places(run, outputs, storages)
    return {name: place.num_bytes for name, place in places.items()}


class FakeRun:
    """A segment with fake arguments.

    Args:
        segment: its placeholders say what each argument is.
        device: where the fakes claim to be.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.segment = segment
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._function = runnable(segment.graph)
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
        """A tensor without numbers."""
        with self.mode:
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def call(self) -> tuple[torch.Tensor, ...]:
        """The segment's outputs."""
        with self.mode:
            outputs: tuple[torch.Tensor, ...] = self._function(*self.arguments)
        return outputs

    def gradients(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the outputs that carry one."""
        with self.mode, torch.no_grad():
            return [torch.empty_like(o) for o in outputs if o.requires_grad]

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Run the segment's backward."""
        if gradients:
            with self.mode:
                torch.autograd.backward([o for o in outputs if o.requires_grad], gradients)


def _measure(run: FakeRun) -> SegmentMemory:
    with torch.no_grad(), Storages(run.arguments) as plain:
        run.call()
    kept, first, places = _backward(run)
    with run.mode, torch.no_grad():
        for parameter in run.parameters:
            parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
    _, later, _ = _backward(run)
    own = sum(o.num_bytes for name, o in places.items() if o.root == name)
    moved_bytes, left_bytes, moved_values = _moved(run)
    return SegmentMemory(
        outputs=places,
        saved_bytes=kept[0] - own,
        forward_bytes=plain.peak_bytes,
        kept_forward_bytes=kept[1],
        first_backward_bytes=first,
        backward_bytes=later,
        deferred_bytes=_deferred_bytes(run.segment.graph),
        moved_bytes=moved_bytes,
        left_bytes=left_bytes - own,
        moved_values=moved_values,
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


def _moved(run: FakeRun) -> tuple[int, int, frozenset[str]]:
    """What can go to host memory, what stays with the outputs, and the values that can go, too."""
    stays = storages_of(a for a in run.arguments if all(a is not i for i in run.inputs.values()))
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        if not can_move(tensor, tensor.device, stays):
            return tensor.detach()
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return None

    with torch.enable_grad(), Storages(run.arguments) as storages:
        with saved_by(pack, _never):
            outputs = run.call()
        values = {**run.inputs, **dict(zip(run.segment.outputs, outputs, strict=True))}
        places = {name: value.untyped_storage()._cdata for name, value in values.items()}
        moved = frozenset(name for name, place in places.items() if place in saved)
        for place in places.values():
            saved.pop(place, None)
        moved_bytes = sum(storage.nbytes() for storage in saved.values())
        saved.clear()
        return moved_bytes, storages.live_bytes, moved


def _never(saved: object) -> torch.Tensor:
    raise AssertionError("nothing goes backward here")


def _places(run: FakeRun, outputs: Sequence[torch.Tensor], storages: Storages) -> dict[str, Output]:
    roots = {value.untyped_storage()._cdata: name for name, value in run.inputs.items()}
    places = {}
    for name, output in zip(run.segment.outputs, outputs, strict=True):
        storage = output.untyped_storage()
        in_a_row = output.is_contiguous()
        if not storages.holds(output):
            # An input's storage is counted as the input; any other argument's not at all.
            places[name] = Output(0, roots.get(storage._cdata, ""), in_a_row)
            continue
        root = roots.setdefault(storage._cdata, name)
        places[name] = Output(storage.nbytes(), root, in_a_row)
    return places


def likeness(graph: fx.Graph) -> Any:
    """The same for graphs that differ in names alone."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((key, plain(item)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", plain(value.start), plain(value.stop), plain(value.step))
        return (type(value), value)

    return tuple(
        (
            node.op,
            "" if node.op in ("placeholder", "output") else node.target,
            plain(node.args) if node.op != "placeholder" else (),
            plain(node.kwargs),
            plain(node.meta.get("tensor")),
            node.meta.get("kind"),
        )
        for node in graph.nodes
    )


_PRODUCTS = {"aten.linear.default": (0, 1), "aten.addmm.default": (1, 2)}
"""Products whose weight's gradient can wait: where their input and their weight are."""


def _deferred_bytes(graph: fx.Graph) -> int:
    """Inputs and gradients of outputs of the products whose weights' gradients wait."""
    waiting: dict[fx.Node, int] = {}
    for node in graph.nodes:
        places = _PRODUCTS.get(str(node.target))
        if places is None or node.kwargs:
            continue
        x, weight = (node.args[place] for place in places)
        if weight.meta.get("kind") is Kind.PARAMETER and weight.meta["tensor"].requires_grad:
            waiting[node] = node.meta["tensor"].num_bytes
            waiting[_whole(x)] = x.meta["tensor"].num_bytes
    return sum(waiting.values())


def _whole(node: fx.Node) -> fx.Node:
    """What a tensor is a view of."""
    while str(node.target) in ("aten.view.default", "aten.reshape.default"):
        node = node.args[0]  # type: ignore[assignment]
    return node
