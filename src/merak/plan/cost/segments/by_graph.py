"""Memory of a segment whose backward is a graph, read off that graph: sizes and lifetimes.

Each part takes its arguments and drops every value after its last use, so what is alive beside each
operator follows from the nodes alone. Kernels' own temporaries are not among it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from merak.core.gradients import LOW_PRECISION
from merak.core.storages import MIN_OFFLOADED_BYTES
from merak.graph.ir.ir import Kind, Segment
from merak.graph.joint.all_reduces import all_in_turns, start_early, with_recomputation
from merak.graph.joint.clean import clean, is_contiguous, is_view
from merak.graph.joint.derive import JointGraph, Layout, derive
from merak.graph.joint.divide import divide
from merak.graph.joint.parts import PartNodes, Parts
from merak.graph.joint.recomputed import results_to_keep
from merak.graph.joint.segment import joint_obstacle
from merak.graph.program.codegen import as_run
from merak.plan.cost.gpu_kernels import graph_of, kernels_of
from merak.plan.cost.joint_operators import parts_of_segment
from merak.plan.cost.segments.memory import BackwardMemory, Output, SegmentMemory

Sizes = dict[int, int]
"""Bytes by storage."""


def joint_graph_of(segment: Segment, device: torch.device, kernels: str) -> JointGraph | str:
    """Joint graph of a segment; where autograd runs its backward, why.

    Args:
        segment: by the shapes in its graph.
        device: of fake tensors.
        kernels: type of the device whose kernels run.
    """
    if obstacle := joint_obstacle(segment.graph):
        return obstacle
    metas = [node.meta["tensor"] for node in segment.graph.find_nodes(op="placeholder")]
    graph = as_run(graph_of(segment.graph, kernels, device))
    with FakeTensorMode():
        like = [torch.empty(m.shape, dtype=m.dtype, device=device) for m in metas]
    try:
        with kernels_of(kernels, device), _disable_current_modes():
            joint = derive(graph, like, None)
        clean(joint)
    except Exception as error:  # as where the engine derives it: autograd runs the backward
        return str(error) or type(error).__name__
    return joint


def joint_graphs_in_turns(
    segments: Sequence[Segment], device: torch.device, kernels: str
) -> list[JointGraph]:
    """Joint graphs of a segment's sub-microbatches; none where autograd runs a backward.

    Storages have numbers of their own in each, and all-reduces are two operators.
    """
    made = [joint_graph_of(segment, device, kernels) for segment in segments]
    joints = [joint for joint in made if not isinstance(joint, str)]
    if len(joints) < len(segments):
        return []
    for number, joint in enumerate(joints):
        start_early(joint)
        for node in joint.graph.nodes:
            layout: Layout | None = node.meta.get("layout")
            if layout is not None:
                storage = layout.storage * len(joints) + number
                node.meta["layout"] = replace(layout, storage=storage)
            sizes: Sizes = node.meta.get("results", {})
            node.meta["results"] = {n * len(joints) + number: b for n, b in sizes.items()}
    return joints


def memory_by_graph(
    segment: Segment,
    joints: Sequence[JointGraph],
    float32_gradients: bool,
    immediate: Collection[str] = (),
    keeps: Collection[str] = (),
    joined: Collection[str] = (),
) -> SegmentMemory:
    """Memory of a segment, read off its joint graph, or off those of its sub-microbatches.

    Args:
        segment: whose joint graph it is, or a sub-microbatch of it.
        joints: the graph, or those of sub-microbatches that run in turns.
        float32_gradients: whether gradients of low precision are accumulated in float32.
        immediate: names of parameters whose gradients are never left for later.
        keeps: names of the operators whose results are kept where others are recomputed.
        joined: names of outputs of sub-microbatches that are put together for others.
    """
    of_each = [parts_of_segment(segment, one, immediate, keeps) for one in joints]
    divisions = [own.division for own in of_each]
    parts = all_in_turns([own.whole for own in of_each])
    split = all_in_turns([own.split for own in of_each])
    places = [place for place, name in enumerate(segment.outputs) if name in joined]
    lifetimes = _Lifetimes(joints, float32_gradients, places)
    outputs = [_outputs(segment, one) for one in joints]
    roots = {s: name for _, own in outputs for s, name in own.items() if name not in joined}
    saved_values = [node for division in divisions for node in division.saved]
    saved = _of(saved_values, lifetimes.arguments)
    own = {storage: size for storage, size in saved.items() if storage not in roots}
    movable = _movable([*saved_values, *(joints[0].arguments[n] for n in parts.reads)])
    sizes = tuple(size for storage, size in own.items() if storage in movable)
    again = [division.recomputation for division in divisions]
    kept = _of([n for one in again for n in one.kept], {*lifetimes.arguments, *roots})
    origins = {n.meta["origin"] for one in again for n in one.nodes if not _is_free(n)}
    return SegmentMemory(
        outputs=outputs[0][0],
        saved_bytes=sum(own.values()),
        saved_outputs=frozenset(roots[s] for s in saved if s in roots),
        forward_bytes=lifetimes.forward_bytes(parts.plain),
        saving_forward_bytes=lifetimes.forward_bytes(parts.forward),
        recompute_bytes=lifetimes.taken_bytes(parts.recompute, stays=kept),
        whole=lifetimes.backward(parts, roots),
        split=lifetimes.backward(split, roots),
        offload_sizes=sizes,
        resident_bytes=sum(own.values()) - sum(sizes),
        offload_values=frozenset(roots[s] for s in movable if s in roots),
        kept_bytes=sum(kept.values()),
        recomputed=frozenset(p for p, n in enumerate(segment.graph.nodes) if n.name in origins),
        whole_in_turns=_in_turns(lifetimes, [own.whole for own in of_each], roots),
        split_in_turns=_in_turns(lifetimes, [own.split for own in of_each], roots),
    )


def _in_turns(
    lifetimes: _Lifetimes, of_each: Sequence[Parts[PartNodes]], roots: Mapping[int, str]
) -> BackwardMemory | None:
    """Memory of backwards that begin with their recomputations; None of a whole microbatch."""
    if len(of_each) == 1:
        return None
    return lifetimes.backward(all_in_turns([with_recomputation(own) for own in of_each]), roots)


def held_by_graph(segment: Segment, joint: JointGraph) -> tuple[int, int]:
    """Bytes that a segment saves of a microbatch for its backward, and those of its outputs.

    Args:
        segment: whose joint graph it is.
        joint: the graph.
    """
    outputs, roots = _outputs(segment, joint)
    others = {*roots, *(node.meta["layout"].storage for node in joint.arguments)}
    saved = sum(_of(divide(joint).saved, others).values())
    return saved, sum(output.num_bytes for output in outputs.values())


def _is_free(node: fx.Node) -> bool:
    """Whether a node computes nothing."""
    return node.meta["layout"] is None or is_view(node)


def _outputs(segment: Segment, joint: JointGraph) -> tuple[dict[str, Output], dict[int, str]]:
    """Storages of a segment's outputs, by name; and the names of those of inputs and outputs."""
    placeholders = segment.graph.find_nodes(op="placeholder")
    values = {placeholders[n].meta["name"]: joint.arguments[n] for n in sorted(joint.inputs)}
    roots = {node.meta["layout"].storage: name for name, node in values.items()}
    others = {node.meta["layout"].storage for node in joint.arguments}
    found = {}
    for name, node in zip(segment.outputs, joint.outputs, strict=True):
        layout = node.meta["layout"]
        if layout.storage in others:
            found[name] = Output(0, roots.get(layout.storage, ""), is_contiguous(layout))
            continue
        root = roots.setdefault(layout.storage, name)
        found[name] = Output(layout.storage_bytes, root, is_contiguous(layout))
    named = reversed([*values.items(), *zip(segment.outputs, joint.outputs, strict=True)])
    return found, {node.meta["layout"].storage: name for name, node in named}


