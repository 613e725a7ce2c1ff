"""Masks that a model makes itself: attention has none where they say no more than causality."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.tensor_meta import TensorMeta
from merak.graph.cache.fingerprint import fingerprint
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.plan.cost.gpu_kernels import attention_kernels
from tests.unit.graph.stages import assert_like_eager, metas

Batch = dict[str, torch.Tensor]
MASK, TOKENS, WIDTH, LONGEST = "attention_mask", 8, 16, 12
INF = float("-inf")


def later() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS).triu(1).bool()


def filled() -> torch.Tensor:
    mask = torch.zeros(TOKENS, TOKENS)
    mask[:-1] += 0
    return mask.masked_fill_(later(), INF)


def counted() -> torch.Tensor:
    return torch.arange(TOKENS)[:, None] >= torch.arange(TOKENS)


def read(column: torch.Tensor) -> torch.Tensor:
    return column[:, None, None, :].bool()


def lowest(column: torch.Tensor) -> torch.Tensor:
    return (1.0 - column[:, None, None, :].double()) * torch.finfo(torch.float64).min


Mask = Callable[["Attention", torch.Tensor], torch.Tensor]

CAUSAL: dict[str, Mask] = {
    "tril": lambda m, c: torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(),
    "infinities": lambda m, c: torch.full((TOKENS, TOKENS), INF).double().triu(1),
    "a billion": lambda m, c: torch.zeros(1, 1, TOKENS, TOKENS).double().where(~later(), -1e9),
    "in place": lambda m, c: filled().double(),
    "as another": lambda m, c: torch.full((TOKENS, TOKENS), INF).triu(1).type_as(m.heads),
    "like another": lambda m, c: m.heads.new_zeros(TOKENS, TOKENS).masked_fill(later(), INF),
    "counted": lambda m, c: counted(),
    "buffer": lambda m, c: m.bias[:, :, :TOKENS, :TOKENS] == 1,
    "buffer of what is hidden": lambda m, c: ~m.hidden[:TOKENS, :TOKENS],
    "buffer of scores": lambda m, c: m.scores[:TOKENS, :TOKENS],
    "attribute": lambda m, c: m.plain[:TOKENS, :TOKENS],
}
OF_ONES: dict[str, Mask] = {
    "and": lambda m, c: ~later() & read(c),
    "product": lambda m, c: (m.bias[:, :, :TOKENS, :TOKENS] * c[:, None, None, :]).bool(),
    "sum": lambda m, c: torch.full((TOKENS, TOKENS), INF).double().triu(1) + lowest(c),
    "filled": lambda m, c: read(c).expand(-1, 1, TOKENS, -1).masked_fill(later(), False),
}
WHOLE: dict[str, Mask] = {"keys": lambda m, c: read(c), "sum of keys": lambda m, c: lowest(c)}
OTHERS: dict[str, Mask] = {
    "window": lambda m, c: counted() & ~torch.ones(TOKENS, TOKENS).tril(-3).bool(),
    "prefix": lambda m, c: counted() | (torch.arange(TOKENS) < 2),
    "not so low": lambda m, c: later().double() * -10.0,
    "slopes": lambda m, c: later().double() * -1e30 + torch.arange(TOKENS),
    "trained": lambda m, c: m.scale * later(),
    "written": lambda m, c: m.written(),
    "of tokens": lambda m, c: ~later() & read(m.ids != 0),
}


class Attention(nn.Module):
    """Makes its mask as one of those above does."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        whole = torch.ones(LONGEST, LONGEST)
        self.register_buffer("bias", whole.tril().view(1, 1, LONGEST, LONGEST))
        self.register_buffer("hidden", whole.triu(1).bool(), persistent=False)
        self.register_buffer("scores", torch.full_like(whole, INF).triu(1))
        self.plain, self.scale = whole.tril().bool(), nn.Parameter(torch.tensor(-1e9))
        self.mask = (CAUSAL | OF_ONES | WHOLE | OTHERS)[mask]
        self.ids: Any = None
        self.heads: Any = None

    def written(self) -> torch.Tensor:
        self.scores.mul_(1)
        return self.scores[:TOKENS, :TOKENS]

    def forward(self, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        self.heads = heads[0]
        found = functional.scaled_dot_product_attention(*heads, attn_mask=self.mask(self, column))
        self.heads = None
        return self.out(found.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.blocks = nn.ModuleList(Attention(mask) for _ in range(2))

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            block.ids = ids
            x = x + block(x, attention_mask)
            block.ids = None
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


class Encoder(Decoder):
    """torch's own encoder, with a mask of later tokens or without."""

    def __init__(self, padding: torch.dtype, is_causal: bool) -> None:
        super().__init__("tril")
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.padding, self.is_causal = padding, is_causal

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        is_boolean = self.padding is torch.bool
        padding = attention_mask == 0 if is_boolean else lowest(attention_mask)[:, 0, 0]
        mask = later() if is_boolean else torch.full((TOKENS, TOKENS), INF).double().triu(1)
        x = self.blocks(
            self.embed(ids), mask if self.is_causal else None, src_key_padding_mask=padding
        )
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def batch_of(padded: bool = False) -> Batch:
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % 19 + 1
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 5:] = 0
    return {"ids": ids, MASK: mask}


def graph_of(model: nn.Module, ones: bool = True) -> ModelGraph:
    columns = metas(batch_of())
    columns[MASK] = replace(columns[MASK], ones=ones)
    return build_graph(GraphSource(model), columns, training=True)


def attentions(graph: ModelGraph) -> list[tuple[bool, bool]]:
    """Of every attention, whether it has a mask, and whether it is causal without."""
    target = torch.ops.aten.scaled_dot_product_attention.default
    nodes = (
        n for s in graph.segments for n in s.graph.find_nodes(op="call_function", target=target)
    )
    return [((*n.args, None)[3] is not None, bool((*n.args, *(False,) * 6)[5])) for n in nodes]


def assert_as_eager(model: nn.Module, batch: Batch, graph: ModelGraph) -> None:
    assert_like_eager(graph, model, batch, {"rtol": 1e-12, "atol": 0.0}, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_mask_of_causality(mask: str) -> None:
    model = Decoder(mask).double()
    graph = graph_of(model, ones=False)
    assert attentions(graph) == [(False, True)] * 2 and not graph.queried
    assert_as_eager(model, batch_of(), graph)


@pytest.mark.parametrize("mask", [*OF_ONES, *WHOLE])
def test_a_mask_of_a_column_that_is_ones(mask: str) -> None:
    model = Decoder(mask).double()
    masked, graph = graph_of(model, ones=False), graph_of(model)
    assert masked.queried == graph.queried == {MASK}
    assert attentions(masked) == [(True, False)] * 2
    assert attentions(graph) == [(False, mask in OF_ONES)] * 2
    assert_as_eager(model, batch_of(), graph)
    assert_as_eager(model, batch_of(padded=True), masked)


@pytest.mark.parametrize("mask", OTHERS)
def test_what_else_a_mask_says_stays(mask: str) -> None:
    model = Decoder(mask).double()
    graph = graph_of(model)
    assert attentions(graph) == [(True, False)] * 2
    assert not graph.queried
    assert_as_eager(model, batch_of(), graph)


@pytest.mark.parametrize("padding", [torch.bool, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_encoders_of_torch(padding: torch.dtype, is_causal: bool) -> None:
    model = Encoder(padding, is_causal).double()
    masked, graph = graph_of(model, ones=False), graph_of(model)
    assert attentions(masked) == [(True, False)] * 2
    assert attentions(graph) == [(False, is_causal)] * 2
    assert_as_eager(model, batch_of(), graph)


def test_it_is_flash_on_a_gpu() -> None:
    graph = graph_of(Decoder("and").bfloat16())
    assert [str(k) for s in graph.segments for k in attention_kernels(s.graph)] == ["flash"] * 2


def test_a_stored_trace_is_of_one_triangle() -> None:
    model, meta = Decoder("buffer"), TensorMeta((2, TOKENS), torch.int64)
    before = fingerprint(model, {"ids": meta})
    assert fingerprint(copy.deepcopy(model), {"ids": meta}) == before
    model.blocks[0].bias[..., 0, 1] = 1
    assert fingerprint(model, {"ids": meta}) != before
