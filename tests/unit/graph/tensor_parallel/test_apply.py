import pytest
import torch

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.apply import (
    TensorParallel,
    attributes_for,
    given_weights,
    tensor_parallel,
)
from merak.graph.tensor_parallel.features import Column, Features, Replicate, Row
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity
from tests.unit.graph.tensor_parallel_cases import GPT2, LLAMA


def given(graph: ModelGraph, features: Features, degree: int) -> dict[str, Shard]:
    return given_weights(graph, attributes_for(graph, features), degree)


@pytest.mark.parametrize("attention,dropout,degree", [("sdpa", 0.2, 4), ("eager", 0.2, 2)])
@one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "bert"])
def test_ranks_equal_one_process(family: str, attention: str, dropout: float, degree: int) -> None:
    model = cases.build(family, attention, dropout)
    calls = assert_parity(model, cases.batch(), None, degree)
    layers = model.config.num_hidden_layers
    norms = 2 * layers if family == "qwen3" else 0  # weights of the norms over a head
    lone = 1 if family == "bert" else 0  # the layer between the blocks and the head
    calls.pop("replicate_to_partial", None)
    assert calls.pop("gather_from", 0) == lone
    split = 1 if family == "llama" else 0  # its table and head are large beside its blocks
    assert calls.pop("vocab_parallel_cross_entropy", 0) == split
    copies, sums = 2 * layers + norms + lone + split, 2 * layers + split
    assert calls == {"copy_to": copies, "reduce_from": sums}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_causal_attention_without_a_mask(family: str) -> None:
    model = cases.build(family, "sdpa", dropout=0.2)
    assert_parity(model, cases.batch(padded=False), None, 2)


def test_a_frozen_model_needs_no_backward_collectives() -> None:
    model = cases.build("gpt2", "sdpa")
    model.transformer.wte.weight.requires_grad_(False)
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[0].ln_1.requires_grad_(False)
    graph = cases.traced(model, cases.batch())
    split, _ = cases.shard_model(graph, tensor_parallel(graph, None, 2).weights, 2)
    names = [getattr(n.target, "__name__", "") for s in split.segments for n in s.graph.nodes]
    assert names.count("copy_to") == 3
    assert names.count("reduce_from") == 4