def kept_bytes(joint: JointGraph, names: Iterable[str]) -> dict[str, int]:
    """Bytes that keeping the results of each of some operators would hold.

    Args:
        joint: the graph.
        names: of the segment's operators.
    """
    forward = [n for n in joint.graph.nodes if n.op == "call_function"]
    forward = [n for n in forward if not n.meta["is_backward"]]
    lasting = {node.meta["layout"].storage for node in joint.arguments}
    found: dict[str, Sizes] = {}
    for node in results_to_keep(forward, frozenset(names)):
        layout = node.meta["layout"]
        if layout.storage not in lasting:
            found.setdefault(node.meta["origin"], {})[layout.storage] = layout.storage_bytes
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def _storages(node: fx.Node) -> Sizes:
    """Storages that a value holds."""
    layout: Layout | None = node.meta["layout"]
    if layout is None:
        found: Sizes = node.meta.get("results", {})
        return found
    return {layout.storage: layout.storage_bytes}


def _of(nodes: Iterable[fx.Node], without: Collection[int]) -> Sizes:
    """Storages of some values, without some."""
    every = {storage: size for node in nodes for storage, size in _storages(node).items()}
    return {storage: size for storage, size in every.items() if storage not in without}


def _movable(nodes: Iterable[fx.Node]) -> set[int]:
    """Storages that an offloaded segment copies to host memory."""
    layouts = [node.meta["layout"] for node in nodes]
    return {
        layout.storage
        for layout in layouts
        if layout is not None
        and layout.storage_bytes >= MIN_OFFLOADED_BYTES
        and not any(layout.lazy)
    }


