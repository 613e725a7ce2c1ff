"""Splits derived from the graph alone: of every architecture, most of a block with few collectives.

Each is checked against one process on all ranks in lockstep, every parameter's gradient.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from merak.core.errors import ShardError
from merak.core.shards import ParameterShard, join, take
from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.apply import auto_tensor_parallel, tensor_parallel
from merak.graph.tensor_parallel.features import Column, Replicate
from merak.graph.tensor_parallel.placement import PartlySharded, Shard
from merak.graph.tensor_parallel.report import replication_warning
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder, SegmentTask, auto_shard
from merak.graph.tensor_parallel.search.cost import FORWARD, Collective, Transfer
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES
from tests.unit.graph.lockstep import assert_parity

CROSS = {"t5": 4, "bart": 2, "deberta_v2": 2}
"""Further collectives in the backward: values that several blocks read, once for each block."""

ALONE = {"bert": 1, "roberta": 1, "deberta_v2": 1, "swin": 1}
"""Layers with no partner, which cost a collective each way for themselves."""


def blocks_of(name: str) -> int:
    """How often a sum over the ranks is needed: once for each attention and feed-forward block."""
    parallel = {"gpt_neox", "falcon", "falcon_new"}
    return {"t5": 10, "bart": 10, "swin": 8}.get(name, 2 if name in parallel else 4)


def collectives(graph: ModelGraph, weights: dict[str, Shard], degree: int) -> list[Transfer]:
    deriver = AutoSharder(graph.parameters, degree)
    return [
        transfer
        for segment in graph.segments
        for transfer in deriver(
            SegmentTask(
                segment,
                {n: weights[n] for n in segment.parameters if n in weights},
                frozenset(segment.parameters),
            )
        ).transfers
        if not transfer.of_weights
    ]


def share_split(graph: ModelGraph, weights: dict[str, Shard], block: str) -> float:
    sizes = {n: math.prod(m.shape) for n, m in graph.parameters.items() if block in n}
    return sum(size for n, size in sizes.items() if n in weights) / sum(sizes.values())


@one_in(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_most_of_a_block_is_split_with_few_collectives(name: str) -> None:
    graph = cases.traced(ARCHITECTURES[name].build(), ARCHITECTURES[name].batch())
    for degree in (2, 4):
        check_split(name, graph, degree)


def check_split(name: str, graph: ModelGraph, degree: int) -> None:
    architecture = ARCHITECTURES[name]
    weights = auto_shard(graph, AutoSharder(graph.parameters, degree), {}, frozenset())
    assert share_split(graph, weights, architecture.block) >= 0.95
    found = collectives(graph, weights, degree)
    blocks, alone = blocks_of(name), ALONE.get(name, 0)
    stem = 1 if architecture.columns == "image" else 0  # pixels need no gradient
    counts = Counter(transfer.kind in FORWARD for transfer in found)
    assert counts[True] == blocks + alone + stem
    assert counts[False] == blocks + alone + CROSS.get(name, 0) + (2 if name == "t5" else 0)
    assert sum(transfer.kind is Collective.REDUCE for transfer in found) == blocks


@one_in(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_equal_those_of_one_process(name: str) -> None:
    architecture = ARCHITECTURES[name]
    assert_parity(architecture.build(), architecture.batch(), None, 2)


def test_identical_segments_are_searched_once() -> None:
    architecture = ARCHITECTURES["gpt2"]
    few, many = (
        cases.traced(architecture.build(n_layer=layers), architecture.batch()) for layers in (3, 9)
    )
    answers = []
    for graph in (few, many):
        deriver = AutoSharder(graph.parameters, 2)
        answers.append(auto_shard(graph, deriver, {}, frozenset()))
        assert len(deriver._known) == 5  # embedding, attention, two feed-forwards, head
    assert len(answers[1]) == 3 * len(answers[0])


def test_heads_that_do_not_divide_stay_whole_and_the_rest_is_split() -> None:
    architecture = ARCHITECTURES["llama"]
    changes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    model = architecture.build(**changes)
    graph = cases.traced(model, architecture.batch())
    weights = tensor_parallel(graph, None, 2).weights
    split = {name.split(".")[3] for name in weights}
    assert split == {"mlp"}
    assert_parity(model, architecture.batch(), None, 2)


@pytest.mark.parametrize(
    ("kv_heads", "attention"), [(1, "sdpa"), (2, "eager"), slow(2, "sdpa"), slow(1, "eager")]
)
def test_fewer_kv_heads_than_ranks_cost_no_further_collective(
    kv_heads: int, attention: str
) -> None:
    architecture = ARCHITECTURES["llama"]
    model = architecture.build(num_key_value_heads=kv_heads, attn_implementation=attention)
    graph = cases.traced(model, architecture.batch())
    weights = dict(tensor_parallel(graph, None, 4).weights)
    of_kv = {n: p for n, p in weights.items() if "k_proj" in n or "v_proj" in n}
    assert all(isinstance(p, Shard) and p.copies == 2 for p in of_kv.values())
    assert bool(of_kv) is (kv_heads > 1)  # one head is whole on every rank
    assert any("q_proj" in name for name in weights)
    kinds = Counter(transfer.kind for transfer in collectives(graph, weights, 4))
    assert kinds == {Collective.COPY: 4, Collective.REDUCE: 4}
    assert_parity(model, architecture.batch(), None, 4)


def test_a_feature_dict_is_followed_and_the_rest_sharded_automatically() -> None:
    architecture = ARCHITECTURES["llama"]
    graph = cases.traced(architecture.build(), architecture.batch())
    features = {"layers.0.mlp.*": Replicate(), "layers.1.mlp.up_proj": Column()}
    weights = tensor_parallel(graph, features, 2).weights
    assert not any("layers.0.mlp" in name for name in weights)
    assert weights["model.layers.1.mlp.down_proj.weight"].dim == 1
    assert weights["model.layers.0.self_attn.o_proj.weight"].dim == 1


def test_a_fused_kv_head_stays_whole_beside_split_queries() -> None:
    architecture = ARCHITECTURES["falcon"]
    graph = cases.traced(architecture.build(), architecture.batch())
    parallel = tensor_parallel(graph, None, 2)
    name = "transformer.h.0.self_attention.query_key_value.weight"
    _, shards = parallel(graph.segments[1])
    assert shards[name] == ParameterShard(0, (64, 8, 8), 2, whole=(1, 2))
    assert shards[name].ranges(1) == ((32, 64), (64, 72), (72, 80))
    whole = torch.arange(80.0).reshape(80, 1)
    shares = [take(whole, shards[name], rank) for rank in range(2)]
    assert [share.shape[0] for share in shares] == [48, 48]
    assert torch.equal(join(shares, shards[name]), whole)


def test_of_a_fused_weight_the_ranks_sum_the_whole_parts_gradient() -> None:
    architecture = ARCHITECTURES["gpt_bigcode"]  # 8 heads of 8 queries, one of keys and values
    graph = cases.traced(architecture.build(), architecture.batch())
    parallel = tensor_parallel(graph, None, 2)
    (segment,) = (s for s in graph.segments if "transformer.h.0.attn.c_attn.weight" in s.parameters)
    sums = [transfer.numel for transfer in parallel.split(segment).transfers if transfer.of_weights]
    assert sorted(sums) == [16, 16 * 64]


class Tower(nn.Module):
    """Layers that no library has: fused halves, a scale per channel, and a lone layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.fused, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.rand(24))
        self.lone = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).tanh()
        left, right = self.fused(x).chunk(2, dim=-1)
        x = x + self.down(left.sigmoid() * right * self.scale)
        x = torch.nn.functional.layer_norm(self.lone(x), (16,))
        return nn.functional.cross_entropy(self.head(x), y)


