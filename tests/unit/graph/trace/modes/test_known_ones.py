"""Batches whose mask masks nothing are traced as eager code runs them: attention has no mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.modes.known_ones import KnownOnes
from merak.graph.trace.opaque.operator import opaque_calls
from merak.plan.cost.gpu_kernels import attention_kernels
from tests.tiers import one_in
from tests.unit.graph import families
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import assert_like_eager, metas

Batch = dict[str, torch.Tensor]
MASK = "attention_mask"


def mistral(window: int) -> nn.Module:
    return families.causal(
        transformers.MistralConfig, transformers.MistralForCausalLM, 2,
        **families.SIZES, num_key_value_heads=1, sliding_window=window,
    )  # fmt: skip


MODELS = {
    "llama": lambda: families.llama(2),
    "gpt2": lambda: families.gpt2(2),
    "mixtral": lambda: families.mixtral(2),
    "bert": lambda: families.bert(2),
    "wide window": lambda: mistral(64),
}


def batch_of(**others: torch.Tensor) -> Batch:
    torch.manual_seed(0)
    ids = torch.randint(1, families.VOCABULARY, (2, 8))
    return {"input_ids": ids, MASK: torch.ones_like(ids), "labels": ids, **others}


def graph_of(model: nn.Module, batch: Batch, ones: bool = True, **options: Any) -> ModelGraph:
    columns = metas(batch)
    columns[MASK] = replace(columns[MASK], ones=ones)
    return build_graph(GraphSource(model, **options), columns, training=True)


def masks(graph: ModelGraph) -> list[Any]:
    """The mask of every attention."""
    found = []
    for segment in graph.segments:
        for node in segment.graph.nodes:
            if node.target is torch.ops.aten.scaled_dot_product_attention.default:
                found.append((*node.args, None)[3])
    return found


@one_in(3)
@pytest.mark.parametrize("family", MODELS)
def test_attention_has_no_mask(family: str) -> None:
    model, batch = MODELS[family](), batch_of()
    masked, graph = graph_of(model, batch, ones=False), graph_of(model, batch)
    assert masked.queried == graph.queried == {MASK}
    assert len(masks(graph)) == 2 and masks(graph) == [None, None]
    assert all(mask is not None for mask in masks(masked))
    assert [s.parameters for s in graph.segments] == [s.parameters for s in masked.segments]
    assert graph.columns[MASK].ones and not masked.columns[MASK].ones
    assert_like_eager(graph, model, batch, {"rtol": 1e-6, "atol": 0.0}, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("family", "others"),
    [("narrow window", {}), ("llama", {"position_ids": torch.arange(8).expand(2, 8) % 4})],
)
def test_what_else_a_mask_says_stays(family: str, others: Batch) -> None:
    model = mistral(4) if family == "narrow window" else MODELS[family]()
    batch = batch_of(**others)
    graph = graph_of(model, batch)
    assert (masks(graph)[0] is None) is (family == "llama")  # whose positions a mask outdoes
    assert_like_eager(graph, model, batch, {"rtol": 1e-6, "atol": 0.0}, rtol=1e-5, atol=1e-7)


def test_a_batch_of_ones_has_flash_attention_on_a_gpu() -> None:
    """Nor are the heads of keys and values repeated."""
    model, batch = families.llama(2).to(torch.bfloat16), batch_of()
    kernels = [
        [str(k) for s in graph_of(model, batch, ones).segments for k in attention_kernels(s.graph)]
        for ones in (False, True)
    ]
    assert kernels == [["memory-efficient, since its mask rules out flash"] * 2, ["flash"] * 2]


def test_a_stored_trace_is_of_what_it_knows(tmp_path: Path) -> None:
    """Else a batch with padding would run the program of one without."""
    model, batch = families.llama(1), batch_of()
    stored = {"cache_dir": tmp_path}
    for ones in (True, False, True, False):
        graph = graph_of(model, batch, ones, **stored)
        assert graph.columns[MASK].ones is ones and graph.queried == {MASK}
        assert (masks(graph) == [None]) is ones


class Balances(Layers):
    """Asks in its own ways, and reads the mask beside that."""

    def hidden(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if not (1 - mask[:, None, :]).bool().any() and mask.to(torch.bool).all():
            return h + 1
        return h * mask[..., None]

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        h = self.b(self.hidden(x, attention_mask)).pow(2).mean(-1)
        loss = (h * attention_mask).sum() / attention_mask.sum()
        return transformers.modeling_outputs.ModelOutput(loss=loss)


def test_questions_of_a_models_own() -> None:
    torch.manual_seed(0)
    model = Balances()
    batch = {"x": torch.randn(2, 4, 8), MASK: torch.ones(2, 4, dtype=torch.int64)}
    graph = graph_of(model, batch)
    assert graph.queried == {MASK} and not opaque_calls(graph)
    assert_like_eager(graph, model, batch, {"rtol": 1e-6, "atol": 0.0}, rtol=1e-5, atol=1e-7)


def test_only_what_a_function_keeps_equal_is_followed() -> None:
    meta = TensorMeta((2, 4), torch.int64, ones=True)
    ones = KnownOnes({"mask": meta, "x": TensorMeta((2, 4), torch.float32)})
    with FakeTensorMode() as mode:
        mask, x = mode.from_tensor(torch.ones(2, 4, dtype=torch.int64)), torch.ones(2, 4)
        ones.begin({"mask": mask, "x": x})
        with ones:
            assert bool((mask.view(8) * 2 == 2).all()) is True
            assert bool(mask.bool().logical_not().any()) is False
            assert mask.transpose(0, 1).amax().item() == 1
            assert not ones.knows(x) and not ones.knows(mask * x) and not ones.knows(mask[:, 4:])
            assert not ones.knows(mask.cumsum(1)) and not ones.knows(mask.sum())
            mask.mul_(3)
            assert not ones.knows(mask)
    assert ones.queried == {"mask"}
