"""Layers in float8 on ranks that share them, beside one process that has all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import transformers

from merak.core.shards import join
from merak.graph.float8 import in_float8
from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.apply import tensor_parallel
from tests.ranks_in_turns import RanksInTurns
from tests.unit.graph import tensor_parallel_cases as cases

DEGREE = 2


def llama() -> torch.nn.Module:
    """One whose layers have sizes that are multiples of 16 on either rank, too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=cases.VOCABULARY, use_cache=False,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 20, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def in_eight_bits(graph: ModelGraph, axes: tuple[str, ...]) -> ModelGraph:
    made = [in_float8(segment.graph, axes) for segment in graph.segments[:-1]]
    assert sum(own is not None for own in made) == 4, "attention and feed-forward of two layers"
    pairs = zip(graph.segments, (*made, None), strict=True)
    return replace(graph, segments=tuple(replace(s, graph=g or s.graph) for s, g in pairs))


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_have_the_gradients_of_one_process(sequence: bool) -> None:
    model, columns = llama(), batch()
    graph, weights = cases.traced(model, columns), cases.weights(model)
    others = {**cases.buffers(model, graph), **columns}
    whole = cases.local(weights, {}, 0)
    loss = cases.run_model(in_eight_bits(graph, ()), whole, others)
    loss.backward()
    chosen = tensor_parallel(graph, None, DEGREE).weights
    split, shards = cases.shard_model(graph, chosen, DEGREE, sequence=sequence)
    shares = [cases.local(weights, shards, rank) for rank in range(DEGREE)]
    own = in_eight_bits(split, ("tp",))

    def train(rank: int) -> torch.Tensor:
        found = cases.run_model(own, shares[rank], dict(others))
        found.backward()
        return found.detach()

    for found in RanksInTurns(DEGREE).run(train):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=0.0)
    # Sums in another order may round an element to another number of eight bits.
    assert _difference(shares, shards, whole) < 2e-2


def _difference(
    shares: list[dict[str, torch.Tensor]],
    shards: Mapping[str, object],
    whole: Mapping[str, torch.Tensor],
) -> float:
    """The largest difference of a parameter's gradient, of the gradient itself."""
    found = []
    for name, parameter in whole.items():
        grads = [share[name].grad for share in shares]
        own = join(grads, shards[name]) if name in shards else grads[0]  # type: ignore[arg-type]
        if parameter.grad is not None:
            found.append(((own - parameter.grad).norm() / parameter.grad.norm()).item())
    return max(found)
