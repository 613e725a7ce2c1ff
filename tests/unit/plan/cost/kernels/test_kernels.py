"""Kernels of a segment by itself and on a tensor parallel rank, with expectations by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.tensor_parallel.rules.norms import sharded_batch_norm
from merak.ops.collectives import copy_to, gather_with_partial_grad, reduce_from, reduce_scatter_to
from merak.ops.sharded_statistics import sharded_layer_norm, sharded_rms_norm
from merak.ops.vocab_parallel import vocab_parallel_cross_entropy
from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.groups import groups_of
from merak.plan.cost.data_sheets import GENERATIONS
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.segment_kernels import Kernel, KernelChoice, segment_kernels
from merak.plan.price.segments import SegmentPrice, price_graph

aten = torch.ops.aten
ROWS, WIDTH, INNER = 4, 8, 16
X, H, WEIGHT = 4 * ROWS * WIDTH, 4 * ROWS * INNER, 4 * WIDTH * INNER
FLOPS = 2.0 * ROWS * WIDTH * INNER
PRODUCT = (X + WEIGHT + H, FLOPS)

FUSED = KernelChoice(fused=True)


class Block:
    """A feed-forward block, (rows, width) in float32: x + down(2 sigmoid(up(x)))."""

    def __init__(self, *, tp: bool = False) -> None:
        self.graph = fx.Graph()
        x = self.placeholder("x", Kind.VALUE, (ROWS, WIDTH))
        up = self.placeholder("up", Kind.PARAMETER, (INNER, WIDTH))
        down = self.placeholder("down", Kind.PARAMETER, (WIDTH, INNER))
        entered = self.call(copy_to, (x, "tp"), (ROWS, WIDTH)) if tp else x
        inner = self.call(aten.linear.default, (entered, up), (ROWS, INNER))
        inner = self.call(aten.sigmoid.default, (inner,), (ROWS, INNER))
        inner = self.call(aten.mul.Tensor, (inner, 2.0), (ROWS, INNER))
        out = self.call(aten.linear.default, (inner, down), (ROWS, WIDTH))
        if tp:
            out = self.call(reduce_from, (out, "tp"), (ROWS, WIDTH))
        self.graph.output((self.call(aten.add.Tensor, (out, x), (ROWS, WIDTH)),))

    def placeholder(self, name: str, kind: Kind, shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = {"tensor": TensorMeta(shape, torch.float32, True), "kind": kind, "name": name}
        return node

    def call(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"tensor": TensorMeta(shape, torch.float32, True)}
        return node


def sizes(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Bytes and FLOPs of every kernel."""
    return [(k.work.num_bytes, k.work.flops) for k in kernels if k.work is not None]


def test_the_traces_operators_run_one_by_one() -> None:
    found = segment_kernels(Block().graph, KernelChoice(), "cuda")
    pointwise = (2 * H, 0)
    assert sizes(found.forward) == [PRODUCT, pointwise, pointwise, PRODUCT, (3 * X, 0)]
    # The input's two gradients are added, and each weight's to that of earlier microbatches.
    added = [(3 * X, 0), (3 * WEIGHT, 0), (3 * WEIGHT, 0)]
    pointwise = (3 * H, 0)
    expected = [PRODUCT, PRODUCT, pointwise, pointwise, PRODUCT, PRODUCT, *added]
    assert sizes(found.backward) == expected
    deferred = [k for k in found.backward if k.is_weight_gradient]
    assert sorted(sizes(deferred)) == sorted([PRODUCT, PRODUCT, *added[1:]])


def test_any_product_with_a_parameter_leaves_its_gradient_to_the_w() -> None:
    block = Block()
    block.graph = fx.Graph()
    x = block.placeholder("x", Kind.VALUE, (ROWS, WIDTH))
    weight = block.placeholder("weight", Kind.PARAMETER, (INNER, WIDTH))
    turned = block.call(aten.t.default, (weight,), (WIDTH, INNER))
    made = block.call(aten.mm.default, (x, turned), (ROWS, INNER))
    block.graph.output((block.call(aten.mm.default, (made, weight), (ROWS, WIDTH)),))
    found = segment_kernels(block.graph, KernelChoice(), "cuda")
    deferred = [k for k in found.backward if k.is_weight_gradient]
    assert sorted(sizes(deferred)) == sorted([PRODUCT, PRODUCT, (3 * WEIGHT, 0)])
    # A product of two values leaves nothing.
    block.graph = fx.Graph()
    x, y = (block.placeholder(name, Kind.VALUE, (WIDTH, WIDTH)) for name in "xy")
    block.graph.output((block.call(aten.mm.default, (x, y), (WIDTH, WIDTH)),))
    found = segment_kernels(block.graph, KernelChoice(), "cuda")
    assert not any(k.is_weight_gradient for k in found.backward)