def test_shapes_are_local_and_outputs_whole() -> None:
    graph = cases.traced(cases.build("llama", "sdpa"), cases.batch())
    attention = graph.segments[1]
    before = str(attention.graph)
    split, shards = tensor_parallel(graph, None, 4)(attention)
    assert str(attention.graph) == before
    assert (split.parameters, split.inputs) == (attention.parameters, attention.inputs)
    prefix = "model.layers.0.self_attn"
    assert {name: (s.dim, s.parts, s.degree) for name, s in shards.items()} == {
        f"{prefix}.q_proj.weight": (0, (32,), 4),
        f"{prefix}.k_proj.weight": (0, (16,), 4),
        f"{prefix}.v_proj.weight": (0, (16,), 4),
        f"{prefix}.o_proj.weight": (1, (32,), 4),
    }
    shapes = {n.meta["name"]: n.meta["tensor"].shape for n in split.graph.nodes if "name" in n.meta}
    assert shapes[f"{prefix}.q_proj.weight"] == (8, 32)
    assert shapes[f"{prefix}.k_proj.weight"] == (4, 32)
    assert shapes[f"{prefix}.o_proj.weight"] == (32, 8)
    (attend,) = [n for n in split.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert attend.meta["tensor"].shape == (2, 2, 8, 4)
    (output,) = split.graph.find_nodes(op="output")
    assert [n.meta["tensor"].shape for n in output.args[0]] == [(2, 8, 32)]


def test_fused_layers_are_split_part_by_part() -> None:
    graph = cases.traced(cases.build("gpt2", "sdpa"), cases.batch())
    _, shards = cases.shard_model(graph, tensor_parallel(graph, None, 2).weights, 2)
    prefix = "transformer.h.0.attn"
    weight, bias = shards[f"{prefix}.c_attn.weight"], shards[f"{prefix}.c_attn.bias"]
    assert (weight.dim, weight.parts) == (1, (32, 32, 32))
    assert (bias.dim, bias.parts) == (0, (32, 32, 32))
    assert shards[f"{prefix}.c_proj.weight"].dim == 0
    assert f"{prefix}.c_proj.bias" not in shards


@pytest.mark.parametrize(  # heads repeated in the graph, or by the kernel
    ("padded", "dropout"), [(True, 0.2), (False, 0.0), slow(True, 0.0), slow(False, 0.2)]
)
def test_fewer_kv_heads_than_ranks_can_be_replicated(padded: bool, dropout: float) -> None:
    features = {**LLAMA, "k_proj": Replicate(), "v_proj": Replicate()}
    model = cases.build("llama", "sdpa", dropout)
    calls = assert_parity(model, cases.batch(padded), features, 8)
    assert "gather_from" not in calls


@one_in(3)
@pytest.mark.parametrize("whole", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("padded", [True, False])
def test_whole_heads_follow_split_ones(whole: str, padded: bool) -> None:
    model = cases.build("llama", "sdpa", dropout=0.2)
    features = {**LLAMA, whole: Replicate()}
    assert_parity(model, cases.batch(padded), features, 2)


def test_degree_1_leaves_a_segment_as_it_is() -> None:
    graph = cases.traced(cases.build("gpt2", "sdpa"), cases.batch())
    alone = TensorParallel(AutoSharder(graph.parameters, 1), {})
    assert alone(graph.segments[1]) == (graph.segments[1], {})


def test_without_attributes_nothing_is_split() -> None:
    calls = assert_parity(cases.build("gpt2", "sdpa"), cases.batch(), {}, 2)
    assert calls == {}


ODD = {
    "h.*.attn.c_attn": Column((1, 1, 1)),  # the projection stays whole: its input is sliced
    "h.*.mlp.c_fc": Column(),  # whole again before the next layer
    "h.1.mlp.c_proj": Row(),
    "h.1.mlp.c_fc": Replicate(),
}


def test_any_assignment_is_right_if_not_fast() -> None:
    model = cases.build("gpt2", "eager", dropout=0.2)
    assert_parity(model, cases.batch(), ODD, 2)


FEED_FORWARD: Features = {
    "mlp.gate_proj": Column(size="feed-forward units"), "mlp.up_proj": Column(),
    "mlp.down_proj": Row(),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Features, int, str]] = {
    "heads that the degree does not divide": (
        "gpt2", GPT2, 3,
        r"tp=3 does not divide the 4 heads of transformer\.h\.0\.attn\.c_attn; the degrees that "
        r"fit this model are 1, 2 and 4\.",
    ),
    "heads, though it divides the weight": (
        "gpt2", GPT2, 8,
        r"tp=8 does not divide the 4 heads of transformer\.h\.0\.attn\.c_attn",
    ),
    "kv-heads, fewer than the degree": (
        "llama", LLAMA, 8,
        r"tp=8 does not divide the 4 kv-heads of model\.layers\.0\.self_attn\.k_proj; .* 1, 2 and",
    ),
    "feed-forward units": (
        "llama", FEED_FORWARD, 5,
        r"tp=5 does not divide the 48 feed-forward units of model\.layers\.0\.mlp\.gate_proj; .* "
        r"1, 2, 3, 4, 6, 8, 12, 16, 24 and 48",
    ),
    "a fused layer without parts": (
        "gpt2", {**GPT2, "attn.c_attn": Column()}, 2,
        r"at split \(aten\.split\.Tensor, in transformer\.h\.0\.attn, .*modeling_gpt2\.py:\d+\): "
        r"it takes 0 … 32 of a dim split in parts of 96; if transformer\.h\.0\.attn\.c_attn is a "
        r"fused layer, say Column\(parts=…\)",
    ),
    "a layer that no product uses": (
        "gpt2", {**GPT2, "wpe": Column()}, 2,
        r"transformer\.wpe\.weight cannot be a Column weight: no matrix product multiplies by it",
    ),
    "parts that do not fit": (
        "gpt2", {"attn.c_attn": Column(parts=(5, 2))}, 2,
        r"c_attn\.bias has a size of 96, which cannot be in parts of relative sizes \(5, 2\)",
    ),
    "a pattern that matches nothing": (
        "gpt2", {**GPT2, "mlp.gate": Column()}, 2, r"'mlp\.gate' matches no parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_features_and_degrees_that_do_not_fit(why: str) -> None:
    family, features, degree, message = REFUSED[why]
    graph = cases.traced(cases.build(family, "sdpa"), cases.batch())
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, features, degree)


class Unruly(torch.nn.Module):
    """An operator inside a split region for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(8, 8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return (x + self.down(self.up(x).logcumsumexp(1))).square().mean()


def test_an_operator_without_a_rule_is_named_with_its_line() -> None:
    graph = cases.traced(Unruly(), {"x": torch.randn(2, 3, 8)})
    features: Features = {"up": Column(), "down": Row()}
    line = r"logcumsumexp \(aten\.logcumsumexp\.default, .*\.py:\d+\)"
    message = rf"at {line}: it has no rule .*; give up another attribute in the feature dict, Repl"
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, features, 2)
