"""Vocabularies in shares, on real ranks: look-ups, losses and every gradient are one process's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import merak
from merak.check import Case, CheckOptions, Layout, check_model
from merak.core.shards import ParameterShard, take
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.ops.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_embedding
from merak.ops.vocab_parallel_reductions import (
    vocab_parallel_log_softmax,
    vocab_parallel_logsumexp,
)
from tests.multirank.check_on import launcher
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES

LARGE = 307
"""A vocabulary that is large beside the blocks, and that no degree divides."""

SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "weighted": True},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.2, "weighted": True, "ignore_index": 3},
    {"classes": 5},  # of four ranks, the last has nothing but padding
    {"shape": (3, 4)},  # classes in the middle
    {"dtype": torch.bfloat16},
]


def losses_off(tp: int) -> list[str]:
    """The settings under which loss or gradient are not those of torch's cross entropy."""
    rank = merak.init(tp=tp, device="cpu").tp_rank
    return [str(settings) for settings in SETTINGS if not loss_is_right(tp, rank, **settings)]


def loss_is_right(
    tp: int,
    rank: int,
    classes: int = 41,
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
    **how: Any,
) -> bool:
    torch.manual_seed(0)
    logits = (torch.randn(6, classes, *shape) * 8).to(dtype).requires_grad_()
    target = torch.randint(classes, (6, *shape))
    ignored = how.get("ignore_index", -100)
    target[1] = ignored
    weight = torch.rand(classes) if weighted else None
    expected = torch.nn.functional.cross_entropy(logits, target, weight, **how)
    upstream = torch.rand(expected.shape)
    expected.backward(upstream.to(expected.dtype))
    assert logits.grad is not None

    shard = ParameterShard(1, (classes,), tp)
    own = take(logits.detach(), shard, rank)
    padding = own.shape[1] - sum(b - a for a, b in shard.ranges(rank))
    own.narrow(1, own.shape[1] - padding, padding).fill_(1e4)  # must not count
    own.requires_grad_()
    reduction = ["none", "mean", "sum"].index(how.get("reduction", "mean"))
    smoothing, layout = how.get("label_smoothing", 0.0), (1, classes, "tp")
    found = vocab_parallel_cross_entropy(own, target, weight, reduction, ignored, smoothing, layout)
    found.backward(upstream.to(found.dtype))
    assert own.grad is not None
    assert not own.grad.narrow(1, own.shape[1] - padding, padding).any()
    off = (own.grad - take(logits.grad, shard, rank)).abs().max() / logits.grad.abs().max()
    # Logits of about 25 less their normaliser are rounded to 25 eps, which exp makes relative.
    rounding = 4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    close = torch.allclose(found, expected, rtol=rounding, atol=0)
    return found.dtype == expected.dtype and close and off.item() <= rounding


@pytest.mark.parametrize("tp", [2, slow(4)])
def test_cross_entropy(pool: RankPool, tp: int) -> None:
    assert pool.run(losses_off, tp, tp) == [[]] * tp


def infinities_off(tp: int) -> list[str]:
    """Values and gradients that are not torch's, of rows with infinities and NaN."""
    rank = merak.init(tp=tp, device="cpu").tp_rank
    inf, nan = math.inf, math.nan
    rows = [[0.0, -inf, 1.0, 1.0, -inf], [-inf] * 5, [inf, 0.0, 1.0, -inf, inf]]
    rows += [[1.0, -inf, -inf, -inf, -inf], [-inf] * 4 + [inf], [nan, 0.0, 1.0, 2.0, inf]]
    shard, layout, off = ParameterShard(1, (6,), tp), (1, 6, "tp"), []
    padded = torch.tensor([[0.5, *row] for row in rows])
    padded[1, 0] = padded[4, 0] = -inf
    for ours, torchs in (
        (lambda x: vocab_parallel_logsumexp(x, True, layout), lambda x: x.logsumexp(1, True)),
        (lambda x: vocab_parallel_log_softmax(x, None, layout), lambda x: x.log_softmax(1)),
    ):
        whole = padded.clone().requires_grad_()
        own = take(padded, shard, rank).requires_grad_()
        expected, found = torchs(whole), ours(own)
        upstream = torch.arange(1.0, 1.0 + expected.numel()).reshape(expected.shape)
        split = expected.shape[1] > 1
        expected.backward(upstream)
        found.backward(take(upstream, shard, rank) if split else upstream)
        assert whole.grad is not None and own.grad is not None
        pairs = [(own.grad, take(whole.grad, shard, rank))]
        pairs.append((found, take(expected, shard, rank) if split else expected))
        off += [str(pair) for pair in pairs if not torch.allclose(*pair, equal_nan=True)]
    return off


@pytest.mark.parametrize("tp", [2, slow(3)])
def test_infinite_logits(pool: RankPool, tp: int) -> None:
    assert pool.run(infinities_off, tp, tp) == [[]] * tp


