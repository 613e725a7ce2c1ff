"""Losses of all tokens but the last ones read all scores; values and gradients stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from merak.graph.context_parallel.apply import context_parallel, gathered_operators
from merak.graph.context_parallel.shifted_losses import read_all_tokens
from merak.graph.ir.operators import NARROWS, family
from merak.graph.tensor_parallel.apply import tensor_parallel
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.context_parallel.test_tokens import traced

CLASSES, SAMPLES, TOKENS = 16, 2, 8

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _weighted(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    weight = torch.arange(float(CLASSES)) + 1
    return cross_entropy(
        scores[:, :-2].float().reshape(-1, CLASSES), ids[:, 2:].reshape(-1), weight, ignore_index=3
    )


LOSSES: Mapping[str, Loss] = {
    "flat": lambda scores, ids: cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    "contiguous": lambda scores, ids: cross_entropy(
        scores[..., :-1, :].contiguous().view(-1, CLASSES),
        ids[..., 1:].contiguous().view(-1),
        label_smoothing=0.1,
    ),
    "swapped": lambda scores, ids: cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:]),
    "log-probabilities": lambda scores, ids: nll_loss(
        scores.log_softmax(-1)[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1), reduction="sum"
    ),
    "weighted": _weighted,
}
"""Ways to write a loss of the tokens behind."""

OTHERS: Mapping[str, Loss] = {
    "tokens in front": lambda scores, ids: cross_entropy(
        scores[:, 1:].flatten(0, 1), ids[:, :-1].flatten()
    ),
    "of each token": lambda scores, ids: (
        cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        .square()
        .mean()
    ),
    "other samples": lambda scores, ids: cross_entropy(
        scores[:, :-1].transpose(0, 1).reshape(-1, CLASSES), ids[:, 1:].flatten()
    ),
    "fewer classes": lambda scores, ids: cross_entropy(
        scores[:, :-1, :8].flatten(0, 1), ids[:, 1:].flatten() % 8
    ),
}
"""Losses that are left as they are."""


class Shifted(nn.Module):
    """A product for each token, and a loss of the tokens behind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.loss = {**LOSSES, **OTHERS}[kind]
        self.embedding = nn.Embedding(CLASSES, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(torch.relu(self.inner(self.embedding(input_ids))))
        return {"loss": self.loss(scores, input_ids), "logits": scores}


@one_in(3)
@pytest.mark.parametrize("kind", [*LOSSES, *OTHERS])
@pytest.mark.parametrize(
    ("samples", "tokens"),
    [(SAMPLES, TOKENS), (TOKENS - 1, TOKENS), (2, CLASSES + 1)],
    ids=["", "as many samples as tokens", "as many classes as tokens"],
)
def test_values_and_gradients_stay(kind: str, samples: int, tokens: int) -> None:
    torch.manual_seed(0)
    model = Shifted(kind)
    ids = torch.randint(0, CLASSES, (samples, tokens), generator=torch.Generator().manual_seed(1))
    graph = traced(model, samples, tokens)
    graphs = [read_all_tokens(segment.graph, {tokens}) for segment in graph.segments]
    pairs = zip(graph.segments, graphs, strict=True)
    changed = replace(graph, segments=tuple(replace(own, graph=new) for own, new in pairs))
    is_same = all(new is own.graph for own, new in zip(graph.segments, graphs, strict=True))
    assert is_same == (kind in OTHERS)
    found = []
    for each in (graph, changed):
        weights = {n: w.requires_grad_() for n, w in cases.weights(model).items()}
        loss = cases.run_model(each, weights, {**cases.buffers(model, graph), "input_ids": ids})
        loss.backward()
        found.append((loss, {n: w.grad for n, w in weights.items() if w.grad is not None}))
    (expected, gradients), (loss, own) = found
    torch.testing.assert_close(loss, expected)
    cases.assert_gradients_equal(own, gradients)


@one_in(3)
@pytest.mark.parametrize("kind", LOSSES)
def test_shares_of_the_tokens_stay_where_they_are(kind: str) -> None:
    graph = traced(Shifted(kind), SAMPLES, TOKENS)
    assert gathered_operators(graph, context_parallel(graph, None, 2)) is None


def test_other_lengths_are_left() -> None:
    graph = traced(Shifted("flat"), SAMPLES, TOKENS)
    for segment in graph.segments:
        assert read_all_tokens(segment.graph, {TOKENS - 1}) is segment.graph


def test_scores_whose_classes_are_split() -> None:
    """OpenAI's GPT shifts its scores itself; with tp their classes are split."""
    config = transformers.OpenAIGPTConfig(
        n_embd=16, n_layer=1, n_head=2, vocab_size=40_000, n_positions=TOKENS
    )
    graph = traced(transformers.OpenAIGPTLMHeadModel(config), SAMPLES, TOKENS, labels=(2, TOKENS))
    tensor = tensor_parallel(graph, None, 2)
    assert any("wte" in name or "embed" in name for name in tensor.weights)
    parallel = context_parallel(graph, tensor, 2)
    _, fitted = parallel.fit(graph)
    losses = [fitted(segment)[0].graph for segment in graph.segments][-1]
    assert not any(family(node.target) in NARROWS for node in losses.nodes)
    assert gathered_operators(graph, parallel) is None