def test_fused_kernels_write_no_inner_value() -> None:
    found = segment_kernels(Block().graph, FUSED, "cuda")
    assert sizes(found.forward) == [PRODUCT, (2 * H, 0), PRODUCT, (3 * X, 0)]
    assert len(found.forward[1].nodes) == 2
    # Weights' gradients are added by their products: read, and written as a gradient is anyway.
    weight = (PRODUCT[0] + WEIGHT, FLOPS)
    products = [weight, PRODUCT]
    gradients = [*products, (3 * H, 0), *products, (3 * X, 0)]
    assert sorted(sizes(found.backward)) == sorted(gradients)


def test_fused_kernels_may_leave_the_sums_of_gradients_to_others() -> None:
    choice = KernelChoice(fused=True, fused_sums=False)
    found = segment_kernels(Block().graph, choice, "cuda")
    added = [(3 * X, 0), (3 * WEIGHT, 0), (3 * WEIGHT, 0)]
    gradients = [PRODUCT, PRODUCT, (3 * H, 0), PRODUCT, PRODUCT]
    assert sorted(sizes(found.backward)) == sorted([*gradients, *added])


def test_gradients_of_low_precision_are_added_in_float32() -> None:
    block = Block()
    for node in block.graph.nodes:
        if "tensor" in node.meta:
            node.meta["tensor"] = TensorMeta(node.meta["tensor"].shape, torch.bfloat16, True)
    num_bytes = sum(
        size for size, _ in sizes(segment_kernels(block.graph, KernelChoice(), "cuda").backward)
    )
    own = KernelChoice(float32_gradients=False)
    less = sum(size for size, _ in sizes(segment_kernels(block.graph, own, "cuda").backward))
    assert num_bytes - less == 2 * (2 * WEIGHT // 2)
    # A framework may convert each gradient first: what it writes is read again.
    converted = KernelChoice(converted_gradients=True)
    more = sum(size for size, _ in sizes(segment_kernels(block.graph, converted, "cuda").backward))
    assert more - num_bytes == 2 * (2 * WEIGHT)


DEVICE = DeviceProfile(
    name="round",
    device_type="cuda",
    flops_per_s={"float32": FLOPS},  # a product takes a second, nothing else takes time
    memory_bytes_per_s=1e15,
    functions_per_s=1e15,
    randoms_per_s=1e15,
    overhead_s=0.0,
    host_bytes_per_s=1e15,
)
SECOND = Link("an activation takes a second", 0.0, X)


def priced(graph: fx.Graph, choice: KernelChoice, degree: int) -> SegmentPrice:
    cluster = Cluster((Nodes(DEVICE, degree, 1, SECOND, SECOND),))
    return price_graph(graph, choice, DEVICE, groups_of(cluster, degree, 1))


def test_collectives_over_tp_are_those_of_the_graph() -> None:
    graph = Block(tp=True).graph
    found = segment_kernels(graph, FUSED, "cuda")
    assert [k.collective for k in found.forward if k.collective] == [("all_reduce", X, "tp")]
    assert [k.collective for k in found.backward if k.collective] == [("all_reduce", X, "tp")]
    # A ring of two ranks passes half of the activation on twice: a second.
    price = priced(graph, FUSED, 2)
    assert price.forward_s == pytest.approx(3.0)
    assert sum(collective_s for _, collective_s in price.forward.steps) == pytest.approx(1.0)
    assert price.backward_s == pytest.approx(5.0)
    assert price.input_gradient.seconds == pytest.approx(3.0)
    assert price.weight_gradient.seconds == pytest.approx(2.0)


def test_ranks_with_some_channels_each_exchange_running_statistics() -> None:
    block = Block()
    (output,) = block.graph.find_nodes(op="output")
    with block.graph.inserting_before(output):
        statistics = [block.placeholder(n, Kind.BUFFER, (2 * WIDTH,)) for n in ("mean", "var")]
        x = output.args[0][0]  # type: ignore[index]
        args = (x, None, None, *statistics, 0.1, 1e-5, False, [2 * WIDTH], "tp")
        normed = block.call(sharded_batch_norm, args, (ROWS, WIDTH))
    output.args = ((normed,),)
    found = segment_kernels(block.graph, FUSED, "cuda").forward
    gathered = 2 * 4 * (2 * WIDTH)
    assert [k.collective for k in found if k.collective] == [("all_gather", gathered, "tp")]


def test_norms_over_ranks_exchange_a_number_for_each_position() -> None:
    block = Block()
    (output,) = block.graph.find_nodes(op="output")
    with block.graph.inserting_before(output):
        x = output.args[0][0]  # type: ignore[index]
        normed = block.call(sharded_rms_norm, (x, None, None, 1, "tp"), (ROWS, WIDTH))
        normed = block.call(sharded_layer_norm, (normed, None, None, 1e-5, 1, "tp"), (ROWS, WIDTH))
        loss = (normed, normed, None, 1, -100, 0.1, (1, 2 * WIDTH, "tp"))
        last = block.call(vocab_parallel_cross_entropy, loss, ())
    output.args = ((last,),)
    found = segment_kernels(block.graph, FUSED, "cuda").forward
    sizes = [k.collective[1] for k in found if k.collective]
    assert sizes == [4 * ROWS, 8 * ROWS, 4 * ROWS * WIDTH, 3 * 4 * ROWS * WIDTH]


def sequence_parallel_block() -> Block:
    """The block of one of two ranks that share a sequence of twice its rows."""
    block = Block()
    nodes = {node.name: node for node in block.graph.nodes}
    with block.graph.inserting_before(nodes["linear_default"]):
        args = (nodes["x"], 0, (ROWS,), "tp")
        gathered = block.call(gather_with_partial_grad, args, (2 * ROWS, WIDTH))
    nodes["linear_default"].update_arg(0, gathered)
    with block.graph.inserting_after(nodes["linear_default_1"]):
        scattered = block.call(
            reduce_scatter_to, (nodes["linear_default_1"], 0, (ROWS,), "tp"), (2, WIDTH)
        )
    nodes["add_tensor"].update_arg(0, scattered)
    return block


def test_sequence_parallel_gathers_again_for_the_weights_gradient() -> None:
    found = segment_kernels(sequence_parallel_block().graph, FUSED, "cuda")
    kinds = [k.collective[0] for k in found.forward if k.collective]
    assert kinds == ["all_gather", "reduce_scatter"]
    kinds = [k.collective[0] for k in found.backward if k.collective]
    assert kinds == ["all_gather", "all_gather", "reduce_scatter"]


def test_a_backward_of_autograd_is_one_piece_and_gathers_nothing_again() -> None:
    """Where other segments run joint graphs; rules are for those of which there are none."""
    graph = sequence_parallel_block().graph
    own = segment_kernels(graph, KernelChoice(), "cuda")
    other = segment_kernels(graph, KernelChoice(recomputes_whole=True), "cuda")
    assert own.weight_gradient == () and own.input_gradient == own.backward
    assert other.weight_gradient and len(other.input_gradient) < len(other.backward)
    kinds = [[k.collective[0] for k in found.backward if k.collective] for found in (own, other)]
    assert kinds == [
        ["all_gather", "reduce_scatter"],
        ["all_gather", "all_gather", "reduce_scatter"],
    ]


def test_collectives_may_run_beside_their_products_but_for_a_chunk() -> None:
    graph = sequence_parallel_block().graph
    apart = priced(graph, FUSED, 2)
    beside = priced(graph, replace(FUSED, overlaps_products=True), 2)
    for one, other, unshared in (
        (apart.forward, beside.forward, True),
        (apart.backward, beside.backward, False),  # two of its three may have one product
    ):
        collectives = [collective_s for _, collective_s in one.steps if collective_s]
        hidden_s = sum(min(own, 1.0) / 2 for own in collectives)  # products take a second each
        spared_s = one.seconds - other.seconds
        if unshared:
            assert spared_s == pytest.approx(0.85 * hidden_s)
        assert 0.5 * hidden_s < spared_s <= 0.85 * hidden_s + 1e-9


def test_a_product_hides_no_more_than_it_takes() -> None:
    graph = sequence_parallel_block().graph
    slow = Link("an activation takes many seconds", 0.0, X / 100)
    cluster = Cluster((Nodes(DEVICE, 2, 1, slow, slow),))
    groups = groups_of(cluster, 2, 1)
    apart = price_graph(graph, FUSED, DEVICE, groups)
    beside = price_graph(graph, replace(FUSED, overlaps_products=True), DEVICE, groups)
    assert apart.forward_s - beside.forward_s == pytest.approx(0.85 * 2 * 0.5)


def test_training_runs_at_the_rate_that_a_device_sustains() -> None:
    curve = GENERATIONS["hopper"]
    burst, long = (
        price_graph(
            Block().graph,
            FUSED,
            replace(DEVICE, efficiency=replace(curve, sustained=sustained)),
            groups_of(Cluster((Nodes(DEVICE, 1, 1, SECOND, SECOND),)), 1, 1),
        )
        for sustained in (1.0, 0.5)
    )
    assert long.forward_s == pytest.approx(2.0 * burst.forward_s)


def test_a_recomputation_runs_the_operators_that_are_recomputed() -> None:
    graph = Block().graph
    price = priced(graph, KernelChoice(), 1)
    others = {p for p, node in enumerate(graph.nodes) if node.name != "linear_default"}
    assert price.recompute(None).seconds == price.forward_s == pytest.approx(2.0)
    assert price.recompute(frozenset(others)).seconds == pytest.approx(1.0)
