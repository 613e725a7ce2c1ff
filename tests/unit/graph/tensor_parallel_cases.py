"""Tiny models, and how the tests of tensor parallelism run their segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import fx

from merak.core.shards import ParameterShard, take
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.program.codegen import runnable
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import TensorParallel
from merak.graph.tensor_parallel.features import Column, Features, Row
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder, WeightPlacements
from tests import shared_cache

BATCH, SEQUENCE, VOCABULARY = 2, 8, 40


def gpt2(attention: str, dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=16,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str, dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, attention_dropout=dropout,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def qwen3(attention: str, dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, vocab_size=VOCABULARY, attention_dropout=dropout,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def bert(attention: str, dropout: float = 0.0) -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, attn_implementation=attention,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


GPT2: Features = {
    "attn.c_attn": Column(parts=(1, 1, 1), size="heads"),
    "attn.c_proj": Row(size="heads"),
    "mlp.c_fc": Column(size="feed-forward units"),
    "mlp.c_proj": Row(size="feed-forward units"),
}

LLAMA: Features = {
    "self_attn.q_proj": Column(size="heads"),
    "self_attn.k_proj": Column(size="kv-heads"),
    "self_attn.v_proj": Column(size="kv-heads"),
    "self_attn.o_proj": Row(size="heads"),
    "mlp.gate_proj": Column(size="feed-forward units"),
    "mlp.up_proj": Column(size="feed-forward units"),
    "mlp.down_proj": Row(size="feed-forward units"),
}

BERT: Features = {
    "attention.self.query": Column(size="heads"),
    "attention.self.key": Column(size="heads"),
    "attention.self.value": Column(size="heads"),
    "intermediate.dense": Column(size="feed-forward units"),
    "output.dense": Row(size="feed-forward units"),
    "attention.output.dense": Row(size="heads"),
}

FAMILIES: Mapping[str, Callable[..., torch.nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "bert": bert,
}


def build(family: str, attention: str, dropout: float = 0.0) -> torch.nn.Module:
    """A tiny model in train mode, the same weights every time."""
    torch.manual_seed(0)
    model = FAMILIES[family](attention, dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms too
    return model.train()


def batch(padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    columns = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        columns["attention_mask"] = mask
    return columns


def traced(model: torch.nn.Module, columns: Mapping[str, torch.Tensor]) -> ModelGraph:
    metas = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in columns.items()}
    return build_graph(GraphSource(model, cache_dir=shared_cache.FOLDER), metas, training=True)


Runner = Callable[[fx.Graph, Sequence[Any]], Sequence[Any]]


def run_graph(graph: fx.Graph, inputs: Sequence[Any]) -> Sequence[Any]:
    return runnable(graph)(*inputs)


def run_model(
    model: ModelGraph,
    parameters: Mapping[str, Any],
    others: Mapping[str, Any],
    runner: Runner = run_graph,
) -> Any:
    """The loss: segment after segment, the random state set before each."""
    return run_segments(model, parameters, others, runner)[model.loss]


def run_segments(
    model: ModelGraph,
    parameters: Mapping[str, Any],
    others: Mapping[str, Any],
    runner: Runner = run_graph,
) -> dict[str | None, Any]:
    """What segments hand on, by name, the loss among it; see `run_model`."""
    values: dict[str | None, Any] = {}
    everything = {**others, **parameters}
    for segment in (model.prologue, *model.segments):
        torch.manual_seed(100 + segment.index)
        names = (*segment.parameters, *segment.buffers, *segment.columns)
        crossing = (*segment.inputs, *segment.batch_only)
        inputs = [everything[n] for n in names] + [values[n] for n in crossing]
        values |= dict(zip(segment.outputs, runner(segment.graph, inputs), strict=True))
    return values


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def buffers(model: torch.nn.Module, graph: ModelGraph) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) | graph.constants


def local(
    whole: Mapping[str, torch.Tensor], shards: Mapping[str, ParameterShard], rank: int
) -> dict[str, torch.Tensor]:
    """The parameters that one rank holds, ready for gradients."""
    shares = {n: take(t, shards[n], rank) if n in shards else t.clone() for n, t in whole.items()}
    return {name: share.requires_grad_() for name, share in shares.items()}


def assert_gradients_equal(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Every gradient within 1e-5 of its largest magnitude.

    Gradients that are zero but for rounding (a key's bias shifts all scores of a query alike) are
    held to 1e-8 of the largest magnitude in the model instead: fp32 rounding of what they sum.
    """
    largest = max(float(g.abs().max()) for g in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        error = float((found[name] - gradient).abs().max()) / scale
        assert error <= 1e-5, f"{name}: off by {error:.1e}"


def shard_model(
    model: ModelGraph, weights: WeightPlacements, degree: int, *, sequence: bool = False
) -> tuple[ModelGraph, dict[str, ParameterShard]]:
    """Rewrite all segments of a model for a tensor parallel degree.

    Args:
        model: the traced model; left as it is. Its `parameters` stay those of the whole.
        weights: how its parameters are split.
        degree: the number of tensor parallel ranks.
        sequence: whether values lie in shares of the sequence where they can.

    Returns:
        The model that every rank runs, and the layout of the parameters that are split.
    """
    parallel = TensorParallel(AutoSharder(model.parameters, degree), weights, sequence)
    model, parallel = parallel.fit(model)
    pairs = [parallel(segment) for segment in model.segments]
    shards = {name: shard for _, found in pairs for name, shard in found.items()}
    return replace(model, segments=tuple(segment for segment, _ in pairs)), shards
