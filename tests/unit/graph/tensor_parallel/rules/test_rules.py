"""Operators between split layers, each in a small block: gradients equal those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.apply import attributes_for, given_weights
from merak.graph.tensor_parallel.features import Column, Features, Row
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

B, T, HEADS, SIZE = 2, 3, 4, 6
WIDTH = HEADS * SIZE
Between = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """stem → x + down(between(up(x))) → loss."""

    def __init__(self, between: Between, up: int = WIDTH, down: int = WIDTH) -> None:
        super().__init__()
        self.between = between
        self.stem = nn.Linear(5, 8)
        self.up, self.down = nn.Linear(8, up), nn.Linear(down, 8)
        self.norm = nn.LayerNorm(SIZE)
        self.all_heads, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)
        self.per_head = nn.Parameter(torch.randn(HEADS, 1, 1))
        self.per_channel = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("slopes", torch.rand(HEADS, 1, T))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return (x + self.down(self.between(self, self.up(x)))).square().mean()


def heads(x: torch.Tensor, num: int = HEADS) -> torch.Tensor:
    return x.view(B, T, num, -1).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(B, T, -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return merged((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def uneven_fused(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
    grouped = [heads(t, HEADS // 2).repeat_interleave(2, dim=1) for t in (k, v)]
    return attend(heads(q), *grouped)


def uneven_sliced(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x[..., :WIDTH], x[..., WIDTH : WIDTH * 3 // 2], x[..., -WIDTH // 2 :]
    shape = (B, HEADS // 2, 2, T, SIZE)
    grouped = [heads(t, HEADS // 2)[:, :, None].expand(shape).flatten(1, 2) for t in (k, v)]
    return attend(heads(q), *grouped)


def grouped_kernel(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
    k, v = heads(k, HEADS // 2), heads(v, HEADS // 2)
    out = functional.scaled_dot_product_attention(
        heads(q), k, v, is_causal=True, enable_gqa=True, dropout_p=0.3
    )
    return merged(out)


def solved(block: Block, x: torch.Tensor) -> torch.Tensor:
    q = heads(x)
    q = torch.linalg.solve_triangular(q @ q.transpose(-1, -2), q, upper=False, unitriangular=True)
    shared = torch.arange(1.0, 1.0 + T * T).view(T, T)
    x = torch.linalg.solve_triangular(shared, merged(q), upper=True)
    return torch.linalg.solve_triangular(
        shared, x.transpose(1, 2), upper=True, left=False
    ).transpose(1, 2)


def fused_outside_heads(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.view(B, T, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v)


def fused_inside_heads(block: Block, x: torch.Tensor) -> torch.Tensor:
    q, k, v = x.view(B, T, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, dim=-1)
    return attend(q, k, v)


def moved_and_reversed(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = heads(x).mT.movedim(1, -1).flip(0, 2).moveaxis((0, 3), (3, 0))
    return merged(x.roll(1, dims=2).permute(3, 0, 2, 1).adjoint().mT)


def batch_and_heads_merged(block: Block, x: torch.Tensor) -> torch.Tensor:
    q = heads(x).reshape(B * HEADS, T, SIZE)
    bias = block.slopes.repeat(B, 1, 1)
    scores = torch.baddbmm(bias, q, q.transpose(1, 2), beta=1.0, alpha=0.5)
    dropped = functional.dropout(scores.view(B, HEADS, T, T).softmax(-1), 0.4)
    return merged(torch.bmm(dropped.view(B * HEADS, T, T), q).view(B, HEADS, T, SIZE))


def per_head_parameters(block: Block, x: torch.Tensor) -> torch.Tensor:
    scores = heads(x) @ heads(x).transpose(-1, -2) * block.per_head + block.slopes
    mask = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    scores = scores.masked_fill(mask, -1e4).to(torch.float64).softmax(-1).to(x.dtype)
    return merged(scores @ heads(x)) * block.per_channel


def rotated_as_complex(block: Block, x: torch.Tensor) -> torch.Tensor:
    turn = torch.polar(torch.ones(T, SIZE // 2), torch.rand(T, SIZE // 2))
    numbers = torch.view_as_complex(heads(x).reshape(B, HEADS, T, -1, 2))
    return merged(torch.view_as_real(numbers * turn).flatten(3))


def einsum(block: Block, x: torch.Tensor) -> torch.Tensor:
    q = x.view(B, T, HEADS, SIZE)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q).log_softmax(-1).exp()
    return torch.einsum("bhqk,bkhd->bqhd", scores, q).flatten(2)


def einsum_with_ellipsis(block: Block, x: torch.Tensor) -> torch.Tensor:
    """As of LongT5's local attention, and with an implicit result."""
    q = x.view(B, T, HEADS, SIZE)
    scores = torch.einsum("...qhd,...khd->...hqk", q, q[:1]).softmax(-1)
    return merged(torch.einsum("...qk,...kd", scores, heads(x)).mT)


