"""The kernels of a segment, and its collectives over ranks, forward and backward, in order.

By default a device runs what Merak's trace has: every operator is a kernel that reads its inputs
and writes its outputs. Jobs with fused kernels are priced by the rule of
`merak.plan.cost.kernels.fusion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import ATTENTIONS, GEMM_OPERANDS, family
from merak.graph.joint.clean import is_contiguous
from merak.graph.joint.parts import PartNodes
from merak.ops.linear import Sends, sent_by, sent_inside
from merak.plan.cost.efficiency import ProductShape
from merak.plan.cost.joint_operators import JointParts
from merak.plan.cost.kernels.fusion import FusedGroup, fused_groups
from merak.plan.cost.operators import Work, is_view, node_work, outputs


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernels of a job: what is fused, hidden behind computation, or run in chunks.

    Args:
        fused: whether pointwise operators and reductions between products are fused.
        fused_sums: whether, where kernels are fused, products of weight gradients add to the sums
            over microbatches. Else kernels of their own add them.
        flash_attention: whether attention of one operator leaves its scores on the chip. Else they
            are written to memory, and computed again for the backward.
        float32_gradients: whether gradients of a low precision are accumulated in float32.
        converted_gradients: whether gradients of a low precision are first converted to float32,
            where kernels of their own add them.
        hides_reductions: whether replicas reduce gradients beside the backward; else after it.
        overlaps_products: whether gathers and reduce-scatters over tp run beside the product that
            reads or gives their values, in as many chunks as there are ranks; Merak has none.
        copies_buckets: whether replicas copy tensors into the buckets that they exchange, and out
            of them, as Merak does; else tensors lie there.
        recomputes_whole: whether a recomputation runs all of a segment again. Merak's runs what the
            backward reads alone.
    """

    fused: bool = False
    fused_sums: bool = True
    flash_attention: bool = True
    float32_gradients: bool = True
    converted_gradients: bool = False
    hides_reductions: bool = True
    overlaps_products: bool = False
    copies_buckets: bool = True
    recomputes_whole: bool = False

    @property
    def adds_in_products(self) -> bool:
        """Whether products of weight gradients read and write the sums over microbatches."""
        return self.fused and self.fused_sums

    @property
    def runs_joint_graphs(self) -> bool:
        """Whether the operators of joint graphs are the kernels that run."""
        return self.flash_attention and not (self.fused or self.recomputes_whole)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a collective over an axis of the mesh.

    Args:
        work: of the kernel; None for a collective.
        collective: kind and bytes, as `collective_seconds` takes them, and the axis of the mesh.
        nodes: names of the operators whose values it computes or sends, in a forward.
        is_weight_gradient: whether a split backward leaves it to the W.
    """

    work: Work | None = None
    collective: tuple[str, float, str] | None = None
    nodes: frozenset[str] = frozenset()
    is_weight_gradient: bool = False


@dataclass(frozen=True, slots=True)
class SegmentKernels:
    """Kernels and collectives that a segment runs for one microbatch.

    Args:
        forward: in order.
        backward: in order, sums of gradients included.
        input_gradient: of a split backward's I.
        weight_gradient: of its W.
        parameters: by name, the rank's shard of every parameter.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_gradient: tuple[Kernel, ...]
    weight_gradient: tuple[Kernel, ...]
    parameters: Mapping[str, TensorMeta]


Operators = dict[fx.Node, list[Kernel]]
"""Kernels of the operators of joint graphs."""


def joint_kernels(
    joint: JointParts,
    choice: KernelChoice,
    device_type: str,
    num_microbatches: int,
    known: Operators | None = None,
) -> SegmentKernels:
    """Kernels and collectives of a segment whose backward is a graph: the operators of its parts.

    Args:
        joint: parts of its joint graph.
        choice: which kernels there are.
        device_type: "cpu" or "cuda".
        num_microbatches: of a step, of which all but the first add to the gradients of parameters.
        known: of the same choice and type of device, which gains what is found here.
    """
    graph, every = joint.segment.graph, joint.arguments
    known = {} if known is None else known

    def kernels(part: PartNodes) -> Iterator[Kernel]:
        for node in part.nodes:
            if node not in known:
                known[node] = _operator(node, choice, device_type)
            yield from known[node]
            for number, owned in part.accumulated.get(node, ()):
                yield from _accumulation(every[number], node, owned, choice, num_microbatches)

    weights = joint.split.weights
    return SegmentKernels(
        forward=tuple(kernels(joint.whole.forward)),
        backward=tuple(kernels(joint.whole.backward)),
        input_gradient=tuple(kernels(joint.split.backward)),
        weight_gradient=() if weights is None else tuple(kernels(weights)),
        parameters=_parameters(graph),
    )


