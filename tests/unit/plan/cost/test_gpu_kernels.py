"""The bytes that a GPU's kernels save, on a machine without one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.mesh import Mesh, pretended
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.segment.cut import cut_into_segments
from merak.graph.trace.trace import trace
from merak.ops.sharded_dropout import dropout_sharded
from merak.plan.cost.gpu_kernels import (
    attention_kernel,
    attention_kernels,
    attention_sentence,
    kernels_of,
)
from merak.plan.cost.optimizer_memory import measure_step
from merak.plan.cost.segments.measured import SegmentMemories
from tests.unit.graph import families
from tests.unit.graph.stages import metas

CPU = torch.device("cpu")
SAMPLES, HEADS, TOKENS, SIZE = 2, 8, 128, 8
NUMBERS = SAMPLES * HEADS * TOKENS * SIZE
SCORES = SAMPLES * HEADS * TOKENS * TOKENS


class Attends(nn.Module):
    """Attention with dropout in it."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops
        self.weight = nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False)

    def forward(self, x, mask=None):
        heads = self.weight(x).view(SAMPLES, TOKENS, HEADS, SIZE).transpose(1, 2)
        found = functional.scaled_dot_product_attention(heads, heads, heads, mask, self.drops)
        return found.sum()


class Drops(nn.Module):
    """Dropout, whose mask alone is saved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return functional.dropout(self.weight(x), 0.1).sum()


def saved_bytes(model, kernels, dtype=torch.float32, masked=False):
    columns = {"x": TensorMeta((SAMPLES, TOKENS, HEADS * SIZE), dtype)}
    if masked:
        columns["mask"] = TensorMeta((SAMPLES, 1, TOKENS, TOKENS), torch.bool)
    memories = SegmentMemories(CPU, kernels=kernels)
    segments = cut_into_segments(trace(model.to(dtype), columns)).segments
    return sum(memories(segment).saved_bytes for segment in segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_saves_no_scores_where_attention_drops(dtype, masked):
    measured = partial(saved_bytes, Attends(0.1), dtype=dtype, masked=masked)
    assert measured("cpu") > SCORES * dtype.itemsize
    # One operand, as it is read by three; the result; a sum for each row of the scores, padded.
    own = (2 * NUMBERS + masked * SAMPLES * TOKENS * TOKENS) * dtype.itemsize
    rows = 4 * SAMPLES * HEADS * TOKENS
    assert own + rows <= measured("cuda") <= own + rows + 64


def test_attention_without_dropout_saves_the_same_everywhere():
    for dtype in (torch.float32, torch.bfloat16):
        here, there = (saved_bytes(Attends(0.0), kind, dtype) for kind in ("cpu", "cuda"))
        assert here <= there <= here + 64  # the state of the random numbers


def test_dropout_saves_a_boolean_mask_on_a_gpu():
    numbers = SAMPLES * TOKENS * HEADS * SIZE
    assert saved_bytes(Drops(), "cpu") - saved_bytes(Drops(), "cuda") == numbers * 3


def test_sharded_dropout_saves_its_own_part_of_a_boolean_mask_on_a_gpu():
    columns = {"x": TensorMeta((SAMPLES, TOKENS, HEADS * SIZE), torch.float32)}
    (segment,) = cut_into_segments(trace(Drops(), columns)).segments
    (dropout,) = segment.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default)
    dropout.target = dropout_sharded
    dropout.args = (*dropout.args, (1, (4 * TOKENS,), "tp", 1))
    with pretended(Mesh(1, 4, 1, 0, CPU, None)):
        here, there = (
            SegmentMemories(CPU, kernels=k)(segment).saved_bytes for k in ("cpu", "cuda")
        )
    assert here - there == SAMPLES * TOKENS * HEADS * SIZE * 3


@pytest.mark.parametrize(
    ("shape", "mask", "dtype", "kernel"),
    [
        ((2, 4, 16, 8), False, torch.bfloat16, "FlashAttention"),
        ((2, 4, 16, 20), False, torch.float16, "Slice"),  # of padded flash attention
        ((2, 4, 16, 8), True, torch.bfloat16, "EfficientAttention"),
        ((2, 4, 16, 8), False, torch.float32, "EfficientAttention"),
        ((2, 4, 16, 264), False, torch.bfloat16, "EfficientAttention"),
        ((2, 4, 16, 3), False, torch.float32, "UnsafeView"),  # products of matrices
        ((4, 16, 8), False, torch.bfloat16, "ToCopy"),  # which are computed in float32
        ((2, 4, 16, 8), False, torch.float64, "UnsafeView"),
    ],
)
def test_the_kernel_follows_the_operands(shape, mask, dtype, kernel):
    query = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    seen = torch.empty((16, 10), dtype=torch.bool, device="meta") if mask else None
    key = query[..., :10, :] if mask else query
    with kernels_of("cuda", CPU):
        found = functional.scaled_dot_product_attention(query, key, key, attn_mask=seen)
    assert found.shape == query.shape
    assert kernel in type(found.grad_fn).__name__


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 4, 16, 16), "memory-efficient"), ((4, 16, 16), "products of matrices")],
)
@pytest.mark.parametrize("learned", [True, False])
def test_a_mask_of_three_dims_is_taken_by_no_fused_kernel(shape, learned, kernel):
    query = TensorMeta((2, 4, 16, 8), torch.bfloat16, requires_grad=True)
    bias = TensorMeta(shape, torch.bfloat16, requires_grad=learned)
    assert attention_kernel(query, query, query, bias, False).name == kernel


def saved_bytes_of_attention(device, drops, together=True):
    """With a bias that gets a gradient, in bfloat16, whose rows lie together or apart."""
    meta = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    query, bias = torch.empty((2, 4, 16, 8), **meta), torch.empty((1, 4, 16, 16), **meta)
    bias = bias if together else bias.mT
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = functional.scaled_dot_product_attention(query, query, query, bias, drops)
    assert found.dtype == torch.bfloat16
    return sum(tensor.nbytes for tensor in saved.values())


SCORES_OF_ONE, NUMBERS_OF_ONE = 2 * 4 * 16 * 16, 2 * 4 * 16 * 8


def test_what_attention_by_products_saves_on_a_gpu():
    """Scores and what dropout leaves of them in float32, and one byte a score of its mask."""
    with kernels_of("cuda", CPU):
        kept, dropped = (saved_bytes_of_attention("meta", p, together=False) for p in (0.0, 0.1))
    assert kept == 4 * SCORES_OF_ONE + 3 * 4 * NUMBERS_OF_ONE
    assert dropped == kept + (4 + 1) * SCORES_OF_ONE


@pytest.mark.parametrize("drops", [0.0, 0.1])
def test_what_attention_with_a_bias_saves_on_a_gpu(drops):
    """As an H200 did, with torch 2.11: memory-efficient attention gives a bias its gradient."""
    with kernels_of("cuda", CPU):
        assert saved_bytes_of_attention("meta", drops) == 9232


@pytest.mark.gpu
@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize("together", [True, False])
def test_what_attention_saves_is_what_a_gpu_saves(drops, together):
    with kernels_of("cuda", CPU):
        expected = saved_bytes_of_attention("meta", drops, together)
    assert saved_bytes_of_attention("cuda", drops, together) == expected


def test_what_t5_adds_to_its_scores_lies_as_memory_efficient_attention_reads_it():
    model = families.t5(1).to(torch.bfloat16)
    columns = metas(families.batch_for("t5"))
    graph = build_graph(GraphSource(model), columns, training=True)
    found = [str(k) for segment in graph.segments for k in attention_kernels(segment.graph)]
    assert found.count("memory-efficient, since its mask rules out flash") == 2
    attention = torch.ops.aten.scaled_dot_product_attention.default
    nodes = [n for s in graph.segments for n in s.graph.nodes if n.target is attention]
    laid_out = [
        read
        for node in nodes
        for read in node.all_input_nodes[3:]
        if read.target is torch.ops.aten.contiguous.default
    ]
    assert len(laid_out) == 2


def test_on_other_devices_nothing_changes():
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    with kernels_of("cpu", CPU):
        found = functional.scaled_dot_product_attention(query, query, query)
    assert "Cpu" in type(found.grad_fn).__name__


def test_an_optimizer_steps_all_parameters_at_once_on_a_gpu():
    metas = [TensorMeta((100, 10), torch.float32)] * 8

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    one_by_one, at_once = (measure_step(adamw, metas, CPU, kind) for kind in ("cpu", "cuda"))
    assert at_once.state_bytes == one_by_one.state_bytes
    assert at_once.taken_bytes >= 8 * 4000 > one_by_one.taken_bytes


@pytest.mark.parametrize(
    ("dtype", "masked", "expected"),
    [
        (torch.bfloat16, False, "flash"),
        (torch.bfloat16, True, "memory-efficient, since its mask rules out flash"),
        (torch.float32, False, "memory-efficient, since float32 rules out flash"),
        (
            torch.float64,
            False,
            "products of matrices, since float64 rules out memory-efficient attention",
        ),
    ],
)
def test_the_kernel_of_attention_and_why_no_better_one_is_said(dtype, masked, expected):
    columns = {"x": TensorMeta((SAMPLES, TOKENS, HEADS * SIZE), dtype)}
    if masked:
        columns["mask"] = TensorMeta((SAMPLES, 1, TOKENS, TOKENS), torch.bool)
    graph = cut_into_segments(trace(Attends(0.0).to(dtype), columns))
    graphs = [segment.graph for segment in graph.segments]
    assert [str(kernel) for own in graphs for kernel in attention_kernels(own)] == [expected]
    advice = "; a causal model needs no attention_mask for batches without padding"
    said = f"attention: {expected} in 1 segment{advice if masked else ''}"
    assert attention_sentence(graphs) == said
    assert attention_sentence([]) is None
    advice = "; a microbatch whose attention_mask is all ones has no mask"
    said = f"attention: {expected} in 1 segment{advice if masked else ''}"
    assert attention_sentence(graphs, {"attention_mask"}) == said