def norm_over_a_head(block: Block, x: torch.Tensor) -> torch.Tensor:
    return merged(block.norm(heads(x)))


def norm_over_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * block.per_channel


def norms_of_all_heads(block: Block, x: torch.Tensor) -> torch.Tensor:
    scaled = functional.layer_norm(x, (WIDTH,), block.per_channel, block.per_channel * 2)
    return block.rms(x) * 0.5 + block.all_heads(x) + functional.rms_norm(x, (WIDTH,)) - scaled


def spread_over_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    """As of the sparse activations of Gemma 3n: what is above some deviations of the mean."""
    cutoff = x.mean(-1, keepdim=True) + 0.3 * x.std(-1, keepdim=True, correction=0)
    return functional.relu(x - cutoff) + x.var(dim=-1, unbiased=True, keepdim=True)


def sums_over_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    total = -(x.sum(-1, keepdim=True) + 2 * x.square().sum(-1, keepdim=True)).transpose(0, 1)
    return x * total.transpose(0, 1).sigmoid() + x.mean()


def reductions_over_whole_dims(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = heads(x)
    return merged((y - y.amax(-1, keepdim=True)) * y.mean((0, 2), keepdim=True) + y.var(0))


def gated(block: Block, x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return functional.dropout(functional.silu(gate) * value, 0.25)


def joined_and_stacked(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = torch.stack([x, x.cos(), torch.ones_like(x)], dim=1)  # (B, 3, T, WIDTH)
    first, second = y.select(1, 0), y[:, 1]
    rotated = torch.cat([-heads(first)[..., 3:], heads(second)[..., :3]], dim=-1)
    return merged(torch.cat([rotated, heads(x)], dim=1)[:, :HEADS].squeeze(0) + rotated)


def whole_again(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.clone().unsqueeze(0).swapaxes(0, 1).squeeze(1) + x.new_zeros(WIDTH)[:1]


def shaped_like_others(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = x.view(B, T, HEADS, SIZE)
    z = functional.pad(x, (0, 0, 1, 1))[:, 1:-1].repeat(1, 2, 1)[:, T:].contiguous().view_as(y)
    return z.reshape_as(x) + torch.zeros(WIDTH).type_as(x).expand_as(z.flatten(2))


def picked(block: Block, x: torch.Tensor) -> torch.Tensor:
    order = torch.arange(T).flip(0)
    x = x.view(B, T, HEADS, SIZE)[..., order.repeat(2)].flatten(2)
    x = x.view(B, T, HEADS, SIZE)[torch.arange(B)[:, None], order].flatten(2)
    scores = (heads(x) @ heads(x).transpose(-1, -2)).index_select(2, order)
    return merged(torch.gather(scores, -1, order.expand(B, HEADS, T, T)) @ heads(x))


def filled_by_a_tensor(block: Block, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = heads(x) @ heads(x).transpose(-1, -2)
    return merged(scores.masked_fill(mask, torch.full((), -1e4)).softmax(-1) @ heads(x))


def filled_in_place(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Masked as XLM does: by a mask of the size of all heads, in place."""
    scores = heads(x) @ heads(x).transpose(-1, -2)
    mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device).triu(1)
    scores.masked_fill_(mask.expand_as(scores), -1e4)
    context = scores.softmax(-1) @ heads(x)
    halves = context.clone().fill_(0.5)
    nothing = context.clone().zero_()
    return merged(context * halves + nothing)


def whole_written_between_uses(block: Block, x: torch.Tensor) -> torch.Tensor:
    whole = block.per_channel * 2
    view = whole.unsqueeze(0)
    before = x + view
    whole.mul_(3)
    return before.relu_() + (x + view)


FUSED = {"up": Column((1, 1, 1)), "down": Row()}
UNEVEN = {"up": Column((2, 1, 1)), "down": Row()}
PLAIN = {"up": Column(), "down": Row()}
ALL_HEADS = {**PLAIN, "all_heads": Column(), "rms": Column(), "per_channel": Column()}


def two_results(block: Block, x: torch.Tensor) -> torch.Tensor:
    fraction, exponent = torch.frexp(x)
    return fraction * exponent


def picked_across_ranks(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.gather(x, -1, torch.arange(WIDTH).flip(0).expand(B, T, WIDTH))


@one_in(4)
@pytest.mark.parametrize(
    "between,features,up",
    [
        (uneven_fused, UNEVEN, 2 * WIDTH),
        (uneven_sliced, UNEVEN, 2 * WIDTH),
        (grouped_kernel, UNEVEN, 2 * WIDTH),
        (fused_outside_heads, FUSED, 3 * WIDTH),
        (fused_inside_heads, PLAIN, 3 * WIDTH),
        (batch_and_heads_merged, PLAIN, WIDTH),
        (moved_and_reversed, PLAIN, WIDTH),
        (per_head_parameters, PLAIN, WIDTH),
        (rotated_as_complex, PLAIN, WIDTH),
        (einsum, PLAIN, WIDTH),
        (solved, PLAIN, WIDTH),
        (einsum_with_ellipsis, PLAIN, WIDTH),
        (norm_over_a_head, PLAIN, WIDTH),
        (norm_over_the_split_dim, PLAIN, WIDTH),
        (norms_of_all_heads, ALL_HEADS, WIDTH),
        (spread_over_the_split_dim, PLAIN, WIDTH),
        (sums_over_the_split_dim, PLAIN, WIDTH),
        (reductions_over_whole_dims, PLAIN, WIDTH),
        (gated, {"up": Column((1, 1)), "down": Row()}, 2 * WIDTH),
        (joined_and_stacked, PLAIN, WIDTH),
        (whole_again, PLAIN, WIDTH),
        (filled_by_a_tensor, PLAIN, WIDTH),
        (filled_in_place, PLAIN, WIDTH),
        (whole_written_between_uses, PLAIN, WIDTH),
        (picked, PLAIN, WIDTH),
        (picked_across_ranks, PLAIN, WIDTH),
        (two_results, PLAIN, WIDTH),
        (shaped_like_others, PLAIN, WIDTH),
        (norm_over_a_head, {"up": Column()}, WIDTH),
        (norm_over_a_head, {"down": Row()}, WIDTH),
        (norm_over_a_head, {"up": Column(), "down": Column()}, WIDTH),
        (norm_over_a_head, {"up": Row(), "down": Column()}, WIDTH),
        (norm_over_a_head, {"up.weight": Column(), "down.weight": Row()}, WIDTH),
    ],
)
def test_gradients_equal_one_process(between: Between, features: Features, up: int) -> None:
    torch.manual_seed(0)
    model = Block(between, up)
    calls = assert_parity(model, {"x": torch.randn(B, T, 5)}, features, 2)
    assert sum(calls.values()) > 0


def test_the_sums_of_parallel_branches_are_reduced_once() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(5, 8)
            self.q, self.up = nn.Linear(8, WIDTH), nn.Linear(8, 16)
            self.o = nn.Linear(WIDTH, 8, bias=False)
            self.down = nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return (x + (self.o(self.q(x)) + self.down(self.up(x).relu())) * 0.5).square().mean()

    torch.manual_seed(0)
    features = {"q": Column(), "o": Row(), "up": Column(), "down": Row()}
    columns = {"x": torch.randn(B, T, 5)}
    calls = assert_parity(Parallel(), columns, features, 4)
    assert calls == {"copy_to": 1, "reduce_from": 1}


def test_running_statistics_that_a_whole_norm_and_a_split_one_update() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(5, WIDTH, bias=False)
            self.up = nn.Linear(WIDTH, WIDTH, bias=False)
            self.norm, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.stem(x))
            return self.down(self.norm(self.up(x)).sigmoid()).square().mean()

    torch.manual_seed(0)
    features = {"up": Column(), "down": Row()}
    calls = assert_parity(Twice(), {"x": torch.randn(6, 5)}, features, 2)
    assert calls["reduce_from"] == 1


def test_a_sum_that_is_written_into() -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            out = self.up(x).relu_() @ self.down.weight.T
            out += x
            return out.square().mean()

    torch.manual_seed(0)
    columns = {"x": torch.randn(B, T, 5)}
    calls = assert_parity(InPlace(whole_again), columns, PLAIN, 2)
    assert calls == {"copy_to": 1, "reduce_from": 1}


def softmax_over_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def norm_that_needs_the_whole(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.all_heads(x)


def channels_moved(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.view(B, T, 3, WIDTH // 3).transpose(2, 3).reshape(B, T, WIDTH)


def three_heads(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.view(B, T, 3, WIDTH // 3).exp().flatten(2)


def slice_across_ranks(block: Block, x: torch.Tensor) -> torch.Tensor:
    return functional.pad(x[..., 1:], (0, 1))


def index_of_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x * x[..., 0:1].select(-1, 0).unsqueeze(-1) + x.select(-1, 3).unsqueeze(-1)


def selected_across_ranks(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.index_select(2, torch.arange(WIDTH))


def indexed_across_ranks(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x[..., torch.arange(WIDTH)]


def random_like(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def maximum_of_the_split_dim(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(-1, keepdim=True)


def different_splits(block: Block, x: torch.Tensor) -> torch.Tensor:
    square = x.new_ones(WIDTH, 1) * x[0, 0]
    return x + (square + square.transpose(0, 1))[:T]


def complex_channels(block: Block, x: torch.Tensor) -> torch.Tensor:
    split = x.view(B, T, 2, -1).transpose(-1, -2)
    return torch.view_as_real(torch.view_as_complex(split.contiguous())).flatten(2)


def reversed_channels(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1)


def written_in_place(block: Block, x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(B, T, WIDTH)
    return whole.add_(x)


@one_in(4)
@pytest.mark.parametrize(
    "between,message",
    [
        (
            softmax_over_the_split_dim,
            r"softmax\.int.* it runs along dim 2, which is split",
        ),
        (norm_that_needs_the_whole, r"normalises over dim 2, which is split, by a whole weight"),
        (channels_moved, r"multiplies operands whose fused parts differ: \(3, 3, .*\) and \(24,\)"),
        (three_heads, r"tp=2 does not divide the 3 outputs of up; the degrees .* are 1 and 3\."),
        (slice_across_ranks, r"it takes 1 … 24 of a dim split in parts of 24; if up is a fused"),
        (index_of_the_split_dim, r"it takes 0 … 1 of a dim split|takes one index of dim 2, which"),
        (selected_across_ranks, r"index_select\.default.* it picks along dim 2, which is split"),
        (indexed_across_ranks, r"index\.Tensor.* it picks elements along a dim that is split"),
        (random_like, r"aten\.rand_like\.default.* it has no rule for operands that are split"),
        (maximum_of_the_split_dim, r"it takes amax over a dim that is split"),
        (different_splits, r"it combines operands that are split along different dims"),
        (complex_channels, r"view_as_complex\.default.* it makes complex numbers of dim 3, which"),
        (reversed_channels, r"aten\.flip\.default.* it moves elements along dim 2, which is split"),
        (written_in_place, r"it writes split values into a whole one"),
    ],
)
def test_what_cannot_be_split_is_refused(between: Between, message: str) -> None:
    graph = cases.traced(Block(between), {"x": torch.randn(B, T, 5)})
    with pytest.raises(ShardError, match=message):
        given_weights(graph, attributes_for(graph, PLAIN), 2)


def test_parts_that_the_model_does_not_have_are_refused() -> None:
    graph = cases.traced(Block(fused_inside_heads, 3 * WIDTH), {"x": torch.randn(B, T, 5)})
    message = (
        r"reshapes \[2, 3, 72\], split over dim 2 in parts of 24 \+ 24 \+ 24, to \[2, 3, 4, 18\]"
    )
    with pytest.raises(ShardError, match=message):
        given_weights(graph, attributes_for(graph, FUSED), 2)


def test_a_layer_used_in_two_ways_is_refused() -> None:
    class Tied(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return (x + self.up(x).relu() @ self.up.weight).square().mean()

    graph = cases.traced(Tied(whole_again), {"x": torch.randn(B, T, 5)})
    with pytest.raises(
        ShardError, match=r"up\.weight cannot be a Column .*: it is used in two ways"
    ):
        given_weights(graph, attributes_for(graph, {"up": Column()}), 2)