def segment_kernels(graph: fx.Graph, choice: KernelChoice, device_type: str) -> SegmentKernels:
    """Kernels and collectives of a segment by its forward, whose backward follows from rules.

    Where others of the job run joint graphs, autograd runs the backward of this one: in one piece,
    which nothing splits, and without gathering again what it has held.

    Args:
        graph: of the segment, rewritten for tp where there is tp.
        choice: which kernels there are.
        device_type: "cpu" or "cuda".
    """
    groups = fused_groups(graph) if choice.fused else {}
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    last = {id(group): group.nodes[-1] for group in groups.values()}
    for node in graph.nodes:
        group = groups.get(node)
        if group is not None:
            if last[id(group)] is node:
                names = frozenset(own.name for own in group.nodes)
                forward.append(Kernel(group.forward(), nodes=names))
                again = group.backward()
                backward += [] if again is None else [Kernel(again)]
            continue
        there, back = _kernels(node, choice, device_type)
        forward += there
        backward += reversed(back)
    backward.reverse()
    backward += _gradient_sums(graph, groups, choice)
    later = [] if choice.runs_joint_graphs else [k for k in backward if k.is_weight_gradient]
    return SegmentKernels(
        tuple(forward),
        tuple(backward),
        tuple(kernel for kernel in backward if not later or not kernel.is_weight_gradient),
        tuple(later),
        _parameters(graph),
    )


def _parameters(graph: fx.Graph) -> dict[str, TensorMeta]:
    return {
        node.meta["name"]: node.meta["tensor"]
        for node in graph.find_nodes(op="placeholder")
        if node.meta["kind"] is Kind.PARAMETER
    }


# Operators of a joint graph


def _operator(node: fx.Node, choice: KernelChoice, device_type: str) -> list[Kernel]:
    """What an operator of a joint graph runs."""
    sent, nodes = sent_by(node.target), frozenset((node.meta["origin"],))
    if sent.there:
        there, _ = _collective(node, sent, choice)
        return [replace(kernel, nodes=nodes) for kernel in there]
    if not outputs(node):  # it gives a number
        return []
    found = [Kernel(work, nodes=nodes) for work in node_work(node, device_type).forward]
    inside = sent_inside(node.target, node.args)
    return found + [Kernel(collective=own, nodes=nodes) for own in inside]


def _accumulation(
    parameter: fx.Node, gradient: fx.Node, owned: bool, choice: KernelChoice, num_microbatches: int
) -> Iterator[Kernel]:
    """The mean over microbatches of what `merak.core.gradients.accumulate` runs for a gradient.

    The first becomes the parameter's where it may, laid out and in the type that it needs; others
    are added.
    """
    made, own = gradient.meta["layout"], outputs(parameter)[0]
    sum_bytes = _gradient_bytes(own, choice)
    is_same = made.num_bytes == sum_bytes and is_contiguous(made)
    first = 0.0 if owned and is_same else float(made.num_bytes + sum_bytes)
    share = 1.0 / num_microbatches
    num_bytes = share * first + (1.0 - share) * (made.num_bytes + 2 * sum_bytes)
    if kernels := share * bool(first) + (1.0 - share):
        yield Kernel(Work(num_bytes, kernels=kernels))


def _kernels(
    node: fx.Node, choice: KernelChoice, device_type: str
) -> tuple[list[Kernel], list[Kernel]]:
    """What one operator runs by itself, forward and backward."""
    sent = sent_by(node.target)
    if sent.there or sent.back:
        return _collective(node, sent, choice)
    if family(node.target) in ATTENTIONS and not choice.flash_attention:
        return _unfused_attention(node, choice)
    work = node_work(node, device_type)
    nodes = frozenset((node.name,))
    forward = [Kernel(kernel, nodes=nodes) for kernel in work.forward]
    inside = sent_inside(node.target, node.args)
    forward += [Kernel(collective=own, nodes=nodes) for own in inside]
    backward = [Kernel(kernel) for kernel in work.backward]
    weight = _weight_of(node)
    if weight is None:
        return forward, backward
    operands = GEMM_OPERANDS[family(node.target)]
    index = int(any(meta.requires_grad for meta in outputs(node.args[operands.x])))  # type: ignore[arg-type]
    if index < len(backward):
        own = backward[index]
        assert own.work is not None
        if choice.adds_in_products and weight is node.args[operands.weight]:
            # It is added to the gradient of earlier microbatches by the product itself.
            meta = weight.meta["tensor"]
            added = 2 * _gradient_bytes(meta, choice) - meta.num_bytes
            own = replace(own, work=replace(own.work, num_bytes=own.work.num_bytes + added))
        backward[index] = replace(own, is_weight_gradient=True)
    return forward, backward