@dataclass(slots=True)
class _Live:
    """Storages that are alive, and how many values hold each."""

    held: Counter[int]
    gained: set[int] = field(default_factory=set)  # numbers of parameters that have a gradient
    now: int = 0
    peak: int = 0

    def take(self, storages: Sizes) -> None:
        for storage, size in storages.items():
            self.now += 0 if self.held[storage] else size
            self.held[storage] += 1
        self.peak = max(self.peak, self.now)

    def drop(self, storages: Sizes) -> None:
        for storage, size in storages.items():
            self.held[storage] -= 1
            self.now -= 0 if self.held[storage] else size


class _Lifetimes:
    """What the parts of a joint graph take while they run.

    Args:
        joints: the graph, or those of sub-microbatches with the same parameters.
        float32_gradients: whether gradients of low precision are accumulated in float32.
        joined: places of outputs that are put together of sub-microbatches.

    Attributes:
        arguments: storages of the segment's arguments, which are held throughout.
    """

    def __init__(
        self, joints: Sequence[JointGraph], float32_gradients: bool, joined: Sequence[int] = ()
    ) -> None:
        self._joint = joints[0]
        self._float32_gradients = float32_gradients
        arguments = [node for joint in joints for node in joint.arguments]
        self.arguments = frozenset(node.meta["layout"].storage for node in arguments)
        outputs = [joint.outputs[place] for joint in joints for place in joined]
        self._joined_bytes: int = sum(node.meta["layout"].num_bytes for node in outputs)
        tangents = [joint.tangents.get(place) for joint in joints for place in joined]
        self._whole_gradients = _of([node for node in tangents if node is not None], ())

    def taken_bytes(
        self, part: PartNodes, stays: Collection[int] = (), is_first: bool = False
    ) -> int:
        """Peak of a part beyond what is held at its start.

        Args:
            part: drops what it is given after its last use.
            stays: storages that others hold as well, besides those of the segment's arguments.
            is_first: whether parameters have no gradient yet.
        """
        live = _Live(Counter([*self.arguments, *stays]))
        last = part.last_uses()
        for node in part.reads:
            live.take(_storages(node))
        start = live.peak = live.now
        for node in part.reads:
            if node not in last:
                live.drop(_storages(node))
        for node in part.reads:
            self._accumulate(part, node, live, is_first)
        for node in part.nodes:
            live.peak = max(live.peak, live.now + node.meta.get("taken_bytes", 0))
            live.take(_storages(node))
            self._accumulate(part, node, live, is_first)
            for gone in dict.fromkeys((*node.all_input_nodes, node)):
                if last.get(gone) is node:
                    live.drop(_storages(gone))
        return live.peak - start

    def _accumulate(self, part: PartNodes, node: fx.Node, live: _Live, is_first: bool) -> None:
        """Add a gradient to parameters', as `merak.core.gradients.accumulate` does."""
        for number, owned in part.accumulated.get(node, ()) if is_first else ():
            if number in live.gained:
                continue
            live.gained.add(number)
            of, made = (n.meta["layout"] for n in (self._joint.arguments[number], node))
            is_low = self._float32_gradients and of.dtype in LOW_PRECISION
            dtype = torch.float32 if is_low else of.dtype
            if owned and dtype == made.dtype and is_contiguous(made):
                live.held[made.storage] += 1  # which becomes the parameter's
                continue
            live.now += made.num_bytes // made.dtype.itemsize * dtype.itemsize
            live.peak = max(live.peak, live.now)

    def forward_bytes(self, part: PartNodes) -> int:
        """Peak of a forward, and of what is put together behind it."""
        results = sum(_of(part.results, self.arguments).values())
        return max(self.taken_bytes(part), results + self._joined_bytes)

    def backward(self, parts: Parts[PartNodes], roots: Mapping[int, str]) -> BackwardMemory:
        """Memory of a backward.

        Args:
            parts: of the graph.
            roots: names of inputs and outputs, by storage.
        """
        first, later = (
            self.taken_bytes(parts.backward, self._whole_gradients, one) for one in (True, False)
        )
        if parts.weights is None:
            return BackwardMemory(first, later)
        held = _of(parts.weights.reads, ())
        own = {s: b for s, b in held.items() if s not in self.arguments and s not in roots}
        return BackwardMemory(
            first,
            later,
            sum(own.values()),
            frozenset(roots[storage] for storage in held if storage in roots),
            self.taken_bytes(parts.weights),
            self.taken_bytes(parts.weights, is_first=True),
            frozenset(parts.weight_parameters),
            any(
                self._joint.arguments[n].meta["kind"] is Kind.PARAMETER for n in parts.weight_reads
            ),
        )