def test_a_model_of_ones_own() -> None:
    torch.manual_seed(0)
    model, batch = Tower(), {"x": torch.randn(6, 8), "y": torch.randint(3, (6,))}
    weights = tensor_parallel(cases.traced(model, batch), None, 2).weights
    assert weights["fused.weight"].parts == (24, 24)
    assert weights["scale"].parts == (24,)
    assert {n.partition(".")[0] for n in weights} >= {"fused", "scale", "down", "lone"}
    assert_parity(model, batch, None, 2)


class Attention(nn.Module):
    """Weights with a dim of heads, which einsums multiply; norms of all heads' queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(16, 4, 8)) for _ in range(4))
        self.of_q, self.of_k = nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-5)
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (torch.einsum("...h,hnd->...nd", h, each) for each in (self.q, self.k, self.v))
        q, k = (
            norm(each.flatten(-2)).unflatten(-1, (4, 8))
            for norm, each in ((self.of_q, q), (self.of_k, k))
        )
        mixed = torch.einsum("bnij,bjnd->bind", torch.einsum("bind,bjnd->bnij", q, k).tanh(), v)
        return (h + self.after(torch.einsum("bind,hnd->bih", mixed, self.o))).square().mean()


def test_weights_of_einsums_and_norms_of_all_heads() -> None:
    torch.manual_seed(0)
    model, batch = Attention(), {"x": torch.randn(2, 64, 16)}
    weights = tensor_parallel(cases.traced(model, batch), None, 2).weights
    split = {name: placed.dim for name, placed in weights.items()}
    assert split.items() >= dict.fromkeys(("q", "k", "v", "o"), 1).items()
    assert {f"of_{norm}.weight" for norm in "qk"} | {"of_q.bias"} <= split.keys()
    assert_parity(model, batch, None, 2)


def test_keys_written_part_by_part() -> None:
    # Latent attention writes its keys into memory of their own, from values that every rank makes
    # whole for its own heads.
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8, vocab_size=64, first_k_dense_replace=2, use_cache=False,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    ids = torch.randint(64, (2, 8))
    assert_parity(model, {"input_ids": ids, "labels": ids}, None, 2)


def test_channels_of_heads_that_share_one_group_of_states() -> None:
    """A Mamba-2 mixer: every rank has the states' parts whole, through a convolution in groups."""
    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=1,
        vocab_size=64, chunk_size=8, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(config)
    ids = torch.randint(64, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    weights = tensor_parallel(cases.traced(model, batch), None, 2).weights
    mixer = "backbone.layers.0.mixer"
    whole = {n: p.whole for n, p in weights.items() if isinstance(p, PartlySharded)}
    assert whole == {
        f"{mixer}.in_proj.weight": {2, 3, 4},
        f"{mixer}.conv1d.weight": {1, 2},
        f"{mixer}.conv1d.bias": {1, 2},
    }
    assert weights[f"{mixer}.out_proj.weight"].dim == 1
    assert_parity(model, batch, None, 2)


class Softened(nn.Module):
    """A wide value between two layers that a softmax must see whole."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.down(self.up(h).softmax(-1))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    "vocabulary,split", [(9, "nothing of"), (95, "nothing but the vocabulary of")]
)
def test_a_degree_that_fits_but_saves_nothing_trains_the_whole(vocabulary: int, split: str) -> None:
    torch.manual_seed(0)
    model = Softened(vocabulary)
    x, y = torch.randint(vocabulary, (2, 2, 8))
    graph = cases.traced(model, {"x": x, "y": y})
    parallel = tensor_parallel(graph, None, 2)
    assert not {"up.weight", "down.weight"} & parallel.weights.keys()
    assert f"tp=2 splits {split} this model" in str(replication_warning(graph, parallel))
    assert_parity(model, {"x": x, "y": y}, None, 2)


def test_a_degree_that_splits_nothing_says_what_limits_it() -> None:
    graph = cases.traced(Tower(), {"x": torch.randn(6, 8), "y": torch.randint(3, (6,))})
    message = (
        r"tp=7 can split nothing of this model: the outputs of .*fused\.weight into 24, .* pieces "
        r"at the most; degrees that split something are 1, 2, 3, 4, 6, 8, 12, 16, 24\."
    )
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, None, 7)


class Router(nn.Module):
    """A layer whose only weight gives four numbers for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2048) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = nn.functional.linear(x, self.weight).softmax(-1)
        return x * shares.amax(-1, keepdim=True)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = Router(), nn.Linear(2048, 2048, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.first(x))).square().mean()


@pytest.mark.parametrize("degree", [4, 8])
def test_a_weight_that_is_small_beside_activations_stays_whole(degree: int) -> None:
    """Though it is all that its layer has: an all-reduce of them would cost more than its work."""
    graph = cases.traced(Layers(), {"x": torch.randn(4, 8, 2048)})
    assert "first.weight" not in auto_tensor_parallel(graph, degree).weights
