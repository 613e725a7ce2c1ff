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
from merak.plan.cost.efficiency import ProductShape
from merak.plan.cost.kernels.by_rules import segment_costs
from merak.plan.cost.kernels.kernel_time import work_seconds
from merak.plan.cost.operators import Work, node_work

DEVICE = replace(
    preset("a100-80gb"),
    flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    memory_bytes_per_s=10.0,
    functions_per_s=2.0,
    randoms_per_s=1.0,
    overhead_s=0.5,
    efficiency=None,
)
TOKENS = (2, 16)
COLUMNS = {name: TensorMeta(TOKENS, torch.int64) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(20.0), 2.0),
        (Work(20.0, flops=300.0), 3.0),
        (Work(20.0, flops=300.0, dtype=torch.bfloat16), 2.0),
        (Work(20.0, flops=1200.0, dtype=torch.bfloat16), 3.0),
        (Work(20.0, functions=6.0), 3.0),
        (Work(20.0, randoms=7.0), 7.0),
        (Work(0.0), 0.0),
    ],
)
def test_a_kernel_takes_the_longer_of_computation_and_traffic(work, seconds):
    assert work_seconds(work, DEVICE) == seconds + DEVICE.overhead_s


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


FAST = 1e30
FREE = replace(
    DEVICE,
    flops_per_s={"float32": FAST},
    memory_bytes_per_s=FAST,
    functions_per_s=FAST,
    randoms_per_s=FAST,
    overhead_s=0.0,
)


def test_a_model_costs_what_its_layers_multiply(gpt2):
    """With one speed alone to wait for, a segment takes what it has to do over that speed."""
    costs = segment_costs(gpt2, replace(FREE, flops_per_s={"float32": 1e9}, device_type="cuda"))
    tokens, hidden = 2 * 16, 8
    kept_scores = 2 * 2 * 16 * 17 // 2
    attention = 2 * tokens * hidden * 4 * hidden + 2 * kept_scores * 2 * 4
    feed_forward = 2 * tokens * hidden * 8 * hidden
    head = 2 * tokens * hidden * 40
    forward = [0, *[attention, feed_forward] * 3, head]
    assert [c.forward_s * 1e9 for c in costs] == pytest.approx(forward)
    attention_backward = 4 * tokens * hidden * 4 * hidden + 2 * kept_scores * 5 * 4
    backward = [0, *[attention_backward, 2 * feed_forward] * 3, 2 * head]
    assert [c.backward_s * 1e9 for c in costs] == pytest.approx(backward)


def test_times_follow_the_device(gpt2):
    for cost, segment in zip(segment_costs(gpt2, replace(FREE, memory_bytes_per_s=1e9)), gpt2):
        works = [node_work(node, FREE.device_type) for node in segment.graph.nodes]
        num_bytes = sum(kernel.num_bytes for work in works for kernel in work.forward)
        assert cost.forward_s == pytest.approx(num_bytes / 1e9)
        num_bytes = sum(kernel.num_bytes for work in works for kernel in work.backward)
        assert cost.backward_s >= num_bytes / 1e9  # and gradients are summed
    kernels = segment_costs(gpt2, replace(FREE, overhead_s=1.0))
    assert all(cost.forward_s >= 2 and cost.backward_s >= 2 for cost in kernels)
    assert segment_costs(gpt2, FREE)[1].forward_s < 1e-20


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


def block(hidden=4096, tokens=(1, 2048)):
    """Segments of a Llama of one layer in bfloat16, as a GPU would run it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128}
    config = LlamaConfig(**sizes, **heads, vocab_size=64, max_position_embeddings=tokens[1])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    columns = {name: TensorMeta(tokens, torch.int64) for name in ("input_ids", "labels")}
    return cut_into_segments(trace(model.train(), columns), outputs=("loss",)).segments


def test_a_block_on_a_data_sheet_takes_a_plausible_time():
    """Between its FLOPs at the peak and at a third of it, as published runs of A100s do."""
    hidden, tokens = 4096, 2048
    weights = 4 * hidden**2 + 3 * 4 * hidden**2
    scores = tokens * (tokens + 1) // 2
    ideal_s = (2 * tokens * weights + 4 * scores * hidden) / 312e12
    times = segment_costs(block(), preset("a100-80gb"))
    forward_s = sum(time.forward_s for time in times)
    backward_s = sum(time.backward_s for time in times)
    assert ideal_s < forward_s < 3 * ideal_s
    assert 2 * ideal_s < backward_s < 6 * ideal_s


def test_a_bigger_device_is_never_slower():
    for hidden in (256, 4096):
        segments = block(hidden)
        for smaller, bigger in (
            ("a100-40gb", "a100-80gb"),
            ("a100-80gb", "h100-sxm"),
            ("h100-pcie", "h100-sxm"),
            ("h100-sxm", "h200"),
            ("h200", "b200"),
            ("rtx-3090", "rtx-4090"),
            ("l4", "l40s"),
        ):
            slow, fast = (segment_costs(segments, preset(name)) for name in (smaller, bigger))
            for less, more in zip(fast, slow, strict=True):
                assert less.forward_s <= more.forward_s, (smaller, bigger)
                assert less.backward_s <= more.backward_s, (smaller, bigger)


def test_small_products_are_further_from_the_peak_than_large_ones():
    device = preset("a100")
    achieved = []
    for size in (128, 1024, 4096, 16384):
        shape = ProductShape(size, size, size)
        work = Work(3 * 2.0 * size**2, 2.0 * size**3, torch.bfloat16, shape=shape)
        achieved.append(work.flops / work_seconds(work, device) / 312e12)
    assert achieved == sorted(achieved)
    assert achieved[0] < 0.05 and 0.2 < achieved[1] < 0.5 and 0.8 < achieved[3] < 0.87
