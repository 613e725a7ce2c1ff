"""Kernels of a segment whose backward is a graph, with expectations by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment
from merak.plan.cost.kernels.segment_kernels import (
    Kernel,
    KernelChoice,
    SegmentKernels,
    joint_kernels,
)
from merak.plan.cost.segments.measured import SegmentMemories

aten = torch.ops.aten
ROWS, WIDTH, INNER = 4, 8, 16
X, H, WEIGHT = 4 * ROWS * WIDTH, 4 * ROWS * INNER, 4 * WIDTH * INNER
PRODUCT = (X + WEIGHT + H, 2.0 * ROWS * WIDTH * INNER)


class Drawn:
    """A graph that is drawn by hand."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def placeholder(self, name: str, kind: Kind, meta: TensorMeta) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = {"tensor": meta, "kind": kind, "name": name}
        return node

    def call(self, target: Any, args: tuple[Any, ...], meta: TensorMeta) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"tensor": meta}
        return node

    def kernels(self, result: fx.Node, choice: KernelChoice, count: int) -> SegmentKernels:
        """What runs of it in a step of so many microbatches."""
        self.graph.output((result,))
        segment = Segment.of(0, "drawn", self.graph, ("result",))
        joint = SegmentMemories(torch.device("cpu"), kernels="cuda").joint_parts(segment)
        assert joint is not None
        return joint_kernels(joint, choice, "cuda", count)


def block(
    count: int, dtype: torch.dtype = torch.float32, choice: KernelChoice | None = None
) -> SegmentKernels:
    """A feed-forward block, (rows, width): x + down(2 sigmoid(up(x)))."""
    drawn = Drawn()
    outer, inner = (TensorMeta((ROWS, size), dtype, True) for size in (WIDTH, INNER))
    x = drawn.placeholder("x", Kind.VALUE, outer)
    up = drawn.placeholder("up", Kind.PARAMETER, TensorMeta((INNER, WIDTH), dtype, True))
    down = drawn.placeholder("down", Kind.PARAMETER, TensorMeta((WIDTH, INNER), dtype, True))
    found = drawn.call(aten.linear.default, (x, up), inner)
    found = drawn.call(aten.sigmoid.default, (found,), inner)
    found = drawn.call(aten.mul.Tensor, (found, 2.0), inner)
    found = drawn.call(aten.linear.default, (found, down), outer)
    result = drawn.call(aten.add.Tensor, (found, x), outer)
    return drawn.kernels(result, choice or KernelChoice(), count)


def sizes(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Bytes and FLOPs of every kernel."""
    return [(k.work.num_bytes, k.work.flops) for k in kernels if k.work is not None]


def test_the_operators_of_the_graph_run_one_by_one() -> None:
    found = block(count=1)
    assert sizes(found.forward) == [PRODUCT, (2 * H, 0), (2 * H, 0), PRODUCT, (3 * X, 0)]
    # A scale reads no operand, a sigmoid its result; the input's two gradients are added. The first
    # microbatch's gradients become those of the parameters.
    pointwise = [(2 * H, 0), (3 * H, 0), (3 * X, 0)]
    assert sorted(sizes(found.backward)) == sorted([*[PRODUCT] * 4, *pointwise])
    assert sizes(found.weight_gradient) == [PRODUCT] * 2
    assert sorted(sizes(found.input_gradient)) == sorted([*[PRODUCT] * 2, *pointwise])


@pytest.mark.parametrize("count", [2, 4])
def test_all_microbatches_but_the_first_add_to_gradients(count: int) -> None:
    one, several = block(count=1), block(count=count)
    added = [k for k in several.backward if k not in one.backward]
    share = 1 - 1 / count
    assert sizes(added) == [(share * 3 * WEIGHT, 0)] * 2
    assert [k.work.kernels for k in added if k.work] == [share] * 2
    assert [k for k in several.weight_gradient if k in added] == added


@pytest.mark.parametrize("in_float32", [True, False])
def test_gradients_of_low_precision_are_converted_first_where_sums_are_float32(
    in_float32: bool,
) -> None:
    choice = KernelChoice(float32_gradients=in_float32)
    low = WEIGHT // 2
    one, two = (block(count, torch.bfloat16, choice) for count in (1, 2))
    plain = sizes(block(1, torch.bfloat16, KernelChoice(float32_gradients=False)).backward)
    first = [(low + WEIGHT, 0.0)] * 2 if in_float32 else []
    assert sorted(sizes(one.backward)) == sorted([*plain, *first])
    later = low + 2 * (WEIGHT if in_float32 else low)
    mean = ((low + WEIGHT if in_float32 else 0) + later) / 2
    assert sorted(sizes(two.backward)) == sorted([*plain, *[(mean, 0.0)] * 2])


def test_a_loss_reads_one_number_of_each_position_and_fills_its_gradient() -> None:
    drawn = Drawn()
    logits = TensorMeta((ROWS, 1000), torch.float32, True)
    x = drawn.placeholder("x", Kind.VALUE, logits)
    labels = drawn.placeholder("labels", Kind.COLUMN, TensorMeta((ROWS,), torch.int64))
    scalar = TensorMeta((), torch.float32, True)
    loss = drawn.call(aten.cross_entropy_loss.default, (x, labels), scalar)
    found = drawn.kernels(loss, KernelChoice(), 1)
    whole, sectors = 4 * ROWS * 1000, 32 * ROWS
    assert sizes(found.forward) == [(2 * whole, 0), (sectors, 0)]
    assert sizes(found.backward) == [(whole, 0), (sectors, 0), (3 * whole, 0)]


def test_a_spread_value_is_read_where_it_lies_and_a_piece_fills_the_whole() -> None:
    drawn = Drawn()
    shape = TensorMeta((ROWS, 100), torch.float32, True)
    x = drawn.placeholder("x", Kind.VALUE, shape)
    piece = drawn.call(aten.slice.Tensor, (x, 1, 0, 50), replace(shape, shape=(ROWS, 50)))
    row = drawn.call(aten.mean.dim, (piece, [1]), replace(shape, shape=(ROWS,)))
    found = drawn.kernels(row, KernelChoice(), 1)
    half, numbers = 4 * ROWS * 50, 4 * ROWS
    assert sizes(found.forward) == [(half + numbers, 0)]
    # The mean's gradient is spread, then divided; the slice's is filled, and half of it copied.
    assert sizes(found.backward) == [(numbers + half, 0), (2 * half, 0), (2 * half, 0)]
