"""Cost and memory of opaque modules: as many products and bytes as in eager code."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.opaque.operator import cost_of, is_opaque, opaque_nodes
from merak.plan.cost.operators import node_work
from merak.plan.cost.segments.measured import SegmentMemories

SHAPE = (64, 32)


class Wide(nn.Module):
    """Two products with much between them, and branches that no trace can follow.

    What the branches save is freed at once, so that others may get its place in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            if x.max() > 100:
                x = x / 2
        return self.down(torch.tanh(self.up(x)).exp())


class Model(nn.Module):
    """One of them between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(32, 32), Wide(), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(self.wide(self.first(x))).square().mean()}


def graph_of(model: nn.Module) -> ModelGraph:
    columns = {"x": TensorMeta(SHAPE, torch.float32)}
    return build_graph(GraphSource(model), columns, training=True)


def test_products_are_counted_both_ways() -> None:
    (node,) = opaque_nodes(graph_of(Model()))
    work = node_work(node, "cpu")
    x = torch.randn(SHAPE, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = Wide()(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert sum(kernel.flops for kernel in work.forward) == forward.get_total_flops() > 0
    assert sum(kernel.flops for kernel in work.backward) == backward.get_total_flops()
    assert all(kernel.num_bytes > 0 for kernel in (*work.forward, *work.backward))


def test_what_it_saves_is_what_eager_code_saves() -> None:
    graph = graph_of(Model())
    (node,) = opaque_nodes(graph)
    module, x = Wide(), torch.randn(SHAPE, requires_grad=True)
    given = {t.untyped_storage()._cdata for t in (x, *module.parameters())}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in given:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    assert sum(seen.values()) >= 2 * 64 * 256 * 4  # of each of the two functions' results
    assert cost_of(node).saved_bytes == sum(seen.values())
    measure = SegmentMemories(torch.device("cpu"))
    (segment,) = (s for s in graph.segments if any(map(is_opaque, s.graph.nodes)))
    others = sum(t.nbytes for t in (torch.empty(64, 32), torch.empty(64, 4)))
    assert sum(seen.values()) <= measure(segment).saved_bytes <= sum(seen.values()) + others
