"""Operators on what a model picks by values: one node, with what eager code computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.errors import TraceError, TrainingError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.program.program import compile_segment
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.opaque.operator import is_dynamic_region
from tests.tiers import one_in
from tests.versions import exported_since

SAMPLES, LENGTH, WORDS, WIDTH = 3, 5, 7, 4
COLUMNS = {
    "x": TensorMeta((SAMPLES, LENGTH), torch.int64),
    "y": TensorMeta((SAMPLES,), torch.int64),
}
Batch = dict[str, torch.Tensor]


class Picking(nn.Module):
    """Words in a table, a layer, and a head that subclasses write."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(torch.tanh(self.layer(self.words(x))), x, y)

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LastMarked(Picking):
    """Takes the last word of a kind of every sample; notes the kind of its loss in the first call.

    The next call is compared with the first, though names and order in the region are others.
    """

    problem_type: str | None = None

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.problem_type is None:
            self.problem_type = "labels"
        marked = x == 2
        torch._check(torch.unique_consecutive(marked.sum(1)).numel() == 1)
        last = h[marked, :].view(h.size(0), -1, h.size(-1))[:, -1]
        return functional.cross_entropy(self.head(last), y)


class Labelled(Picking):
    """Asks whether any sample has a label."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits, found = self.head(h.mean(1)), (y >= 0).nonzero()
        if found.size(0) > 0:
            rows = found.expand(found.size(0), logits.size(1))
            labels = torch.gather(y, 0, found.view(-1))
            return functional.cross_entropy(torch.gather(logits, 0, rows), labels)
        return logits.new_zeros(())


class Masked(Picking):
    """Predicts some words by the table itself, in a loss of two parts."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        picked = x > 2
        logits = functional.linear(h[picked], self.words.weight)
        loss = functional.cross_entropy(logits, x[picked], reduction="sum") / SAMPLES
        return loss + functional.cross_entropy(self.head(h.sum(1)), y)


class Between(Picking):
    """Weighs the picked ones against each other, and adds what they give to all."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = (x > 2).flatten().nonzero().squeeze(1)
        picked = h.flatten(0, 1)[rows]
        shared = (self.layer(picked).softmax(0) * picked).sum(0)
        twice = h.flatten(0, 1).index_put((rows,), picked, accumulate=True)
        return functional.cross_entropy(self.head((twice.view_as(h) + shared).mean(1)), y)


class Counted(Picking):
    """Insists on how many words of a kind there are, and on some others."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        marked = (x == 2).nonzero()
        assert marked.shape[0] == 2 * x.size(0), "two of every sample"
        ends = marked.view(-1, 2, 2)[:, 1, 1]
        picked = h[torch.arange(x.size(0)), ends]
        if (x > 2).nonzero().size(0) < 2:
            raise ValueError("too few others")
        return functional.cross_entropy(self.head(picked), y)


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    x[:, 1] = x[:, 3] = 2
    return {"x": x, "y": torch.randint(3, (SAMPLES,), generator=generator)}


def traced(model: nn.Module) -> ModelGraph:
    return build_graph(GraphSource(model), COLUMNS, training=True)


def run(graph: ModelGraph, model: nn.Module, given: Batch) -> torch.Tensor:
    """The loss, one segment after the other."""
    values: dict[str, torch.Tensor] = {}
    parameters = dict(model.named_parameters())
    for part in (graph.prologue, *graph.segments):
        program = compile_segment(part, graph.values)
        names = (*part.parameters, *part.columns, *part.inputs, *part.batch_only)
        everything = {**parameters, **given, **values}
        made = program.function(*(everything[name] for name in names))
        values.update(zip(part.outputs, made, strict=True))
    return values[str(graph.loss)]


@one_in(3)
@pytest.mark.parametrize(
    "kind",
    [
        LastMarked,
        Labelled,
        pytest.param(Masked, marks=exported_since(2, 12)),
        Between,
        pytest.param(Counted, marks=exported_since(2, 13)),
    ],
)
def test_gradients_are_those_of_eager_code(kind: type[Picking]) -> None:
    torch.manual_seed(1)
    model = kind()
    graph = unpack_model(pack_model(traced(model)))
    nodes = [n for s in graph.segments for n in s.graph.nodes if is_dynamic_region(n)]
    assert nodes
    for seed in range(3):
        given = batch(seed)
        if kind is Labelled:
            given["y"][seed % 2 :: 2] = -100
        found = torch.autograd.grad(
            run(graph, model, given), list(model.parameters()), allow_unused=True
        )
        expected = torch.autograd.grad(model(**given), list(model.parameters()), allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def change(given: Batch, **columns: Any) -> Batch:
    return {**given, **columns}


@one_in(3)
@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        (LastMarked, "x", torch.tensor([[2, 3, 3, 3, 3], [2, 2, 2, 3, 3], [2, 2, 3, 3, 3]])),
        (LastMarked, "x", torch.full((SAMPLES, LENGTH), 3)),
        (Labelled, "y", torch.full((SAMPLES,), -100)),
        pytest.param(
            Counted,
            "x",
            torch.tensor([[2, 3, 3, 3, 3], [2, 2, 2, 3, 3], [2, 2, 2, 3, 3]]),
            marks=exported_since(2, 13),
        ),
        pytest.param(
            Counted,
            "x",
            torch.tensor([[2, 1, 1, 2, 1], [2, 1, 1, 2, 1], [2, 1, 1, 2, 3]]),
            marks=exported_since(2, 13),
        ),
    ],
)
def test_a_batch_for_which_the_trace_is_not_true_is_refused(
    kind: type[Picking], column: str, value: torch.Tensor
) -> None:
    model = kind()
    graph = traced(model)
    with pytest.raises(TrainingError, match=f"{__file__}.* does not fit these values"):
        run(graph, model, change(batch(), **{column: value}))


class Returned(Picking):
    """Returns as many numbers as it picks."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return h[x > 2]


class Branching(Picking):
    """Goes one way if it picks many, and another if it picks few."""

    def loss(self, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        picked = h[x > 2]
        return picked.mean() if picked.size(0) > 4 else picked.square().mean()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Returned, "the shape of a tensor depends there on the values of another"),
        (Branching, "what runs next, or a shape, depends there on the values"),
    ],
)
def test_what_cannot_be_one_node_is_refused_with_its_line(kind: type[Picking], said: str) -> None:
    with pytest.raises(TraceError, match=f"{__file__}.*{said}"):
        traced(kind())
