"""FLOPs are compared with torch's own counter at work, bytes with counts by hand."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.trace import trace
from merak.ops.attention.ring import Ring, attend_ring
from merak.plan.cost.operators import NodeWork, node_work


class Call(nn.Module):
    """A function of an input and some weights; the input gets a gradient, or is plain data."""

    def __init__(self, function, *shapes, through=True):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=through)

    def forward(self, x):
        return self.function(x * self.scale, *self.weights).sum()


def graph_of(model, shape):
    return trace(model, {"x": TensorMeta(shape, torch.float32)}).graph


def works_of(model, shape, device_type="cuda"):
    """The work of every operator, by its name, in order."""
    found = {}
    for node in graph_of(model, shape).nodes:
        if node.op == "call_function":
            name = str(node.target).removeprefix("aten.").partition(".")[0]
            found.setdefault(name, node_work(node, device_type))
    return found


def flops_of(model, shape):
    works = [node_work(node, "cuda") for node in graph_of(model, shape).nodes]
    return (
        sum(kernel.flops for work in works for kernel in work.forward),
        sum(kernel.flops for work in works for kernel in work.backward),
    )


PRODUCTS = {
    "linear": (F.linear, [(5, 4), (5,)], (2, 3, 4)),
    "addmm": (lambda x, b, w: torch.addmm(b, x, w), [(5,), (4, 5)], (3, 4)),
    "mm": (torch.mm, [(4, 5)], (3, 4)),
    "bmm": (torch.bmm, [(2, 4, 5)], (2, 3, 4)),
    "baddbmm": (lambda x, b, w: torch.baddbmm(b, x, w), [(2, 3, 5), (2, 4, 5)], (2, 3, 4)),
    "matmul": (torch.matmul, [(2, 4, 5)], (2, 3, 4)),
    "matmul that spreads": (torch.matmul, [(7, 1, 4, 5)], (2, 3, 4)),
    "einsum": (lambda x, w: torch.einsum("bsd,hde->bhse", x, w), [(6, 4, 5)], (2, 3, 4)),
    "einsum with dots": (lambda x, w: torch.einsum("...d,de->...e", x, w), [(4, 5)], (2, 3, 4)),
    "conv1d": (F.conv1d, [(6, 4, 3), (6,)], (2, 4, 9)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(6, 4, 3, 3)], (2, 4, 9, 9)),
    "conv3d": (F.conv3d, [(6, 4, 2, 2, 2)], (2, 4, 5, 5, 5)),
    "conv_transpose1d": (F.conv_transpose1d, [(4, 6, 3)], (2, 4, 9)),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        [(4, 6, 3, 3)],
        (2, 4, 5, 5),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("through", [True, False])
def test_products_count_as_torch_counts_them(name, through):
    function, shapes, shape = PRODUCTS[name]
    model = Call(function, *shapes, through=through)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randn(shape))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() > 0
    expected = (forward.get_total_flops(), backward.get_total_flops())
    assert flops_of(model, shape) == expected


def test_a_product_with_a_vector_multiplies_every_element_once():
    # torch's counter leaves these out.
    assert flops_of(Call(torch.matmul, (4,)), (2, 3, 4)) == (2 * 24, 2 * 2 * 24)


def test_a_dot_product_multiplies_every_element_once():
    model = Call(lambda x, w: x @ w, (4,))
    assert flops_of(model, (4,)) == (2.0 * 4, 2 * 2.0 * 4)


def test_a_bilinear_form_multiplies_every_pair_of_features():
    # torch's counter leaves these out.
    model = Call(lambda x, w, b: F.bilinear(x, x, w, b), (5, 4, 4), (5,))
    flops = 2 * 2 * (2 * 3) * 5 * 4 * 4
    assert flops_of(model, (2, 3, 4)) == (flops, 3 * flops)


def test_grouped_convolutions_multiply_within_their_groups():
    model = Call(lambda x, w: F.conv2d(x, w, groups=2), (6, 2, 3, 3))
    outputs = 2 * 6 * 5 * 5
    flops = 2 * outputs * 2 * 3 * 3
    assert flops_of(model, (2, 4, 7, 7)) == (flops, 2 * flops)


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_recurrent_layers_multiply_every_weight_with_every_token():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 5, num_layers=2)

        def forward(self, x):
            return self.layer(x)[0].sum()

    weights = 4 * 5 * (4 + 5) + 4 * 5 * (5 + 5)
    flops = 2 * 3 * 2 * weights
    assert flops_of(Recurrent(), (3, 2, 4)) == (flops, 2 * flops)


def attention(x, *_, **options):
    keys = options.pop("keys", x)
    return F.scaled_dot_product_attention(x, keys, keys, **options)


def test_fused_attention_counts_as_torch_counts_it():
    shape = (2, 3, 8, 4)
    assert flops_of(Call(attention), shape) == (
        sdpa_flop_count(shape, shape, shape),
        sdpa_backward_flop_count(shape, shape, shape, shape),
    )


def test_attention_of_few_key_heads_multiplies_for_every_query_head():
    shape, keys = (2, 4, 8, 4), (2, 2, 8, 4)

    def grouped(x, weight):
        return F.scaled_dot_product_attention(x, weight, weight, enable_gqa=True)

    assert flops_of(Call(grouped, keys), shape) == (
        sdpa_flop_count(shape, keys, keys),
        sdpa_backward_flop_count(shape, shape, keys, keys),
    )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(8, 8), (5, 8), (8, 5), (1, 8)])
def test_causal_attention_multiplies_the_scores_that_it_keeps(num_queries, num_keys):
    def causal(x, weight):
        return F.scaled_dot_product_attention(x, weight, weight, is_causal=True)

    shape, keys = (1, 1, num_queries, 4), (1, 1, num_keys, 4)
    kept = int(torch.ones(num_queries, num_keys).tril().sum())
    forward, backward = flops_of(Call(causal, keys), shape)
    assert forward == 2 * kept * (4 + 4)
    assert backward == 2 * kept * (3 * 4 + 2 * 4)


@pytest.mark.parametrize("tokens", [8, 7])
def test_ranks_of_a_ring_share_the_products_of_causal_attention(tokens):
    """Of an even number, evenly; of an odd one, the price is that of the mean rank."""
    degree, graph = 4, torch.fx.Graph()
    operands = [graph.placeholder(name) for name in ("query", "key", "value")]
    node = graph.call_function(attend_ring, (*operands, None, *Ring(None, True, degree, "cp")))
    for each in (*operands, node):
        each.meta["tensor"] = TensorMeta((1, 2, tokens, 4), torch.float32, requires_grad=True)
    work, whole = node_work(node, "cuda"), (1, 2, tokens * degree, 4)
    expected = flops_of(Call(partial(attention, is_causal=True)), whole)
    found = [sum(own.flops for own in way) for way in (work.forward, work.backward)]
    assert [degree * flops for flops in found] == pytest.approx(expected)


def test_dropout_makes_attention_on_the_cpu_write_its_scores():
    scores_bytes = 4 * 2 * 3 * 8 * 8
    model = Call(lambda x: attention(x, dropout_p=0.5, is_causal=True))
    shape = (2, 3, 8, 4)
    on_gpu = works_of(model, shape, "cuda")["scaled_dot_product_attention"]
    on_cpu = works_of(model, shape, "cpu")["scaled_dot_product_attention"]
    assert sum(work.num_bytes for work in on_gpu.forward) < 4 * 4 * 2 * 3 * 8 * 4 + 1
    assert sum(work.num_bytes for work in on_cpu.forward) > 8 * scores_bytes
    assert sum(work.randoms for work in on_cpu.forward) == 2 * 3 * 8 * 8
    assert sum(work.flops for work in on_cpu.forward) == sdpa_flop_count(shape, shape, shape)
    without = works_of(Call(attention), shape, "cpu")["scaled_dot_product_attention"]
    assert without == works_of(Call(attention), shape)["scaled_dot_product_attention"]


def test_a_product_reads_its_factors_and_each_gradient_is_another():
    work = works_of(Call(F.linear, (5, 4), (5,)), (6, 4))["linear"]
    x, weight, bias, out = 4 * 6 * 4, 4 * 5 * 4, 4 * 5, 4 * 6 * 5
    assert [kernel.num_bytes for kernel in work.forward] == [x + weight + out]
    assert [kernel.num_bytes for kernel in work.backward] == [
        x + weight + out,
        x + weight + out,
        out + bias,
    ]


def test_frozen_weights_and_the_batch_get_no_gradient():
    model = Call(F.linear, (5, 4))
    model.weights[0].requires_grad_(False)
    forward, backward = flops_of(model, (6, 4))
    assert forward == backward == 2 * 6 * 4 * 5
    model.scale.requires_grad_(False)
    model.weights.append(nn.Parameter(torch.ones(())))
    model.function = lambda x, weight, scale: F.linear(x, weight) * scale
    assert flops_of(model, (6, 4)) == (forward, 0)


def test_an_embedding_looks_up_and_scatters_without_products():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 8)

        def forward(self, x):
            return self.table(x).sum()

    graph = trace(Lookup(), {"x": TensorMeta((3, 5), torch.int64)}).graph
    (node,) = (n for n in graph.nodes if "embedding" in str(n.target))
    work = node_work(node, "cuda")
    rows, indices = 4 * 3 * 5 * 8, 8 * 3 * 5
    assert [kernel.num_bytes for kernel in work.forward] == [indices + 2 * rows]
    assert [kernel.num_bytes for kernel in work.backward] == [4 * 100 * 8, indices + 3 * rows]
    assert not any(kernel.flops for kernel in (*work.forward, *work.backward))


def test_elementwise_operators_read_and_write_once():
    size = 4 * 6 * 4
    works = works_of(Call(lambda x, w: F.gelu(x) * w, (6, 4)), (6, 4))
    assert [kernel.num_bytes for kernel in works["gelu"].forward] == [2 * size]
    assert [kernel.num_bytes for kernel in works["gelu"].backward] == [3 * size]
    assert works["gelu"].forward[0].functions == works["gelu"].backward[0].functions == 6 * 4


def test_a_sum_hands_its_gradient_on_and_sums_for_what_was_spread():
    works = works_of(Call(lambda x, w: x + w, (4,)), (6, 4))
    assert [kernel.num_bytes for kernel in works["add"].forward] == [4 * (24 + 4 + 24)]
    assert [kernel.num_bytes for kernel in works["add"].backward] == [4 * (24 + 4)]
    assert works_of(Call(lambda x, w: x + w, (6, 4)), (6, 4))["add"].backward == ()


@pytest.mark.parametrize(
    ("view", "backward_bytes"),
    [
        (lambda x: x.view(24), []),
        (lambda x: x.transpose(0, 1), []),
        (lambda x: x.unsqueeze(0), []),
        # Zeros of the whole, and the piece's gradient copied into them.
        (lambda x: x[2:5], [96, 2 * 48]),
        (lambda x: x[2], [96, 2 * 16]),
        # All gradients put together, or summed.
        (lambda x: torch.stack(x.split(2)), [96 + 96]),
        (lambda x: x.unsqueeze(0).expand(3, 6, 4), [96 + 288]),
    ],
)
def test_views_are_free_forward_and_put_gradients_in_their_place(view, backward_bytes):
    works = works_of(Call(view), (6, 4))
    views = {n: w for n, w in works.items() if n not in ("mul", "sum", "stack")}
    assert views
    assert all(work.forward == () for work in views.values())
    kernels = [kernel for work in views.values() for kernel in work.backward]
    assert [kernel.num_bytes for kernel in kernels] == backward_bytes


def test_a_conversion_copies_and_one_to_the_same_type_does_not():
    assert works_of(Call(lambda x: x.to(torch.bfloat16)), (6, 4))["to"].forward[0].num_bytes == (
        24 * 4 + 24 * 2
    )


def test_dropout_draws_for_every_element():
    model = Call(lambda x: F.dropout(x, 0.5, training=True))
    assert works_of(model, (6, 4))["dropout"].forward[0].randoms == 24


def test_layer_norm_reads_and_writes_once_and_goes_over_its_input_three_times_backward():
    size, row = 4 * 2 * 3 * 8, 4 * 8
    work = works_of(Call(lambda x, w, b: F.layer_norm(x, (8,), w, b), (8,), (8,)), (2, 3, 8))
    (forward,), (backward,) = work["layer_norm"].forward, work["layer_norm"].backward
    assert forward.num_bytes == 2 * size + 2 * row
    # The gradient, the input and the weights are read, and their gradients written; then the
    # gradient and the input are read again for those of the weights.
    assert backward.num_bytes == (2 * size + 2 * row) + (size + 2 * row) + 2 * size


SEVERAL = {
    "split": lambda x: x.split(4, -1),
    "split_with_sizes": lambda x: x.split((3, 5), -1),
    "chunk": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unbind(0),
    "unsafe_split": lambda x: torch.unsafe_split(x, 4, -1),
    "max": lambda x: x.max(-1),
    "topk": lambda x: x.topk(2, -1),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_taking_one_of_several_results_costs_nothing(name):
    graph = graph_of(Call(lambda x: SEVERAL[name](x)[0] * 2), (2, 3, 8))
    taken = [node for node in graph.nodes if node.target is operator.getitem]
    assert len(taken) >= 1
    assert all(node_work(node, "cuda") == NodeWork() for node in taken)


def test_results_of_one_operator_are_counted_with_it_alone():
    size, rows = 4 * 2 * 3 * 8, 2 * 3
    values_and_places = (4 + 8) * rows
    work = works_of(Call(lambda x: SEVERAL["max"](x)[0]), (2, 3, 8))["max"]
    assert [kernel.num_bytes for kernel in work.forward] == [size + values_and_places]
    for name in ("split", "split_with_sizes", "chunk", "unbind", "unsafe_split"):
        work = works_of(Call(lambda x, name=name: SEVERAL[name](x)[0]), (2, 3, 8))[name]
        assert work.forward == ()
        assert [kernel.num_bytes for kernel in work.backward] == [2 * size]


def test_variants_of_an_operator_do_its_work():
    norm = works_of(Call(lambda x: SEVERAL["native_layer_norm"](x)[0]), (2, 3, 8))
    plain = works_of(Call(lambda x: F.layer_norm(x, (8,))), (2, 3, 8))
    statistics = 4 * 2 * 2 * 3
    for way in ("forward", "backward"):
        (variant,) = getattr(norm["native_layer_norm"], way)
        (usual,) = getattr(plain["layer_norm"], way)
        assert variant.num_bytes == usual.num_bytes + statistics
    dropout = works_of(Call(lambda x: SEVERAL["native_dropout"](x)[0]), (2, 3, 8))
    assert dropout["native_dropout"].forward[0].randoms == 2 * 3 * 8