def outside() -> tuple[str, str]:
    """What a rank says of an index and of a target that are in no rank's share."""
    merak.init(tp=2, device="cpu")
    beyond = torch.tensor([1, 5])
    with pytest.raises(IndexError, match="out of range"):
        vocab_parallel_embedding(torch.rand(3, 2), beyond, -1, False, False, 5, "tp")
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocab_parallel_cross_entropy(torch.rand(2, 3), beyond, None, 1, -100, 0.0, (1, 5, "tp"))
    return "", ""


def test_what_is_outside_the_vocabulary_fails_on_every_rank(pool: RankPool) -> None:
    pool.run(outside, 2)


class SoftCapped(torch.nn.Module):
    """A tied head with a bias whose logits are scaled and capped, a loss written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(LARGE, 16, padding_idx=2, scale_grad_by_freq=True)
        self.up, self.down = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.bias = torch.nn.Parameter(torch.randn(LARGE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        logits = torch.nn.functional.linear(x, self.table.weight) + self.bias
        logits = 30.0 * torch.tanh(logits.float() / 30.0)
        logits, targets = logits[:, :-1, :].transpose(1, 2), ids[:, 1:]
        smoothing = {"ignore_index": 4, "label_smoothing": 0.1}
        return torch.nn.functional.cross_entropy(logits, targets, **smoothing)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    name: partial(ARCHITECTURES[name].build, vocab_size=LARGE)
    for name in ("gpt2", "llama", "bert", "t5", "bloom", "gemma3")
}
MODELS["soft-capped"] = SoftCapped


class ByHand(SoftCapped):
    """The same with a loss of one's own: log-probabilities, picked, averaged, and a z-loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        logits = torch.nn.functional.linear(x, self.table.weight, self.bias)[:, :-1]
        logp, targets = -logits.log_softmax(-1), ids[:, 1:]
        picked = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        smoothed = 0.9 * picked + 0.05 * logp.mean(-1) + 0.05 / LARGE * logp.sum(-1)
        likelihood = torch.nn.functional.nll_loss(-logp.flatten(0, 1), targets.flatten())
        return smoothed.mean() + likelihood + 0.01 * logits.logsumexp(-1).square().mean()


MODELS["by-hand"] = ByHand


def gradients_off(names: list[str], tp: int) -> dict[str, str]:
    """By model, where this rank's gradients are not its share of one process's."""
    rank = merak.init(tp=tp, device="cpu").tp_rank
    problems = {}
    for name in names:
        torch.manual_seed(0)
        model = MODELS[name]()
        ids = torch.randint(LARGE, (2, 8), generator=torch.Generator().manual_seed(3))
        columns = {"input_ids": ids, "labels": ids} if name in ARCHITECTURES else {"ids": ids}
        try:
            assert_rank_equals_one_process(model, columns, tp, rank)
        except AssertionError as error:
            problems[name] = str(error)
    return problems


def assert_rank_equals_one_process(
    model: torch.nn.Module, columns: dict[str, torch.Tensor], tp: int, rank: int
) -> None:
    graph = cases.traced(model, columns)
    others = {**cases.buffers(model, graph), **columns}
    alone = cases.local(cases.weights(model), {}, 0)
    loss = cases.run_model(graph, alone, others)
    loss.backward()
    split, shards = cases.shard_model(graph, tensor_parallel(graph, None, tp).weights, tp)
    assert any(shard.parts == (LARGE,) for shard in shards.values()), "no vocabulary is split"
    shares = cases.local(cases.weights(model), shards, rank)
    own_loss = cases.run_model(split, shares, others)
    own_loss.backward()
    assert math.isclose(own_loss.item(), loss.item(), rel_tol=1e-5)
    whole = {n: t.grad for n, t in alone.items() if t.grad is not None}
    expected = {n: take(g, shards[n], rank) if n in shards else g for n, g in whole.items()}
    cases.assert_gradients_equal({n: shares[n].grad for n in expected}, expected)


@pytest.mark.parametrize(
    "tp,names", [(2, ["bert", "by-hand"]), slow(2, list(MODELS)), slow(4, ["bert", "by-hand"])]
)
def test_every_gradient(pool: RankPool, tp: int, names: list[str]) -> None:
    """Chosen from the graph alone, tied and not, with biases, scaled and capped."""
    assert pool.run(gradients_off, tp, names, tp) == [{}] * tp


def build(name: str) -> torch.nn.Module:
    return ARCHITECTURES[name].build(vocab_size=LARGE)


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, LARGE, (samples, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("name", ["gpt2", slow("bert")])
def test_together_with_a_pipeline(pool: RankPool, name: str) -> None:
    """Tied over two stages, clipped, with weight decay; parameters too after some steps."""

    case = Case(name, partial(build, name), draw)
    report = check_model(case, Layout(tp=2, pp=2), CheckOptions(steps=2), launch=launcher(pool))
    assert (report.ok, report.reason) == (True, None)
    assert report.tp_sharded_fraction > 0.95
