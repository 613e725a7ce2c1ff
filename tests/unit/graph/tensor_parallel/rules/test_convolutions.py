"""Convolutions in groups of channels, as of Mamba and linear attention: ranks convolve their own.

Each is checked against one process, every parameter's gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.apply import attributes_for, given_weights, tensor_parallel
from merak.graph.tensor_parallel.features import Column
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

WIDTH, TOKENS = 16, 6


class Convolved(nn.Module):
    """stem → x + down(conv(up(x)) · gate(x)) → loss; values of the convolution are fused parts."""

    def __init__(self, groups: int, multiple: int = 1, parts: int = 1, bias: bool = True) -> None:
        super().__init__()
        channels = 24
        self.parts = parts
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, channels)
        self.conv = nn.Conv1d(channels, channels * multiple, 3, 1, 2, groups=groups, bias=bias)
        self.down = nn.Linear(channels * multiple // parts, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        found = self.conv(self.up(x).mT)[..., :TOKENS].mT
        first, *others = nn.functional.silu(found).chunk(self.parts, -1)
        for other in others:
            first = first * other
        return (x + self.down(first)).square().mean()


def columns() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))}


SPLIT = {"up.weight", "up.bias", "conv.weight", "down.weight"}


@one_in(3)
@pytest.mark.parametrize(
    "model,split",
    [
        (lambda: Convolved(24), SPLIT | {"conv.bias"}),
        (lambda: Convolved(24, bias=False), SPLIT),
        (lambda: Convolved(24, multiple=2), SPLIT | {"conv.bias"}),
        (lambda: Convolved(12), SPLIT | {"conv.bias"}),
        (lambda: Convolved(24, parts=3), SPLIT | {"conv.bias"}),
    ],
)
@one_in(2)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_convolve_their_own_groups(
    model: type[Convolved], split: set[str], degree: int
) -> None:
    torch.manual_seed(0)
    made = model()
    graph = cases.traced(made, columns())
    assert split <= tensor_parallel(graph, None, degree).weights.keys()
    calls = assert_parity(made, columns(), None, degree)
    assert calls["reduce_from"] >= 1


@pytest.mark.parametrize("groups", [1, 24])
def test_channels_of_a_sample_alone(groups: int) -> None:
    torch.manual_seed(0)
    calls = assert_parity(Convolved(groups), {"x": columns()["x"][0]}, None, 2)
    assert calls["reduce_from"] >= 1


class PartsOfParts(nn.Module):
    """A gate beside values that are convolved and then taken apart, as of Mamba 2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 8 + 24 + 4)
        self.conv = nn.Conv1d(24, 24, 3, 1, 2, groups=24)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        gate, values, scale = self.up(x).split([8, 24, 4], -1)
        convolved = self.conv(values.transpose(1, 2))[..., :TOKENS].transpose(1, 2)
        first, small, large = convolved.split([8, 4, 12], -1)
        heads = first.unflatten(-1, (4, 2)) * (scale * small)[..., None]
        heads = heads * large.unflatten(-1, (4, 3)).sum(-1, keepdim=True)
        return (x + self.down(heads.flatten(-2) * gate.sigmoid())).square().mean()


@pytest.mark.parametrize("degree", [2, 4])
def test_a_part_of_a_fused_layer_is_taken_apart_again(degree: int) -> None:
    torch.manual_seed(0)
    model = PartsOfParts()
    weights = tensor_parallel(cases.traced(model, columns()), None, degree).weights
    assert weights["up.weight"].parts == (8, 8, 4, 12, 4)
    assert weights["conv.weight"].parts == (8, 4, 12)
    assert {"up.bias", "conv.bias", "down.weight"} <= weights.keys()
    calls = assert_parity(model, columns(), None, degree)
    assert (calls["copy_to"], calls["reduce_from"]) == (1, 1)


MAMBA_2: dict[str, Any] = {
    "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 4,
    "num_hidden_layers": 1, "vocab_size": cases.VOCABULARY, "chunk_size": 4, "use_cache": False,
}  # fmt: skip

QWEN_3_NEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": cases.VOCABULARY, "num_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention"], "use_cache": False,
}  # fmt: skip


@one_in(2)
@pytest.mark.parametrize(
    "model_class,config",
    [
        (hf.Mamba2ForCausalLM, hf.Mamba2Config(**MAMBA_2)),
        (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(**QWEN_3_NEXT)),
    ],
)
def test_linear_attention_is_split(model_class: Any, config: Any) -> None:
    torch.manual_seed(0)
    model = model_class(config).train()
    graph = cases.traced(model, cases.batch(padded=False))
    weights = tensor_parallel(graph, None, 4).weights
    assert {"conv1d.weight", "out_proj.weight"} <= {".".join(n.split(".")[-2:]) for n in weights}
    assert_parity(model, cases.batch(padded=False), None, 4)


def test_groups_that_the_degree_does_not_divide_are_refused() -> None:
    torch.manual_seed(0)
    graph = cases.traced(Convolved(6), columns())
    with pytest.raises(ShardError, match="splits a size of 6, which tp=4 does not divide"):
        given_weights(graph, attributes_for(graph, {"up": Column()}), 4)
    with pytest.raises(ShardError, match="split inside a group"):
        given_weights(graph, attributes_for(graph, {"up": Column(parts=(1, 2, 5))}), 1)
