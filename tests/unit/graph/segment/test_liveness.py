"""Lifetimes of values, and where cuts may fall between them."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from merak.graph.ir.operators import is_embedding, is_weight_gemm
from merak.graph.segment.liveness import Liveness, Span, analyze_liveness
from merak.graph.trace.trace import trace
from tests.unit.graph import odd_models
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import metas


def flow_of(readers: list[list[int]], uncuttable: frozenset[int] = frozenset()) -> Liveness:
    """A flow of nodes by the positions that each reads."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"n{i}") for i in range(len(readers))]
    last = list(range(len(readers)))
    for i, sources in enumerate(readers):
        for source in sources:
            last[source] = i
    dying: list[list[int]] = [[] for _ in readers]
    for made, end in enumerate(last):
        if end > made:
            dying[end].append(made)
    return Liveness(tuple(nodes), (), tuple(last), tuple(map(tuple, dying)), uncuttable)


def bounds(spans: list[Span]) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in spans]


CHAIN = [[], [0], [1], [2]]
SKIP = [[], [0], [1], [0, 2], [3]]


def test_a_chain_is_cut_everywhere() -> None:
    parts = flow_of(CHAIN).cut(Span(0, 4, ()), frozenset())
    assert bounds(parts) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [part.incoming for part in parts] == [(), (0,), (1,), (2,)]


def test_a_skip_joins_what_it_passes() -> None:
    parts = flow_of(SKIP).cut(Span(0, 5, ()), frozenset())
    assert bounds(parts) == [(0, 1), (1, 4), (4, 5)]


def test_a_skip_set_aside_joins_nothing() -> None:
    flow = flow_of(SKIP)
    inner = flow.cut(Span(1, 4, (0,)), frozenset({0}))
    assert bounds(inner) == [(1, 2), (2, 3), (3, 4)]
    assert [part.incoming for part in inner] == [(0,), (0, 1), (0, 2)]


def test_no_cut_where_none_may_fall() -> None:
    parts = flow_of(CHAIN, frozenset({1})).cut(Span(0, 4, ()), frozenset())
    assert bounds(parts) == [(0, 1), (1, 3), (3, 4)]


def test_nothing_is_cut_into_one_empty_span() -> None:
    assert bounds(flow_of([]).cut(Span(0, 0, ()), frozenset())) == [(0, 0)]


def test_tuples_stay_with_their_readers() -> None:
    flow = analyze_liveness(trace(odd_models.Chunks(), metas(odd_models.rows())).graph)
    chunk = next(i for i, n in enumerate(flow.main) if "chunk" in str(n.target))
    assert set(range(chunk, flow.last_use[chunk])) <= flow.uncuttable


class ActivationInPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h.mul_(2).relu_()
        return (self.b(h) + h).mean()


def test_writes_stay_together_and_later_readers_need_not() -> None:
    flow = analyze_liveness(trace(ActivationInPlace(), metas(odd_models.rows())).graph)
    names = [str(node.target).split(".")[1] for node in flow.main]
    assert names == ["linear", "mul_", "relu_", "linear", "add", "mean"]
    assert flow.uncuttable == {0, 1}


def test_operators_on_the_batch_alone_are_batch_only() -> None:
    flow = analyze_liveness(trace(odd_models.DerivedFirst(), metas(odd_models.rows())).graph)
    batch_only = {str(node.target) for node in flow.batch_only}
    assert {"aten.gt.Scalar", "aten.arange.default", "aten.stack.default"} <= batch_only
    assert not any(is_weight_gemm(node) for node in flow.batch_only)


def test_gemms_and_embeddings_of_weights() -> None:
    viewed = trace(odd_models.ViewedParameters(), metas(odd_models.rows())).graph
    assert sum(is_weight_gemm(node) for node in viewed.nodes) == 2
    words = trace(odd_models.ShiftedLabels(), metas(odd_models.tokens())).graph
    assert sum(is_embedding(node) for node in words.nodes) == 2


class ScoresOnly(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.softmax(h @ h.t(), -1).mean()


def test_a_product_of_activations_is_no_weight_gemm() -> None:
    graph = trace(ScoresOnly(), metas(odd_models.rows())).graph
    found = [str(node.target) for node in graph.nodes if is_weight_gemm(node)]
    assert found == ["aten.linear.default"]
