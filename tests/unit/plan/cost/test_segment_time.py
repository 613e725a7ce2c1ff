from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.cut import cut_into_segments
from merak.graph.trace.trace import trace
from merak.plan.balance import balance
from merak.plan.cost.device import preset
from merak.plan.cost.operators import Work
from merak.plan.cost.segment_time import segment_costs, work_seconds

DEVICE = replace(
    preset("a100-80gb"),
    flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    memory_bytes_per_s=10.0,
    functions_per_s=2.0,
    randoms_per_s=1.0,
    overhead_s=0.5,
)
TOKENS = (2, 16)
COLUMNS = {name: TensorMeta(TOKENS, torch.int64) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("work", "autocast", "seconds"),
    [
        (Work(20.0), None, 2.0),
        (Work(20.0, flops=300.0), None, 3.0),
        (Work(20.0, flops=300.0, dtype=torch.bfloat16), None, 2.0),
        (Work(20.0, functions=6.0), None, 3.0),
        (Work(20.0, randoms=7.0), None, 7.0),
        (Work(0.0), None, 0.0),
        # Half the bytes at four times the rate; other kernels stay in float32.
        (Work(20.0, flops=800.0), torch.bfloat16, 2.0),
        (Work(40.0, flops=400.0), torch.bfloat16, 2.0),
        (Work(20.0), torch.bfloat16, 2.0),
    ],
)
def test_a_kernel_takes_the_longer_of_computation_and_traffic(work, autocast, seconds):
    assert work_seconds(work, DEVICE, autocast) == seconds + DEVICE.overhead_s


@pytest.fixture(scope="module")
def gpt2():
    """Segments of a GPT-2 with 3 layers of 8 features, 2 heads and 40 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 40}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens))
    return cut_into_segments(trace(model.train(), COLUMNS), outputs=("loss",)).segments


def test_a_model_costs_what_its_layers_multiply(gpt2):
    costs = segment_costs(gpt2, preset("h100-sxm"))
    tokens, hidden = 2 * 16, 8
    kept_scores = 2 * 2 * 16 * 17 // 2
    attention = 2 * tokens * hidden * 4 * hidden + 2 * kept_scores * 2 * 4
    feed_forward = 2 * tokens * hidden * 8 * hidden
    head = 2 * tokens * hidden * 40
    assert [c.forward_flops for c in costs] == [0, *[attention, feed_forward] * 3, head]
    attention_backward = 4 * tokens * hidden * 4 * hidden + 2 * kept_scores * 5 * 4
    backward = [0, *[attention_backward, 2 * feed_forward] * 3, 2 * head]
    assert [c.backward_flops for c in costs] == backward


def test_costs_count_parameters_and_what_crosses_each_cut(gpt2):
    costs = segment_costs(gpt2, preset("h100-sxm"))
    activation = 4 * 2 * 16 * 8
    assert [c.boundary_bytes for c in costs] == [*[activation] * 7, 0]
    norm, attention, feed_forward = 2 * 8, 8 * 24 + 24 + 8 * 8 + 8, 8 * 32 + 32 + 32 * 8 + 8
    table, positions = 40 * 8, 16 * 8
    layers = [norm + attention, norm + feed_forward] * 3
    # The last norm stands before the head's only product, so it goes with what is before.
    layers[-1] += norm
    parameters = [table + positions, *layers, table]
    assert [c.parameter_bytes for c in costs] == [4 * number for number in parameters]


def test_times_follow_the_device(gpt2):
    """With one speed alone to wait for, a segment takes what it has to do over that speed."""
    fast = 1e30
    free = replace(
        DEVICE,
        flops_per_s={"float32": fast},
        memory_bytes_per_s=fast,
        functions_per_s=fast,
        randoms_per_s=fast,
        overhead_s=0.0,
    )
    computing = segment_costs(gpt2, replace(free, flops_per_s={"float32": 1e9}))
    for cost in computing:
        assert cost.forward_s == pytest.approx(cost.forward_flops / 1e9)
        assert cost.backward_s == pytest.approx(cost.backward_flops / 1e9)
    for cost in segment_costs(gpt2, replace(free, memory_bytes_per_s=1e9)):
        assert cost.forward_s + cost.backward_s == pytest.approx(cost.num_bytes / 1e9)
    kernels = segment_costs(gpt2, replace(free, overhead_s=1.0))
    assert all(cost.forward_s >= 2 and cost.backward_s >= 2 for cost in kernels)
    assert segment_costs(gpt2, free)[1].forward_s < 1e-20


def test_autocast_speeds_products_up(gpt2):
    whole = segment_costs(gpt2, DEVICE)
    mixed = segment_costs(gpt2, DEVICE, autocast=torch.bfloat16)
    assert all(a.forward_s < b.forward_s for a, b in zip(mixed[1:], whole[1:], strict=True))
    assert mixed[0].forward_s == whole[0].forward_s
    assert [c.forward_flops for c in mixed] == [c.forward_flops for c in whole]


def test_gradients_are_summed_over_readers_and_microbatches():
    class Twice(nn.Module):
        """A weight and an activation, each read twice."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            y = torch.neg(x * self.weight)
            return (torch.abs(y) * torch.sqrt(y) * self.weight).sum()

    class Once(Twice):
        def forward(self, x):
            y = torch.neg(x * self.weight)
            return (torch.abs(torch.sqrt(y))).sum()

    def backward_kernels(model):
        graph = trace(model, {"x": TensorMeta((3, 5), torch.float32)})
        free = {"memory_bytes_per_s": 1e30, "functions_per_s": 1e30, "overhead_s": 1.0}
        device = replace(DEVICE, **free, flops_per_s={"float32": 1e30})
        return sum(
            round(c.backward_s) for c in segment_costs(cut_into_segments(graph).segments, device)
        )

    # Once: mul, neg, sqrt, abs, sum, and the weight's gradient added to earlier microbatches.
    assert backward_kernels(Once()) == 6
    # Twice: two more multiplications, and a sum each for the activation and the weight.
    assert backward_kernels(Twice()) == 6 + 2 + 2


def test_estimates_balance_a_model_with_a_heavy_head(gpt2):
    costs = segment_costs(gpt2, replace(DEVICE, overhead_s=0.0, memory_bytes_per_s=1e30))
    partition = balance(costs, 2, 8)
    assert partition.sizes[0] > partition.sizes[1]
