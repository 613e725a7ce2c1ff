"""Losses of causal models without a mask of the padding behind each sample, where that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import ModelOutput

from merak.graph.context_parallel.padded_rows import ignores_padding
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from tests.tiers import one_in
from tests.unit.graph import families
from tests.unit.graph.stages import assert_like_eager, metas

MASK = "attention_mask"


def batch_of() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, families.VOCABULARY, (3, 8))
    mask = (torch.arange(8) < torch.tensor([[8], [5], [2]])).long()
    return {"input_ids": ids, MASK: mask, "labels": ids.masked_fill(mask == 0, -100)}


def graph_of(model: nn.Module) -> ModelGraph:
    columns = metas(batch_of())
    columns[MASK] = replace(columns[MASK], ignored=("labels",))
    return build_graph(GraphSource(model), columns, training=True)


class Head(nn.Module):
    """A causal model, with a loss of its own."""

    def __init__(self, loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.loss = families.llama(1), loss

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> ModelOutput:
        logits = self.body(input_ids=input_ids, attention_mask=attention_mask).logits
        return ModelOutput(loss=self.loss(logits, labels, attention_mask))


def sliced(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def same_token(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / 7


def token_before(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The padding's first row has a label that is not ignored."""
    return functional.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


def other_sample(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flip(0).flatten())


def other_label(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    labels = labels.masked_fill(labels == -100, 0)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def balanced(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return sliced(logits, labels, mask) + logits.softmax(-1).mean((0, 1)).pow(2).sum()


def pooled(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return sliced(logits + logits.mean(1, keepdim=True), labels, mask)


def convolved(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return sliced(logits + logits.roll(-1, 1), labels, mask)


def paired(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    pairs = logits.unflatten(1, (4, 2))
    return sliced((pairs + pairs.mean(2, keepdim=True)).flatten(1, 2), labels, mask)


@one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda: families.llama(1),
        lambda: families.gpt2(1),
        lambda: families.neox(1),
        lambda: Head(sliced),
        lambda: Head(same_token),
    ],
    ids=["llama", "gpt2", "neox", "sliced", "same_token"],
)
def test_what_is_behind_the_ends_of_samples_is_not_read(make: Callable[[], nn.Module]) -> None:
    model, batch = make(), batch_of()
    graph = graph_of(model)
    attention = torch.ops.aten.scaled_dot_product_attention.default
    found = [n for s in graph.segments for n in s.graph.nodes if n.target is attention]
    assert len(found) == 1 and all((*node.args, None)[3] is None for node in found)
    assert ignores_padding(graph, MASK)
    assert_like_eager(graph, model, batch, {"rtol": 1e-6, "atol": 0.0}, rtol=1e-5, atol=1e-7)


def windowed() -> nn.Module:
    return families.causal(
        transformers.MistralConfig, transformers.MistralForCausalLM, 2,
        **families.SIZES, num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip


@one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        *(
            (lambda loss=loss: Head(loss))
            for loss in (
                token_before, other_sample, other_label, balanced, pooled, convolved, paired
            )
        ),
        lambda: families.bert(1),
        windowed,
        lambda: families.mixtral(1),
    ],
    ids=[
        "token_before", "other_sample", "other_label", "balanced", "pooled", "convolved", "paired",
        "bidirectional", "windowed", "experts",
    ],
)  # fmt: skip
def test_what_reads_it_is_found(make: Callable[[], nn.Module]) -> None:
    assert not ignores_padding(graph_of(make()), MASK)
