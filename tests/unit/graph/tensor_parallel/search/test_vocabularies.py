"""Vocabularies split over ranks: chosen by price, and nowhere are all logits in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.cut import cut_into_segments
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import Replicate, Vocabulary
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.report import report_sharding
from merak.graph.trace.trace import trace
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES
from tests.unit.graph.lockstep import assert_parity

LARGE = 307
"""A vocabulary that is large beside the blocks, and that no degree divides."""


def traced(name: str, vocabulary: int) -> ModelGraph:
    architecture = ARCHITECTURES[name]
    return cases.traced(architecture.build(vocab_size=vocabulary), architecture.batch())


def split_by_vocabulary(graph: ModelGraph, degree: int, size: int) -> set[str]:
    weights = tensor_parallel(graph, None, degree).weights
    return {name for name, placed in weights.items() if placed.parts == (size,)}


TABLES = {
    "gpt2": {"transformer.wte.weight"},
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "bert": {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
    "t5": {"shared.weight"},
    "gemma3": {"model.embed_tokens.weight"},
    "bart": {"model.shared.weight"},
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", *map(slow, ("gemma3", "bart"))])
def test_large_ones_are_split_and_no_rank_sees_all_logits(name: str) -> None:
    graph = traced(name, LARGE)
    for degree in (2, 4):
        assert split_by_vocabulary(graph, degree, LARGE) == TABLES[name]
        split, _ = cases.shard_model(graph, tensor_parallel(graph, None, degree).weights, degree)
        shapes = [
            node.meta["tensor"].shape
            for segment in split.segments
            for node in segment.graph.nodes
            if isinstance(node.meta.get("tensor"), TensorMeta)
            and node.meta.get("name") != "final_logits_bias"  # a buffer
        ]
        assert not any(LARGE in shape for shape in shapes)
        assert any(-(-LARGE // degree) in shape for shape in shapes)


@one_in(4)
@pytest.mark.parametrize("name", [*TABLES, "vit"])
def test_small_ones_stay_whole(name: str) -> None:
    graph = cases.traced(ARCHITECTURES[name].build(), ARCHITECTURES[name].batch())
    weights = tensor_parallel(graph, None, 2).weights
    assert not weights.keys() & {*TABLES.get(name, ()), "classifier.weight"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_feature_dict_forces_it(name: str) -> None:
    architecture = ARCHITECTURES[name]
    features = dict.fromkeys(TABLES[name], Vocabulary())
    calls = assert_parity(architecture.build(vocab_size=41), architecture.batch(), features, 2)
    assert calls["vocab_parallel_cross_entropy"] == 1
    assert calls.pop("gather_from", 0) == 0


def test_a_bias_follows_its_head_and_a_feature_dict_can_forbid_both() -> None:
    graph = traced("bert", 41)
    table, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    weights = tensor_parallel(graph, {"word_embeddings": Vocabulary()}, 2).weights
    assert weights[table] == weights[bias] == Shard(0, (41,))
    kept = tensor_parallel(traced("bert", LARGE), {"word_embeddings": Replicate()}, 2).weights
    assert not kept.keys() & {table, bias}


def test_logits_are_whole_where_they_are_asked_for() -> None:
    architecture = ARCHITECTURES["gpt2"]
    model, columns = architecture.build(vocab_size=LARGE), architecture.batch()
    parallel = tensor_parallel(cases.traced(model, columns), None, 2)
    metas = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in columns.items()}
    all_outputs = cut_into_segments(trace(model.eval(), metas))
    head, _ = parallel(all_outputs.segments[-1])
    targets = [getattr(node.target, "__name__", "") for node in head.graph.nodes]
    assert targets.count("gather_from") == targets.count("vocab_parallel_cross_entropy") == 1
    (output,) = head.graph.find_nodes(op="output")
    assert {node.meta["tensor"].shape for node in output.args[0]} >= {(2, 8, LARGE), ()}


def test_the_report_names_it() -> None:
    graph = traced("llama", LARGE)
    first, *_, last = report_sharding(graph, tensor_parallel(graph, None, 2))
    assert first.split == {"model.embed_tokens.weight": "vocabulary (307 and 1 of padding)"}
    assert last.split == {"lm_head.weight": "vocabulary (307 and 1 of padding)"}
    # The loss sums twice inside, the gradient of what enters the head once.
    assert (first.forward, last.forward, last.backward) == (1, 2, 1)


class Classifier(nn.Module):
    """A head over many classes, with a loss of one's own."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 101)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.down(self.up(x).relu())), y)


def to_probabilities(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, nn.functional.one_hot(y, 101).float())


def by_gate(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits / (logits.sigmoid() + 1.0), y)


def by_probability(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, y) + logits.softmax(-1).square().mean()


@pytest.mark.parametrize("loss", [to_probabilities, by_gate, by_probability])
def test_what_must_see_all_classes_or_could_see_padding_keeps_a_head_whole(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model, batch = Classifier(loss), {"x": torch.randn(6, 8), "y": torch.randint(101, (6,))}
    graph = cases.traced(model, batch)
    assert "head.weight" not in tensor_parallel(graph, None, 2).weights
    assert_parity(model, batch, None, 2)
    with pytest.raises(ShardError, match="tensor parallelism cannot go on at"):
        tensor_parallel(graph, {"head": Vocabulary()}, 2)


def test_class_weights_and_smoothing() -> None:
    torch.manual_seed(0)
    weight = torch.rand(101)

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, y, weight, label_smoothing=0.1)

    model, batch = Classifier(loss), {"x": torch.randn(6, 8), "y": torch.randint(101, (6,))}
    assert {"head.weight", "head.bias"} <= tensor_parallel(
        cases.traced(model, batch), None, 2
    ).weights.keys()
    assert_parity(model, batch, None, 2)


def in_two_steps(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.nll_loss(logits.log_softmax(-1), y)


def picked(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


def summed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, y) - logits.mean(-1).sum()


@pytest.mark.parametrize("loss", [in_two_steps, picked, summed])
@one_in(2)
@pytest.mark.parametrize("degree", [2, 101])  # with padding and without
def test_losses_written_by_hand(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], degree: int
) -> None:
    model, batch = Classifier(loss), {"x": torch.randn(6, 8), "y": torch.randint(101, (6,))}
    graph = cases.traced(model, batch)
    split, shards = cases.shard_model(
        graph, tensor_parallel(graph, {"head": Vocabulary()}, degree).weights, degree
    )
    assert shards["head.weight"].parts == shards["head.bias"].parts == (101,)
    shapes = [
        node.meta["tensor"].shape
        for node in split.segments[-1].graph.nodes
        if isinstance(node.meta.get("tensor"), TensorMeta)
    ]
    assert not any(101 in shape for shape in shapes)


class Tables(nn.Module):
    """A table, and a parameter that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.rand(6, 8))
        self.table = nn.Embedding(101, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) + self.added).square().mean()


def test_a_weight_without_a_vocabulary() -> None:
    graph = cases.traced(Tables(), {"ids": torch.randint(101, (4, 6))})
    message = "added cannot be split over a vocabulary: its rows are not looked up, nor are they"
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, {"added": Vocabulary()}, 2)