def _collective(
    node: fx.Node, sent: Sends, choice: KernelChoice
) -> tuple[list[Kernel], list[Kernel]]:
    """A collective, and the copies that torch's interface makes of its tensors."""
    sides = (node,) if sent.counts else (node, *node.all_input_nodes)
    own = max((meta.num_bytes for n in sides for meta in outputs(n)), default=0)
    function: Any = node.target
    given = signature(function).bind(*node.args, **node.kwargs).arguments
    whole = sent.size(own, *fx.map_arg(tuple(given.values()), lambda n: n.meta["tensor"]))
    nodes = frozenset((node.name,))
    copies = [] if choice.fused else [Kernel(Work(2 * own), nodes=nodes)]
    axis = sent.axis or str(given["axis"])
    there, back = (
        [*copies, Kernel(collective=(kind, whole, axis), nodes=nodes)] if kind else []
        for kind in (sent.there, sent.back)
    )
    # Only the shard is saved, and gathered again for the weight's gradient; by autograd, the whole.
    if sent.is_repeated and not choice.runs_joint_graphs:
        back = [*there, *back]
    return there, back if any(meta.requires_grad for meta in outputs(node)) else []


def _weight_of(node: fx.Node) -> fx.Node | None:
    """Parameter that a product multiplies with, or a view or cast of it; None where none trains.

    Its gradient is what a split backward leaves to the W, product and sum.
    """
    operands = GEMM_OPERANDS.get(family(node.target)) if node.op == "call_function" else None
    if operands is None:
        return None
    weight = node.args[operands.weight]
    assert isinstance(weight, fx.Node)
    if not any(meta.requires_grad for meta in outputs(weight)):
        return None
    while weight.op == "call_function" and (is_view(weight) or family(weight.target) == "to"):
        weight = weight.all_input_nodes[0]
    is_parameter = weight.op == "placeholder" and weight.meta["kind"] is Kind.PARAMETER
    return weight if is_parameter else None


def _gradient_bytes(meta: TensorMeta, choice: KernelChoice) -> int:
    low = meta.dtype in (torch.bfloat16, torch.float16) and choice.float32_gradients
    return meta.num_bytes * (2 if low else 1)


def _unfused_attention(node: fx.Node, choice: KernelChoice) -> tuple[list[Kernel], list[Kernel]]:
    """Attention that writes its scores to memory, and computes them again for the backward."""
    query, key, value = (outputs(node.args[index])[0] for index in range(3))  # type: ignore[arg-type]
    rows = query.num_bytes // query.dtype.itemsize // query.shape[-1]
    scores = rows * key.shape[-2]
    size = scores * query.dtype.itemsize
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    mask = scores if dropout else 0

    batch = rows // query.shape[-2]
    shape = ProductShape(query.shape[-2], key.shape[-2], query.shape[-1], batch)

    def product(operand: TensorMeta, other: TensorMeta) -> Work:
        num_bytes = operand.num_bytes + other.num_bytes + size
        return Work(num_bytes, 2.0 * scores * operand.shape[-1], query.dtype, shape=shape)

    def passes(count: int) -> list[Work]:
        """Scaling and masking, softmax, dropout: so many reads and writes of the scores."""
        functions, randoms = float(scores), float(mask)
        if choice.fused:
            return [Work(count // 2 * size + mask, functions=functions, randoms=randoms)]
        kinds = [Work(2 * size), Work(2 * size, functions=functions)]
        return kinds + ([Work(2 * size + mask, randoms=randoms)] if dropout else [])

    whole = [product(query, key), *passes(4), product(value, query)]
    there = [Kernel(work, nodes=frozenset((node.name,))) for work in whole]
    if not any(meta.requires_grad for meta in outputs(node)):
        return there, []
    back = [
        *whole[:-1],
        product(value, query),
        product(value, query),
        *passes(6),
        product(query, key),
        product(query, key),
    ]
    # `segment_kernels` lists backwards in reverse.
    return there, [Kernel(work) for work in reversed(back)]


# Sums of gradients


def _gradient_sums(
    graph: fx.Graph, groups: Mapping[fx.Node, FusedGroup], choice: KernelChoice
) -> Iterator[Kernel]:
    """Sums of a value's gradients from several readers, and with those of earlier microbatches."""
    products = set(map(_weight_of, graph.nodes))
    for node in graph.nodes:
        found = outputs(node)
        if len(found) != 1 or not found[0].requires_grad:
            continue
        (meta,) = found
        readers = {
            id(groups[user]) if user in groups else id(user)
            for user in node.users
            if user.op != "output" and any(m.requires_grad for m in outputs(user))
        }
        readers.discard(id(groups.get(node)))
        for _ in range(len(readers) - 1):
            yield Kernel(Work(3 * meta.num_bytes))
        if node.meta.get("kind") is not Kind.PARAMETER or not readers:
            continue
        if not (choice.adds_in_products and all(_weight_of(user) is node for user in node.users)):
            float32_bytes = _gradient_bytes(meta, choice)
            size = meta.num_bytes + 2 * float32_bytes
            if choice.converted_gradients and float32_bytes != meta.num_bytes:
                size += 2 * float32_bytes  # the converted one, written and read
            yield Kernel(Work(size), is_weight_gradient=node in products)
