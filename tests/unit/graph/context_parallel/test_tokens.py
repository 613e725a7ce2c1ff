"""Context parallelism of a graph: what is shared, gathered and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from merak.core.errors import ShardError
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.engine.build import forecast_of
from merak.graph.context_parallel.apply import context_parallel, gathered_operators
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.plan.engine_options import EngineOptions
from tests import shared_cache
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build

LONG = 131_072


class Convolved(nn.Module):
    """A convolution over tokens between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return {"loss": self.head(torch.relu(x)).square().mean()}


class Flattened(nn.Module):
    """One product over all tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(64, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        return {"loss": self.head(x.cumsum(1).flatten(1)).square().mean()}


class Reordered(nn.Module):
    """A table of results that is filled with tokens in another order, then read by every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        reordered, backwards = torch.zeros_like(x), torch.arange(x.shape[1] - 1, -1, -1)
        reordered[:, backwards] = self.inner(x)
        return {"loss": self.head(torch.relu(x + reordered)).square().mean()}


class WrittenScores(nn.Module):
    """Attention whose scores, of each sample, get a bias of each token written into them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key = nn.Linear(8, 8, bias=False)
        self.bias = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        scores = torch.zeros(len(x), x.shape[1], x.shape[1]) + self.bias(x)
        scores.view(-1, x.shape[1]).mul_(0.5)
        scores += self.query(x) @ self.key(x).transpose(1, 2)
        return {"loss": self.head(scores.softmax(-1) @ self.value(x)).square().mean()}


class NumberedScores(nn.Module):
    """Attention whose scores of some tokens are a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        inner = torch.where(input_ids[..., None] > 2, self.value(x), 0.0)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return {"loss": self.head(scores.softmax(-1) @ inner).square().mean()}


def traced(model: nn.Module, *shape: int, **others: tuple[int, ...]) -> ModelGraph:
    shapes = {"input_ids": shape, **others}
    metas = {name: TensorMeta(size, torch.int64) for name, size in shapes.items()}
    return build_graph(GraphSource(model, cache_dir=shared_cache.FOLDER), metas, training=True)


def test_values_between_segments_are_a_ranks_tokens() -> None:
    graph = traced(cases.build("llama", "sdpa"), 2, 8, labels=(2, 8))
    parallel = context_parallel(graph, None, 2)
    fitted, _ = parallel.fit(graph)
    hidden = [name for name, meta in graph.values.items() if meta.shape == (2, 8, 32)]
    assert hidden
    assert {fitted.values[name].shape for name in hidden} == {(2, 4, 32)}
    assert gathered_operators(graph, parallel) is None


def test_what_mixes_tokens_is_gathered_and_said() -> None:
    graph = traced(Convolved(), 2, 8)
    said = gathered_operators(graph, context_parallel(graph, None, 2))
    assert said is not None
    assert said.startswith("cp=2: every rank gathers all tokens for 1 × conv1d")


def test_a_choice_between_values_of_tokens_and_a_number_gathers_nothing() -> None:
    graph = traced(NumberedScores(), 2, 8)
    assert gathered_operators(graph, context_parallel(graph, None, 2)) is None


def test_writes_that_mix_tokens_get_whole_values() -> None:
    graph = traced(Reordered(), 2, 8)
    said = gathered_operators(graph, context_parallel(graph, None, 2))
    assert said is not None
    assert said.startswith("cp=2: every rank gathers all tokens for 1 × zeros_like, 1 × ")


def test_what_is_written_into_heads_is_gathered() -> None:
    graph = traced(WrittenScores(), 2, 8)
    said = gathered_operators(graph, context_parallel(graph, None, 2))
    assert said is not None
    assert said.startswith("cp=2: every rank gathers all tokens for 1 × add_, the first at")


def test_a_length_that_does_not_divide_is_computed_whole() -> None:
    graph = traced(cases.build("llama", "sdpa"), 2, 8, labels=(2, 8))
    parallel = context_parallel(graph, None, 2)
    other = traced(cases.build("llama", "sdpa"), 2, 7, labels=(2, 7))
    fitted, _ = parallel.fit(other)
    assert fitted.values == other.values


@pytest.mark.parametrize(
    ("model", "shape", "sentence"),
    [
        (Convolved(), (2, 7), "cp=2 shares out the tokens of each sample, but the batch has 7"),
        (Flattened(), (2, 8), "this model mixes tokens everywhere; use cp=1, and the 2 ranks for"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    model: nn.Module, shape: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(ShardError) as refused:
        context_parallel(traced(model, *shape), None, 2)
    assert sentence in str(refused.value)


def activations(cp: int) -> int:
    """Bytes of a rank's activations with a long sample."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=LONG, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    sample: Any = tuple(
        (name, TensorMeta((1, LONG), torch.int64)) for name in ("input_ids", "labels")
    )
    mesh = Mesh(1, 1, 1, 0, torch.device("cpu"), None, cp=cp)
    forecast = forecast_of(GraphSource(model), sample, mesh, EngineOptions(recompute="off"))
    return sum(forecast.saved_bytes().values())


def test_four_ranks_hold_a_quarter_of_the_activations_of_131072_tokens() -> None:
    assert activations(4) == pytest.approx(activations(1) / 4, rel=0.1)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "separate", "all_called"])
def test_experts_of_tensor_parallel_ranks_get_a_ranks_own_tokens(kind: str) -> None:
    graph = traced(build(kind), 2, 8, labels=(2, 8))
    tensor = tensor_parallel(graph, None, 2, ep=2)
    assert gathered_operators(graph, context_parallel(graph, tensor, 2)) is None
